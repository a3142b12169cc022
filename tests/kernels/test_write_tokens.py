"""Values written to a cache in rows or pages: both mirrors agree bit for bit, nothing else is touched, errors read so."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.triton import row_ops as fast

from .cases import definitions, draw, pairwise

reference = definitions("row_ops")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "uint8": torch.uint8}


def values(device, dtype, *size, seed=0):
    """Any bits: among codes all occur, and a copy keeps those of NaN."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(256, (*size, dtype.itemsize), generator=draws, dtype=torch.uint8).view(dtype)[..., 0].to(device)


def bits(t):
    return t.contiguous().view(torch.uint8)


@pairwise
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("width", [None, 20, 64])
@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize("start", [0, 7, "by row"])
@pytest.mark.parametrize("paged", [False, True])
def test_matches(dtype, width, tokens, start, paged, device):
    rows, copies, heads, positions = 3, 2, 2, 8 if paged else 64
    size = () if width is None else (width,)
    cache = values(device, dtype, 50, heads, positions, *size)
    new = values(device, dtype, rows, heads, tokens, *size, seed=1).transpose(1, 2)
    blocks = torch.randperm(50, generator=torch.Generator().manual_seed(2))[: rows * copies * (8 if paged else 1)]
    blocks = blocks.view(rows, copies, -1).to(device, torch.int32 if paged else torch.int64)
    if start == "by row":
        start = torch.tensor([3, 0, 12], device=device, dtype=torch.int32)
    got, want = (mirror.write_tokens(cache.clone(), new, blocks, start) for mirror in (fast, reference))
    assert torch.equal(bits(got), bits(want)) and not torch.equal(bits(want), bits(cache))


def test_tokens_are_where_the_table_says(device):
    new = draw(device, torch.float32, 1, 3, 2, 4)
    cache = kernels.write_tokens(
        torch.zeros(6, 2, 2, 4, device=device), new, torch.tensor([[[4, 1], [0, 5]]], dtype=torch.int32, device=device), 1
    )
    for first, second in ((4, 1), (0, 5)):
        assert torch.equal(cache[first, :, 1], new[0, 0])
        assert torch.equal(cache[second], new[0, 1:].transpose(0, 1))
    assert not cache[[2, 3]].any() and not cache[[4, 0], :, 0].any()


@pytest.mark.parametrize("blocks", [[[[7, -1]]], [[[1 << 20, 9]]]])
def test_a_block_that_there_is_not_gets_nothing(blocks, device):
    table = torch.tensor(blocks, dtype=torch.int32, device=device)
    new = torch.ones(1, 5, 1, 8, device=device)
    for mirror in (fast, reference):
        assert not mirror.write_tokens(torch.zeros(3, 1, 2, 8, device=device), new, table, -1).any()


def test_errors():
    cache, new, blocks = torch.zeros(3, 2, 4, 8), torch.ones(1, 2, 2, 8), torch.zeros(1, 1, 1, dtype=torch.int32)
    for given, what in (
        ((cache, new.half(), blocks, 0), "new must be"),
        ((cache.transpose(0, 1), new, blocks, 0), "cache must be"),
        ((cache, new[..., :4], blocks, 0), "cache must be"),
        ((cache, new, blocks.float(), 0), "blocks must be"),
        ((cache, new, blocks, torch.zeros(1)), "start must be"),
    ):
        with pytest.raises(ValueError, match=what):
            kernels.write_tokens(*given)
