"""Batch-invariant products and attention: parity with the reference, and bits that the other rows do not change."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.invariant import BLOCK, MEMBERS, SharedKeys
from gpubound.kernels.registry import load
from gpubound.kernels.triton import invariant as fast

from .cases import TOLERANCE, draw, pairwise, same

DTYPES = [torch.float32, torch.bfloat16]
SOURCES = ["triton", "reference"]
SEQUENCES = [0, 70, 70, 75, 205, 206]  # bounds


@pairwise
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 65])
@pytest.mark.parametrize("inputs, outputs", [(64, 96), (40, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_agrees_with_the_reference(device, dtype, rows, inputs, outputs, biased):
    x, weight = draw(device, dtype, rows, inputs), draw(device, dtype, outputs, inputs, seed=1)
    bias = draw(device, dtype, outputs, seed=2) if biased else None
    got, want = (load(source, "invariant_linear")(x, weight, bias) for source in SOURCES)
    same("y", got, want, max(TOLERANCE[dtype], 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_a_row_of_a_product_does_not_depend_on_the_others(device, dtype, source):
    product = load(source, "invariant_linear")
    x, weight = draw(device, dtype, 150, 192), draw(device, dtype, 96, 192, seed=1)
    y = product(x, weight)
    for first, last in ((0, 1), (63, 65), (7, 140)):
        assert torch.equal(product(x[first:last].contiguous(), weight), y[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("inputs, outputs", [(1024, 6144), (3072, 1024), (2048, 1024), (1024, 50304), (1040, 72)])
@pytest.mark.parametrize("alone", [True, False])
def test_every_tile_of_a_product_has_the_same_bits(device, inputs, outputs, alone, monkeypatch):
    """alone: without torch's products."""
    if alone:
        monkeypatch.setattr(fast, "_equal_to_torch", lambda x, weight: False)
    x, weight = draw(device, torch.bfloat16, 4096, inputs), draw(device, torch.bfloat16, outputs, inputs, seed=1)
    y = kernels.invariant_linear(x, weight)
    for rows in (1, 8, 33, 64, 200, 256, 1024):
        assert torch.equal(kernels.invariant_linear(x[:rows].contiguous(), weight), y[:rows]), rows


