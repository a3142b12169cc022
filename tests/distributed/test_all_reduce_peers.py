"""Sums that copy engines carry: here threads are the ranks, and what they see of each other is plain memory."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from threading import Barrier

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric

from gpubound import trace
from gpubound.distributed import ALONE, all_reduce, join
from gpubound.distributed.all_reduce import SymmetricSums, cannot, shares, symmetric_sums
from tests.distributed.processes import on_ranks
from tests.messages import message


@pytest.mark.parametrize("start, stop, world", [(0, 1000, 2), (64, 65, 4), (5, 5, 3), (32, 4099, 8), (0, 64, 2)])
def test_each_element_is_one_ranks(start, stop, world):
    found = shares(start, stop, world)
    assert len(found) == world and found[0][0] == start and found[-1][1] == stop
    assert all(first <= last for first, last in found) and all(a[1] == b[0] for a, b in pairwise(found))
    assert max(last - first for first, last in found) <= -(-(stop - start) // world) + all_reduce.ALIGNED


@pytest.mark.parametrize("world", [2, 3, 5])
def test_all_ranks_have_the_sum_with_the_same_bits(world, monkeypatch):
    """Of the stretches that they ask for, in pieces of 40 elements; the rest stays each one's own."""
    monkeypatch.setattr(all_reduce, "PIECE", 40)
    drawn = torch.randn(world, 700, generator=torch.Generator().manual_seed(world))
    buffers, meeting = list(drawn.clone()), Barrier(world)

    def work(rank):
        mine = SymmetricSums(buffers, rank, lambda: meeting.wait(60) and None)
        for wait in (mine.begin(100, 650), mine.begin(0, 33), mine.end()):
            wait()
        return mine.mine

    with ThreadPoolExecutor(world) as many:
        found = list(many.map(work, range(world)))
    wanted = drawn.double().sum(0)
    for rank, sums in enumerate(found):
        for summed in (slice(100, 650), slice(0, 33)):
            torch.testing.assert_close(sums[summed].double(), wanted[summed], rtol=1e-6, atol=1e-6)
            assert torch.equal(sums[summed], found[0][summed])
        for kept in (slice(33, 100), slice(650, 700)):
            assert torch.equal(sums[kept], drawn[rank, kept])


def test_a_cpu_and_one_that_is_alone_have_none():
    assert symmetric_sums(ALONE, 100) is None
    assert on_ranks(2, found_on_cpus) == [True, True]


def test_gpus_that_do_not_see_each_other_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other != 2)
    assert cannot(0, [0, 1]) is None
    assert cannot(1, [0, 1, 2]) == message("parallel/peers:gpus_that_do_not_see_eac")
    assert cannot(0, [0, 0]) == message("parallel/peers:gpus_that_do_not_see_eac.2")


def found_on_cpus():
    with join("cpu") as ranks:
        return symmetric_sums(ranks, 100) is None


def without(stage):
    """A driver that gives rank 1 no shared memory, or shows nobody the others'."""
    with join("cpu") as ranks:
        torch.cuda.can_device_access_peer = lambda own, other: True
        torch.cuda.memory_reserved = lambda device: 0
        symmetric.empty = lambda elements, dtype, device: failing("no memory") if stage == ranks.rank else torch.zeros(elements)
        symmetric.rendezvous = lambda buffer, group: failing("no fabric")
        ours = replace(ranks, device=torch.device("cuda", ranks.rank))  # as if: nothing runs there
        return symmetric_sums(ours, 100), [line for line in trace._printed if line.startswith("parallel: ")]


def failing(said):
    raise RuntimeError(f"{said}\nand a long explanation")


@pytest.mark.parametrize("stage, why", [(1, "no memory"), (None, "no fabric")])
def test_where_one_rank_cannot_none_does_and_a_line_says_why(stage, why):
    said = f"parallel: gradients are summed by NCCL's kernels, not by copies between GPUs: {why}."
    assert on_ranks(2, without, stage) == [(None, [said])] * 2


def summed_on_gpus(elements):
    with join("cuda") as ranks:
        sums = symmetric_sums(ranks, elements)
        g = torch.Generator("cuda").manual_seed(ranks.rank)
        sums.mine.copy_(torch.randn(elements, device="cuda", generator=g))
        wanted = sums.mine.clone()
        ranks.sum(wanted)
        found = []
        for _ in range(3):  # nobody may still read what the next round writes
            sums.mine.copy_(torch.randn(elements, device="cuda", generator=g.manual_seed(ranks.rank)))
            for wait in (sums.begin(0, 1000), sums.begin(1000, elements), sums.end()):
                wait()
            found.append(torch.equal(sums.mine, wanted))
        return found


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_two_gpus_have_the_sum_that_nccl_gives():
    """Of two terms there is one sum, whoever adds."""
    assert on_ranks(2, summed_on_gpus, 9_000_001) == [[True] * 3] * 2
