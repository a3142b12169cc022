"""Ranks find each other, say the same to each other, and end in one sentence where they do not fit; alone, nothing is asked."""

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpubound as gb
from gpubound.distributed import ALONE, join, launched, rendezvous
from gpubound.distributed.fsdp import shard
from gpubound.distributed.ranks import ranks_of
from gpubound.errors import DeviceError
from tests.distributed.processes import RankFailed, on_ranks, started
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


SOON = timedelta(seconds=1)


def met(world):
    """What joining ends in; rank 1 has another torch."""
    if os.environ["RANK"] == "1":
        torch.__version__ = "2.0.0"
    os.environ["WORLD_SIZE"] = str(world)
    try:
        with join("cpu", SOON) as ranks:
            return ranks.world
    except DeviceError as error:
        return str(error)


def test_ranks_of_two_versions_are_told_which():
    said = on_ranks(2, met, 2)
    here = torch.__version__
    assert said == [f"rank 1 has torch 2.0.0, rank 0 has {here}; install the same version for every rank."] * 2


def test_a_rank_that_does_not_come_is_named():
    assert on_ranks(1, met, 3) == [message("parallel/meeting:a_rank_that_does_not_com")]


def test_two_ranks_on_one_gpu_are_named():
    versions = {"gpubound": "1", "torch": "2"}
    assert rendezvous.mismatch([versions | {"GPU": name} for name in "ab"]) == ""
    said = rendezvous.mismatch([versions | {"GPU": name} for name in "aba"])
    assert said.startswith("ranks 0 and 2 have the same GPU (a), and NCCL wants one for each; start as many processes as")


def test_a_port_that_is_taken_and_a_place_where_nobody_is_are_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        variables = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(DeviceError, check=message("parallel/meeting:a_port_that_is_taken_and")):
            rendezvous.open_store(0, 2, torch.device("cpu"), SOON)
    with pytest.raises(DeviceError, check=message("parallel/meeting:a_port_that_is_taken_and.2")):
        rendezvous.open_store(1, 2, torch.device("cpu"), SOON)


def test_a_gpu_build_without_nccl_and_an_nccl_that_fails_are_named(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(DeviceError, check=message("parallel/meeting:a_gpu_build_without_nccl")):
        rendezvous.about(torch.device("cuda", 0))

    def fail(*args, **kwargs):
        raise dist.DistBackendError("NCCL error in: init.cpp:1\nncclUnhandledCudaError: Call to CUDA function failed.")

    monkeypatch.setattr(dist, "init_process_group", fail)
    said = refusal(DeviceError, lambda: rendezvous.init_group("nccl", None, 1, 2, torch.device("cuda", 1), SOON))
    assert said == message("parallel/meeting:a_gpu_build_without_nccl.2")


def unlike_recipes():
    with join("cpu") as ranks:
        try:
            ranks.check_same("recipe", {"lr": 1e-3, "seed": 0})
            ranks.check_same("recipe", {"lr": 1e-3, "seed": 7 * ranks.rank})
        except ValueError as error:
            return str(error)


def test_a_rank_with_another_recipe_is_named_with_the_keys():
    sentence = "recipe: rank 1 has another one than rank 0: seed is 7, rank 0's 0. Start all ranks with the same."
    assert on_ranks(2, unlike_recipes) == [sentence] * 2


def speaks_aside(late):
    """A second line between the ranks, as a run's saves have one; one rank is late for it."""
    with join("cpu") as ranks:
        time.sleep(0.3 * (ranks.rank == late))
        return ranks.aside().gather(ranks.rank)


def test_ranks_that_begin_again_do_not_call_those_before():
    """torch's agent keeps one store over all starts. A rank that is early found the address of one that was gone."""
    processes, pipes, store = started(2, speaks_aside, None)
    assert [pipe.recv() for pipe in pipes] == [[0, 1]] * 2
    for process in processes:
        process.join(60)
    assert on_ranks(2, speaks_aside, 0, store=store) == [[0, 1]] * 2
