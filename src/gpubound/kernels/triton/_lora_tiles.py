"""Functions shared by the kernels of low-rank adapters (lora.py): tiles, a dropout that is not stored, blocks of columns."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import interpreted
from ..hash_dropout import Drop, threshold
from ..plans import power_of_two

RANKS = 128  # of a tile


@triton.jit
def _hash(i, first, second):
    """kernels/lora.py: _hash"""
    i = i + first
    i = (i ^ (i >> 16)) * 0x21F0AAAD + second
    i = (i ^ (i >> 15)) * 0x735A2D97
    return i ^ (i >> 15)


@triton.jit
def _keys(seed_ptr, site):
    seed = tl.load(seed_ptr)
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = _hash(low, site.to(tl.uint32), 0)
    return first, _hash(high, first, 0)


@triton.jit
def _kept(row, column, columns, first, second, limit):
    """Return which elements of a tile the dropout keeps."""
    i = row.to(tl.uint32)[:, None] * columns + column.to(tl.uint32)[None]
    return (_hash(i, first, second) >> 1).to(tl.int32) >= limit


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """total + a b, the second factor rounded to the dtype of the first."""
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        return tl.dot(a.to(tl.float32), b.to(a.dtype).to(tl.float32), total, input_precision=PRECISION)
    return tl.dot(a, b.to(a.dtype), total, input_precision=PRECISION)


@triton.jit
def _tile(ptr, row, column, rows, columns, along_row, along_column):
    """Elements of a matrix at `row` and `column`, 0 beyond its `rows` and `columns`; the strides lead from one to the next."""
    at = ptr + row.to(tl.int64)[:, None] * along_row + column[None] * along_column
    return tl.load(at, mask=(row < rows)[:, None] & (column < columns)[None], other=0.0)


@triton.jit
def _block(column, middle, last):
    """Return the number of the block, of up to three, that has the column. They begin at 0, `middle` and `last`."""
    return (column >= middle).to(tl.int32) + (column >= last).to(tl.int32)


def _dense(t: Tensor) -> Tensor:
    """A matrix whose rows a kernel can read: neighbours in memory."""
    return t if t.stride(1) == 1 else t.contiguous()


def _masked(drop: Drop | None) -> tuple[Tensor | None, int, int]:
    return (None, 0, 0) if drop is None else (drop.seed, drop.site, threshold(drop.p))


def _upscale(drop: Drop | None) -> float:
    return 1.0 if drop is None else 1 / (1 - drop.p)


def _arithmetic() -> dict[str, Any]:
    return {"PRECISION": _fp32_precision(), "WIDE": interpreted()}


def _fp32_precision() -> str:
    """Return the precision of torch's own fp32 products."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"  # type: ignore[attr-defined]


def _ranks(rank: int) -> int:
    return min(RANKS, max(16, power_of_two(rank)))


def _rows(count: int) -> int:
    """For plans: a step's number of tokens, which differs a little from step to step."""
    return -(-count // 256) * 256


def _edges(blocks: Sequence[int] | None, columns: int) -> tuple[int, int]:
    """Return the first columns of the second and third block: the number of columns if there is none."""
    starts = [0, *accumulate(blocks or ())][1:-1]
    return tuple((*starts, columns, columns)[:2])  # type: ignore[return-value]


def _within(width: int, blocks: Sequence[int] | None) -> int:
    """At most `width` columns, so that no tile of them spans two blocks."""
    while any(size % width for size in (blocks or ())[:-1]):
        width //= 2
    return width
