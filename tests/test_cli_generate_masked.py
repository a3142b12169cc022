"""`gpubound generate` on a masked diffusion model: from an export and from a checkpoint, and what it refuses."""

import io
import json

import pytest
import torch

from gpubound.cli import main
from gpubound.data import Tokenizer
from gpubound.decode import MaskedSampler
from gpubound.models import Decoder, DecoderConfig, save_hf
from tests.messages import message

from .models.llama.test_masked import DREAM, LLADA, write
from .train.runs import build_corpus, recipe, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpubound.device.interpreted", lambda: False)
        changes = {"model": "diffusion-tiny", "objective": "diffusion", "steps": 3}
        run, _ = train(recipe(build_corpus(folder / "corpus"), folder / "run", **changes))
        run.export(folder / "run" / "hf")
    return folder / "run", run


@pytest.fixture
def command(monkeypatch, capsys):
    monkeypatch.setattr("gpubound.device.interpreted", lambda: False)

    def run(*argv):
        code = main(["generate", *map(str, argv), "--device", "cpu"])
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_it_writes_what_the_sampler_does(trained, command):
    folder, run = trained
    options = ["--prompt", "import", "--prompt", "def", "--max-new-tokens", "8", "--block", "4", "--denoising-steps", "4"]
    drawn = [*options, "--temperature", "1.5", "--seed", "3", "--n", "2", "--ignore-eos"]
    code, out, err = command(folder / "hf", *drawn, "--json")
    assert code == 0 and message("cli_generate_masked:it_writes_what_the_sampl").within(err)
    told = json.loads(out)
    sampler = MaskedSampler(run.model.eval(), run.tokenizer, ends=[])
    want = sampler.generate(["import", "def"], 8, block=4, steps=4, temperature=1.5, seed=3, n=2)
    assert [sequence["tokens"] for sequence in told["sequences"]] == want.tokens
    assert [sequence["prompt"] for sequence in told["sequences"]] == ["import", "import", "def", "def"]
    assert told["steps"] == 4 and told["bytes_a_step"] is None and told["roofline"] is None
    texts = command(folder / "hf", *options)[1]
    assert texts.startswith("--- 1: 'import'\n") and "--- 2: 'def'\n" in texts
    assert texts == command(sorted((folder / "checkpoints").iterdir())[-1], *options)[1]


@pytest.mark.slow
def test_by_itself_it_takes_blocks_of_32(trained, command):
    _, out, _ = command(trained[0], "--prompt", "import", "--denoising-steps", "8", "--json", "--ignore-eos")
    assert len(json.loads(out)["sequences"][0]["tokens"]) == 128 and json.loads(out)["steps"] == 8
    code, _, err = command(trained[0], "--prompt", "import", "--denoising-steps", "3")
    assert code == 2 and message("cli_generate_masked:by_itself_it_takes_block").within(err)


def test_steps_are_those_of_the_optimizer(trained, command):
    code, _, err = command(trained[0], "--prompt", "import", "--steps", "8")
    assert code == 2 and "--denoising-steps" in err


def test_options_of_the_other_kind_are_refused(trained, command, tmp_path):
    hf = trained[0] / "hf"
    for option in (["--top-k", "3"], ["--speculate", "2"], ["--no-fused"], ["--stop", "x"]):
        code, _, err = command(hf, "--prompt", "a", *option)
        name = option[0].removeprefix("--").removeprefix("no-")
        assert code == 2
        assert err.splitlines()[-1] == message("cli_generate_masked:options_of_the_other_kin", name, hf)
    torch.manual_seed(0)
    causal = save_hf(Decoder(DecoderConfig(16, 32, 1, 2, 1, 320)), tmp_path / "causal", Tokenizer.load(hf))
    code, _, err = command(causal, "--prompt", "a", "--block-cache")
    assert code == 2 and message("cli_generate_masked:options_of_the_other_kin.2", causal).within(err)


@pytest.mark.slow
def test_published_folders(command, tmp_path):
    """LLaDA's is trained for a step, and generated from before and after it; Dream's has no tokenizer.json."""
    write(tmp_path / "llada", LLADA, tokenizer=True)
    options = ["--prompt", "def main", "--max-new-tokens", "8", "--denoising-steps", "2", "--ignore-eos", "--json"]
    code, out, _ = command(tmp_path / "llada", *options)
    assert code == 0 and len(json.loads(out)["sequences"][0]["tokens"]) == 8
    cached = json.loads(command(tmp_path / "llada", *options[:4], *options[6:], "--threshold", "0.9", "--block-cache")[1])
    assert len(cached["sequences"][0]["tokens"]) == 8 and 1 <= cached["steps"] <= 8
    (tmp_path / "text.txt").write_text("def main(): return 1\n" * 200)
    changes = {"model": str(tmp_path / "llada"), "objective": "diffusion", "steps": 1, "data": (str(tmp_path / "text.txt"),)}
    run, _ = train(recipe("", tmp_path / "run", **changes))
    assert run.objective.mask_token == LLADA["mask_token_id"]
    exported = run.export(tmp_path / "hf")
    assert json.loads((exported / "config.json").read_text())["model_type"] == "llada"
    assert json.loads(command(exported, *options)[1])["sequences"][0]["tokens"]

    write(tmp_path / "dream", DREAM)
    code, _, err = command(tmp_path / "dream", *options)
    assert code == 2 and "--tokenizer FOLDER" in err
    code, out, _ = command(tmp_path / "dream", *options, "--tokenizer", tmp_path / "llada")
    assert code == 0 and len(json.loads(out)["sequences"][0]["tokens"]) == 8


def test_a_conversation(command, tmp_path, monkeypatch):
    """A turn sees those before it; an end of turn ends a reply, and a long one is refused."""
    write(tmp_path, LLADA | {"max_sequence_length": 64}, tokenizer=True)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer = Tokenizer.load(tmp_path)
    Tokenizer(tokenizer.inner, tokenizer.eos_token, template, **tokenizer.special).save(tmp_path, overwrite=True)
    monkeypatch.setattr("sys.stdin", io.StringIO("def\n" + "a " * 60 + "\n"))
    options = ["--max-new-tokens", "8", "--denoising-steps", "2", "--ignore-eos", "--json"]
    code, out, err = command(tmp_path, "--chat", *options)
    messages = json.loads(out)["messages"]
    assert code == 2 and "smaller --max-new-tokens" in err
    assert [message["role"] for message in messages] == ["user", "assistant"]
    rendered = "user: def\n"
    want = json.loads(command(tmp_path, "--prompt", rendered, *options)[1])["sequences"][0]
    assert messages[1]["content"] == want["text"]
