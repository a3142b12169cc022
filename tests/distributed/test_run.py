"""Runs of the train command on several ranks, of every kind: beside one rank, and resumed on other numbers of them."""

import dataclasses
import json
import zlib
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gpubound import device as facts
from gpubound.data import Corpus
from gpubound.distributed import join
from gpubound.distributed.local_shard import gathered
from gpubound.models.llama import checkpoint as llama
from gpubound.train.checkpoint import Checkpoints, checkpoints
from gpubound.train.loop import Stop
from gpubound.train.prepare import check_shared, prepare
from tests.distributed.processes import on_ranks
from tests.train.runs import CHATS, build_corpus, recipe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build_corpus(tmp_path_factory.mktemp("data") / "corpus")


def trained(todo, resume=False, asked_at=None, rank_asked=0):
    """What every rank knows of a run; at step `asked_at` rank `rank_asked` alone is asked to stop."""
    facts.interpreted = lambda: False  # the process is this test's
    with join(todo.device) as ranks:
        run, records, stop = prepare(todo, checkpoints, progress=False, ranks=ranks), [], Stop(ranks)

        def on_record(record):
            records.append(record)
            if record["step"] == asked_at and ranks.rank == rank_asked:
                stop.asked = "SIGINT"

        run.go(on_record, stop)
        whole = [p.detach().flatten() for _, p in gathered(dict(run.model.named_parameters()))]
        weights = zlib.crc32(torch.cat(whole).cpu().numpy().tobytes())
        found = {
            "losses": {r["step"]: r["loss"] for r in records}, "tokens": [r["tokens"] for r in records], "done": run.done,
            "evaluations": run.evaluations, "best": run.best, "over": run.over, "asked": stop.asked,
            "waited": [r.get("waited_ms") for r in records],
            "feed": run.feed.state_dict(), "weights": weights, "saved": run.checkpoints.latest().step,
        }  # fmt: skip
        if run.finished:
            run.evaluations = run.evaluations | {10: 0.0}  # the best one is not the last
            run.export(run.folder / "hf")
        return found


def assert_near(found, wanted, rel=1e-6):
    """fp32 sums in another order: 1e-6 of a loss near 5."""
    assert found.keys() == wanted.keys()
    assert all(found[step] == pytest.approx(wanted[step], rel=rel) for step in wanted), (found, wanted)


def assert_alike(ranks):
    """Bit for bit."""
    assert all(other == ranks[0] for other in ranks[1:]), ranks


@pytest.fixture(scope="module")
def todo(corpus, tmp_path_factory):
    """Into the second epoch, with an average, evaluations and checkpoints."""
    common = {"accumulate": 4, "steps": 14, "ema": 0.9, "eval_every": 5, "save_every": 4}
    return recipe(corpus, tmp_path_factory.mktemp("whole"), **common)


@pytest.fixture(scope="module")
def alone(todo):
    (found,) = on_ranks(1, trained, todo)
    assert found["feed"]["epoch"] == 1 and found["evaluations"].keys() == {5, 10, 14} and found["done"] == 14
    return found


def test_four_ranks_take_the_steps_that_one_takes_and_know_the_same(todo, alone, tmp_path):
    ranks = on_ranks(4, trained, dataclasses.replace(todo, out=str(tmp_path)))
    assert_alike(ranks)
    waited = ranks[0]["waited"]
    assert waited[0] is None and all(len(step) == 4 and min(step) >= 0 and max(step) > 0 for step in waited[1:])
    assert_near(ranks[0]["losses"], alone["losses"])
    assert_near(ranks[0]["evaluations"], alone["evaluations"])
    for what in ("tokens", "feed", "done", "saved", "best"):
        assert ranks[0][what] == alone[what], what
    exported, saved = load_file(tmp_path / "hf" / "model.safetensors"), Checkpoints(tmp_path / "checkpoints").at(10).tensors()
    same = [torch.equal(tensor, saved[f"average.{name}"]) for name, tensor in exported.items() if f"average.{name}" in saved]
    assert same and all(same), "the best weights' average is what is exported"


def test_a_run_goes_on_with_another_number_of_ranks(todo, alone, tmp_path):
    """1 -> 2 -> 1: the losses of the run that nobody stopped. Of two ranks one alone is asked, and both stop at one step."""
    parts = dataclasses.replace(todo, out=str(tmp_path))
    (first,) = on_ranks(1, trained, parts, False, 3)
    second = on_ranks(2, trained, parts, True, 7, 1)
    (third,) = on_ranks(1, trained, parts, True)
    assert_alike(second)
    assert 3 <= first["done"] < 7 < second[0]["done"] == second[0]["saved"] <= 11 and third["done"] == 14
    assert second[0]["asked"] == "SIGINT" and not second[0]["over"]
    assert_near(first["losses"] | second[0]["losses"] | third["losses"], alone["losses"])
    assert_near(third["evaluations"], alone["evaluations"])
    assert third["feed"] == alone["feed"]