def packed(device, dtype, heads=4, kv_heads=2, width=32):
    q, k, v = (draw(device, dtype, SEQUENCES[-1], n, width, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    return q, k, v, torch.tensor(SEQUENCES, device=device, dtype=torch.int32), width**-0.5


def cached(k, v, begin, end, pages):
    """The keys and values of a sequence in a cache that is NaN elsewhere, and its blocks."""
    size = BLOCK if pages else 192
    blocks = torch.tensor([[5, 2, 3]] if pages else [[1]], device=k.device, dtype=torch.int32)
    caches = [torch.full((6, k.shape[1], size, k.shape[2]), float("nan"), device=k.device, dtype=k.dtype) for _ in range(2)]
    for cache, t in zip(caches, (k, v)):
        for number, part in enumerate(t[begin:end].split(size)):
            cache[blocks[0, number], :, : len(part)] = part.transpose(0, 1)
    return *caches, blocks


@pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("width", [24, 64])
def test_attention_agrees_with_the_reference(device, dtype, heads, kv_heads, width):
    arguments = packed(device, dtype, heads, kv_heads, width)
    (y, lse), (want, want_lse) = (load(source, "invariant_attention")(*arguments) for source in SOURCES)
    same("y", y, want, max(2 * TOLERANCE[dtype], 1e-5))
    same("lse", lse, want_lse, max(TOLERANCE[dtype], 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_a_step_of_attention_has_the_bits_of_the_packed_rows(device, dtype, pages, source):
    """Of one token, and of several that follow: queries at places 60 to 129 of the sequence that begins at 75."""
    q, k, v, bounds, scale = packed(device, dtype)
    want, _ = load(source, "invariant_attention")(q, k, v, bounds, scale)
    step = load(source, "invariant_cached_attention")
    for place, tokens in ((0, 1), (63, 1), (64, 1), (129, 1), (60, 70)):
        cache = cached(k, v, 75, 75 + place + tokens, pages)
        mine = slice(75 + place, 75 + place + tokens)
        position = torch.tensor([place], device=device, dtype=torch.int32)
        assert torch.equal(step(q[None, mine], *cache, position, scale)[0], want[mine]), place


def grouped(groups, counts, device):
    rows = torch.full((len(groups), MEMBERS), -1, dtype=torch.int32)
    for line, members in zip(rows, groups):
        line[: len(members)] = torch.tensor(members)
    return SharedKeys(rows.to(device), torch.tensor(counts, device=device, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_blocks_that_rows_share_are_read_once_with_equal_bits(device, dtype, heads, kv_heads):
    """Those of the row of a group that is furthest, 2 and 1: the tables of 0, 3 and 12 name blocks there that do not exist.
    Row 7 is at a place before the end of what it shares, and the third group is larger than a tile."""
    members = [[8, 0, 2, 3, 7], [12, 1], [4, 5, 6, 9, 10, 11]]
    counts = [130, 70, 130, 130, 128, 128, 128, 130, 130, 128, 128, 128, 70]
    q = draw(device, dtype, 13, 1, heads, 32)
    k, v = (draw(device, dtype, 45, kv_heads, BLOCK, 32, seed=seed) for seed in (1, 2))
    blocks = torch.arange(39, device=device, dtype=torch.int32).view(13, 3) + 3
    for group, count in zip(members, (2, 1, 2)):
        blocks[group, :count] = blocks[group[0], :count].clone()
    position = torch.tensor([130, 70, 191, 128, 177, 129, 140, 90, 150, 160, 170, 180, 64], device=device, dtype=torch.int32)
    step = load("triton", "invariant_cached_attention")
    want = step(q, k, v, blocks, position, 0.2)
    own, shared = blocks.clone(), grouped([*members, []], counts, device)
    blocks[[0, 3], :2], blocks[12, 0] = 45, 45
    assert torch.equal(step(q, k, v, blocks, position, 0.2, shared), want)
    same("y", kernels.invariant_cached_attention(q, k, v, own, position, 0.2, shared), want, max(2 * TOLERANCE[dtype], 1e-5))
    blocks[2, 1], shared.rows[1, 2:4] = 45, torch.tensor([13, -7])  # a block and rows that there are not
    y = step(q, k, v, blocks, position, 0.2, shared)
    assert y.isnan().flatten(1).any(1).tolist() == [row in (8, 0, 2, 3) for row in range(13)]


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads, width", [(16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 8, 256)])
def test_samples_of_many_prompts_have_the_bits_of_single_ones(device, heads, kv_heads, width):
    samples, rows, dtype = 8, 128, torch.bfloat16
    q = draw(device, dtype, rows, 1, heads, width)
    k, v = (draw(device, dtype, 8 * rows, kv_heads, BLOCK, width, seed=seed) for seed in (1, 2))
    blocks = torch.randperm(8 * rows, generator=torch.Generator().manual_seed(0)).int().to(device).view(rows, 8)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).view(-1, samples).tolist()
    counts = [0] * rows
    for group, members in enumerate(order):
        for row in members:
            counts[row] = 64 * (group % 4) + group % 3
            blocks[row, : group % 4] = blocks[members[0], : group % 4].clone()
    position = torch.tensor([count + 37 * row % 256 for row, count in enumerate(counts)], device=device, dtype=torch.int32)
    arguments = q, k, v, blocks, position, width**-0.5
    shared = grouped([members for group, members in enumerate(order) if group % 4], counts, device)
    want = kernels.invariant_cached_attention(*arguments)
    assert want.isfinite().all() and torch.equal(kernels.invariant_cached_attention(*arguments, shared), want)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads, width", [(16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 8, 256), (20, 4, 96)])
def test_a_tile_of_few_rows_has_the_bits_of_a_large_one(device, heads, kv_heads, width, monkeypatch):
    """In every place of a block, of one block and of several, and as many rows as it takes. Only Hopper has such tiles."""
    rows, dtype = 300, torch.bfloat16
    q = draw(device, dtype, rows, 1, heads, width)
    k, v = (draw(device, dtype, 5 * rows, kv_heads, BLOCK, width, seed=seed) for seed in (1, 2))
    blocks = torch.randperm(5 * rows, generator=torch.Generator().manual_seed(0)).int().to(device).view(rows, 5)
    arguments = q, k, v, blocks, torch.arange(rows, device=device, dtype=torch.int32), width**-0.5
    few = kernels.invariant_cached_attention(*arguments)
    assert few.isfinite().all() and all(fast._agree.values()), "the trial of a tile of few rows found other bits"
    monkeypatch.setattr(fast, "_step_rows", lambda q, k: None)
    assert torch.equal(kernels.invariant_cached_attention(*arguments), few)


def test_blocks_and_positions_that_the_cache_does_not_have(device):
    q, k = draw(device, torch.float32, 4, 1, 4, 32), draw(device, torch.float32, 3, 2, BLOCK, 32, seed=1)
    blocks = torch.tensor([[0, 1], [0, 3], [-1, 1], [1, 2]], device=device, dtype=torch.int32)
    position = torch.tensor([70, 70, 70, 2 * BLOCK], device=device, dtype=torch.int32)
    y = load("triton", "invariant_cached_attention")(q, k, k, blocks, position, 0.2)
    assert y.isnan().flatten(1).all(1).tolist() == [False, True, True, True] and y[0].isfinite().all()


def test_bounds_beyond_the_tokens(device):
    q, k, v, _, scale = packed(device, torch.float32)
    bounds = torch.tensor([-9, 70, 300], device=device, dtype=torch.int32)
    y, _ = load("triton", "invariant_attention")(q, k, v, bounds, scale)
    assert y[:70].isfinite().all()


@pytest.mark.parametrize(
    "call, got",
    [
        (lambda: kernels.invariant_linear(torch.randn(2, 8), torch.randn(4, 6)), "(2, 8)"),
        (lambda: kernels.invariant_linear(torch.randn(2, 8).double(), torch.randn(4, 8)), "torch.float64"),
        (lambda: kernels.invariant_attention(*packed("cpu", torch.float32, 3, 2)), "(206, 3, 32)"),
        (lambda: kernels.invariant_attention(*packed("cpu", torch.float32)[:3], torch.zeros(2), 1.0), "torch.float32 (2,)"),
    ],
)
def test_wrong_arguments(call, got):
    with pytest.raises(ValueError) as error:
        call()
    assert got in str(error.value)


def test_no_rows():
    assert kernels.invariant_linear(torch.randn(0, 8), torch.randn(4, 8)).shape == (0, 4)
