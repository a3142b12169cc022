"""Values of tokens written to a cache, whose rows are whole or in pages: keys, values and scales of a prompt or a step.

Legend: B rows, C copies of a row, T tokens, K heads, D width of a head, N blocks of L positions, P blocks of a row.
"""

from typing import Any

import torch
from torch import Tensor

from .dispatch import implementation, require
from .registry import definition, draw, frozen, ints

TOKENS = 16  # of a program


def write_tokens(cache: Tensor, new: Tensor, blocks: Tensor, start: Tensor | int) -> Tensor:
    """Write `new` to the positions from `start` on of each copy of its row; return the cache.

    cache   (N, K, L, D), or (N, K, L) for one number a head
    new     (B, T, K, D), or (B, T, K), in the cache's dtype, with any strides but the last
    blocks  (B, C, P) integers: where positions 0 to L - 1 of each copy are stored, L to 2 L - 1, ...
    start   (B,) int32, or one for all rows

    Nothing is written where a row has no block for a position. Copies that are the same block get the same values.
    """
    if new.dim() not in (3, 4) or new.dtype != cache.dtype:
        raise ValueError(
            f"write_tokens: new must be (rows, tokens, heads, width) in the cache's {cache.dtype}, got {tuple(new.shape)} "
            f"{new.dtype}; cast or reshape it before the call."
        )
    if not cache.is_contiguous() or cache.shape[1::2] != new.shape[2:] or cache.device != new.device:
        raise ValueError(
            f"write_tokens: cache must be a contiguous tensor (blocks, {new.shape[2]}, positions"
            f"{f', {new.shape[3]}' if new.dim() == 4 else ''}) on {new.device} to match new, got {tuple(cache.shape)} on "
            f"{cache.device}; make it once, and change it in place."
        )
    if blocks.dtype != torch.int64:
        require("write_tokens", "blocks", blocks, torch.int32, (len(new), "copies", "blocks"), new.device)
    if isinstance(start, Tensor):
        require("write_tokens", "start", start, torch.int32, (len(new),), new.device)
    shape = *new.shape[3:], min(TOKENS, new.shape[1]), blocks.dtype, isinstance(start, Tensor)
    return implementation("write_tokens", cache, None, shape)(cache, new, blocks, start)


def as_integers(t: Tensor) -> Tensor:
    """View a tensor as integers of the same size, whose copies keep every bit.

    torch's deterministic index_put_ adds what it writes to a zero, which changes the bits of a NaN.
    """
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize])


def _example(g: torch.Generator, *shape: Any) -> tuple:
    """Two rows, two copies of each, over blocks of 4 positions. The values are in the range of bytes, too."""
    *width, tokens, dtype, many = shape or (24, 5, torch.int32, True)
    cache, new = (frozen(20 * draw(g, *size, *width).abs()) for size in ((12, 2, 4), (2, tokens, 2)))
    blocks = torch.stack([ints(*range(6)), ints(*range(6, 12))])[:, None].expand(2, 2, 6).to(dtype).contiguous()
    return cache, new, blocks, ints(3, 0) if many else 2


@definition(_example)
@torch.no_grad()
def write_tokens_reference(cache: Tensor, new: Tensor, blocks: Tensor, start: Tensor | int) -> Tensor:
    size, first = cache.shape[2], start[:, None] if isinstance(start, Tensor) else start
    position = (torch.arange(new.shape[1], device=new.device) + first).expand(new.shape[:2])  # (B, T)
    page = (position // size)[:, None].expand(-1, blocks.shape[1], -1)  # (B, C, T)
    known = (page >= 0) & (page < blocks.shape[2])
    block = blocks.long().gather(2, page.clamp(0, blocks.shape[2] - 1))
    known = (known & (block >= 0) & (block < len(cache))).flatten()
    if not known.numel():
        return cache
    # A boolean index would wait for the device. A position without a block repeats the write of the first one that has a block;
    # where none has, the values that are there are written again.
    same = torch.where(known, torch.arange(known.numel(), device=known.device), known.int().argmax())
    block, at = (index.flatten()[same] for index in (block, (position % size)[:, None].expand_as(block)))
    block, old = block.clamp(0, len(cache) - 1), as_integers(cache)
    values = as_integers(new)[:, None].expand(-1, blocks.shape[1], *new.shape[1:]).flatten(0, 2)[same]
    old[block, :, at] = torch.where(known.any(), values, old[block, :, at])
    return cache
