"""Adapters in a decoding step (kernels/decode_adapters.py): fused into a product, or added to one by a separate launch.

The first programs of a launch compute h, one column of a row each; all others compute some outputs of a row and add h bᵀ.
Programs begin in the order of their numbers, and the first ones wait for no other, so the values that the others wait for are
always on their way. An element of h is its own flag: one word, written once. Words are read past the L1, which may hold an old
value.

A row has one adapter of a weight, or all, or none, so its columns of h are consecutive, and programs count from the first. With
a program for each column, most of which had nothing to do, a launch took 16 us where a row had one of eight adapters (H200, 1b,
8 rows).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..decode_adapters import EMPTY, EVERY_ADAPTER, StepAdapter, StepAdapters, table_of
from ..plans import cdiv, power_of_two
from ._launch import _gained, _row, _wait, bump_versions

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
    """Compute a column of h for a row of x, by the same code for each row, so that its bits do not depend on the batch.

    Columns of other adapters are set to zero at once, so that readers need not know the adapter of a column to wait for it.
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
def _wanted(table, ids, b, column, mask, columns):
    """Return which columns of h belong to adapters of row b."""
    own = tl.load(ids + b + column * 0)  # as many as there are columns: the interpreter makes int32 of a scalar truth
    return mask & ((tl.load(table + 3 * columns + column, mask=mask, other=-1) == own) | (own == _EVERY))


@triton.jit
def _asked(h, b, first, last, columns, RANKS: tl.constexpr):
    """Load the words of row b in columns from `first` on.

    Loaded after the product: before it they are not yet written, and a step of 1b took 971 us instead of 868 (H200).
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
def _up(table, first, last, columns, row, mask, RANKS: tl.constexpr, TYPE: tl.constexpr):
    """The rows `row` of b, in columns from `first` on."""
    column = first + tl.arange(0, RANKS)
    return _up_of(table, column, column < last, columns, row, mask, TYPE)


@triton.jit
def _up_of(table, column, inside, columns, row, mask, TYPE: tl.constexpr):
    """The rows `row` of b, in those columns that are `inside`."""
    start = tl.load(table + columns + column, mask=inside, other=0)
    apart = tl.load(table + 2 * columns + column, mask=inside, other=0)
    at = (start[None] + row.to(tl.int64)[:, None] * apart[None]).to(tl.pointer_type(TYPE))
    return tl.load(at, mask=mask[:, None] & inside[None], other=0.0).to(tl.float32)


@triton.jit
def _widened(up, words):
    """up times h. What a row does not have adds nothing, whatever it holds: one that has diverged spoils no other's rows."""
    return tl.sum(tl.where(words[None] == 0, 0.0, up * words.to(tl.float32, bitcast=True)[None]), 1)


@triton.jit
def _added(words, up, h, table, b, first, last, columns, row, mask, RANKS: tl.constexpr, MORE: tl.constexpr,
           TYPE: tl.constexpr):  # fmt: skip
    """Return the adapters' part of row b in the outputs `row`. `words` and `up` are of the first RANKS columns."""
    at = h + b * columns + first + tl.arange(0, RANKS)
    y = _widened(up, _come(words, at, RANKS))
    if MORE:
        for start in range(first + RANKS, last, RANKS):
            at += RANKS
            words = _come(_asked(h, b, start, last, columns, RANKS), at, RANKS)
            y += _widened(_up(table, start, last, columns, row, mask, RANKS, TYPE), words)
    return y


@triton.jit
def _empty(before, count, program, programs):
    """`before` is emptied, a share by each program."""
    lane = tl.arange(0, 128)
    for at in range(program * 128, count, programs * 128):
        tl.store(before + at + lane, tl.full([128], _EMPTY, tl.int32), mask=at + lane < count)


def _adapter_arguments(adapters: StepAdapters | None, rows: int, inputs: int) -> dict[str, Any]:
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


TILE = 2048  # numbers of b that a program holds: 16 a thread


