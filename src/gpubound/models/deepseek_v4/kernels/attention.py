"""Attention of DeepSeek-V4 in a decoding step, and RMSNorm and RoPE of its queries, keys and output.

All heads share one key, which is also the value. A token attends to the last tokens in a ring buffer, and to compressed
entries: those that the indexer chose, or all before a limit. A sink adds a logit without a value to each head's softmax. RoPE
applies to keys, and so to values: the output can be rotated by the negative angles of the token's position. RoPE rotates the
last 2 P channels, adjacent channels forming a pair.

Legend: N tokens, consecutive within a row; B rows, H heads, D width of a head and of a key, P pairs, R slots of the ring, L
entries of the store, k chosen entries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.decode_product import WRITTEN
from ....kernels.dispatch import implementation, require
from ....kernels.registry import definition, draw, ints, zeros
from ....kernels.rope import draw_angles
from .compressor import turned


def sparse_attention(
    q: Tensor,
    position: Tensor,
    ring: Tensor,
    window: int,
    sinks: Tensor,
    scale: float,
    out: Tensor,
    store: Tensor | None = None,
    ids: Tensor | None = None,
    limit: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """Compute attention of q (N, H, D) over the ring and the store to out (N, H, D). Masked keys are not read.

    position  (N,) int32: position of each token, whose key is already in the ring. For a negative position, out is 0
    ring      (B, R, D): the key of position p at slot p mod R, for at least the last `window` + N / B - 1 positions
    window    number of last positions that a token attends to, including its position
    sinks     (H,) fp32
    store     (B, L, D): compressed entries; None: only the ring
    ids       (N, k) int32: entries that each token attends to, padded with -1
    limit     (N,) int32, instead of ids: each token attends to all entries before `limit`
    cos, sin  (positions, pairs) fp32: the output is rotated by the negative angles of its token's position
    """
    _check(q, position, ring, window, sinks, out)
    _check_store(q, ring, store, ids, limit)
    _check_angles(q, cos, sin)
    kernel = implementation("sparse_attention", ring, None, (q.shape[2], store is not None, ids is not None, cos is not None))
    return kernel(q, position, ring, window, sinks, scale, out, store, ids, limit, cos, sin)


@definition(lambda g, *shape: _example(g, *shape))
@torch.no_grad()
def sparse_attention_reference(
    q: Tensor, position: Tensor, ring: Tensor, window: int, sinks: Tensor, scale: float, out: Tensor,
    store: Tensor | None = None, ids: Tensor | None = None, limit: Tensor | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:  # fmt: skip
    dtype32 = torch.promote_types(ring.dtype, torch.float32)
    rows = torch.arange(len(q), device=q.device)[:, None] // (len(q) // len(ring))
    place = position[:, None].long() - torch.arange(window, device=q.device)
    masks, keys = [place >= 0], [ring[rows, place % ring.shape[1]]]
    if store is not None:
        if ids is not None:
            at = ids.long()
            valid = (at >= 0) & (at < store.shape[1])
        else:
            at = torch.arange(store.shape[1], device=q.device).expand(len(q), -1)
            valid = at < limit[:, None] if limit is not None else at < 0
        masks.append(valid & (position >= 0)[:, None])
        keys.append(store[rows, torch.where(valid, at, 0)])
    live = torch.cat(masks, 1)
    key = torch.cat(keys, 1).to(dtype32).masked_fill(~live[..., None], 0.0)  # masked keys may be NaN
    scores = torch.einsum("nhd,nkd->nhk", q.to(dtype32), key) * scale
    scores = scores.masked_fill(~live[:, None], float("-inf"))
    sink = sinks.to(dtype32)[None, :, None].expand(len(q), -1, 1)
    result = torch.einsum("nhk,nkd->nhd", torch.cat([scores, sink], -1).softmax(-1)[..., :-1], key)
    if cos is not None and sin is not None:
        at = position.long().clamp(0, len(cos) - 1)
        result = turned(result, cos.to(dtype32)[at][:, None], -sin.to(dtype32)[at][:, None])
    return out.copy_(result)


def _check(q: Tensor, position: Tensor, ring: Tensor, window: int, sinks: Tensor, out: Tensor) -> None:
    op, device = "sparse_attention", ring.device
    require(op, "ring", ring, None, ("rows", "slots", "width"), device, "a position's key lies at its place mod the slots")
    require(op, "q", q, ring.dtype, ("tokens", "heads", ring.shape[2]), device, "it has heads as wide as the keys")
    (N, H, D), (B, R, _) = q.shape, ring.shape
    if N % B:
        raise ValueError(f"{op}: q must have as many tokens for each of {B} rows of the ring, got {N} tokens.")
    if not 0 < window <= R - N // B + 1:
        raise ValueError(
            f"{op}: window must be from 1 to {R - N // B + 1}, got {window}; a ring of {R} slots holds no more of the "
            f"positions that {N // B} new tokens see."
        )
    require(op, "position", position, torch.int32, (N,), device, "it says where each token stands")
    require(op, "sinks", sinks, torch.float32, (H,), device, "it has one logit for each head")
    require(op, "out", out, None, (N, H, D), device, WRITTEN)


def _check_store(q: Tensor, ring: Tensor, store: Tensor | None, ids: Tensor | None, limit: Tensor | None) -> None:
    op, device = "sparse_attention", ring.device
    if (store is None) != (ids is None and limit is None) or (ids is not None and limit is not None):
        names = [name for name, t in (("store", store), ("ids", ids), ("limit", limit)) if t is not None]
        raise ValueError(f"{op}: a store goes with either ids or limit, got {' and '.join(names)}; pass two of the three.")
    if store is not None:
        require(op, "store", store, ring.dtype, (len(ring), "entries", ring.shape[2]), device, "it has entries like the keys")
    if ids is not None:
        require(op, "ids", ids, torch.int32, (len(q), "chosen"), device, "index_topk writes it")
    if limit is not None:
        require(op, "limit", limit, torch.int32, (len(q),), device, "it says how many entries each token sees")


def _check_angles(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    for name, t in (("cos", cos), ("sin", sin)):
        if t is not None:
            require("sparse_attention", name, t, torch.float32, ("positions", "pairs"), q.device, "its rows are positions")
    if (cos is None) != (sin is None) or (cos is not None and sin is not None and cos.shape != sin.shape):
        raise ValueError("sparse_attention: cos and sin go together and have one shape; pass both or neither.")
    if cos is not None and 2 * cos.shape[1] > q.shape[2]:
        raise ValueError(f"sparse_attention: cos has {cos.shape[1]} pairs, a head of {q.shape[2]} at most {q.shape[2] // 2}.")


def _example(
    generator: torch.Generator, width: int = 48, stored: bool = True, chosen: bool = True, turned_back: bool = True
) -> tuple:
    """Draw two tokens for each of two rows: two late positions, an early one, and a negative one."""
    q, ring = draw(generator, 4, 3, width), draw(generator, 2, 12, width)
    store = draw(generator, 2, 70, width) if stored else None
    ids = ints(0, 5, 69, -1, 3, 1, -1, -1, -1, -1, -1, -1, 2, 4, 6, 8).view(4, 4) if stored and chosen else None
    limit = ints(70, 3, 0, 5) if stored and not chosen else None
    angles = draw_angles(generator, 100, 4) if turned_back else (None, None)
    sinks, out = draw(generator, 3).detach(), zeros(4, 3, width)
    return q, ints(80, 81, 2, -1), ring, 11, sinks, 0.2, out, store, ids, limit, *angles


MOST_HEADS = 3  # tensors of heads per launch


class TurnedHeads(NamedTuple):
    """Input and output of one tensor of heads."""

    x: Tensor  # (N, H, D)
    out: Tensor  # (N, H, D)
    weight: Tensor | None = None  # (D,), the norm's gain
    eps: float | None = None  # of the norm. None: no norm
    # (N,) int32, distinct: index of each token in out, which is then (places, H, D), such as a ring buffer. Out-of-range tokens
    # are not written.
    slot: Tensor | None = None


def turn_heads(
    parts: Sequence[TurnedHeads], position: Tensor, cos: Tensor, sin: Tensor, back: bool = False
) -> tuple[Tensor, ...]:  # fmt: skip
    """Apply RMSNorm and RoPE to the heads of each part, in one launch: out = RoPE(x / √(mean square + eps) · weight).

    position  (N,) int32; a position outside cos makes its token's heads NaN
    cos, sin  (positions, P) fp32
    back      rotate by the negative angles
    """
    if not 1 <= len(parts) <= MOST_HEADS:
        raise ValueError(f"turn_heads: got {len(parts)} tensors of heads, wanted 1 to {MOST_HEADS}.")
    device, tokens = parts[0].x.device, len(parts[0].x)
    require("turn_heads", "position", position, torch.int32, (tokens,), device, "it says where each token stands")
    for name, t in (("cos", cos), ("sin", sin)):
        require("turn_heads", name, t, torch.float32, (*cos.shape[:1], *cos.shape[-1:]), device, "its rows are positions")
    if len(cos) == 0:
        raise ValueError("turn_heads: cos and sin must have a row for each position, got none.")
    for part in parts:
        _check_heads(part, tokens, 2 * cos.shape[1], device)
    return implementation("turn_heads", parts[0].x, None, (len(parts),))(parts, position, cos, sin, back)


def _check_heads(part: TurnedHeads, tokens: int, turning: int, device: torch.device) -> None:
    x, out, weight, eps, slot = part
    require("turn_heads", "x", x, None, (tokens, "heads", "width"), device, "a head follows the other")
    H, D = x.shape[1:]
    require("turn_heads", "out", out, None, (tokens if slot is None else "places", H, D), device, WRITTEN)
    if slot is not None:
        require("turn_heads", "slot", slot, torch.int32, (tokens,), device, "it says where each token is kept")
    if turning > D:
        raise ValueError(f"turn_heads: cos must have at most {D // 2} pairs for heads of {D}, got {turning // 2}.")
    if weight is not None:
        require("turn_heads", "weight", weight, None, (D,), device, "it has one number for each channel")
        if eps is None:
            raise ValueError("turn_heads: weight is of a norm, which eps=None leaves out; pass its eps.")


@definition(lambda g, parts=2: _heads_example(g, parts))
@torch.no_grad()
def turn_heads_reference(
    parts: Sequence[TurnedHeads], position: Tensor, cos: Tensor, sin: Tensor, back: bool = False
) -> tuple[Tensor, ...]:  # fmt: skip
    known, place = (position >= 0) & (position < len(cos)), position.long().clamp(0, len(cos) - 1)
    cos, sin = (t.index_select(0, place)[:, None] for t in (cos, -sin if back else sin))
    return tuple(_turned_part(part, known, cos, sin) for part in parts)


def _turned_part(part: TurnedHeads, known: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, out, weight, eps, slot = part
    dtype32 = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype32)
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(dtype32)
    y = turned(y, cos.to(dtype32), sin.to(dtype32)).masked_fill(~known[:, None, None], float("nan"))
    if slot is None:
        return out.copy_(y)
    inside, beside = (slot >= 0) & (slot < len(out)), torch.cat([out, out[:1]])
    return out.copy_(beside.index_copy_(0, torch.where(inside, slot, len(out)).long(), y.to(out.dtype))[:-1])


def _heads_example(generator: torch.Generator, parts: int) -> tuple:
    """Draw heads with a norm and a gain; heads with a norm and slots; and heads without either."""
    angles = (draw(generator, 10, 12).detach().float() for _ in range(2))
    heads = [
        TurnedHeads(draw(generator, 3, 2, 40), zeros(3, 2, 40), draw(generator, 40).detach(), 1e-6),
        TurnedHeads(draw(generator, 3, 1, 24), zeros(5, 1, 24), None, 1e-6, ints(4, -1, 0)),
        TurnedHeads(draw(generator, 3, 3, 32), zeros(3, 3, 32)),
    ]
    return heads[:parts], ints(5, 0, 9), *angles
