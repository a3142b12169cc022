"""`gpubound train`: config files and options, what is refused and in which words, and whole runs."""

import json
import os
import re
import shlex
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from safetensors import SafetensorError

import gpubound as gb
from gpubound import device as facts
from gpubound.cli import arguments, main
from gpubound.cli.train import presets
from gpubound.cli.train_options import Train, from_file
from gpubound.data import Corpus
from gpubound.errors import RankError
from gpubound.files import LOCK, locked
from gpubound.models import Decoder, DecoderConfig, save_hf
from gpubound.models.llama import checkpoint as llama
from gpubound.models.llama.checkpoint import PRESETS
from gpubound.models.registry import presets as every_preset
from gpubound.train.checkpoint import Checkpoints
from tests.messages import message, refusal, same_texts

from . import forked, tiny_recipe
from .processes import plain_environment
from .train.runs import texts

pytestmark = pytest.mark.usefixtures("one_thread")
corpus, config = tiny_recipe.corpus, tiny_recipe.config  # fixtures


def test_from_a_file_to_a_report(config, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", str(config), "--export", str(tmp_path / "model"), "--json"]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["finished"] and answer["last"]["step"] == 6 and answer["out"] == str(out)
    assert answer["report"] == str(out / "report.html") and "<svg" in (out / "report.html").read_text()
    assert len((out / "steps.jsonl").read_text().splitlines()) == 6
    assert answer["verdict"].startswith("6 steps on CPU (1 threads), loss ") and answer["verdict"] in said.err
    about = json.loads((out / "run.json").read_text())
    assert "doctor: STEP " in said.err and said.err.count("\ndoctor: without prices: the CPU computes the steps itself") == 1
    assert answer["doctor"]["step_ms"] > 0 and answer["doctor"]["findings"] == [] and about["doctor"].startswith("STEP ")
    assert about["doctor"].splitlines()[0] in (out / "report.html").read_text()
    assert message("cli_train:from_a_file_to_a_report", about["mfu"]).within(said.err)
    formula, size = re.fullmatch(
        r"MFU = tokens/s · \(6 · 94.2k parameters in products \+ 6 · 2 layers · 64 wide · 32 tokens\) / "
        r"([\d.]+)([GT])FLOP/s \(fp32, measured on this machine\)", about["mfu"],
    ).groups()  # fmt: skip
    record, rate = answer["last"], float(formula) * {"G": 1e9, "T": 1e12}[size]
    assert record["mfu"] == pytest.approx(record["tokens_per_s"] * (6 * 94_208 + 6 * 2 * 64 * 32) / rate, rel=6e-3)
    assert {p.name for p in (tmp_path / "model").iterdir()} == {
        "config.json", "generation_config.json", "gpubound.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert about["config"]["lr"] == 3e-3 and about["finished"] and "model.layers.*.mlp (2)" in about["placement"]


def test_options_override_the_file_and_a_run_is_not_begun_twice(config, tmp_path, capsys):
    assert main(["train", str(config), "--steps", "2", "--lr", "1e-4"]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["lr"] == 1e-4
    capsys.readouterr()
    assert main(["train", str(config), "--steps", "2"]) == 2
    assert capsys.readouterr().err == message("cli_train:options_override_the_fil", tmp_path / "run" / "checkpoints")


@pytest.mark.slow
def test_a_run_that_lies_beside_its_config_is_not_begun_anew_elsewhere(config, tmp_path, monkeypatch, capsys):
    config.write_text(config.read_text().replace(f"out: {tmp_path / 'run'}", "out: run"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "config.yaml", "--steps", "2"]) == 0
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    capsys.readouterr()
    assert main(["train", "../config.yaml", "--steps", "3", "--resume"]) == 2
    assert capsys.readouterr().err == message("cli_train:a_run_that_lies_beside_i")
    assert not list(Path.cwd().iterdir())
    assert main(["train", "../config.yaml", "--steps", "3", "--resume", "--out", "../run"]) == 0


@pytest.mark.slow
def test_quiet_says_only_what_needs_somebody(config, tmp_path, capsys):
    assert main(["train", str(config), "--quiet", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and json.loads(said.out)["finished"]
    assert main(["train", str(config), "--quiet", "--out", str(tmp_path / "bad"), "--lr", "1e30", "--clip", "1e30"]) == 1
    warning, line = capsys.readouterr().err.splitlines()
    assert "skipped" in warning and line.startswith("bad: FAILED, the training is not sound")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["135m", "350m", "8b"])  # tied; three query heads a key head; another rotation
def test_every_preset_in_small(config, tmp_path, capsys, preset):
    """Trained, exported, and loaded by transformers: the preset's query heads a key head, tied or not, its rotation."""
    from transformers import AutoModelForCausalLM

    export = ["--model", f"{preset}-tiny", "--steps", "15", "--export", "hf", "--json"]
    assert main(["train", str(config), *export]) == 0
    answer = json.loads(capsys.readouterr().out)
    records = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert answer["finished"] and records[-1]["loss"] < records[0]["loss"] - 0.5
    assert answer["export"] == str(tmp_path / "run" / "hf")
    whole, small = PRESETS[preset], AutoModelForCausalLM.from_pretrained(answer["export"]).config
    assert (small.num_hidden_layers, small.num_key_value_heads, small.head_dim) == (2, 2, 16)
    assert small.num_attention_heads / 2 == whole.heads / whole.kv_heads
    assert small.tie_word_embeddings == whole.tied and small.rope_parameters["rope_theta"] == whole.rope_theta
    assert small.intermediate_size / small.hidden_size == pytest.approx(whole.intermediate / whole.hidden, abs=0.1)


def test_list(capsys):
    assert main(["train", "--list"]) == 0
    assert capsys.readouterr().out == presets() + "\n"
    heading, *rows = [line.split() for line in presets().replace("kv heads", "kv_heads").splitlines()]
    listed = {row[0]: dict(zip(heading, row, strict=True)) for row in rows if len(row) == len(heading)}
    assert listed.keys() == set(every_preset()) and len(rows) == len(listed) + 2
    assert listed["1b"]["kv_heads"] == "8" and listed["1b"]["causal"] == "yes" and listed["8b"]["tied"] == "no"
    assert listed["richards-tiny"]["mlp"] == "richards_glu" and listed["diffusion-10m"]["causal"] == "no"


def test_help_has_an_example(capsys):
    assert main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert "gpubound train config.yaml --resume" in said and "--accumulate N" in said and "phases" not in said


def test_an_unknown_option_names_the_near_one(capsys):
    assert main(["train", "--micro-batches", "4"]) == 2
    assert "--micro-batch" in capsys.readouterr().err


def test_a_wrong_file(tmp_path):
    file, said = tmp_path / "c.yaml", []
    for text in (
        "step: 10", "lr: fast", "steps: true", "data: [1, 2]", "phases: 3", "phases: [{name: a, stps: 3}]",
        "phases: [{name: a, lr: fast}]", "quiet: perhaps", "seq: 0", f"lr: {10**400}", "lr: 1e999", 'out: ""', 'data: ""',
        "lora: 8", "objective_options: 0.1", "data: {train: a.jsonl}", "rank: 8", "phases: [{phases: []}]",
    ):  # fmt: skip
        file.write_text(text)
        said.append(refusal(ValueError, partial(from_file, str(file))))
    same_texts("cli_train:a_wrong_file", said, file)


def test_keys_of_another_command(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("rewards: [exact_match]\n")
    (tmp_path / "rl.yaml").write_text("accumulate: 2\n")
    assert main(["train", str(tmp_path / "c.yaml")]) == 2 and main(["rl", str(tmp_path / "rl.yaml")]) == 2
    train, rl = capsys.readouterr().err.splitlines()
    assert train == message("cli_train:keys_of_another_command", tmp_path / "c.yaml")
    assert rl == message("cli_train:keys_of_another_command.2", tmp_path / "rl.yaml")


def test_flags_that_repeat_what_the_config_says(tmp_path):
    """`--resume` beside `resume: true` was no option."""
    (tmp_path / "c.yaml").write_text("resume: true\nquiet: false\n")
    default = from_file(str(tmp_path / "c.yaml"))
    for words, wanted in ((["--resume", "--no-quiet"], (True, False)), (["--no-resume", "--quiet"], (False, True))):
        options = arguments(Train, words, "train", default)
        assert (options.resume, options.quiet) == wanted


def test_hints_of_options(capsys):
    said = []
    for words in (
        ["train", "--config", "c.yaml"], ["place", "m", "--nofuse"], ["report", "--undo"], ["plan", "--loraa", "8"], ["TRAIN"],
    ):  # fmt: skip
        assert main(words) == 2
        said += capsys.readouterr().err.splitlines()
    assert "\n".join(said) == message("cli_train:hints_of_options")
    assert main(["help", "train"]) == 0 and capsys.readouterr().out.startswith("usage: gpubound train")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "--lora", "8"], "lora"), (["train", "--lora.rank=8"], "lora"), (["plan", "--lora", "8"], "lora"),
        (["train", "--objective-options.beta", "0.1"], "objective_options"), (["rl", "--rewards", "exact_match"], "rewards"),
    ],
)  # fmt: skip
def test_keys_of_config_files_alone(words, key, capsys):
    """--lora 8 was "neither an option nor the value of one", and --lora.rank was taken for --local_rank."""
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"there is no option {words[1].split('=')[0]}: {key} is a key of config files alone;" in said


def test_a_model_folder_is_kept(folder_of_model, tmp_path, capsys):
    """A run in the folder of its model was taken for the model afterwards; a model without a tokenizer was given a new one."""
    (tmp_path / "text.txt").write_text("some text " * 100)
    words = ["train", "--model", str(folder_of_model), "--data", str(tmp_path / "text.txt"), "--device", "cpu", "--out"]
    before = contents_of(folder_of_model)
    assert main([*words, str(folder_of_model)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == message("cli_train:a_model_folder_is_kept", folder_of_model)
    assert main([*words, str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == message("cli_train:a_model_folder_is_kept.2", folder_of_model)
    assert contents_of(folder_of_model) == before and not (tmp_path / "run" / "corpus").exists()


def test_a_page_that_no_run_wrote_is_refused_before_the_run(tmp_path, capsys):
    """The report is written last: a run of hours ended with this error."""
    page = tmp_path / "report.html"
    page.write_text("a page of mine")
    assert main(["train", "--model", "1m-tiny", "--steps", "1", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert f"out: {page} exists and is not an HTML page" in capsys.readouterr().err
    assert page.read_text() == "a page of mine" and [*tmp_path.iterdir()] == [page]


@pytest.fixture
def folder_of_model(tmp_path):
    return save_hf(Decoder(DecoderConfig(32, 64, 1, 2, 1, 300)), tmp_path / "model")


def test_files_that_are_no_config(tmp_path, capsys):
    (tmp_path / "list.yaml").write_text("- 1")
    assert main(["train", str(tmp_path / "list.yaml")]) == 2
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    (tmp_path / "broken.yaml").write_text("a: [")
    assert main(["train", str(tmp_path / "broken.yaml")]) == 2
    (tmp_path / "twice.yaml").write_text("steps: 9\nphases:\n  - {lr: 1e-3}\n  - {lr: 1e-3, steps: 8}\nsteps: 90\n")
    assert main(["train", str(tmp_path / "twice.yaml")]) == 2
    assert main(["train", str(tmp_path)]) == 2
    first, second, third, fourth, fifth = capsys.readouterr().err.splitlines()
    assert fifth == message("cli_train:files_that_are_no_config.3", tmp_path)
    assert fourth.endswith(
        "twice.yaml cannot be read as YAML: 'steps' is there twice, in lines 1 and 5; leave one of them out; "
        "see gpubound train --help."
    )
    assert first == message("cli_train:files_that_are_no_config", tmp_path / "list.yaml")
    assert second == message("cli_train:files_that_are_no_config.2", tmp_path / "none.yaml")
    assert third.startswith(f"gpubound train: config: {tmp_path / 'broken.yaml'} cannot be read as YAML: while parsing")


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize("text", ["", "# steps: 2000\n", "---\n"])
def test_a_file_without_keys(tmp_path, capsys, command, text):
    (tmp_path / "c.yaml").write_text(text)
    assert main([command, str(tmp_path / "c.yaml")]) == 2
    assert capsys.readouterr().err == message("cli_train:a_file_without_keys", command, tmp_path / "c.yaml")


def test_a_home_folder_in_a_config_file(tmp_path, monkeypatch):
    """As a shell reads it; in the middle of a path it is a name like any other."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("out: ~/runs/a\ndata: [~/texts, here/~]\nexport: ~/hf\n")
    options = from_file(str(tmp_path / "c.yaml"))
    assert (options.out, options.export) == (f"{tmp_path}/runs/a", f"{tmp_path}/hf")
    assert list(options.data) == [f"{tmp_path}/texts", "here/~"]


def test_numbers_that_yaml_counts_otherwise_than_they_look(tmp_path):
    file, said = tmp_path / "c.yaml", []
    for text in ("lr: 1e-3\nsteps: 1:30", "seed: 010", "lora: {rank: -0_10}", "phases: [{clip: 1:30.5}]"):
        file.write_text(text)
        said.append(refusal(ValueError, partial(from_file, str(file))))
    same_texts("cli_train:yaml_counts_otherwise", said, file)
    file.write_text("steps: 1_000\nseed: 00\nvocabulary: 0x200\nout: '010'\nfinal: 0.05\n")
    options = from_file(str(file))
    assert (options.steps, options.seed, options.vocabulary, options.out, options.final) == (1000, 0, 512, "010", 0.05)


def test_what_is_refused(config, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some text " * 100)
    said = []
    for options in (
        ["--data", "no.txt"], ["--data", str(tmp_path / "text.txt"), "--tokenizer", "nowhere"], ["--model", "12m"],
        ["--recompute", "some"], ["--recompute", "3"], ["--auto-batch"], ["--log", "paper"],
        ["--precision", "fp61"],
    ):  # fmt: skip
        assert main(["train", str(config), *options]) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    same_texts("cli_train:what_is_refused", said)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)
HOSTILE = {
    "itself": "data: &a [*a]\n",
    "aliases": LAUGHS + "data: *i\n",
    "merges": LAUGHS.replace("[x, x, x, x, x, x, x, x, x, x]", "{x: 1}").replace("[*", "{<<: [*").replace("]", "]}"),
    "deep": "data: " + "[" * 200 + "]" * 200 + "\n",
    "deeper": "data: " + "[" * 100_000 + "\n",
    "large": "#" * (2 << 20),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "command"), list(zip(HOSTILE.values(), ("train", "plan") * 3)), ids=HOSTILE)
def test_a_config_that_would_never_be_read_is_refused(tmp_path, capsys, command, text):
    (tmp_path / "c.yaml").write_text(text)
    assert main([command, str(tmp_path / "c.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "c.yaml") in line


def test_a_config_that_is_no_file_is_refused(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        for command in ("train", "plan"):
            assert main([command, path]) == 2
            assert path in capsys.readouterr().err


def test_aliases_and_merges_of_a_config_are_read(config):
    config.write_text(config.read_text() + "phases: [&a {name: a, lr: 1.0e-3}, {<<: *a, name: b}]\n")
    assert [own.lr for _, own in from_file(str(config)).recipe().stages()] == [1e-3, 1e-3]


def test_options_of_another_trainer_override_the_file(config, tmp_path, capsys):
    config.write_text(config.read_text().replace("lr: 3e-3", "learning_rate: 3e-3"))
    words = ["--max_steps", "2", "--learning-rate=1e-4", "--warmup-steps", "1", "--logging-steps", "5"]
    assert main(["train", str(config), *words, "--quiet"]) == 0
    ran = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert (ran["steps"], ran["lr"], ran["warmup"]) == (2, 1e-4, 1)
    assert "logging_steps: every step is recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, names",
    [
        (["--lr", "1", "--learning-rate", "1"], ["--lr"]),
        (["--push-to-hub"], ["push_to_hub", "--export"]),
        (["--learning-ratte", "1"], ["learning_rate", "lr"]),
    ],
)
def test_options_of_another_trainer_that_are_refused(config, capsys, words, names):
    assert main(["train", str(config), *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert all(name in said for name in names)


@pytest.mark.parametrize("value", ["null", "0", "none"])
def test_clipping_is_switched_off(config, value):
    config.write_text(config.read_text() + f"clip: {value}\n")
    assert from_file(str(config)).recipe().clip is None


@pytest.mark.slow
def test_a_run_is_resumed_by_the_config_that_it_has_recorded(config, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["train", "--out", run, "--resume"]) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1] == message("cli_train:resumed_without_a_run", run) and not Path(run).exists()
    )
    assert main(["train", str(config), "--steps", "2", "--lr", "1e-4"]) == 0
    assert main(["train", "--out", run, "--resume", "--steps", "4"]) == 0
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["finished"] and about["config"]["lr"] == 1e-4 and about["config"]["steps"] == 4
    assert main(["train", "--out", run, "--resume", "--seed", "5"]) == 2
    assert "seed was 0, is 5" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_reports_what_changed(config, tmp_path, capsys):
    assert main(["train", str(config), "--steps", "2"]) == 0
    config.write_text(config.read_text().replace("lr: 3e-3", "lr: 1e-3\nresume: {allow: lr}"))
    assert main(["train", str(config)]) == 0
    assert "from step 3 on lr was 0.003, is 0.001" in json.loads((tmp_path / "run" / "run.json").read_text())["verdict"]
    capsys.readouterr()
    assert main(["train", str(config)]) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_the_same_from_python(config, tmp_path, capsys):
    """With the names of other trainers, and paths of pathlib; the run can be used afterwards."""
    trained = gb.train(config, num_train_epochs=0.1, out=tmp_path / "run", export=tmp_path / "hf")
    assert trained.run.finished and not trained.failed and trained.export == tmp_path / "hf"
    assert trained.outcome.verdict in capsys.readouterr().err and trained.report.exists()
    assert trained.run.best_weights and next(trained.run.model.parameters()).isfinite().all()
    with pytest.raises(ValueError, match="pass --resume"):
        gb.train(config, num_train_epochs=0.1)
    assert gb.train(config, num_train_epochs=0.1, resume=True).run.done == trained.run.done
    with pytest.raises(ValueError, match="'gpus'"):
        gb.train(config, gpus=2)


def contents_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


FOREIGN = {"model": "config.json", "template": "chat_template.jinja", "corpus": "corpus.json", "checkpoint": "state.json"}


@pytest.mark.parametrize("name", FOREIGN.values(), ids=FOREIGN)
def test_an_export_does_not_replace_files_of_another_origin(config, tmp_path, capsys, name):
    there = tmp_path / "there"
    there.mkdir()
    (there / name).write_text("{}")
    assert main(["train", str(config), "--export", str(there)]) == 2
    assert str(there) in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert contents_of(there) == {name: b"{}"}


def test_an_export_into_the_folder_of_the_run_is_refused(config, tmp_path, capsys):
    assert main(["train", str(config), "--export", str(tmp_path / "run")]) == 2
    assert "--out" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_export_replaces_only_that_of_its_own_run(config, tmp_path, capsys):
    """The same run may export again, also when it is resumed; another run with the same recipe may not."""
    there, export = tmp_path / "there", ["--export", str(tmp_path / "there")]
    assert main(["train", str(config), *export]) == 0
    first = contents_of(there)
    assert main(["train", str(config), "--resume", "--steps", "9", *export]) == 0
    second = contents_of(there)
    assert json.loads(second["gpubound.json"])["run"] == json.loads(first["gpubound.json"])["run"]
    assert second["model.safetensors"] != first["model.safetensors"]
    capsys.readouterr()
    assert main(["train", str(config), "--out", str(tmp_path / "other"), *export]) == 2
    assert str(there) in capsys.readouterr().err and not list((tmp_path / "other").glob("checkpoints/step-*"))
    assert contents_of(there) == second


def test_a_run_does_not_replace_a_run_json_of_another_origin(config, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"name": "mine"}')
    assert main(["train", str(config)]) == 2
    assert "run.json" in capsys.readouterr().err and (tmp_path / "run" / "run.json").read_text() == '{"name": "mine"}'


@pytest.mark.slow
@pytest.mark.parametrize("token", [5, 65_000], ids=["within the vocabulary", "beyond it"])
def test_resuming_verifies_the_corpus_that_the_run_built(config, tmp_path, capsys, token):
    (tmp_path / "text.txt").write_text("\n\n".join(texts()))
    command = ["train", str(config), "--data", str(tmp_path / "text.txt"), "--vocabulary", "300"]
    assert main(command) == 0
    (shard,) = (tmp_path / "run" / "corpus").glob("*.gbt")
    with open(shard, "r+b") as file:
        file.seek(4096 + 2 * 100)  # a header's page, then two bytes a token
        file.write(token.to_bytes(2, "little"))
    capsys.readouterr()
    assert main([*command, "--resume", "--steps", "9"]) == 2
    assert str(shard) in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused_before_data_is_read(config, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["train", str(config), "--model", str(tmp_path / "empty")]) == 2
    assert "config.json" in capsys.readouterr().err and not list((tmp_path / "run").glob("*"))


def test_export_onto_a_file_is_refused_before_training(config, tmp_path, capsys):
    for folder in (config, config / "model"):
        assert main(["train", str(config), "--export", str(folder)]) == 2
        assert capsys.readouterr().err == message("cli_train:export_onto_a_file_is_re", config)
    assert not (tmp_path / "run").exists()


FULL = "Error while serializing: I/O error: No space left (os error 28)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "owner, name, error, said",
    [
        (Corpus, "build", OSError(28, "No space left on device"), "cli_train:a_full_disk"),
        (llama, "save", SafetensorError(FULL), "cli_train:a_full_disk.2"),
        (llama, "save", RankError(f"rank 0: {FULL}"), "cli_train:a_full_disk.2"),
    ],
    ids=["corpus", "export", "export on several ranks"],
)
def test_a_full_disk_before_and_after_training(config, tmp_path, monkeypatch, capsys, owner, name, error, said):
    def full(*arguments, **options):
        raise error

    monkeypatch.setattr(owner, name, full)
    (tmp_path / "text.txt").write_text("some text " * 5000)
    options = ["--data", str(tmp_path / "text.txt"), "--vocabulary", "300", "--export", "hf"]
    assert main(["train", str(config), *options]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == message(said, tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.setattr(facts, "interpreted", lambda: False)
    assert main(["train", str(config), *options, "--resume"]) == 0
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_signals_save_and_say_how_to_go_on(config, tmp_path):
    """Ctrl-C, then SIGTERM on the resumed run, as another process sees them: exit code 0 and a checkpoint of the last step."""
    out = tmp_path / "it's mine"  # to be quoted in the line that goes on
    command = [forked.python(), "-m", "gpubound", "train", str(config), "--out", str(out), "--steps", "100000"]
    stopped = []
    for more, number in (([], signal.SIGINT), (["--resume"], signal.SIGTERM)):
        before = stopped[-1] if stopped else 0
        child = subprocess.Popen(
            [*command, *more], stderr=subprocess.PIPE, text=True, env=plain_environment() | {"OMP_NUM_THREADS": "1"}
        )
        with child.stderr as heard:
            assert any(re.match(r"it's mine \d+/100000  loss", line) for line in heard), (
                "it ended before its first step was done"
            )
            child.send_signal(number)
            said = heard.read()
        assert child.wait() == 0, said
        found = Checkpoints(out / "checkpoints").latest()
        assert message(
            "cli_train:signals_save_and_say_how", signal.Signals(number).name, found.step, out / "checkpoints"
        ).within(said)
        assert said.endswith(f"go on with: {shlex.join(['gpubound', *command[3:], '--resume'])}\n")
        assert (out / "report.html").exists() and lines(out) == found.step > before
        stopped.append(found.step)


def test_a_folder_in_use_is_refused(config, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        for options in ([], ["--resume"]):
            assert main(["train", str(config), *options]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"gpubound train: {tmp_path / 'run'} is in use by process {os.getpid()} on ")
            assert said.count("\n") == 1 and [p.name for p in (tmp_path / "run").iterdir()] == [LOCK]


@pytest.mark.slow
def test_torchrun_trains_one_run_whose_first_rank_speaks(corpus, config, tmp_path):
    command = [forked.python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gpubound"]
    options = ["--accumulate", "2", "--eval-every", "4", "--export", str(tmp_path / "model"), "--json"]
    environment = plain_environment() | {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": forked.python()}
    done = subprocess.run([*command, "train", str(config), *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer["ranks"] == 2 and answer["finished"] and answer["verdict"].startswith("6 steps on 2 ranks, the first on CPU")
    for once in ("parallel: ddp: each of 2 ranks holds ", "run: 94.5k parameters", "report: ", "export: "):
        assert done.stderr.count(once) == 1, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6] and records[0]["tokens"] == 2 * 4 * 32
    assert (tmp_path / "model" / "model.safetensors").exists() and (tmp_path / "run" / "report.html").exists()


def test_what_several_processes_cannot_do_is_refused(config, capsys, monkeypatch):
    monkeypatch.setattr("gpubound.distributed.launched", lambda: True)
    assert main(["demo", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == message("cli_train:what_several_processes_c")
    assert main(["train", str(config), "--parallel", "tensor"]) == 2
    assert capsys.readouterr().err == message("cli_train:what_several_processes_c.2")


@pytest.mark.slow
def test_a_run_that_diverged_says_so_and_fails(config, tmp_path, capsys):
    assert main(["train", str(config), "--lr", "1e30", "--warmup", "0", "--export", "hf", "--json"]) == 1
    said = capsys.readouterr()
    answer = json.loads(said.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert answer["failed"] and answer["finished"] and answer["export"] is None and answer["last"]["step"] == 6
    assert re.match(r"FAILED, the training is not sound \(try a lower lr or clip\): 6 steps on CPU", answer["verdict"])
    said = ", 5 of 6 steps were skipped, the first at step 2: the loss or the gradient was not finite, "
    assert said in answer["verdict"] and answer["verdict"].count("skipped") == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["verdict"] == answer["verdict"]
    assert "FAILED" in (tmp_path / "run" / "report.html").read_text() and not (tmp_path / "run" / "hf").exists()


def lines(out) -> int:
    return len((out / "steps.jsonl").read_text().splitlines()) if (out / "steps.jsonl").exists() else 0


@pytest.mark.slow
def test_the_example_runs_and_learns_to_answer(tmp_path, monkeypatch, capsys):
    """examples/train_from_yaml as it stands, its phases cut to 10 and 30 steps, and its tokenizer made on 100 kB."""
    from gpubound.train import data

    root, whole = Path(__file__).parents[1], data.python_stdlib_texts
    monkeypatch.chdir(root)
    monkeypatch.setattr(data, "python_stdlib_texts", lambda limit: whole(100_000))
    text = (root / "examples" / "train_from_yaml" / "two_phases.yaml").read_text()
    for whole_run, short in (("steps: 300", "steps: 10"), ("steps: 60", "steps: 30"), ("eval_every: 60", "eval_every: 5")):
        assert whole_run in text
        text = text.replace(whole_run, short)
    (tmp_path / "c.yaml").write_text(text)
    assert main(["train", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run"), "--device", "cpu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["finished"] and answer["last"]["step"] == 40
    records = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < records[10]["loss"] - 1, "the answers are few and learnt by heart"
