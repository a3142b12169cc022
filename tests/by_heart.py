"""What the tests of `gpubound generate` share: a tiny model that knows a few texts by heart, and the command run on it."""

import sys
from collections import defaultdict
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gpubound import device as facts, trace
from gpubound.cli import main
from gpubound.data import train_tokenizer
from gpubound.models import Decoder, DecoderConfig, save_hf

STEPS = 1000  # of training, at most; ten seeds took 101 to 138
MARGIN = 5.0  # logits: int8 weights move them by 0.1, bf16 by less
CPU = torch.device("cpu")
_learnt: list[Path] = []  # each module that imports the fixture `ckpt` registers it anew
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
    monkeypatch.setattr(trace, "_printed", set())  # what is said once a process may have been said by another test


@pytest.fixture(scope="session")
def ckpt(tmp_path_factory) -> Path:
    """A Hugging Face folder with a model that has learnt TEXTS by heart, one for all modules."""
    if _learnt:
        return _learnt[0]
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = train_tokenizer(TEXTS, 300)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # before one_thread does: on products this small threads wait for each other
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "interpreted", lambda: False)
        model = Decoder(DecoderConfig(64, 128, 2, 4, 2, 320, tied=True, positions=512))
        learn(model, [tokenizer.inner.encode(text, add_special_tokens=False).ids for text in TEXTS])
    tokenizer.save(save_hf(model, folder))
    _learnt.append(folder)
    return folder


def learn(model: Decoder, rows: list[list[int]]) -> None:
    """Train until every token that its text determines is ahead of all others by MARGIN, which no rounding can turn."""
    following = defaultdict(set)
    for row in rows:
        for at, token in enumerate(row):
            following[tuple(row[:at])].add(token)
    ids, labels = torch.zeros(len(rows), 32, dtype=torch.long), torch.full((len(rows), 32), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        for at in range(1, len(row)):  # "hello" and "fine" both follow <|user|>: what a user says is not the model's to know
            labels[i, at] = row[at] if len(following[tuple(row[:at])]) == 1 else -100
    known, wanted = labels[:, 1:] >= 0, labels[:, 1:][labels[:, 1:] >= 0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(STEPS):
        logits = model(ids)[:, :-1][known]
        if margin(logits.detach(), wanted) > MARGIN:
            return
        optimizer.zero_grad()
        F.cross_entropy(logits, wanted).backward()
        optimizer.step()
    raise AssertionError(f"after {STEPS} steps the texts are not known by a margin of {MARGIN}")


def margin(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far the wanted token (N,) lies above the best of the others, in the row of logits (N, V) where it does so least."""
    others = logits.scatter(-1, wanted[:, None], float("-inf")).amax(-1)
    return (logits.gather(-1, wanted[:, None])[:, 0] - others).min().item()


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*argv, stdin=None, device="cpu") -> (exit code, stdout, stderr)"""

    def call(*argv, stdin=None, device="cpu"):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", StringIO(stdin))
        capsys.readouterr()
        code = main(["generate", *map(str, argv), "--device", device])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
