"""Attention of DeepSeek-V4 in a decoding step, RMSNorm and RoPE of its queries, keys and output, and its compressed keys.

All heads share one key, which is also the value. A token attends to the last tokens in a ring buffer, and to compressed
entries: those that the indexer chose, or all before a limit. A sink adds a logit without a value to each head's softmax. RoPE
applies to keys, and so to values: the output can be rotated by the negative angles of the token's position. RoPE rotates the
last 2 P channels, adjacent channels forming a pair.

Legend: N tokens, consecutive within a row; B rows, H heads, D width of a head and of a key, P pairs, R slots of the ring, L
entries of the store, k chosen entries.

Keys are compressed, and the lightning indexer chooses those that a token attends to.

A window of m tokens is pooled to one entry. Each token has two products, kv and gate. The entry of a full window is, per
channel, the mean of the window's kv weighted by the softmax of gate + bias over the tokens, followed by RMSNorm and RoPE at the
position of the window's first token. Windows may overlap: kv and gate then consist of two series, and an entry pools the first
series of the preceding window and the second series of the current window, 2 m slots in all. The indexer's score is

    score_s = Σ_h w_h · ReLU(q_h · k_s) · scale        for each visible entry s

`index_topk` chooses the k entries of the largest scores. No op synchronises with the host.

Legend: B rows, T new tokens per row, N tokens, consecutive within a row; m tokens per window, H heads, L entries of the store,
D channels of an entry or a head, W = D, or 2 D for two series.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.decode_product import WRITTEN, Norm, rms_normed
from ....kernels.dispatch import implementation, require
from ....kernels.registry import definition, draw, ints, zeros
from ....kernels.rope import draw_angles

MOST = 2  # parts per launch


class Pending(NamedTuple):
    """Ring buffers of the last tokens' products: position p is at slot p mod slots, with at least W / D · m slots."""

    kv: Tensor  # (B, slots, W)
    gate: Tensor  # (B, slots, W)


class Windows(NamedTuple):
    """Products of new tokens, pending products, and the store of entries. All parts of a call have the same B, T and m."""

    kv: Tensor  # (B, T, W), output of a projection
    gate: Tensor  # (B, T, W)
    pending: Pending
    store: Tensor  # (B, L, D): entry j pools tokens j m to j m + m - 1. Entries from L on are dropped
    bias: Tensor  # (m, W)
    norm: Norm


def compress(parts: Sequence[Windows], position: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Write the products of T new tokens of each row to `pending`, and the entries of filled windows to `store`, in place.

    Returns (store, pending.kv, pending.gate) of each part. The kernel determines full windows from the positions on the device,
    so the launches are independent of the positions.

    position  (B,) int32: of each row's first new token. A row with a negative position is unchanged
    cos, sin  (positions, pairs) fp32, for every position where a window of the store may begin. The last 2 · pairs channels
              are rotated, adjacent channels forming a pair
    """
    if not 1 <= len(parts) <= MOST:
        raise ValueError(f"compress: got {len(parts)} parts, wanted 1 to {MOST}.")
    (B, T), m = parts[0].kv.shape[:2], len(parts[0].bias)
    require("compress", "position", position, torch.int32, (B,), parts[0].store.device, "it says where each row stands")
    for part in parts:
        _check_compressed(part, cos, sin)
        if (now := (*part.kv.shape[:2], len(part.bias))) != (B, T, m):
            raise ValueError(f"compress: all parts must have the same rows, new tokens and window, got {(B, T, m)} and {now}.")
    first = parts[0]
    series = first.kv.shape[2] // first.store.shape[2]
    return implementation("compress", first.store, None, (series, len(parts)))(parts, position, cos, sin)


@definition(lambda g, series=2, parts=1: _compressor_example(g, series, parts))
def compress_reference(parts, position, cos, sin):
    return tuple(written for part in parts for written in _compressed(part, position, cos, sin))


def _compressed(part: Windows, position: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kv, gate, pending, store, bias, norm = part
    (B, T, W), (m, D), size = kv.shape, (len(bias), store.shape[2]), pending.kv.shape[1]
    slots, first = W // D * m, position.long()[:, None]
    rows, dtype32 = torch.arange(B, device=kv.device)[:, None], torch.promote_types(store.dtype, torch.float32)
    ends = first + (m - 1 - first % m) + m * torch.arange(-(-T // m), device=kv.device)  # the last tokens of the windows
    place = ends[..., None] - slots + 1 + torch.arange(slots, device=kv.device)  # (B, windows, slots)

    def read(new: Tensor, old: Tensor) -> Tensor:
        mine = new[rows[..., None], (place - first[..., None]).clamp(0, T - 1)].to(dtype32)
        both = torch.where((place >= first[..., None])[..., None], mine, old[rows[..., None], place % size].to(dtype32))
        return _series(both, m, D)

    z = read(gate, pending.gate) + _series(bias.to(dtype32)[place % m], m, D)
    shares = torch.where((place >= 0)[..., None], z, float("-inf")).softmax(2)
    values = torch.where((place >= 0)[..., None], read(kv, pending.kv), 0.0)  # slots before the first token are undefined
    start = (ends - m + 1).clamp(0, len(cos) - 1)
    entries = turned(rms_normed((shares * values).sum(2), norm), cos[start].to(dtype32), sin[start].to(dtype32)).to(store.dtype)
    full = (ends < first + T) & (ends // m < store.shape[1]) & (first >= 0)
    for window in range(ends.shape[1]):
        at = torch.where(full[:, window], ends[:, window] // m, 0)
        store[rows[:, 0], at] = torch.where(full[:, window, None], entries[:, window], store[rows[:, 0], at])
    stored_tokens = torch.arange(max(0, T - size), T, device=kv.device)
    for new, old in ((kv, pending.kv), (gate, pending.gate)):
        at = (first + stored_tokens) % size
        old[rows, at] = torch.where((first >= 0)[..., None], new[:, stored_tokens].to(old.dtype), old[rows, at])
    return store, *pending


def _series(x: Tensor, m: int, D: int) -> Tensor:
    """Return (..., slots, D) from (..., slots, W): of two series, the preceding window's first and the current one's second."""
    return x if x.shape[-1] == D else torch.cat([x[..., :m, :D], x[..., m:, D:]], -2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last 2 · pairs channels, adjacent channels forming a pair; the other channels are unchanged."""
    pairs = cos.shape[-1]
    fixed, moving = x.split([x.shape[-1] - 2 * pairs, 2 * pairs], -1)
    a, b = moving.unflatten(-1, (pairs, 2)).unbind(-1)
    return torch.cat([fixed, torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)], -1)


