"""Runs of other kinds than the plain one, on two ranks beside one: adapters over phases, and patience that runs out."""

import dataclasses
import json
from itertools import chain, repeat

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gpubound import device as facts
from gpubound.data import Corpus
from gpubound.distributed import join
from gpubound.distributed.local_shard import gathered
from gpubound.models.llama import checkpoint as llama
from gpubound.train.loop import Stop
from gpubound.train.prepare import prepare
from tests.distributed.processes import on_ranks
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
        {"name": "chats", "data": (str(folder / "chats.jsonl"),), "steps": 4, "lr": 1e-3, "eval_every": 2},
    )
    adapting = recipe("", folder, model=str(base), lora={"rank": 4, "alpha": 8}, phases=phases)
    coded = recipe(corpus, folder, model=str(base), lora={"rank": 4, "base": "nf4"}, steps=4)
    patient = recipe(corpus, folder, steps=40, eval_every=3, patience=2)
    rows = [{"prompt": "the answer is " * (1 + n % 5), "completion": f"{n} and {2 * n}"} for n in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    several = {"model": str(base), "data": (str(folder / "rows.jsonl"),), "pack": "none", "buckets": 3, "seq": 128}
    lengths = recipe("", folder, **several, micro_batch=2, steps=5, lr=1e-3)
    return {"adapters and phases": adapting, "adapters over codes": coded, "patience": patient, "lengths": lengths}


def test_two_ranks_do_what_one_does(todos, tmp_path):
    """Replicas, and shards in two ways. Adam makes as much of a gradient of noise as of any: weights are held by their norm."""
    phases = {"phases": dataclasses.replace(todos["adapters and phases"], lora={})}
    (alone,) = on_ranks(1, all_of, todos | phases, tmp_path / "1")
    sharded = {f"{name}, sharded": name for name in ("phases", "adapters over codes")}
    dealt = {name: dataclasses.replace((todos | phases)[known], parallel="fsdp") for name, known in sharded.items()}
    replicas = {name: todos[name] for name in ("adapters and phases", "patience", "lengths")}
    two = on_ranks(2, all_of, replicas | dealt, tmp_path / "2")
    assert [done["done"] for _, _, done, _ in alone.values()] == [7, 4, 12, 5, 7]
    for found in two:
        for name, (losses, weights, known, checkpoints) in found.items():
            wanted_losses, wanted, wanted_known, wanted_checkpoints = alone[sharded.get(name, name)]
            assert losses == pytest.approx(wanted_losses, rel=2e-6), name
            held, wanted_held = known.pop("held"), wanted_known["held"]
            assert held == pytest.approx(wanted_held, rel=2e-6) and checkpoints == wanted_checkpoints, name
            assert known == {key: value for key, value in wanted_known.items() if key != "held"}, name
            for key, value in wanted.items():
                if value.dtype == np.uint8:  # codes, which are dealt as fp32 numbers of the same bits
                    assert weights[key].tobytes() == value.tobytes(), f"{name}: {key}"
                else:
                    assert np.linalg.norm(weights[key] - value) <= 1e-3 * np.linalg.norm(value), f"{name}: {key}"


def stretch(todo, folder, resume=False, until=None):
    """Losses of the steps up to the stop behind step `until`; at the end the adapter is written."""
    facts.interpreted = lambda: False
    with join("cpu") as ranks:
        run = prepare(dataclasses.replace(todo, out=str(folder)), resume, progress=False, ranks=ranks)
        losses, stop = {}, Stop(ranks)

        def on_record(record):
            losses[record["step"]] = record["loss"]
            if record["step"] == until:
                stop.asked = "SIGINT"

        run.go(on_record, stop)
        if run.finished:
            run.export(folder / "hf")
        return losses


def test_adapters_over_rows_go_on_over_a_whole_base_and_back(todos, tmp_path):
    """2 ranks with rows -> one process -> 2 ranks with rows: the losses, and the file, of a run that nobody stopped."""
    todo = dataclasses.replace(todos["adapters over codes"], lora={"rank": 4, "base": "int8"}, steps=9)
    rows = dataclasses.replace(todo, parallel="fsdp")
    (alone,) = on_ranks(1, stretch, todo, tmp_path / "alone")
    first, _ = on_ranks(2, stretch, rows, tmp_path / "parts", False, 2)
    (second,) = on_ranks(1, stretch, todo, tmp_path / "parts", True, 5)
    third, _ = on_ranks(2, stretch, rows, tmp_path / "parts", True)
    assert 0 < len(first) < max(second) < max(third) == 9
    assert first | second | third == pytest.approx(alone, rel=1e-5)
    got, wanted = (load_file(tmp_path / name / "hf" / "adapter_model.safetensors") for name in ("parts", "alone"))
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (got[name] - value).norm() <= 1e-3 * value.norm().clamp_min(1e-3), name
