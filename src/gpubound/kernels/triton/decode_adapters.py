"""Adapters' part of products of a decoding step that are computed already (kernels/decode_adapters.py): one launch.

The programs in front compute h, a column of a row each. All others compute some outputs of a row, and read of b what it has.
A row has one adapter of a weight, or all, or none: so its columns of h lie side by side, and programs count from the first.
With a program for each column, most of which had nothing to do, a launch took 16 us where a row had one of eight adapters
(H200, 1b, 8 rows).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_adapters import StepAdapter, StepAdapters
from ..plans import cdiv, power_of_two
from ._adapters import HELD, _come, _down, _empty, _up_of, _wanted, _widened, launched
from ._launch import bump_versions

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
def add_adapters(
    x: Tensor, adapters: StepAdapters, y: Tensor, k: Tensor | None = None, v: Tensor | None = None
) -> tuple[Tensor, ...]:
    args = tuple(one for one in (y, k, v) if one is not None)
    spare = 3 - len(args)
    three, most = (*args, *[y[:, :0]] * spare), [*map(_most, adapters.parts), *[0] * spare]
    (rows, width), ranks = x.shape, max(16, min(HELD, power_of_two(max(most))))
    outputs = TILE // ranks
    tiles = [cdiv(one.shape[1], outputs) for one in three]
    more = launched(adapters, rows, width) | {"ahead": rows * sum(most), "RANKS": ranks}
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
