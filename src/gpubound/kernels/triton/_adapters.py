"""Adapters inside a decoding step's product (decode_adapters.py): the programs in front compute h, all others add h bᵀ.

Programs begin in the order of their numbers, and those in front wait for no other: so what the others wait for is on its way.
A number of h is its own flag: one word, written once. Words are read past the L1, which may hold what was there before.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..decode_adapters import EMPTY, EVERY_ADAPTER, StepAdapters, table_of
from ..plans import power_of_two
from ._pdl import _gained, _row, _wait

_EMPTY, _EVERY = tl.constexpr(EMPTY), tl.constexpr(EVERY_ADAPTER)
_NAN = tl.constexpr(0x7FC00000)  # a quiet one, which EMPTY is not
POLLS = tl.constexpr(1 << 22)  # at 0.5 to 1 us each 2 s and more; the programs that are waited for take microseconds
REACH = 2048  # elements of a row of a that a program asks for at once
HELD = 128  # ranks of b that a program holds while it multiplies
LANES = tl.constexpr(32)  # of a warp
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _wants(table, ids, b, column, columns):
    """Return whether row b has the adapter of that column."""
    own = tl.load(ids + b)
    return (own == tl.load(table + 3 * columns + column)) | (own == _EVERY)


@triton.jit
def _down(program, x_ptr, norm_ptr, eps, table, ids, h, columns, B, K: tl.constexpr, C: tl.constexpr, GAIN: tl.constexpr,
          TYPE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """A column of h for a row of x: the same code for each row, so that its bits are those that it gets alone.

    What the row does not have is zero at once, so that nobody need know whose a column is to know whether h is there.
    """
    b, column = program % B, program // B
    wanted = _wants(table, ids, b, column, columns)
    a_ptr = tl.load(table + column).to(tl.pointer_type(TYPE))
    scale = tl.load(table + 4 * columns + column).to(tl.int32).to(tl.float32, bitcast=True)
    col = tl.arange(0, C)
    EVEN: tl.constexpr = K % C == 0
    a = _row(a_ptr, col, K, EVEN)
    _wait(DEPENDENT)
    if wanted:
        total, square = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for start in range(0, K, C):
            x = _row(x_ptr + b * K + start, col, K - start, EVEN)
            total += a * _gained(x, norm_ptr + start, col, K - start, EVEN, GAIN)
            square += x * x
            if start + C < K:
                a = _row(a_ptr + start + C, col, K - start - C, EVEN)
        y = tl.sum(total, 0)
        if GAIN is not None:
            y /= tl.sqrt(tl.sum(square, 0) / K + eps)
        tl.atomic_xchg(h + b * columns + column, (y * scale).to(tl.int32, bitcast=True), sem="relaxed")
    else:
        tl.atomic_xchg(h + b * columns + column, 0, sem="relaxed")


@triton.jit
def _wanted(table, ids, b, column, there, columns):
    """Return which columns of h belong to adapters of row b."""
    own = tl.load(ids + b + column * 0)  # as many as there are columns: the interpreter makes int32 of a scalar truth
    return there & ((tl.load(table + 3 * columns + column, mask=there, other=-1) == own) | (own == _EVERY))


@triton.jit
def _asked(h, b, first, last, columns, RANKS: tl.constexpr):
    """The words of row b in columns from `first` on, now.

    Asked for behind the product: before it they are not there yet, and a step of 1b took 971 us in place of 868 (H200).
    """
    column = first + tl.arange(0, RANKS)
    return tl.load(h + b * columns + column, mask=column < last, other=0, volatile=True)


@triton.jit
def _come(words, at, RANKS: tl.constexpr):
    """The words at `at`, of which the first answers are given, when all are there; NaN for one that has not come after POLLS.

    The NaN is stored in its place, so that other programs that need it wait no longer. It makes the row's logits NaN, which
    decoding reports as an error.
    """
    polls = 0
    while (tl.max((words == _EMPTY).to(tl.int32), 0) > 0) & (polls < POLLS):
        words = tl.load(at, mask=words == _EMPTY, other=words, volatile=True)
        polls += 1
    if RANKS > LANES:
        # With more threads than words Triton keeps a word in several warps, and each loads its own. The maximum looks at one of
        # these copies. Another, loaded a moment earlier, may still be empty. What one has seen is there, so it asks again.
        words = tl.load(at, mask=words == _EMPTY, other=words, volatile=True)
    late = (words == _EMPTY) & (tl.zeros_like(words) + polls >= POLLS)  # the interpreter makes int32 of a scalar truth
    tl.store(at, tl.full([RANKS], _NAN, tl.int32), mask=late)
    return tl.where(words == _EMPTY, _NAN, words)


@triton.jit
def _up(table, first, last, columns, row, there, RANKS: tl.constexpr, TYPE: tl.constexpr):
    """The rows `row` of b, in columns from `first` on."""
    column = first + tl.arange(0, RANKS)
    return _up_of(table, column, column < last, columns, row, there, TYPE)


@triton.jit
def _up_of(table, column, inside, columns, row, there, TYPE: tl.constexpr):
    """The rows `row` of b, in those columns that are `inside`."""
    start = tl.load(table + columns + column, mask=inside, other=0)
    apart = tl.load(table + 2 * columns + column, mask=inside, other=0)
    at = (start[None] + row.to(tl.int64)[:, None] * apart[None]).to(tl.pointer_type(TYPE))
    return tl.load(at, mask=there[:, None] & inside[None], other=0.0).to(tl.float32)


@triton.jit
def _widened(up, words):
    """up times h. What a row does not have adds nothing, whatever it holds: one that has diverged spoils no other's rows."""
    return tl.sum(tl.where(words[None] == 0, 0.0, up * words.to(tl.float32, bitcast=True)[None]), 1)


