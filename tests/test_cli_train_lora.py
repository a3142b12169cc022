"""`gpubound train` with a `lora` section, and the Richards family's examples, shorter."""

import json
import subprocess
import textwrap
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from gpubound import device as facts
from gpubound.cli import main
from gpubound.cli.train_options import from_file
from gpubound.files import EXPORT
from tests.messages import message, refusal

from . import forked
from .processes import plain_environment
from .train.runs import CHATS, build_corpus, recipe, train

pytestmark = pytest.mark.usefixtures("one_thread")


def exported(folder: Path, steps: int) -> Path:
    """Train two layers on some of Python's own library, into a Hugging Face folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "interpreted", lambda: False)
        run, _ = train(recipe(build_corpus(folder / "corpus"), folder / "run", steps=steps, accumulate=1, lr=1e-2))
        return run.export(folder / "hf")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder where nothing depends on what the model has read."""
    return exported(tmp_path_factory.mktemp("base"), 1)


@pytest.fixture
def config(base, tmp_path):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    options = {"model": str(base), "data": str(tmp_path / "chats.jsonl"), "lora": {"rank": 16, "alpha": 32}}
    options |= {"micro_batch": 4, "steps": 60, "lr": "5e-3", "validation": 0.1, "eval_every": 20, "device": "cpu"}
    options |= {"seq": 64, "pack": "none"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options | {"out": str(tmp_path / "run")}))
    return tmp_path / "c.yaml"


def put(config, section):
    """This lora section in place of the one that the config has."""
    rest = yaml.safe_load(config.read_text())
    del rest["lora"]
    config.write_text(yaml.safe_dump(rest) + f"lora: {section}\n")


@pytest.mark.slow
def test_the_model_of_a_lora_section_may_be_an_option(base, config, tmp_path, capsys):
    """By itself the config has random weights, which adapters do not fit: an error only where no option follows."""
    alone = {
        "lora": {"rank": 2},
        "data": str(tmp_path / "chats.jsonl"),
        "steps": 1,
        "validation": 0,
        "device": "cpu",
        "seq": 64,
    }
    config.write_text(yaml.safe_dump(alone))
    assert main(["train", str(config), "--quiet"]) == 2 and f"{config}: recipe: lora: " in capsys.readouterr().err
    assert main(["train", str(config), "--model", str(base), "--out", str(tmp_path / "run"), "--quiet"]) == 0