@triton.jit
def _own(table, ids, b, low, high, columns, WIDTH: tl.constexpr):
    """The first column that row b has of those from `low` up to `high`, and how many."""
    column = low + tl.arange(0, WIDTH)
    wanted = _wanted(table, ids, b, column, column < high, columns)
    return tl.min(tl.where(wanted, column, high), 0), tl.sum(wanted.to(tl.int32), 0)


@triton.jit
def _add_adapters_kernel(x_ptr, y_ptr, k_ptr, v_ptr, y_apart, k_apart, v_apart, y_count, k_count, v_count, y_tiles, k_tiles,
                         tiles, y_most, k_most, v_most, B, table, ids, narrow, before, columns, split, second, emptied, ahead,
                         K: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, REACH: tl.constexpr,
                         TYPE: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    makes = program < ahead
    if not makes:
        program -= ahead
        _empty(before, emptied, program, tl.num_programs(0) - ahead)
    # One after the other, what belongs to y, to k and to v: columns of h that a row may have, or tiles of outputs.
    of_y, of_k = tl.where(makes, y_most, y_tiles), tl.where(makes, k_most, k_tiles)
    of_row = tl.where(makes, y_most + k_most + v_most, tiles)
    b, number = program // of_row, program % of_row
    in_k, in_v = number >= of_y, number >= of_y + of_k
    number -= tl.where(in_v, of_y + of_k, tl.where(in_k, of_y, 0))
    low, high = tl.where(in_v, second, tl.where(in_k, split, 0)), tl.where(in_v, columns, tl.where(in_k, second, split))
    first, own = _own(table, ids, b, low, high, columns, WIDTH)
    if makes:
        most = tl.where(in_v, v_most, tl.where(in_k, k_most, y_most))
        for at in range(number, own, most):
            _down((first + at) * B + b, x_ptr, x_ptr, 0.0, table, ids, narrow, columns, B, K, REACH, None, TYPE, 0)
        return
    to = tl.where(in_v, v_ptr, tl.where(in_k, k_ptr, y_ptr)) + b * tl.where(in_v, v_apart, tl.where(in_k, k_apart, y_apart))
    row = number * R + tl.arange(0, R)
    in_range = row < tl.where(in_v, v_count, tl.where(in_k, k_count, y_count))
    total = tl.load(to + row, mask=in_range, other=0.0).to(tl.float32)
    for start in range(first, first + own, RANKS):
        column = start + tl.arange(0, RANKS)
        inside, at = column < first + own, narrow + b * columns + column
        up = _up_of(table, column, inside, columns, row, in_range, TYPE)
        words = tl.load(at, mask=inside, other=0, volatile=True)
        total += _widened(up, _come(words, at, RANKS))
    tl.store(to + row, total.to(y_ptr.dtype.element_ty), mask=in_range)


@torch.no_grad()
def add_adapters(x, adapters, y, k=None, v=None):
    args = tuple(one for one in (y, k, v) if one is not None)
    spare = 3 - len(args)
    three, most = (*args, *[y[:, :0]] * spare), [*map(_most, adapters.parts), *[0] * spare]
    (rows, width), ranks = x.shape, max(16, min(HELD, power_of_two(max(most))))
    outputs = TILE // ranks
    tiles = [cdiv(one.shape[1], outputs) for one in three]
    more = _adapter_arguments(adapters, rows, width) | {"ahead": rows * sum(most), "RANKS": ranks}
    del more["MORE"]  # a program loops over them
    _add_adapters_kernel[(rows * (sum(most) + sum(tiles)),)](
        x, *three, *(one.stride(0) for one in three), *(one.shape[1] for one in three), *tiles[:2], sum(tiles), *most, rows,
        K=width, R=outputs, WIDTH=power_of_two(max(adapters.columns)), **more, num_warps=4,
    )  # fmt: skip
    bump_versions(adapters.h, adapters.before, *args)
    return args


def _most(part: Sequence[StepAdapter]) -> int:
    """The columns of h that a row may have of a weight, if it has one adapter; one that has all takes more turns."""
    return max((one.a.shape[0] for one in part), default=0)
