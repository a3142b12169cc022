"""Arguments of the low-rank adapters' ops (lora.py): dropout by a hash, adapters by row, blocks of outputs, and their checks.

Legend: N tokens, the rows of x, of B sequences in a batch; R ranks, the columns of h.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import matches, require, require_device

WORD = 0xFFFFFFFF
BLOCKS, BLOCK = 3, 16  # an op takes at most 3 blocks; each has a multiple of 16 outputs
# Counters of one call, at most. Programs share sums where a GPU has more multiprocessors than there are tiles of columns, each
# of which may have up to four tiles of ranks.
SHARED_SUMS = 2048


class Drop(NamedTuple):
    """Dropout whose mask is a hash of each element's index: it is recomputed by each kernel, and never stored.

    Element i of a matrix, counted along its rows, is dropped where 31 bits of a hash of (seed, site, i) are below p · 2^31. The
    count wraps at 2^32 elements. Kernels and definition drop the same elements.
    """

    p: float
    seed: Tensor  # int64 (1,), on the device: a captured graph reads it at each replay
    site: int = 0  # sites that share a seed have different masks


def drawn(p: float, device: torch.device) -> Drop | None:
    """Return dropout with a new seed of `device`'s generator, also at each replay of a captured graph; None for p = 0."""
    if not 0 <= p < 1:
        raise ValueError(f"lora: dropout must be a probability from 0 up to, not including, 1, got {p}; 0 drops nothing.")
    return Drop(p, torch.randint(-(2**63), 2**63 - 1, (1,), device=device)) if p else None


def kept(drop: Drop, rows: int, columns: int) -> Tensor:
    """Return which elements of a matrix (rows, columns) `drop` keeps."""
    first, second = _keys(drop)
    i = torch.arange(rows * columns, device=drop.seed.device, dtype=torch.int64)
    return ((_hash(i, first, second) >> 1) >= threshold(drop.p)).view(rows, columns)


def threshold(p: float) -> int:
    return min(round(p * 2**31), 2**31 - 1)


def _keys(drop: Drop) -> tuple[Tensor, Tensor]:
    low, high = drop.seed & WORD, (drop.seed >> 32) & WORD
    first = _hash(low, drop.site, 0)
    return first, _hash(high, first, 0)


def _hash(i: Tensor, first: Tensor | int, second: Tensor | int) -> Tensor:
    """Hash i to 32 bits by Wellons' lowbias32 with two keys. In int64, whose products keep the low bits."""
    i = (i + first) & WORD
    i = ((i ^ (i >> 16)) * 0x21F0AAAD + second) & WORD
    i = ((i ^ (i >> 15)) * 0x735A2D97) & WORD
    return i ^ (i >> 15)


def dropped(x: Tensor, drop: Drop | None) -> Tensor:
    """Return drop(x) of a matrix: the elements that are kept, times 1 / (1 − p)."""
    return x if drop is None else torch.where(kept(drop, *x.shape), x / (1 - drop.p), 0.0)


class Owners(NamedTuple):
    """Adapters by row, computed as one adapter of rank R: in h, a row has the columns of its adapter, and zeros elsewhere.

    The matrices a of all adapters are stacked by rows and their b by columns, so the ops of one adapter compute all of them:
    where h and gh are zero, they add nothing to y, dx, da and db.
    """

    ids: Tensor  # int32 or int64 (B,), on the device: row i of the batch has adapter ids[i]; none if no column has it (-1)
    owner: Tensor  # int32 (R,): the adapter of each column of h
    scales: Tensor  # fp32 (R,): a scale for each column, in addition to that of the call


class OwnRanks(NamedTuple):
    """Nonzero columns of h for `Owners` whose adapters are in order and have equal ranks.

    Row i of the batch has columns ids[i] · ranks to (ids[i] + 1) · ranks of each `adapters` · ranks.
    """

    ids: Tensor  # see Owners
    ranks: int  # of each adapter
    adapters: int


def own_columns(h: Tensor, rows: Owners | None) -> Tensor:
    """Return h (N, R) with the columns of each row's adapter, scaled, and zeros elsewhere."""
    if rows is None:
        return h
    ids = rows.ids.repeat_interleave(h.shape[0] // max(len(rows.ids), 1))
    return torch.where(ids[:, None] == rows.owner, h * rows.scales.to(h.dtype), 0.0)


def check_call(
    op: str,
    x: Tensor,
    drop: Drop | None,
    blocks: Sequence[int] | None,
    columns: int,
    **tensors: tuple[Tensor | None, tuple[int | str, ...]],
) -> None:
    """Raise ValueError unless x is a float matrix, and each tensor a float tensor of the given shape on x's device.

    A name in a shape is any size from 1. `columns` is the number of outputs that `blocks` must add up to.
    """
    if drop is not None:
        require(op, "drop.seed", drop.seed, torch.int64, (1,), x.device, "make it once, and write each step's seed into it")
    if blocks is not None and (
        not 1 <= len(blocks) <= BLOCKS or sum(blocks) != columns or any(size < BLOCK or size % BLOCK for size in blocks)
    ):
        raise ValueError(
            f"{op}: blocks must be one to {BLOCKS} multiples of {BLOCK} that add up to {columns}, got {list(blocks)}; "
            f"multiply others separately."
        )
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"{op}: its first argument must be a floating-point matrix, got {x.dtype} {tuple(x.shape)}; reshape it."
        )
    for name, (t, shape) in tensors.items():
        if t is None:
            continue
        if t.dim() != len(shape) or not (t.shape == shape or matches(t, shape)) or not t.is_floating_point():
            raise ValueError(
                f"{op}: {name} must be a floating-point tensor ({', '.join(map(str, shape))}), got {t.dtype} {tuple(t.shape)}; "
                f"its sizes follow from the first argument and the rank."
            )
        if t.device != x.device:
            require_device(op, x, **{name: t})


def check_output(op: str, name: str, t: Tensor) -> None:
    """Raise ValueError unless the rows of the matrix `t`, which the op writes, are dense and do not overlap."""
    rows, columns = t.shape
    if t.numel() and ((columns > 1 and t.stride(1) != 1) or (rows > 1 and t.stride(0) < columns)):
        raise ValueError(
            f"{op}: {name} is written, so its rows must be dense and apart, got strides {t.stride()}; pass a contiguous one."
        )


def check_rows(op: str, rows: Owners, x: Tensor, rank: int) -> None:
    ids, owner, scales = rows
    _check_ids(op, ids, x)
    require(op, "rows.owner", owner, torch.int32, (rank,), x.device, "say of each column which adapter it belongs to")
    require(op, "rows.scales", scales, torch.float32, (rank,), x.device, "give each column the scale of its adapter")


def check_own_ranks(op: str, rows: OwnRanks, x: Tensor, rank: int) -> None:
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
    require_device(op, x, **{"rows.ids": ids})
