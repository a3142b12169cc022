"""Dropout by a hash of where an element stands, which the definition and the kernels compute alike."""

from typing import NamedTuple

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


class Drop(NamedTuple):
    """Dropout whose mask is a function of numbers: computed again wherever it is needed, and never stored.

    Element i of a matrix, counted along its rows, is dropped where 31 bits of a hash of (seed, site, i) are below p · 2^31. The
    count wraps at 2^32 elements. Kernels and definition drop the same elements.
    """

    p: float
    seed: Tensor  # int64 (1,), on the device: a captured graph reads it at each replay
    site: int = 0  # sites that share a seed have different masks


def drawn(p: float, device: torch.device) -> Drop | None:
    """Dropout by a new seed from torch's generator of `device`, also at each replay of a captured graph; None for p = 0."""
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
    """32 bits of i, by a product-and-shift hash (Wellons' lowbias32) with a key before it and one within. In int64, of which
    products keep the low bits."""
    i = (i + first) & WORD
    i = ((i ^ (i >> 16)) * 0x21F0AAAD + second) & WORD
    i = ((i ^ (i >> 15)) * 0x735A2D97) & WORD
    return i ^ (i >> 15)


def dropped(x: Tensor, drop: Drop | None) -> Tensor:
    """drop(x) of a matrix: what is kept, times 1 / (1 − p)."""
    return x if drop is None else torch.where(kept(drop, *x.shape), x / (1 - drop.p), 0.0)
