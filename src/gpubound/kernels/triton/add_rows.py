"""Rows added into a table at ids that may come more than once: the gradient of a lookup. One sort, then one pass.

Sorted, equal ids lie together. The program at the first of a run sums the run's rows, in their order, and adds them to the
table's row; all others return at once. So the bits are the same in every run, and what nobody looked up is not touched: torch
writes a dense table of gradients (0.5 GB at 1b) and adds that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import power_of_two

ROWS = 8  # of a run at a time: a padding id that fills a whole batch must not be summed one by one
COLUMNS, WARPS = 1024, 4  # of a program


@triton.jit(do_not_specialize=["count", "without"])
def _add_rows_kernel(table_ptr, ids_ptr, order_ptr, rows_ptr, count, without, cols,
                     ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    first = tl.program_id(0)
    wanted = tl.load(ids_ptr + first)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
    if (wanted != before) & (wanted != without):
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        more = wanted == wanted
        while more:
            place = first + tl.arange(0, ROWS)
            mine = tl.load(ids_ptr + place, mask=place < count, other=-1) == wanted
            row = tl.load(order_ptr + place, mask=mine, other=0)
            at = row[:, None] * cols + col[None]
            total += tl.sum(tl.load(rows_ptr + at, mask=mine[:, None] & (col < cols)[None], other=0.0).to(tl.float32), 0)
            first += ROWS
            more = tl.min(mine.to(tl.int32), 0) > 0  # sorted: where the last one is mine, all are
        out = table_ptr + wanted.to(tl.int64) * cols + col
        tl.store(out, tl.load(out, mask=col < cols, other=0.0) + total, mask=col < cols)


@torch.no_grad()
def add_rows(table: Tensor, ids: Tensor, rows: Tensor, without: int) -> Tensor:
    cols = table.shape[1]
    sorted_ids, order = ids.flatten().to(torch.int32).sort(stable=True)  # of 32 bits: half as many passes as of 64
    block = min(COLUMNS, power_of_two(cols))
    _add_rows_kernel[(len(order), triton.cdiv(cols, block))](
        table, sorted_ids, order, rows.reshape(-1, cols).contiguous(), len(order), without, cols, ROWS, block, num_warps=WARPS
    )
    return table
