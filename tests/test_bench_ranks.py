"""The benchmarks of several GPUs: ranks speak as one, contenders take the same steps, both ways of saving write the same."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.bench_checkpoint import SavesJob, batches, one_round
from benchmarks.bench_ranks import CASES, TINY
from benchmarks.ranks_worker import CONTENDERS
from benchmarks.saves_worker import training
from benchmarks.serving import Job, introduce
from benchmarks.workers import Team, Worker, joint
from gpubound.distributed import join
from gpubound.distributed.sharded_checkpoint import shapes
from gpubound.errors import MeasureError
from gpubound.models import PRESETS
from tests.distributed.processes import on_ranks


def test_what_ranks_say_is_said_as_one():
    facts = [
        {"loss": 1.0, "syncs": 0, "captured": True, "peak_gib": 3.5},
        {"loss": 2.0, "syncs": 1, "captured": False, "peak_gib": 3},
    ]
    assert joint(facts) == {"loss": 1.5, "syncs": 1, "captured": False, "peak_gib": 3.5}
    assert joint([0.25, 0.5]) == 0.5 and joint([[1.0], [2.0]]) == [1.0]


def test_ranks_of_a_team_end_at_once():
    """NCCL lets a rank go when all others go, too: one after the other, the first was killed after 30 s."""
    together = threading.Barrier(2)

    class Rank:
        def __exit__(self, *_: object) -> None:
            together.wait(timeout=60)

    team = Team.__new__(Team)
    team._many, team._workers = ThreadPoolExecutor(2), [Rank(), Rank()]
    with team:
        pass
    assert not together.broken


def test_a_contender_that_is_late_is_ended(tmp_path):
    (tmp_path / "never_ready.py").write_text("import sys\nsys.stdin.read()\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with pytest.raises(MeasureError, match="compile-max: no step has ended within 0 s; give a longer --limit"):
        Worker(Job("compile-max", "tiny", 8, 1, 1, "cpu"), "never_ready", variables={"PYTHONPATH": path}, limit=0.2)


def test_every_contender_of_a_case_is_there():
    for case in (*CASES.values(), *TINY.values()):
        assert {case.ours, *case.peers} <= CONTENDERS.keys()


@pytest.mark.parametrize("name", ["8b", "8b-lora"])
def test_contenders_of_a_large_case_have_as_many_rows_a_step_whatever_fits(name):
    case = CASES[name]
    for who in (case.ours, *case.peers):
        jobs = list(case.jobs(who, "cuda"))
        assert jobs and {job.micro * job.accumulate * job.seq for job in jobs} == {case.tokens}
        assert [job.micro for job in jobs] == sorted((job.micro for job in jobs), reverse=True)


def steps(*contenders: str):
    os.environ.pop("TRITON_INTERPRET", None)  # as in a worker: the definitions run
    with join("cpu") as ranks:
        return {who: losses(TINY["tiny"].job(who, "cpu"), ranks) for who in contenders}


def losses(job, ranks):
    step, facts = introduce(job, CONTENDERS[job.who](job, ranks))
    return [facts["loss"], *(step().item() for _ in range(3))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ours_and_torchs_own_begin_alike_and_learn():
    """Ours says the mean over all ranks, DDP that of its own rows: so theirs is averaged here."""
    one, other = on_ranks(2, steps, "ours-ddp", "ours-fsdp", "ddp", "ours-fsdp-lora", "fsdp-peft")
    adapted, (c, d) = one["ours-fsdp-lora"], (one["fsdp-peft"], other["fsdp-peft"])
    assert adapted[0] == pytest.approx((c[0] + d[0]) / 2, rel=1e-3) and adapted[-1] < adapted[0]
    ours, (a, b) = one["ours-ddp"], (one["ddp"], other["ddp"])
    assert ours == other["ours-ddp"] and ours[0] == pytest.approx((a[0] + b[0]) / 2, rel=1e-3)
    assert one["ours-fsdp"] == other["ours-fsdp"] == pytest.approx(ours, rel=1e-3)
    for learnt in (ours, a, b):
        assert learnt[-1] < learnt[0]


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
