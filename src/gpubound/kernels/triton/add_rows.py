"""Rows added into a table at ids that may repeat: the gradient of a lookup. One sort, then one pass.

Sorted, equal ids are adjacent. The program at the first of a run sums the run's rows, in their order, and adds them to the
table's row; all others return at once. So the bits are the same in every run, and rows that were not looked up are not touched:
torch writes a dense table of gradients (0.5 GB at 1b) and adds that.

The sorted keys have 32 bits, which takes half the passes of 64. An id outside the table gets the lowest key, so that every
program sees it in the first key, and an ignored id gets the highest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import cdiv, power_of_two
from ._launch import bump_versions

ROWS = 8  # of a run at a time: a padding id that fills a whole batch must not be summed row by row
COLUMNS, WARPS = 1024, 4  # of a program
KEYS = 1024  # of a program
UNKNOWN = tl.constexpr(-1)


@triton.jit(do_not_specialize=["count", "without", "size"])
def _keys_kernel(ids_ptr, keys_ptr, count, without, size, BLOCK: tl.constexpr):
    """The id itself where the table has it, UNKNOWN where it does not, the table's `size` where the row is left out."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(ids_ptr + i, mask=i < count, other=0).to(tl.int64)
    key = tl.where((wanted >= 0) & (wanted < size), wanted, UNKNOWN)
    key = tl.where(wanted == without, size, key)
    tl.store(keys_ptr + i, key.to(tl.int32), mask=i < count)


@triton.jit(do_not_specialize=["count", "size"])
def _add_rows_kernel(table_ptr, keys_ptr, order_ptr, rows_ptr, count, size, cols,
                     ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    first = tl.program_id(0)
    wanted = tl.load(keys_ptr + first)
    before = tl.load(keys_ptr + first - 1, mask=first > 0, other=UNKNOWN - 1)
    broken = tl.load(keys_ptr) == UNKNOWN  # then the first row is NaN, whatever else is added to it
    if (wanted != before) & (wanted < size) & ((wanted != 0) | (not broken)):
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        more = wanted != UNKNOWN
        while more:
            place = first + tl.arange(0, ROWS)
            mine = tl.load(keys_ptr + place, mask=place < count, other=UNKNOWN) == wanted
            row = tl.load(order_ptr + place, mask=mine, other=0)
            at = row[:, None] * cols + col[None]
            total += tl.sum(tl.load(rows_ptr + at, mask=mine[:, None] & (col < cols)[None], other=0.0).to(tl.float32), 0)
            first += ROWS
            more = tl.min(mine.to(tl.int32), 0) > 0  # sorted: where the last one is mine, all are
        out = table_ptr + tl.maximum(wanted, 0).to(tl.int64) * cols + col
        total = tl.where(wanted == UNKNOWN, float("nan"), total)
        tl.store(out, tl.load(out, mask=col < cols, other=0.0) + total, mask=col < cols)


@torch.no_grad()
def add_rows(table: Tensor, ids: Tensor, rows: Tensor, without: int) -> Tensor:
    (size, cols), count = table.shape, ids.numel()
    keys = torch.empty(count, device=ids.device, dtype=torch.int32)
    _keys_kernel[(cdiv(count, KEYS),)](ids.flatten().contiguous(), keys, count, without, size, KEYS, num_warps=WARPS)
    keys, order = keys.sort(stable=True)
    block = min(COLUMNS, power_of_two(cols))
    _add_rows_kernel[(count, cdiv(cols, block))](
        table, keys, order, rows.reshape(-1, cols).contiguous(), count, size, cols, ROWS, block, num_warps=WARPS
    )
    bump_versions(table)
    return table