def _check_compressed(part: Windows, cos: Tensor, sin: Tensor) -> None:
    kv, gate, pending, store, bias, norm = part
    device = store.device
    require("compress", "store", store, None, ("rows", "entries", "channels"), device, WRITTEN)
    require("compress", "kv", kv, None, (len(store), "tokens", "width"), device, "a row of it belongs to each new token")
    require("compress", "gate", gate, kv.dtype, tuple(kv.shape), device, "it weighs kv")
    (B, L, D), W, m = store.shape, kv.shape[2], len(bias)
    if W not in (D, 2 * D):
        raise ValueError(
            f"compress: kv must be as wide as an entry of the store, {D}, or hold two series, {2 * D}, got {W}; "
            "pass both series side by side."
        )
    require("compress", "bias", bias, None, ("window", W), device, "it has a row for each token of a window")
    for name, t in (("pending.kv", pending.kv), ("pending.gate", pending.gate)):
        require("compress", name, t, pending.kv.dtype, (B, pending.kv.shape[1], W), device, WRITTEN)
    if pending.kv.shape[1] < W // D * m:
        raise ValueError(
            f"compress: pending must have a slot for each of the {W // D * m} tokens of an entry, got {pending.kv.shape[1]}."
        )
    require("compress", "norm.weight", norm.weight, None, (D,), device, "it has one number for each channel")
    for name, t in (("cos", cos), ("sin", sin)):
        require("compress", name, t, torch.float32, ("positions", "pairs"), device, "its rows are positions")
    if len(cos) <= (L - 1) * m or 2 * cos.shape[1] > D or cos.shape != sin.shape:
        raise ValueError(
            f"compress: cos and sin must have a row for each position up to {(L - 1) * m} and at most {D // 2} pairs, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}."
        )


def _compressor_example(generator, series, parts):
    """Draw windows of 4 for rows in the middle of a window, at its last token, at position 0, and with a negative position."""
    examples = [_draw_windows(generator, series, width) for width in (24, 16)[:parts]]
    return examples, ints(9, 7, 0, -1), *draw_angles(generator, 24, 4)


def _draw_windows(generator, series, width):
    rows, tokens, m, W = 4, 3, 4, series * width
    kv, gate = (draw(generator, rows, tokens, W).detach() for _ in range(2))
    pending = Pending(draw(generator, rows, series * m, W), draw(generator, rows, series * m, W))
    bias, norm = draw(generator, m, W).detach(), Norm(draw(generator, width).detach(), 1e-6)
    return Windows(kv, gate, pending, draw(generator, rows, 6, width), bias, norm)