HELD_OUT = """
    import json, sys
    from itertools import islice
    import torch
    import torch.nn.functional as F
    from gpubound import lora
    from gpubound.data import Corpus
    from gpubound.models import load_hf
    from gpubound.train.stages import stage_of
    from gpubound.train.recipe import Recipe

    base, adapter, corpus, recipe = json.loads(sys.argv[1])
    recipe = Recipe(**recipe)
    (rows,) = stage_of("", recipe, Corpus.open(corpus)).eval_sets

    @torch.no_grad()
    def held_out(model):
        losses = []
        for batch in islice(rows.feed(torch.device("cpu")), rows.batches):
            out = model.eval()(batch["input_ids"])
            logits = (out.logits if hasattr(out, "logits") else out).flatten(0, 1)
            losses.append(F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="none"))
        losses = torch.cat(losses)
        return losses[losses != 0].double().mean().item()

    ours = load_hf(base)
    found = {"base": held_out(ours)}
    lora.load(ours, adapter)
    found["ours"] = held_out(ours)
    if "peft" in sys.argv:
        from peft import AutoPeftModelForCausalLM
        found["peft"] = held_out(AutoPeftModelForCausalLM.from_pretrained(adapter))
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_fine_tune_lowers_the_held_out_loss_and_its_adapter_keeps_it(config, tmp_path, capsys):
    """As the run reports it: read back here and by PEFT, and far below that of the base."""
    base = exported(tmp_path / "base", 60)
    assert main(["train", str(config), "--model", str(base), "--export", "hf", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    best = answer["best"]["held_out"]
    told = {"seq": 64, "micro_batch": 4, "validation": 0.1, "pack": "none"}
    arguments = json.dumps([str(base), answer["export"], str(tmp_path / "run" / "corpus"), told])
    there = ["peft"] if find_spec("peft") else []
    said = subprocess.run(
        [forked.python(), "-W", "ignore", "-c", textwrap.dedent(HELD_OUT), arguments, *there],
        capture_output=True,
        check=True,
        env=plain_environment(),
    )
    found = json.loads(said.stdout.splitlines()[-1])
    assert best < found["base"] - 1
    for reader in ("ours", *there):
        assert found[reader] == pytest.approx(best, rel=1e-5), reader


def test_options_as_yaml_reads_them(config, base, tmp_path):
    """3e-1 is a text to YAML, and a list no tuple."""
    put(config, "{rank: 4, alpha: 8, dropout: 3e-1, targets: [q_proj, v_proj], init: gaussian}")
    options = from_file(str(config)).recipe().adapters
    assert (options.rank, options.alpha, options.dropout) == (4, 8.0, 0.3)
    assert (options.targets, options.rslora, options.init) == (("q_proj", "v_proj"), False, "gaussian")


@pytest.mark.parametrize(
    "section, sentence",
    [
        ("{rank: 4, dropuot: 0.1}", "recipe: lora: 'dropuot' is unknown; did you mean 'dropout'?"),
        ("{rank: four}", "recipe: lora: rank must be a whole number, got 'four'."),
        ("16", "recipe: lora must be keys and values, got 16."),
        ("", "recipe: lora must be keys and values, got None."),
        ("{}", "recipe: lora: rank is missing; give one, such as rank: 16."),
    ],
)
def test_a_wrong_section_names_file_and_field(config, section, sentence):
    put(config, section)
    assert refusal(ValueError, lambda: from_file(str(config))) == f"{config}: {sentence}"


def test_a_phase_has_no_adapters_of_its_own(config):
    config.write_text(config.read_text() + "phases: [{name: a, lora: {rank: 2}}]\n")
    assert refusal(ValueError, lambda: from_file(str(config))) == message("cli_train_lora:a_phase_has_no_adapters", config)


def test_the_base_is_not_written_over(config, base, capsys):
    assert main(["train", str(config), "--export", f"{base}/../hf", "--merge"]) == 2
    said = capsys.readouterr().err
    assert said == message("cli_train_lora:the_base_is_not_written", base)


@pytest.mark.parametrize("there, options", [("config.json", []), ("adapter_config.json", ["--merge"])])
def test_adapters_and_whole_models_are_not_mixed(config, tmp_path, capsys, there, options):
    """Of both in one folder some programs load the one and some the other, whichever is newer."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / there).touch()
    (folder / EXPORT).write_text('{"run": "1"}')  # also of one run
    assert main(["train", str(config), "--export", str(folder), *options]) == 2
    assert str(folder) in capsys.readouterr().err and (folder / there).read_bytes() == b""


def test_merge_needs_an_export(config, capsys):
    assert main(["train", str(config), "--merge"]) == 2
    assert capsys.readouterr().err == message("cli_train_lora:merge_needs_an_export")


@pytest.mark.slow
def test_the_example_runs(base, tmp_path, monkeypatch, capsys):
    """examples/train_from_yaml/lora.yaml as it stands, on another base, and shorter."""
    monkeypatch.chdir(Path(__file__).parents[1])
    changes = ["--model", str(base), "--out", str(tmp_path / "run"), "--device", "cpu", "--steps", "6", "--seq", "16"]
    assert main(["train", "examples/train_from_yaml/lora.yaml", *changes, "--export", "hf", "--json"]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["finished"] and answer["export"] == str(tmp_path / "run" / "hf")
    assert {p.name for p in (tmp_path / "run" / "hf").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "gpubound.json",
    }  # fmt: skip
    assert message("cli_train_lora:the_example_runs").within(said.err)
    assert message("cli_train_lora:the_example_runs.2").within(said.err)


ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("name, falls", [("richards", 1.0), ("diffusion", 0.5)])
def test_it_learns_in_two_phases(name, falls, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(facts, "interpreted", lambda: False)
    monkeypatch.chdir(ROOT)
    text = (ROOT / "examples" / "train_from_yaml" / f"{name}.yaml").read_text()
    for whole, short in (("steps: 80", "steps: 20"), ("steps: 60", "steps: 12")):
        assert whole in text
        text = text.replace(whole, short)
    (tmp_path / "c.yaml").write_text(text)
    assert main(["train", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run"), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"]
    records = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [record["phase"] for record in records] == ["pretrain"] * 20 + ["instruct"] * 12
    first, last = (fmean(record["loss"] for record in part) for part in (records[:4], records[-4:]))
    assert last < first - falls
