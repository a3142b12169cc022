"""Runs of other kinds than the plain one, on two ranks beside one: adapters over phases, and patience that runs out."""

import dataclasses
import json
from itertools import chain, repeat

import numpy as np
import pytest
import torch

from gpubound import device as facts
from gpubound.corpus import Corpus
from gpubound.models.llama import training as llama
from gpubound.parallel import join
from gpubound.parallel.pieces import gathered
from gpubound.train.prepare import prepare
from tests.parallel.processes import on_ranks
from tests.train.runs import CHATS, build_corpus, recipe

pytestmark = pytest.mark.usefixtures("one_thread")
HELD_OUT = [3.0, 2.0, 2.5, 2.2]  # at steps 3, 6, 9, 12: the best is step 6's


def trained(todo, folder, ranks):
    run, losses = prepare(dataclasses.replace(todo, out=str(folder)), progress=False, ranks=ranks), {}
    if todo.patience:
        coming = chain(HELD_OUT, repeat(2.2))
        run.validate = lambda: {"held_out": next(coming)}
    run.go(lambda record: losses.update({record["step"]: record["loss"]}))
    weights = {name: p.numpy().copy() for name, p in gathered(dict(run.model.named_parameters()))}
    facts = {"finished": run.finished, "done": run.done, "best": run.best, "phase": run.phase, "held": run.evaluations}
    return losses, weights, facts, sorted(path.name for path in run.checkpoints.paths())


def all_of(todos, folder):
    facts.interpreted = lambda: False  # the process is this test's
    with join("cpu") as ranks:
        return {name: trained(todo, folder / name, ranks) for name, todo in todos.items()}


@pytest.fixture(scope="module")
def todos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    corpus = build_corpus(folder / "corpus")
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    torch.manual_seed(0)
    model = llama.make("tiny", 320, 4096, torch.device("cpu"))
    base = llama.save(model, folder / "base", Corpus.open(corpus).tokenizer())
    phases = (
        {"name": "texts", "data": (str(corpus),), "steps": 3},
        {"name": "chats", "data": (str(folder / "chats.jsonl"),), "steps": 4, "lr": 1e-3, "evaluate_every": 2},
    )
    adapting = recipe("", folder, model=str(base), lora={"rank": 4, "alpha": 8}, phases=phases, ema=0.5)
    patient = recipe(corpus, folder, steps=40, evaluate_every=3, patience=2, ema=0.5)
    return {"adapters and phases": adapting, "patience": patient}


def test_two_ranks_do_what_one_does(todos, tmp_path):
    """Replicas and shards. Adam makes as much of a gradient that is all rounding as of any: weights are held by their norm."""
    phases = {"phases": dataclasses.replace(todos["adapters and phases"], lora={})}
    (alone,) = on_ranks(1, all_of, todos | phases, tmp_path / "1")
    sharded = {"patience, sharded": "patience", "phases, sharded": "phases"}
    dealt = {name: dataclasses.replace((todos | phases)[known], parallel="fsdp") for name, known in sharded.items()}
    two = on_ranks(2, all_of, todos | dealt, tmp_path / "2")
    assert [done["done"] for _, _, done, _ in alone.values()] == [7, 12, 7]
    for found in two:
        for name, (losses, weights, known, checkpoints) in found.items():
            wanted_losses, wanted, wanted_known, wanted_checkpoints = alone[sharded.get(name, name)]
            assert losses == pytest.approx(wanted_losses, rel=2e-6), name
            held, wanted_held = known.pop("held"), wanted_known["held"]
            assert held == pytest.approx(wanted_held, rel=2e-6) and checkpoints == wanted_checkpoints, name
            assert known == {key: value for key, value in wanted_known.items() if key != "held"}, name
            for key, value in wanted.items():
                assert np.linalg.norm(weights[key] - value) <= 1e-3 * np.linalg.norm(value), f"{name}: {key}"
