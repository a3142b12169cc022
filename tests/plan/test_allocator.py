"""What lies free between tensors that stay, by the rules of torch's allocator: cases small enough to work out by hand."""

from dataclasses import replace

import pytest

from gpubound.plan.allocator import MIB, Heap
from gpubound.plan.cases import lora_setting_of_case
from gpubound.plan.lora_left import between_weights


def test_small_tensors_share_a_segment_and_large_ones_have_their_own():
    heap = Heap()
    heap.take(1000)
    heap.take(MIB // 2)
    assert (heap.reserved, heap.in_use) == (2 * MIB, 1024 + MIB // 2)
    heap.take(9 * MIB)
    heap.take(9 * MIB)
    assert heap.reserved == (2 + 20) * MIB
    heap.take(11 * MIB)
    assert heap.reserved == (2 + 20 + 12) * MIB


def test_the_smallest_free_block_is_taken_and_neighbours_become_one():
    heap = Heap()
    blocks = [heap.take(size * MIB) for size in (40, 20, 12)]
    for block in blocks:
        heap.give(block)
    parts = [heap.take(6 * MIB), heap.take(6 * MIB), heap.take(20 * MIB)]
    assert [part.segment for part in parts] == [3, 3, 2]
    for part in parts:
        heap.give(part)
    assert heap.take(12 * MIB).segment == 3
    assert (heap.reserved, heap.in_use) == (72 * MIB, 12 * MIB)


def test_a_segment_goes_back_when_nothing_of_it_is_in_use():
    heap = Heap()
    one, other = heap.take(40 * MIB), heap.take(40 * MIB)
    heap.give(one)
    half = heap.take(20 * MIB)
    heap.give(other)
    heap.empty()
    assert (heap.reserved, heap.in_use) == (40 * MIB, 20 * MIB)
    heap.give(half)
    heap.empty()
    assert heap.reserved == heap.in_use == 0


def test_weights_that_were_cast_leave_more_free_than_weights_that_were_read():
    drawn = lora_setting_of_case("8b", 4096, 1, None)
    read = replace(drawn, cast_from=None)
    assert between_weights(drawn) / 2**30 == pytest.approx(5.98, abs=0.01)
    assert between_weights(read) / 2**30 == pytest.approx(0.30, abs=0.01)
    assert between_weights(replace(drawn, captured=False)) == between_weights(replace(drawn, sharded=True, world=8)) == 0
