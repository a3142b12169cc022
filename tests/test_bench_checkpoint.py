"""The benchmark of saves in shards: both ways write the same, and a line says the median of the slowest rank."""

import os

import pytest

from benchmarks.bench_checkpoint import SavesJob, batches, one_round
from benchmarks.saves_worker import training
from gpubound.distributed import join
from gpubound.distributed.sharded_checkpoint import shapes
from gpubound.models import PRESETS
from tests.distributed.processes import on_ranks


def saves(folder):
    os.environ.pop("TRITON_INTERPRET", None)  # as in a worker: the definitions run
    job = SavesJob("saves", "tiny", 8, 1, 1, "cpu", folder=folder)
    with join("cpu") as ranks, training(job, ranks) as (step, ways):
        window = batches(PRESETS["tiny"].vocabulary, job.seq, job.micro, job.accumulate, ranks.device)
        rounds = {name: one_round(step, window, way, 0) | {"written": way.written} for name, way in ways.items()}
        return rounds, {name: shapes(path) for name, way in ways.items() for path in way.wait()}


@pytest.mark.slow
def test_ours_and_torchs_own_save_the_same_tensors(tmp_path):
    for rounds, found in on_ranks(2, saves, str(tmp_path)):
        assert all(seconds["written"] > 0 and seconds["triggers"] > 0 for seconds in rounds.values())
        assert found["ours"] == found["dcp"] and len(found["dcp"]) > 30
