"""What the tests of `gpubound generate` share: a tiny model that knows a few texts by heart, and the command run on it."""

import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gpubound import device as facts
from gpubound import trace
from gpubound.cli import main
from gpubound.feed.tokenizer import train_tokenizer
from gpubound.models import Decoder, DecoderConfig, save_hf

CPU = torch.device("cpu")
HELLO = "<|user|>hello<|end|><|assistant|>hi, how are you?<|end|>"
TEXTS = [
    "the cat sat on the mat and slept.<|endoftext|>",
    "one two three four five six seven.<|endoftext|>",
    HELLO,
    f"{HELLO}<|user|>fine<|end|><|assistant|>good to hear.<|end|>",
    "<|user|>fine<|end|><|assistant|>what is?<|end|>",
    "<|system|>be rude<|end|><|user|>hello<|end|><|assistant|>go away.<|end|>",
]
LINE = (
    r"(\d+) tokens, ([\d.,]+) tokens/s, [\d.]+% of the roofline \(([\d.]+)kB a step / [\d.]+[GT]B/s read here\), "
    r"first token after [\d.]+ (?:ms|s|µs), host syncs: not counted \(no GPU\)\n"
)


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    """The reference kernels: what is tested here is the command, not the interpreter."""
    monkeypatch.setattr(facts, "interpreted", lambda: False)
    monkeypatch.delenv("GPUBOUND_TRACEBACK", raising=False)
    monkeypatch.setattr(trace, "_said", set())  # what is said once a process may have been said by another test


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory) -> Path:
    """A Hugging Face folder with a model that has learnt TEXTS by heart."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = train_tokenizer(TEXTS, 300)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # before one_thread does: on products this small threads wait for each other
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "interpreted", lambda: False)
        model = Decoder(DecoderConfig(64, 128, 2, 4, 2, 320, tied=True, positions=512))
        learn(model, [tokenizer.inner.encode(text, add_special_tokens=False).ids for text in TEXTS])
    tokenizer.save(save_hf(model, folder))
    return folder


def learn(model: Decoder, rows: list[list[int]]) -> None:
    ids, labels = torch.zeros(len(rows), 32, dtype=torch.long), torch.full((len(rows), 32), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = labels[i, : len(row)] = torch.tensor(row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(120):
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*argv, stdin=None) -> (exit code, stdout, stderr)"""

    def call(*argv, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", StringIO(stdin))
        capsys.readouterr()
        code = main(["generate", *map(str, argv), "--device", "cpu"])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
