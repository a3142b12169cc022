"""What adapters add to products of a decoding step's rows that are there already (kernels/decode_adapters.py): one launch.

The programs in front compute h, a column of a row each, and end at once where the row has another adapter. All others compute
some outputs of a row, and read of b what that row has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_adapters import StepAdapters
from ._adapters import _EMPTY, _begun, _down, _empty, _up_of, _wanted, _wants, _widened, launched

OUTPUTS = 64  # of a program, with up to 128 ranks of b: 64 numbers a thread


@triton.jit
def _add_adapters_kernel(x_ptr, y_ptr, k_ptr, v_ptr, y_apart, k_apart, v_apart, y_count, k_count, v_count, y_tiles, k_tiles,
                         tiles, B, table, ids, narrow, before, columns, split, second, emptied, ahead, K: tl.constexpr,
                         R: tl.constexpr, RANKS: tl.constexpr, REACH: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    if program < ahead:
        if _wants(table, ids, program % B, program // B, columns):
            _down(program, x_ptr, x_ptr, 0.0, table, ids, narrow, columns, B, K, REACH, None, TYPE, 0)
        return
    program -= ahead
    _empty(before, emptied, program, tl.num_programs(0) - ahead)
    b, tile = program // tiles, program % tiles
    in_k, in_v = tile >= y_tiles, tile >= y_tiles + k_tiles
    to = tl.where(in_v, v_ptr, tl.where(in_k, k_ptr, y_ptr)) + b * tl.where(in_v, v_apart, tl.where(in_k, k_apart, y_apart))
    count = tl.where(in_v, v_count, tl.where(in_k, k_count, y_count))
    low, high = tl.where(in_v, second, tl.where(in_k, split, 0)), tl.where(in_v, columns, tl.where(in_k, second, split))
    row = (tile - tl.where(in_v, y_tiles + k_tiles, tl.where(in_k, y_tiles, 0))) * R + tl.arange(0, R)
    there = row < count
    total = tl.load(to + row, mask=there, other=0.0).to(tl.float32)
    for first in range(low, high, RANKS):
        column = first + tl.arange(0, RANKS)
        wanted = _wanted(table, ids, b, column, column < high, columns)
        if tl.max(wanted.to(tl.int32), 0) > 0:
            up = _up_of(table, column, wanted, columns, row, there, TYPE)
            words = _begun(narrow, table, ids, b, first, high, columns, RANKS)
            while tl.max((words == _EMPTY).to(tl.int32), 0) > 0:
                words = _begun(narrow, table, ids, b, first, high, columns, RANKS)
            total += _widened(up, words)
    tl.store(to + row, total.to(y_ptr.dtype.element_ty), mask=there)


@torch.no_grad()
def add_adapters(
    x: Tensor, adapters: StepAdapters, y: Tensor, k: Tensor | None = None, v: Tensor | None = None
) -> tuple[Tensor, ...]:
    given = tuple(one for one in (y, k, v) if one is not None)
    three = *given, *[y[:, :0]] * (3 - len(given))
    rows, width = x.shape
    tiles = [triton.cdiv(one.shape[1], OUTPUTS) for one in three]
    more = launched(adapters, rows, width)
    del more["MORE"]  # than a program holds: it takes them in turns
    _add_adapters_kernel[(more["ahead"] + rows * sum(tiles),)](
        x, *three, *(one.stride(0) for one in three), *(one.shape[1] for one in three), *tiles[:2], sum(tiles), rows, K=width,
        R=OUTPUTS, **more, num_warps=4,
    )  # fmt: skip
    return given
