"""Rows of a batch with separate adapters: which columns of a low-rank product h (kernels/lora.py) a row keeps.

Legend: N tokens, the rows of x, of B rows of a batch; R ranks, the columns of h.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import require, require_device


class Owners(NamedTuple):
    """Several adapters as one of rank R, of which each row of a batch has its own columns of h, and the others are zero there.

    So a of all lie one below the other and b beside each other, and all products of one adapter serve for many: where h and gh
    are zero, they add nothing to y, dx, da and db.
    """

    ids: Tensor  # int32 or int64 (B,), on the device: row i of the batch has adapter ids[i], none where no column says so (-1)
    owner: Tensor  # int32 (R,): the adapter that a column of h belongs to
    scales: Tensor  # fp32 (R,): a column's own scale, beside that of the call


class OwnRanks(NamedTuple):
    """Nonzero columns of h for `Owners` whose adapters are in order and have equal ranks.

    Row i of the batch has columns ids[i] · ranks to (ids[i] + 1) · ranks of each `adapters` · ranks.
    """

    ids: Tensor  # as of Owners
    ranks: int  # of each adapter
    adapters: int


def own_columns(h: Tensor, rows: Owners | None) -> Tensor:
    """h (N, R) with the columns of each row's adapter, scaled, and zeros elsewhere."""
    if rows is None:
        return h
    ids = rows.ids.repeat_interleave(h.shape[0] // max(len(rows.ids), 1))
    return torch.where(ids[:, None] == rows.owner, h * rows.scales.to(h.dtype), 0.0)


def check_rows(op: str, rows: Owners | None, x: Tensor, rank: int) -> None:
    if rows is None:
        return
    ids, owner, scales = rows
    _check_ids(op, ids, x)
    require(op, "rows.owner", owner, torch.int32, (rank,), x.device, "say of each column which adapter it belongs to")
    require(op, "rows.scales", scales, torch.float32, (rank,), x.device, "give each column the scale of its adapter")


def check_own_ranks(op: str, rows: OwnRanks | None, x: Tensor, rank: int) -> None:
    if rows is None:
        return
    _check_ids(op, rows.ids, x)
    if rows.ranks < 1 or rows.adapters < 1 or rank % (rows.ranks * rows.adapters):
        raise ValueError(
            f"{op}: rows are of {rows.adapters} adapters of {rows.ranks} ranks, wanted a divisor of the {rank} ranks of b; "
            f"leave rows out where adapters have different ranks."
        )


def _check_ids(op: str, ids: Tensor, x: Tensor) -> None:
    tokens = x.shape[0]
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or (tokens % len(ids) if len(ids) else tokens):
        raise ValueError(
            f"{op}: rows.ids must be int32 or int64 (B,), one for each row of a batch of {tokens} tokens, "
            f"got {ids.dtype} {tuple(ids.shape)}; all rows have the same number of tokens."
        )
    require_device(op, "rows.ids", ids, x)
