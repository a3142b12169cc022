"""The gradient of a lookup."""

import torch
from torch import Tensor

from .checks import INTEGERS
from .choose import implementation


def add_rows(table: Tensor, ids: Tensor, rows: Tensor, without: int = -1) -> Tensor:
    """table[ids] += rows in place, where ids may repeat: what a lookup of `ids` adds to the gradient of its table.

    table (V, C) is float32 and contiguous, ids (...) are integers below V, rows (..., C) of any floating dtype. Rows whose id
    is `without` are left out, as a padding id's are. The sums are fp32 and in the same order in every run.

    Any other id that the table does not have makes the table's first row NaN: asking the device for it would cost a wait.
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
    return implementation("add_rows", rows, unable)(table, ids, rows, without)
