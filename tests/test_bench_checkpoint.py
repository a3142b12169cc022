"""The benchmark of saves in shards: both ways write the same, and a line says the median of the slowest rank."""

import os
from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch

from benchmarks import bench_checkpoint
from benchmarks.bench_checkpoint import Checkpoint, SavesJob, batches, measure_shards, one_round
from benchmarks.saves_worker import training
from gpubound.models import PRESETS
from gpubound.parallel import join
from gpubound.parallel.saved import shapes
from tests.parallel.processes import on_ranks

STEPS = {"normal": 0.2, "behind": 0.21, "slowest": 0.25}  # seconds of those around a save


def saves(folder):
    os.environ.pop("TRITON_INTERPRET", None)  # as in a worker: the definitions run
    job = SavesJob("saves", "tiny", 8, 1, 1, "cpu", folder=folder)
    with join("cpu") as ranks, training(job, ranks) as (step, ways):
        window = batches(PRESETS["tiny"].vocabulary, job.seq, job.micro, job.accumulate, ranks.device)
        rounds = {name: one_round(step, window, way, 0) | {"written": way.written} for name, way in ways.items()}
        return rounds, {name: shapes(path) for name, way in ways.items() for path in way.wait()}


def test_ours_and_torchs_own_save_the_same_tensors(tmp_path):
    for rounds, found in on_ranks(2, saves, str(tmp_path)):
        assert all(seconds["written"] > 0 and seconds["triggers"] > 0 for seconds in rounds.values())
        assert found["ours"] == found["dcp"] and len(found["dcp"]) > 30


def test_a_save_is_held_to_how_much_longer_its_step_is(monkeypatch):
    seconds, said = {"ours": 1.2, "dcp": 3.2}, []

    def ask(save):
        return {"triggers": seconds[save], "written": 10 * seconds[save]} | STEPS

    team = Namespace(facts={"bytes": 1}, ask=ask)
    monkeypatch.setattr(bench_checkpoint, "started", lambda *_, **__: nullcontext(team))
    bench = Namespace(device=torch.device("cpu"), figure=lambda *given: said.append(given))
    measure_shards(bench, Checkpoint(gpus=2), 1)
    (case, unit, ours, peers, gates), whole = said
    assert case.endswith("held up") and (unit, gates) == ("ms", {"wanted": 1.0})
    assert ours == pytest.approx(1000) and peers == pytest.approx({"dcp": 3000, "wanted": 1000})
    assert whole[2] == 12000 and whole[3] == {"dcp": 32000}


def test_ours_alone_is_held_to_the_gate_and_to_no_peer(monkeypatch):
    asked, said = [], []

    def ask(save):
        asked.append(save)
        return {"triggers": 0.3, "written": 2.0} | STEPS

    team = Namespace(facts={"bytes": 1}, ask=ask)
    monkeypatch.setattr(bench_checkpoint, "started", lambda *_, **__: nullcontext(team))
    bench = Namespace(device=torch.device("cpu"), figure=lambda *given: said.append(given))
    measure_shards(bench, Checkpoint(gpus=2, alone=True, rounds=1), 1)
    assert asked == ["ours"] * 2  # the first makes room and is not counted
    ((_, _, ours, peers, gates),) = said
    assert ours == pytest.approx(100) and peers == {"wanted": 1000} and gates == {"wanted": 1.0}
