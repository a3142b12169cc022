"""Compressed keys of DeepSeek-V4, and the lightning indexer, which chooses those that a token attends to.

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
        _check(part, cos, sin)
        if (now := (*part.kv.shape[:2], len(part.bias))) != (B, T, m):
            raise ValueError(f"compress: all parts must have the same rows, new tokens and window, got {(B, T, m)} and {now}.")
    first = parts[0]
    series = first.kv.shape[2] // first.store.shape[2]
    return implementation("compress", first.store, None, (series, len(parts)))(parts, position, cos, sin)


@definition(lambda g, series=2, parts=1: _example(g, series, parts))
@torch.no_grad()
def compress_reference(parts: Sequence[Windows], position: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
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


def _check(part: Windows, cos: Tensor, sin: Tensor) -> None:
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


def _example(generator: torch.Generator, series: int, parts: int) -> tuple:
    """Draw windows of 4 for rows in the middle of a window, at its last token, at position 0, and with a negative position."""
    examples = [_draw_windows(generator, series, width) for width in (24, 16)[:parts]]
    return examples, ints(9, 7, 0, -1), *draw_angles(generator, 24, 4)


def _draw_windows(generator: torch.Generator, series: int, width: int) -> Windows:
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
@torch.no_grad()
def index_scores_reference(q: Tensor, keys: Tensor, weights: Tensor, limit: Tensor, scale: float, out: Tensor) -> Tensor:
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
@torch.no_grad()
def index_topk_reference(scores: Tensor, limit: Tensor, ids: Tensor) -> Tensor:
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
