"""Ranks that do not find each other, or do not fit each other, end in one sentence that all of them know."""

import os
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gpubound.distributed import join, rendezvous
from gpubound.errors import DeviceError
from tests.distributed.processes import on_ranks, started
from tests.messages import message

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
    with pytest.raises(DeviceError) as failed:
        rendezvous.init_group("nccl", None, 1, 2, torch.device("cuda", 1), SOON)
    assert str(failed.value) == message("parallel/meeting:a_gpu_build_without_nccl.2")


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
