"""What the tests of whole runs share: a small corpus, a small recipe, and what a run leaves to be compared."""

from itertools import islice
from pathlib import Path

import torch

from gpubound.data import Corpus, python_stdlib_texts, train_tokenizer
from gpubound.train.loop import Stop
from gpubound.train.prepare import prepare
from gpubound.train.recipe import Recipe

SMALL = {"model": "tiny", "seq": 32, "micro_batch": 4, "accumulate": 2, "steps": 12, "validation": 0.1, "device": "cpu"}
CHATS = [
    [{"role": "user", "content": f"what is {n} plus {n}?"}, {"role": "assistant", "content": f"it is {2 * n}, I think."}]
    for n in range(60)
]


def texts(count: int = 12) -> list[str]:
    """The beginnings of some files of Python's own library."""
    return [text[:900] for text in islice(python_stdlib_texts(), count)]


def build_corpus(path: Path) -> Path:
    """About 180 rows of 32 tokens: 22 steps of a small run are an epoch."""
    Corpus.build(texts(), train_tokenizer(texts(), 300), path, progress=False)
    return path


def recipe(corpus: Path | str, out: Path, **changes) -> Recipe:
    """`corpus` "" where `changes` names the data."""
    data = {"data": (str(corpus),)} if corpus else {}
    return Recipe(**SMALL | data | {"out": str(out)} | changes)


def train(recipe: Recipe, resume: bool = False, until: int | None = None):
    """(the run, its records); stopped by hand behind step `until`."""
    run, records = prepare(recipe, resume=resume, progress=False), []
    stop = Stop()

    def on_record(record):
        records.append(record)
        if until is not None and record["step"] >= until - 1:  # records come one step late
            stop.asked = "the test"

    run.go(on_record, stop)
    return run, records


def state(run) -> dict[str, torch.Tensor]:
    """Everything that the next step depends on."""
    tensors = run.checkpoints.latest().tensors()
    return {name: t for name, t in tensors.items() if not name.startswith("random.")}


def assert_same(one, other) -> None:
    here, there = state(one), state(other)
    assert here.keys() == there.keys()
    different = [name for name in here if not torch.equal(here[name], there[name])]
    assert not different, f"{len(different)} of {len(here)} tensors differ: {different[:5]}"
    assert one.feed.state_dict() == other.feed.state_dict()


def losses(records) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records}
