"""Ops on rows: between the products of a decoding step, into a cache, and into a table.

LayerNorm of the stream, and the activation of an MLP without a gate: as in decode_product.py, outputs are written in place, one
token for each of B rows, and `dependent` is a mode of programmatic dependent launch. A LayerNorm has its own launch: within a
product, each weight's row would need two more sums.

Rows are added into a table, where ids may repeat: the gradient of a lookup.

Values of tokens are written to a cache, whose rows are whole or in pages: keys, values and scales of a prompt or a step.

Legend: B rows, C copies of a row, T tokens, K heads, D width of a head, N blocks of L positions, P blocks of a row.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_product import ACTIVATED, WRITTEN
from .dispatch import INTEGERS, implementation, require
from .registry import definition, draw, frozen, ints, zeros


class LayerNorm(NamedTuple):
    """A LayerNorm, as the ops of a decoding step take one."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float = 0.0  # the gain is offset + weight


def layer_norm_rows(x: Tensor, norm: LayerNorm, out: Tensor, dependent: int = 0) -> Tensor:
    """out (B, hidden, in any dtype) = (x − mean) / sqrt(variance + eps) · (offset + weight) + bias, of fp32 x (B, hidden)."""
    require("layer_norm_rows", "x", x, torch.float32, ("rows", len(norm.weight)), x.device, "it is the stream")
    for name, t in (("norm.weight", norm.weight), ("norm.bias", norm.bias)):
        if t is not None:
            require("layer_norm_rows", name, t, None, x.shape[1:], x.device, "it has one number for each column of x")
    require("layer_norm_rows", "out", out, None, tuple(x.shape), x.device, WRITTEN)
    form = (norm.bias is not None, norm.offset)
    return implementation("layer_norm_rows", norm.weight, None, () if form == (True, 0.0) else form)(x, norm, out, dependent)


@definition(lambda g, bias=True, offset=0.0: (
    draw(g, 2, 48).detach(), LayerNorm(draw(g, 48), draw(g, 48) if bias else None, 1e-5, offset), zeros(2, 48)
))  # fmt: skip
def layer_norm_rows_reference(x, norm, out, dependent=0):
    return out.copy_(layer_normed(x, norm))


def layer_normed(x: Tensor, norm: LayerNorm) -> Tensor:
    """Return the LayerNorm of x in its dtype."""
    gain, bias = norm.weight.to(x.dtype) + norm.offset, None if norm.bias is None else norm.bias.to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], gain, bias, norm.eps)


def activate_rows(x: Tensor, activation: str, out: Tensor, dependent: int = 0, by: Tensor | None = None) -> Tensor:
    """out (B, width, in the model's dtype) = activation(x) of a product x (B, width) in fp32; one of ACTIVATED.

    by: fp32 of x's shape, that it is multiplied by
    """
    require("activate_rows", "x", x, torch.float32, ("rows", "width"), x.device, "norm_product writes it")
    require("activate_rows", "out", out, None, tuple(x.shape), x.device, WRITTEN)
    if activation not in ACTIVATED:
        raise ValueError(f"activate_rows: activation must be one of {', '.join(ACTIVATED)}, got {activation!r}.")
    if by is not None:
        require("activate_rows", "by", by, torch.float32, tuple(x.shape), x.device, "it has one number for each of x")
    shape: tuple = (activation, True) if by is not None else () if activation == "gelu_tanh" else (activation,)
    return implementation("activate_rows", out, None, shape)(x, activation, out, dependent, by)


@definition(lambda g, activation="gelu_tanh", by=False: (
    draw(g, 2, 48).detach(), activation, draw(g, 2, 48), 0, draw(g, 2, 48).detach() if by else None
))  # fmt: skip
def activate_rows_reference(x, activation, out, dependent=0, by=None):
    y = ACTIVATED[activation](x)
    return out.copy_(y if by is None else y * by)


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
def add_rows_reference(table, ids, rows, without):
    ids, rows = ids.flatten().long(), rows.reshape(-1, rows.shape[-1]).to(table.dtype)
    left_out, inside = ids == without, (ids >= 0) & (ids < len(table))
    rows = rows.masked_fill(left_out[:, None], 0).masked_fill(~(left_out | inside)[:, None], torch.nan)
    ids = torch.where(inside, ids, 0)
    # On a GPU index_add_ adds by atomics, in another order at every run.
    return table.index_put_((ids,), rows, accumulate=True) if table.is_cuda else table.index_add_(0, ids, rows)


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


def _example(g, *shape):
    """Two rows, two copies of each, over blocks of 4 positions. The values are in the range of bytes, too."""
    *width, tokens, dtype, many = shape or (24, 5, torch.int32, True)
    cache, new = (frozen(20 * draw(g, *size, *width).abs()) for size in ((12, 2, 4), (2, tokens, 2)))
    blocks = torch.stack([ints(*range(6)), ints(*range(6, 12))])[:, None].expand(2, 2, 6).to(dtype).contiguous()
    return cache, new, blocks, ints(3, 0) if many else 2


@definition(_example)
def write_tokens_reference(cache, new, blocks, start):
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
