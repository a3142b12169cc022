"""Compressed keys of DeepSeek-V4: a window of m tokens is pooled to one entry, to which later tokens attend.

Each token has two products, kv and gate. The entry of a full window is, per channel, the mean of the window's kv weighted by
the softmax of gate + bias over the tokens, followed by RMSNorm and RoPE at the position of the window's first token. Windows
may overlap: kv and gate then consist of two series, and an entry pools the first series of the preceding window and the second
series of the current window, 2 m slots in all.

Legend: B rows, T new tokens per row, m tokens per window, D channels of an entry, W = D, or 2 D for two series.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.checks import require
from ....kernels.decode_product import WRITTEN, Norm, rms_normed
from ....kernels.dispatch import implementation
from ....kernels.registry import definition, draw, ints
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
    rows, wide = torch.arange(B, device=kv.device)[:, None], torch.promote_types(store.dtype, torch.float32)
    ends = first + (m - 1 - first % m) + m * torch.arange(-(-T // m), device=kv.device)  # the last tokens of the windows
    place = ends[..., None] - slots + 1 + torch.arange(slots, device=kv.device)  # (B, windows, slots)

    def read(new: Tensor, old: Tensor) -> Tensor:
        mine = new[rows[..., None], (place - first[..., None]).clamp(0, T - 1)].to(wide)
        both = torch.where((place >= first[..., None])[..., None], mine, old[rows[..., None], place % size].to(wide))
        return _series(both, m, D)

    z = read(gate, pending.gate) + _series(bias.to(wide)[place % m], m, D)
    shares = torch.where((place >= 0)[..., None], z, float("-inf")).softmax(2)
    values = torch.where((place >= 0)[..., None], read(kv, pending.kv), 0.0)  # slots before the first token are undefined
    start = (ends - m + 1).clamp(0, len(cos) - 1)
    entries = turned(rms_normed((shares * values).sum(2), norm), cos[start].to(wide), sin[start].to(wide)).to(store.dtype)
    full = (ends < first + T) & (ends // m < store.shape[1]) & (first >= 0)
    for window in range(ends.shape[1]):
        at = torch.where(full[:, window], ends[:, window] // m, 0)
        store[rows[:, 0], at] = torch.where(full[:, window, None], entries[:, window], store[rows[:, 0], at])
    kept = torch.arange(max(0, T - size), T, device=kv.device)
    for new, old in ((kv, pending.kv), (gate, pending.gate)):
        at = (first + kept) % size
        old[rows, at] = torch.where((first >= 0)[..., None], new[:, kept].to(old.dtype), old[rows, at])
    return store, *pending


def _series(x: Tensor, m: int, D: int) -> Tensor:
    """Return (..., slots, D) from (..., slots, W): of two series, the preceding window's first and the current one's second."""
    return x if x.shape[-1] == D else torch.cat([x[..., :m, :D], x[..., m:, D:]], -2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last 2 · pairs channels, adjacent channels forming a pair; the other channels are unchanged."""
    pairs = cos.shape[-1]
    still, moving = x.split([x.shape[-1] - 2 * pairs, 2 * pairs], -1)
    a, b = moving.unflatten(-1, (pairs, 2)).unbind(-1)
    return torch.cat([still, torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)], -1)


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
    made = [_drawn(generator, series, width) for width in (24, 16)[:parts]]
    return made, ints(9, 7, 0, -1), *draw_angles(generator, 24, 4)


def _drawn(generator: torch.Generator, series: int, width: int) -> Windows:
    rows, tokens, m, W = 4, 3, 4, series * width
    kv, gate = (draw(generator, rows, tokens, W).detach() for _ in range(2))
    pending = Pending(draw(generator, rows, series * m, W), draw(generator, rows, series * m, W))
    bias, norm = draw(generator, m, W).detach(), Norm(draw(generator, width).detach(), 1e-6)
    return Windows(kv, gate, pending, draw(generator, rows, 6, width), bias, norm)