def test_sharded_ranks_take_the_same_steps_and_replicas_and_one_process_go_on_with_them(todo, alone, tmp_path):
    """fsdp -> ddp -> one process: losses, held-out ones of the average, and what is exported."""
    parts = dataclasses.replace(todo, out=str(tmp_path), parallel="fsdp", keep=10)
    first = on_ranks(2, trained, parts, False, 6)
    second = on_ranks(2, trained, dataclasses.replace(parts, parallel="ddp"), True, 9)
    third = on_ranks(2, trained, parts, True)
    for ranks in (first, second, third):
        assert_alike(ranks)
    for ranks, sharded in ((first, True), (second, False), (third, True)):
        _, *waited = ranks[0]["waited"]  # a record has those of the step before; of shards they are not measured
        assert waited and all(step is None if sharded else max(step) > 0 for step in waited)
    assert first[0]["done"] < second[0]["done"] < third[0]["done"] == 14
    assert_near(first[0]["losses"] | second[0]["losses"] | third[0]["losses"], alone["losses"], rel=2e-6)
    assert_near(third[0]["evaluations"], alone["evaluations"], rel=2e-6)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    wanted = load_file(Path(todo.out) / "hf" / "model.safetensors")
    assert exported.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_two_gpus_take_the_steps_that_one_takes(todo, tmp_path):
    """Captured where it can be; a GPU adds up in another order at every run."""
    todo = dataclasses.replace(todo, device="cuda", precision="fp32")
    (one,) = on_ranks(1, trained, dataclasses.replace(todo, out=str(tmp_path / "1")))
    two = on_ranks(2, trained, dataclasses.replace(todo, out=str(tmp_path / "2")))
    assert_alike(two)
    assert_near(two[0]["losses"], one["losses"], rel=1e-4)
    assert_near(two[0]["evaluations"], one["evaluations"], rel=1e-4)


def drawn(folder):
    """What each rank draws after it has saved its random numbers, and after it has taken them up again."""
    with join("cpu") as ranks:
        torch.manual_seed(0)
        checkpoints.seed_ranks(ranks, 0)
        states = checkpoints.rng_states(ranks, ranks.device)
        before = torch.rand(1).item()
        checkpoints.restore_rng(states, ranks, ranks.device, 0, 0)
        assert torch.rand(1).item() == before
        if ranks.first:
            torch.save(states, f"{folder}/2.pt")
        return before


def redrawn(path):
    with join("cpu") as ranks:
        checkpoints.restore_rng(torch.load(path), ranks, ranks.device, 0, 5)
        return torch.rand(1).item()


def test_each_rank_has_random_numbers_of_its_own_which_are_kept(tmp_path):
    two = on_ranks(2, drawn, str(tmp_path))
    three = on_ranks(3, redrawn, str(tmp_path / "2.pt"))
    assert three[:2] == two and len(set(three)) == 3, "the third begins anew"
    torch.manual_seed(0)
    assert two[0] == torch.rand(1).item(), "the first has those of a run that is alone"


CHANGES = [
    ({"accumulate": 3}, "accumulate: got 3 micro-batches in a step, wanted a multiple of the 2 ranks"),
    ({"device": "cuda:1"}, "device: got 'cuda:1', one GPU, for 2 ranks; leave it out: each takes its own."),
    ({"seed": 1}, "recipe: rank 1 has another one than rank 0: lr is 0.2, rank 0's 0.1."),
]


def refused(out):
    said = []
    with join("cpu") as ranks:
        for changes, _ in CHANGES:
            todo = recipe("", out, **({"accumulate": 2} | changes))
            try:
                check_shared(dataclasses.replace(todo, lr=0.1 * (1 + ranks.rank)) if todo.seed else todo, ranks)
            except ValueError as error:
                said.append(str(error))
    return said


def test_what_ranks_cannot_share_is_refused_on_all_of_them(tmp_path):
    for said in on_ranks(2, refused, tmp_path):
        assert [words[: len(sentence)] for words, (_, sentence) in zip(said, CHANGES, strict=True)] == [s for _, s in CHANGES]


HELD_OUT = [3.0, 2.0, 2.5, 2.2]  # at steps 3, 6, 9, 12: the best is step 6's


def trained_otherwise(todo, folder, ranks):
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
        return {name: trained_otherwise(todo, folder / name, ranks) for name, todo in todos.items()}


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
    adapting = recipe("", folder, model=str(base), lora={"rank": 4, "alpha": 8}, phases=phases, ema=0.5)
    coded = recipe(corpus, folder, model=str(base), lora={"rank": 4, "base": "nf4"}, steps=4)
    patient = recipe(corpus, folder, steps=40, eval_every=3, patience=2, ema=0.5)
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
        for name, (losses, weights, known, kept) in found.items():
            wanted_losses, wanted, wanted_known, wanted_kept = alone[sharded.get(name, name)]
            assert losses == pytest.approx(wanted_losses, rel=2e-6), name
            held, wanted_held = known.pop("held"), wanted_known["held"]
            assert held == pytest.approx(wanted_held, rel=2e-6) and kept == wanted_kept, name
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
