"""Memory that a cache lends to graphs, and finds again at its address."""

import gc

import pytest
import torch

from gpubound import trace
from gpubound.errors import GenerateError
from gpubound.graph import capture
from gpubound.graph.guards import ReentryGuard
from gpubound.graph.runner import LentMemory, released


def guard():
    return ReentryGuard(GenerateError, "busy")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_tensors_share_one_block_and_come_back_as_zeros(dtype):
    codes, scales = torch.ones(3, 5, 7).to(dtype).transpose(0, 1), torch.ones(9)
    memory = LentMemory([codes, scales], guard())
    assert codes.shape == (5, 3, 7) and codes.stride() == (7, 35, 1) and codes.dtype == dtype and not memory.lent
    for _ in range(2):
        assert not codes.float().any() and not scales.any()
        codes.view(torch.uint8).fill_(1)
        assert not scales.any(), "they do not overlap"
        scales.fill_(torch.nan)
        memory.lend()
        memory.lend()
        assert memory.lent and codes.untyped_storage().nbytes() == scales.untyped_storage().nbytes() == 0
        memory.take_back()
        assert not memory.take_back(), "it is there"


def test_memory_in_use_is_not_lent():
    users = guard()
    memory = LentMemory([torch.ones(4)], users)
    with users, pytest.raises(AssertionError, match="while a request uses it"):
        memory.lend()
    memory.lend()
    assert memory.lent


def test_what_the_borrower_keeps_in_it_begins_as_zeros():
    sums = torch.ones(6)
    memory = LentMemory([torch.ones(4)], guard(), sums)
    for _ in range(2):
        memory.lend()
        assert not sums.any()
        sums.fill_(1)
        memory.take_back()
        assert sums.isnan().all(), "a GPU's are overwritten by the owner"


def test_a_tensor_has_no_memory_until_the_owner_has_its_own():
    sums = torch.ones(6)
    part = sums[2:]
    with released(None), released(sums):
        assert not sums.untyped_storage().nbytes()
    assert part.equal(torch.zeros(4))
    with released(sums):
        memory = LentMemory([torch.ones(4)], guard(), sums)
        assert sums.untyped_storage().nbytes()
    memory.lend()
    assert part.equal(torch.zeros(4))


SIZE = 1 << 28


def activations(x):
    """Up to seven eighths of the block at once."""
    parts = [x * number for number in range(5)]
    return sum(parts[1:], parts[0]).sum()


@pytest.mark.gpu
def test_a_graph_computes_in_it_and_its_owner_finds_it_where_it_was():
    cache, x = torch.zeros(SIZE, device="cuda", dtype=torch.uint8), torch.arange(SIZE // 32, device="cuda").float()
    memory = LentMemory([cache], guard())
    address, reserved = cache.data_ptr(), torch.cuda.memory_reserved()
    memory.lend()
    graph = capture(activations, x, pool=memory.pool, warm_in_pool=True, clone=True)
    assert graph.memory_bytes < SIZE // 2, "its activations take the block"
    want = graph(x).clone()
    for _ in range(2):
        assert not memory.take_back() and cache.data_ptr() == address and not cache.any()
        cache.fill_(255)  # NaN to the graph
        memory.lend()
        assert torch.equal(graph(x), want)
    torch.cuda.empty_cache()
    assert not memory.take_back(), "what is lent stays mapped"
    assert torch.cuda.memory_reserved() - reserved < SIZE // 2
    del graph, memory, cache
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved - SIZE // 2


@pytest.mark.gpu
def test_sums_that_a_graph_writes_lie_in_the_first_bytes():
    cache, x = torch.zeros(SIZE, device="cuda", dtype=torch.uint8), torch.arange(SIZE // 32, device="cuda").float()
    sums = torch.ones(1 << 22, device="cuda")
    part, allocated = sums[3:], torch.cuda.memory_allocated()
    with released(sums):
        assert torch.cuda.memory_allocated() == allocated - sums.nbytes
        memory = LentMemory([cache], guard(), sums)
    address = cache.data_ptr()
    assert sums.data_ptr() == address and part.data_ptr() == address + 12 and cache.nbytes == SIZE
    memory.lend()
    add = capture(lambda x: part.add_(activations(x)), x, pool=memory.pool, warm_in_pool=True)
    want = activations(x)
    for _ in range(2):
        assert not sums.any()
        add(x)
        assert bool((part == want).all()) and not sums[:3].any()
        assert not memory.take_back() and cache.data_ptr() == address and not cache.any()
        cache.fill_(255)
        memory.lend()


@pytest.mark.gpu
def test_what_a_graph_keeps_in_it_stays_and_the_tensors_move(monkeypatch):
    monkeypatch.setattr(trace, "fallbacks", type(trace.fallbacks)())
    cache, x = torch.zeros(SIZE, device="cuda", dtype=torch.uint8), torch.arange(SIZE // 32, device="cuda").float()
    memory = LentMemory([cache], guard())
    address = cache.data_ptr()
    memory.lend()
    graph = capture(lambda x: x * 2, x, pool=memory.pool, warm_in_pool=True)
    result = graph(x)  # the graph's own output, in the block
    assert address <= result.data_ptr() < address + SIZE
    assert memory.take_back() and cache.data_ptr() != address
    cache.fill_(255)
    assert torch.equal(result, x * 2)
    assert [what for what, _ in trace.fallbacks] == ["memory lent to graphs"]