@triton.jit
def _added(words, up, h, table, b, first, last, columns, row, there, RANKS: tl.constexpr, MORE: tl.constexpr,
           TYPE: tl.constexpr):  # fmt: skip
    """Return the adapters' part of row b in the outputs `row`. `words` and `up` are of the first RANKS columns."""
    at = h + b * columns + first + tl.arange(0, RANKS)
    y = _widened(up, _come(words, at, RANKS))
    if MORE:
        for start in range(first + RANKS, last, RANKS):
            at += RANKS
            words = _come(_asked(h, b, start, last, columns, RANKS), at, RANKS)
            y += _widened(_up(table, start, last, columns, row, there, RANKS, TYPE), words)
    return y


@triton.jit
def _empty(before, count, program, programs):
    """`before` is emptied, a share by each program."""
    lane = tl.arange(0, 128)
    for at in range(program * 128, count, programs * 128):
        tl.store(before + at + lane, tl.full([128], _EMPTY, tl.int32), mask=at + lane < count)


def launched(adapters: StepAdapters | None, rows: int, inputs: int) -> dict[str, Any]:
    """Return a kernel's arguments for `rows` rows of x; without adapters, placeholders."""
    if adapters is None:
        return dict.fromkeys(("table", "ids", "narrow", "before", "TYPE")) | dict.fromkeys(
            ("columns", "split", "second", "emptied", "ahead", "RANKS", "MORE", "REACH"), 0
        )  # fmt: skip
    counts = adapters.columns
    ranks = power_of_two(max(counts))
    return {
        "table": table_of(adapters.parts) if adapters.table is None else adapters.table,
        "ids": adapters.ids,
        "narrow": adapters.h,
        "before": adapters.before,
        "TYPE": TYPES[adapters.dtype],
        "columns": sum(counts),
        "split": counts[0],
        "second": sum(counts[:2]),
        "emptied": adapters.before.numel(),
        "ahead": sum(counts) * rows,
        "RANKS": min(ranks, HELD),
        "MORE": int(ranks > HELD),
        "REACH": min(power_of_two(inputs), REACH),
    }
