"""Ranks find each other, and say the same to each other; a process that nobody launched is alone."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpubound as gb
from gpubound.distributed import ALONE, join, launched
from gpubound.distributed.fsdp import shard
from gpubound.distributed.ranks import ranks_of
from tests.distributed.processes import RankFailed, on_ranks
from tests.messages import message, refusal


def told():
    with join("cpu") as ranks:
        flat = torch.full((3,), float(ranks.rank + 1))
        ranks.sum(flat)
        ranks.wait()
        agreed = ranks.all(True), ranks.all(ranks.rank == 0)
        return (
            ranks.rank,
            ranks.world,
            ranks.first,
            flat.tolist(),
            ranks.gather(ranks.rank * 10),
            ranks.of_first(ranks.rank),
            agreed,
        )


def test_ranks_speak_to_each_other():
    world = 4
    total = world * (world + 1) / 2
    assert on_ranks(world, told) == [
        (rank, world, rank == 0, [total] * 3, [10 * other for other in range(world)], 0, (True, False)) for rank in range(world)
    ]


def test_a_process_that_nobody_launched_is_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not launched() and ALONE.alone and ALONE.first
    with join("cpu") as ranks:
        x = torch.ones(2)
        ranks.sum(x)
        ranks.wait()
        assert (
            ranks.alone and x.tolist() == [1, 1] and ranks.gather(7) == [7] and ranks.of_first(7) == 7 and not ranks.all(False)
        )


class Graph:
    released = False

    def release(self):
        assert dist.is_initialized(), "a communicator waits for graphs that use it"
        self.released = True


def ended():
    with join("cpu") as ranks:
        graph, gone = Graph(), Graph()
        ranks.graphs.update((graph, gone))
        del gone
        before = len(ranks.graphs), graph.released
    return *before, graph.released, dist.is_initialized()


def test_graphs_with_sums_inside_end_before_what_they_sum_over():
    assert on_ranks(2, ended) == [(1, False, True, False)] * 2


def shares(accumulate):
    with join("cpu") as ranks:
        return ranks.share(accumulate)


def test_the_micro_batches_of_a_step_are_shared_out_evenly_or_refused():
    assert on_ranks(2, shares, 4) == [2, 2]
    with pytest.raises(RankFailed, check=message("parallel/ranks:the_micro_batches_of_a_s")):
        on_ranks(2, shares, 3)


SUMS = """
import sys

sys.setswitchinterval(1000)  # gloo's threads get the interpreter where the program sleeps, and nowhere else
import torch

from gpubound.distributed import join

with join("cpu") as ranks:
    for _ in range(50):
        ranks.sum(torch.ones(3))
"""


def test_a_program_that_ends_right_behind_a_sum_ends_well():
    """One of two was aborted: a thread of gloo's let go of its last tensor when there was no interpreter any more."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    programs = [
        subprocess.Popen([sys.executable, "-c", SUMS], env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    assert [program.wait(120) for program in programs] == [0, 0]


@pytest.mark.parametrize(
    ("who", "call"),
    [
        ("TrainStep", lambda model, ranks: gb.TrainStep(model, lambda m, b: (m(b).sum(), 1), ranks=ranks)),
        ("shard", lambda model, ranks: shard(model, [], ranks)),
    ],
)
def test_join_without_its_block_is_named(who, call):
    with pytest.raises(ValueError, check=message("parallel/ranks:join_without_its_block_i", who)):
        call(nn.Linear(2, 2), join("cpu"))


# --- a script's own process group, used and left open ---


def own_group():
    dist.init_process_group("gloo")
    with join("cpu") as ranks:
        x = torch.tensor([1.0 + ranks.rank])
        ranks.sum(x)
    odd_even = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = ranks_of(odd_even[dist.get_rank() % 2], "cpu")
    y = torch.tensor([10.0**half.rank])
    half.sum(y)
    return ranks.rank, ranks.world, x.item(), (half.rank, half.world, half.of_first(dist.get_rank()), y.item())


def test_a_process_group_that_is_there_is_used_and_left():
    assert on_ranks(4, own_group) == [(rank, 4, 10.0, (rank // 2, 2, rank % 2, 11.0)) for rank in range(4)]


def wrong_engine():
    dist.init_process_group("gloo")
    with join("cuda"):
        pass


def test_a_group_that_cannot_add_up_on_the_device_is_refused():
    assert message("parallel/own_group:a_group_that_cannot_add").within(refusal(RankFailed, lambda: on_ranks(2, wrong_engine)))
