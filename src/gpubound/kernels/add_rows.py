"""Rows added into a table, where ids may repeat: the gradient of a lookup."""

import torch
from torch import Tensor

from .dispatch import INTEGERS, implementation
from .registry import definition, draw, ints


def add_rows(table: Tensor, ids: Tensor, rows: Tensor, without: int = -1) -> Tensor:
    """table[ids] += rows in place, where ids may repeat: the backward of an embedding lookup.

    table (V, C) is float32 and contiguous, ids (...) are integers below V, and rows (..., C) have any floating dtype. Rows
    whose id is `without` (a padding id, say) are skipped. The sums are fp32 and run in the same order every time.

    Any other id outside the table makes its first row NaN, because an error would make the host wait for the device.
    """
    if table.dim() != 2 or table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError(
            f"add_rows: table must be a contiguous torch.float32 matrix, got {table.dtype} {tuple(table.shape)}; "
            f"16 bits cannot hold sums of gradients."
        )
    if rows.shape != (*ids.shape, table.shape[1]) or not rows.is_floating_point() or rows.device != table.device:
        raise ValueError(
            f"add_rows: rows must hold one row of {table.shape[1]} floats on {table.device} for each of the ids "
            f"{tuple(ids.shape)}, got {tuple(rows.shape)} {rows.dtype} on {rows.device}; "
            f"pass the gradient of what was looked up."
        )
    if ids.dtype not in INTEGERS or ids.device != table.device:
        raise ValueError(f"add_rows: ids must be integers on {table.device}, got {ids.dtype} on {ids.device}; pass the tokens.")
    if not len(table) and ids.numel():
        raise ValueError(f"add_rows: table has no rows for {ids.numel()} ids; pass the table that they were looked up in.")
    unable = "its kernel sorts ids of 32 bits" if len(table) >= 2**31 - 1 else None
    return implementation("add_rows", rows, unable, table.shape[1:])(table, ids, rows, without)


@definition(lambda g, cols=40: (draw(g, 9, cols).detach(), ints(3, 8, 3, 0, 3).long(), draw(g, 5, cols), 0))
@torch.no_grad()
def add_rows_reference(table: Tensor, ids: Tensor, rows: Tensor, without: int) -> Tensor:
    ids, rows = ids.flatten().long(), rows.reshape(-1, rows.shape[-1]).to(table.dtype)
    left_out, inside = ids == without, (ids >= 0) & (ids < len(table))
    rows = rows.masked_fill(left_out[:, None], 0).masked_fill(~(left_out | inside)[:, None], torch.nan)
    ids = torch.where(inside, ids, 0)
    # On a GPU index_add_ adds by atomics, in another order at every run.
    return table.index_put_((ids,), rows, accumulate=True) if table.is_cuda else table.index_add_(0, ids, rows)
