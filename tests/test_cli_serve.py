"""`gpubound serve`: a service in a process, from its first line to Ctrl-C; options that are refused before anything is read."""

import re
import signal
import subprocess

import pytest
import torch

from gpubound import cli
from gpubound.data import train_tokenizer
from gpubound.models import Decoder, DecoderConfig, save_hf
from gpubound.serve import Client

from . import forked
from .processes import plain_environment


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(32, 64, 1, 2, 1, 300, tied=True, positions=64))
    train_tokenizer(["one two three four five.<|endoftext|>"] * 3, 290).save(save_hf(model, tmp_path / "base"))
    return tmp_path / "base"


@pytest.mark.slow
@pytest.mark.parametrize("quantised", [(), ("--base", "int8")], ids=["16 bits", "int8"])
def test_a_service_from_its_first_line_to_ctrl_c(base, tmp_path, quantised):
    (tmp_path / "token.txt").write_text("sesame\n")
    command = [forked.python(), "-m", "gpubound", "serve", str(base), "--port", "0", "--device", "cpu", "--max-batch", "4"]
    command += ["--token-file", "token.txt", *quantised]
    with subprocess.Popen(command, cwd=tmp_path, env=plain_environment(), stderr=subprocess.PIPE, text=True) as service:
        lines = iter(service.stderr)
        address = next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        client = Client(address, token="sesame", timeout=120)
        for name in ("kept", "lost"):
            client.create(name, rank=4, lr=1e-2)
            losses = []
            for _ in range(2):
                result = client.forward_backward(name, [{"prompt": "one two", "answer": " three"}])
                losses.append(result["loss"])
                client.optim_step(name)
            assert losses[1] < losses[0]
        answers = client.sample(["kept", None], ["one", "two"], max_new_tokens=4)
        assert [len(one["tokens"]) == len(one["logprobs"]) > 0 and isinstance(one["text"], str) for one in answers] == [
            True
        ] * 2
        client.save_state("kept", "kept")
        service.send_signal(signal.SIGINT)
        rest = "".join(lines)
        assert service.wait(60) == 0
    assert "lost (2 updates)" in rest and "kept (" not in rest and "Traceback" not in rest
    assert (tmp_path / "policies" / "kept" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--max-length", "1"],
        ["--max-batch", "0"],
        ["--port", "-1"],
        ["--token-file", "empty"],
        ["--host", "0.0.0.0"],
        ["--folder", "empty"],
        ["--precision", "fp61"],
        ["--graph", "maybe"],  # which the first create or save had found
    ],
)
def test_options_that_are_refused(base, options, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUBOUND_TOKEN", raising=False)
    (tmp_path / "empty").touch()
    assert cli.main(["serve", str(base), "--device", "cpu", *options]) == 2
    err = capsys.readouterr().err
    assert options[0].removeprefix("--") in err.splitlines()[-1] and "Traceback" not in err
