"""The training benchmark: what takes turns with what, and what never lies on one GPU at a time."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_train
from benchmarks.bench_train import CASES, measure_case
from benchmarks.harness import Bench
from gpubound.errors import MeasureError
from tests.messages import message

alive, most, jobs = [], [], []


class Pretended:
    """A contender's process that takes 0.1 s a micro-batch and 50 GiB, for which a GPU has 80."""

    def __init__(self, job, **_):
        if len(alive) == Pretended.room:
            raise MeasureError(f"{job.who}: its process ended with 1; its own message is above.")
        self.job, self.who = job, job.who
        self.facts = {"captured": True, "first_step_s": 1.0, "loss": 7.0, "peak_gib": 50.0, "parameters": 1}

    def ask(self, steps):
        return 0.1 * self.job.accumulate

    def __enter__(self):
        alive.append(self)
        jobs.append(self.job)
        most.append(len(alive))
        return self

    def __exit__(self, *_):
        alive.remove(self)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measure a case on a GPU of so many GiB, which has room for so many of our contenders."""
    monkeypatch.setattr(bench_train, "Worker", Pretended)

    def run(name, gib, room):
        for noted in (alive, most, jobs):
            noted.clear()
        bench = Bench("train", torch.device("cpu"), "gpubound bench train", folder=tmp_path)
        monkeypatch.setattr(bench_train, "room_gib", lambda bench: gib)
        monkeypatch.setattr(Pretended, "room", room, raising=False)
        limit = SimpleNamespace(flops_per_s=lambda dtype: 1e15)
        measure_case(bench, name, CASES[name], 3, limit, ["none"], "")
        return bench

    return run


@pytest.mark.parametrize(("gib", "room"), [(80.0, 1), (140.0, 2)])
def test_a_step_of_one_micro_batch_comes_beside_ours_or_behind(measured, gib, room):
    bench = measured("8b", gib, room)
    assert max(most) == room and not bench.unmeasured
    (line,) = [line for line in bench.lines if line.peer_name == "accumulate 1"]
    assert (line.gate, line.ratio, line.ours) == (1.0, pytest.approx(1.0), pytest.approx(2048 / 0.1, rel=1e-3))


def test_the_step_of_one_micro_batch_is_otherwise_ours(measured):
    measured("1b-x8-fp8", 140.0, 2)
    ours, one = jobs
    assert (ours.accumulate, one.accumulate) == (8, 1)
    assert replace(ours, accumulate=1) == one


def test_the_figures_stay_when_the_step_of_one_micro_batch_does_not_start(measured):
    """GPU memory that others hold is not known beforehand."""
    bench = measured("8b", 140.0, 1)
    assert bench.unmeasured == [message("bench_train:the_figures_stay_when_th")]
    assert {line.case for line in bench.lines} >= {"8b", "8b first step", "8b peak memory"}