SEEN = "it says how many entries each token sees"


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, limit: Tensor, scale: float, out: Tensor) -> Tensor:
    """Write scores to out (N, L) fp32: -inf from entry `limit` on. Zero scores are +0, so that ties have equal bits.

    q        (N, H, D)
    keys     (B, L, D): a row's entries, for its N / B tokens
    weights  (N, H) fp32
    limit    (N,) int32: entries from `limit` on are not read
    """
    device = keys.device
    require("index_scores", "keys", keys, None, ("rows", "entries", "width"), device, "an entry's key follows the other's")
    (B, L, D), N = keys.shape, len(q)
    require("index_scores", "q", q, keys.dtype, (N, "heads", D), device, "it has heads as wide as the keys")
    if N % B:
        raise ValueError(f"index_scores: q must have as many tokens for each of {B} rows of keys, got {N} tokens.")
    require("index_scores", "weights", weights, torch.float32, tuple(q.shape[:2]), device, "it has one for each head")
    require("index_scores", "limit", limit, torch.int32, (N,), device, SEEN)
    require("index_scores", "out", out, torch.float32, (N, L), device, WRITTEN)
    return implementation("index_scores", keys)(q, keys, weights, limit, scale, out)


@definition(lambda g: (*(draw(g, *s) for s in ((4, 3, 24), (2, 70, 24))), draw(g, 4, 3).detach(), *_limits(0, 70, 1, 66)))
def index_scores_reference(q, keys, weights, limit, scale, out):
    dtype32 = torch.promote_types(keys.dtype, torch.float32)
    products = torch.einsum("bthd,bsd->bths", q.to(dtype32).unflatten(0, (len(keys), -1)), keys.to(dtype32)).flatten(0, 1)
    scores = (products.relu() * scale * weights[..., None]).sum(1) + 0.0
    hidden = torch.arange(keys.shape[1], device=keys.device) >= limit[:, None]
    return out.copy_(scores.masked_fill_(hidden, float("-inf")))


def index_topk(scores: Tensor, limit: Tensor, ids: Tensor) -> Tensor:
    """Write the indices of each row's k largest scores before `limit` to ids (N, k) int32, ascending and padded with -1.

    Ties go to the lower index, so the choice is the same in any shape and batch. A score of -inf is never chosen; NaN counts as
    the largest.

    scores  (N, L) fp32
    limit   (N,) int32: scores from `limit` on are not read
    """
    require("index_topk", "scores", scores, torch.float32, ("tokens", "entries"), scores.device, "index_scores writes it")
    require("index_topk", "limit", limit, torch.int32, (len(scores),), scores.device, SEEN)
    require("index_topk", "ids", ids, torch.int32, (len(scores), "slots"), scores.device, WRITTEN)
    return implementation("index_topk", scores)(scores, limit, ids)


@definition(lambda g: (draw(g, 4, 40).detach().round(decimals=1), ints(0, 40, 5, 39), ints(*[7] * 24).view(4, 6)))
def index_topk_reference(scores, limit, ids):
    entries, slots = scores.shape[1], ids.shape[1]
    hidden = torch.arange(entries, device=scores.device) >= limit[:, None]
    scores = scores.masked_fill(scores.isnan(), float("inf")).masked_fill(hidden, float("-inf"))
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    place = torch.where(ranked.values > float("-inf"), ranked.indices, entries)[:, :slots].sort(dim=-1).values
    ids[:, place.shape[1] :] = -1
    ids[:, : place.shape[1]] = torch.where(place < entries, place, -1)
    return ids


def _limits(*limit: int) -> tuple:
    return ints(*limit), 0.25, zeros(len(limit), 70)


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
def sparse_attention_reference(
    q, position, ring, window, sinks, scale, out, store=None, ids=None, limit=None, cos=None, sin=None
):
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


def _example(generator, width=48, stored=True, chosen=True, turned_back=True):
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
def turn_heads_reference(parts, position, cos, sin, back=False):
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


def _heads_example(generator, parts):
    """Draw heads with a norm and a gain; heads with a norm and slots; and heads without either."""
    angles = (draw(generator, 10, 12).detach().float() for _ in range(2))
    heads = [
        TurnedHeads(draw(generator, 3, 2, 40), zeros(3, 2, 40), draw(generator, 40).detach(), 1e-6),
        TurnedHeads(draw(generator, 3, 1, 24), zeros(5, 1, 24), None, 1e-6, ints(4, -1, 0)),
        TurnedHeads(draw(generator, 3, 3, 32), zeros(3, 3, 32)),
    ]
    return heads[:parts], ints(5, 0, 9), *angles
