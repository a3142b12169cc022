"""Kernels of sparse attention: programs split a token's keys (split-K), and a second launch combines their partial results.

A program has 16 heads, which all multiply the same tile of keys. In 16 bits, a tile is loaded once, for scores and values. The
tiles of the ring come first, then those of the entries, gathered by ids or contiguous up to the limit. Tiles are assigned in
order, and a program without tiles reads no keys. A program writes its weighted sums, its largest score and its softmax weight.

The second launch has a program for each head, which adds the sums in order, with the sink in the divisor, and rotates the
result by the negative angles.

Kernel of turn_heads. A program computes one head, and loads each channel's pair partner a second time, from the cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....device import interpreted
from .....kernels.plans.types import MatrixPlan, TilePlan, cdiv, job_of, power_of_two
from .....kernels.triton._launch import _begin, _wait, bump_versions, launch, options
from ..attention import MOST_HEADS, TurnedHeads
from .compressor import _turned

NOTHING = tl.constexpr(-1e30)  # below every score; -inf would make NaN of -inf - -inf
MOST = 32  # programs that share a token's keys
FEW = 16  # tokens up to which keys are split, equally in any such batch, for equal bits; otherwise one program has all keys
DEPTH = 32  # channels of an fp32 key that are multiplied at a time: 512 at once spill 5 KB per thread


@triton.jit
def _part(q_ptr, heads, key_ptr, at, live, scale, peak, weight, total, D: tl.constexpr, DP: tl.constexpr, DEPTH: tl.constexpr,
          WIDE: tl.constexpr):  # fmt: skip
    """Update the online softmax by one tile of keys, DEPTH channels of a key at a time."""
    d = tl.arange(0, DP)
    key = tl.load(key_ptr + at[:, None] * D + d[None], mask=live[:, None] & (d < D)[None], other=0.0)
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        key = key.to(tl.float32)
    if DEPTH < DP:
        score = tl.zeros([peak.shape[0], live.shape[0]], tl.float32)
        for start in tl.static_range(0, D, DEPTH):
            c = start + tl.arange(0, DEPTH)
            q = tl.load(q_ptr + c[None], mask=heads & (c < D)[None], other=0.0)
            stretch = tl.load(key_ptr + at[None] * D + c[:, None], mask=live[None] & (c < D)[:, None], other=0.0)
            score = tl.dot(q.to(key.dtype), stretch.to(key.dtype), score, input_precision="tf32x3")
    else:
        q = tl.load(q_ptr + d[None], mask=heads & (d < D)[None], other=0.0)
        score = tl.dot(q.to(key.dtype), tl.trans(key), input_precision="tf32x3")
    score = tl.where(live[None], score * scale, NOTHING)
    new = tl.maximum(peak, tl.max(score, 1))
    p, fix = tl.where(live[None], tl.exp(score - new[:, None]), 0.0), tl.exp(peak - new)
    total = tl.dot(p.to(key.dtype), key, total * fix[:, None], input_precision="tf32x3")
    return new, weight * fix + tl.sum(p, 1), total


@triton.jit
def _sparse_attention_kernel(q_ptr, position_ptr, ring_ptr, store_ptr, ids_ptr, limit_ptr, sum_ptr, weight_ptr, scale, tokens,
                             slots, places, WINDOW: tl.constexpr, STORED: tl.constexpr, CHOSEN: tl.constexpr, H: tl.constexpr,
                             HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr,
                             SPLITS: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Compute partial attention. tokens: per row. CHOSEN: ids per token; 0: a token attends to all entries before `limit`."""
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    h, d, i = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, DP), tl.arange(0, KEYS)
    position = tl.load(position_ptr + n)
    ring_ptr += n // tokens * slots * D
    near: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    tiles = near
    if STORED:
        store_ptr += n // tokens * places * D
        if CHOSEN > 0:
            entries = CHOSEN
        else:
            entries = tl.minimum(tl.maximum(tl.load(limit_ptr + n), 0), places)
        tiles = near + tl.cdiv(entries, KEYS)
    each = tl.cdiv(tiles, SPLITS)
    first = split * each
    last = tl.where(position >= 0, tl.minimum(first + each, tiles), 0)
    peak, weight = tl.full([HEADS], NOTHING, tl.float32), tl.zeros([HEADS], tl.float32)
    to = (n * SPLITS + split) * H + h
    if first < last:
        inside = (h < H)[:, None] & (d < D)[None]
        mine = q_ptr + (n * H + h[:, None]) * D
        total = tl.zeros([HEADS, DP], tl.float32)
        for tile in range(first, tl.minimum(last, near)):
            back = tile * KEYS + i
            live = (back < WINDOW) & (back <= position)
            at = tl.where(live, position - back, 0) % slots
            peak, weight, total = _part(
                mine, (h < H)[:, None], ring_ptr, at, live, scale, peak, weight, total, D, DP, DEPTH, WIDE
            )
        if STORED:
            for tile in range(tl.maximum(first, near), last):
                entry = (tile - near) * KEYS + i
                live = entry < entries
                if CHOSEN > 0:
                    entry = tl.load(ids_ptr + n * CHOSEN + entry, mask=live, other=-1)
                    live = (entry >= 0) & (entry < places)
                peak, weight, total = _part(
                    mine, (h < H)[:, None], store_ptr, entry, live, scale, peak, weight, total, D, DP, DEPTH, WIDE
                )
        tl.store(sum_ptr + to[:, None] * D + d[None], total, mask=inside)
    tl.store(weight_ptr + 2 * to, peak, mask=h < H)
    tl.store(weight_ptr + 2 * to + 1, weight, mask=h < H)


@triton.jit
def _sparse_combine_kernel(sum_ptr, weight_ptr, position_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, positions, H: tl.constexpr,
                           D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
                           PAIRS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Combine the partial results of one head. PAIRS 0: no rotation."""
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, d = tl.arange(0, SP), tl.arange(0, DP)
    part = (n * SPLITS + split) * H + h
    peak = tl.load(weight_ptr + 2 * part, mask=split < SPLITS, other=NOTHING)
    weight = tl.load(weight_ptr + 2 * part + 1, mask=split < SPLITS, other=0.0)
    sink = tl.load(sink_ptr + h).to(tl.float32)
    top = tl.maximum(tl.max(peak, 0), sink)
    fix = tl.exp(peak - top)
    mask = (weight > 0.0)[:, None] & (d < D)[None]  # a program without keys wrote no sums
    total = tl.sum(tl.load(sum_ptr + part[:, None] * D + d[None], mask=mask, other=0.0) * fix[:, None], 0)
    y = total / (tl.sum(weight * fix, 0) + tl.exp(sink - top))
    if PAIRS > 0:
        at = tl.minimum(tl.maximum(tl.load(position_ptr + n), 0), positions - 1).to(tl.int64) * PAIRS
        y = _turned(y, cos_ptr + at, sin_ptr + at, D, DP, PAIRS, True)
    tl.store(out_ptr + (n * H + h) * D + d, y.to(out_ptr.dtype.element_ty), mask=d < D)


@torch.no_grad()
def sparse_attention(
    q: Tensor, position: Tensor, ring: Tensor, window: int, sinks: Tensor, scale: float, out: Tensor,
    store: Tensor | None = None, ids: Tensor | None = None, limit: Tensor | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (N, H, D), (B, slots, _) = q.shape, ring.shape
    wide, places = max(16, power_of_two(D)), 0 if store is None else store.shape[1]
    chosen = 0 if ids is None else ids.shape[1]
    job = job_of("sparse_attention", "", (H, D), ring)
    depth, stages = (wide, 2) if ring.element_size() == 2 else (min(wide, DEPTH), 1)

    def run(plan: MatrixPlan) -> None:
        groups = cdiv(H, plan.rows)
        tiles = cdiv(window, plan.columns) + cdiv(chosen or places, plan.columns)
        splits = min(MOST, tiles) if N <= FEW else 1
        sums = torch.empty(N, splits, H, D, device=q.device, dtype=torch.float32)
        weights = torch.empty(N, splits, H, 2, device=q.device, dtype=torch.float32)
        _sparse_attention_kernel[(N, groups, splits)](
            q, position, ring, ring if store is None else store, position if ids is None else ids,
            position if limit is None else limit, sums, weights, scale, N // B, slots, places, window, store is not None,
            chosen, H, plan.rows, D, wide, plan.columns, depth, splits, interpreted(), num_stages=stages,
            **options(plan.warps),
        )  # fmt: skip
        angles = (sinks, sinks) if cos is None or sin is None else (cos, sin)
        _sparse_combine_kernel[(N, H)](
            sums, weights, position, sinks, *angles, out, len(angles[0]), H, D, wide, splits, power_of_two(splits),
            0 if cos is None else cos.shape[1], **options(4),
        )  # fmt: skip

    launch(job, run)
    bump_versions(out)
    return out


@triton.jit
def _gained(x_ptr, weight_ptr, i, inside):
    x = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _turn_head(head, position_ptr, cos_ptr, sin_ptr, positions, x_ptr, out_ptr, weight_ptr, slot_ptr, eps, places,
               H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NORMED: tl.constexpr, P: tl.constexpr,
               BACK: tl.constexpr):  # fmt: skip
    x_ptr += head * D
    i = tl.arange(0, C)
    inside = i < D
    place = tl.load(position_ptr + head // H).to(tl.int64)
    known = (place >= 0) & (place < positions)
    place = tl.minimum(tl.maximum(place, 0), positions - 1)
    turning = inside & (i >= D - 2 * P)
    pair = place * P + (i - (D - 2 * P)) // 2
    first = (i - (D - 2 * P)) % 2 == 0
    cos = tl.load(cos_ptr + pair, mask=turning, other=1.0)
    sin = tl.load(sin_ptr + pair, mask=turning, other=0.0)
    x = _gained(x_ptr, weight_ptr, i, inside)
    other = _gained(x_ptr, weight_ptr, tl.where(first, i + 1, i - 1), turning)
    y = x * cos + tl.where(first != BACK, -other, other) * sin
    if NORMED:
        plain = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
        y *= 1.0 / tl.sqrt(tl.sum(plain * plain, 0) / D + eps)
    y = tl.where(known, y, float("nan"))
    to = head
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + head // H).to(tl.int64)
        inside = tl.where((slot >= 0) & (slot < places), i, D) < D
        to = slot * H + head % H
    tl.store(out_ptr + to * D + i, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["positions", "tokens", "p0", "p1", "p2"])
def _turn_heads_kernel(position_ptr, cos_ptr, sin_ptr, positions, tokens, x0, out0, w0, slot0, eps0, p0, x1, out1, w1, slot1,
                       eps1, p1, x2, out2, w2, slot2, eps2, p2, H0: tl.constexpr, D0: tl.constexpr, C0: tl.constexpr,
                       N0: tl.constexpr, H1: tl.constexpr, D1: tl.constexpr, C1: tl.constexpr, N1: tl.constexpr,
                       H2: tl.constexpr, D2: tl.constexpr, C2: tl.constexpr, N2: tl.constexpr, P: tl.constexpr,
                       BACK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Apply RMSNorm and RoPE to one head. H0 to H2: heads per token in each part, or 0."""
    _wait(DEPENDENT)  # a fence (_launch.py)
    _begin(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    if head < tokens * H0:
        _turn_head(head, position_ptr, cos_ptr, sin_ptr, positions, x0, out0, w0, slot0, eps0, p0, H0, D0, C0, N0, P, BACK)
    if H1 > 0:
        head -= tokens * H0
        if (head >= 0) & (head < tokens * H1):
            _turn_head(head, position_ptr, cos_ptr, sin_ptr, positions, x1, out1, w1, slot1, eps1, p1, H1, D1, C1, N1, P, BACK)
    if H2 > 0:
        head -= tokens * H1
        if head >= 0:
            _turn_head(head, position_ptr, cos_ptr, sin_ptr, positions, x2, out2, w2, slot2, eps2, p2, H2, D2, C2, N2, P, BACK)


@torch.no_grad()
def turn_heads(
    parts: Sequence[TurnedHeads], position: Tensor, cos: Tensor, sin: Tensor, back: bool = False
) -> tuple[Tensor, ...]:  # fmt: skip
    tokens, given, sizes = len(position), list[Any](), list[int]()
    for x, out, weight, eps, slot in parts:
        given += [x, out, weight, slot, 0.0 if eps is None else eps, len(out)]
        sizes += [*x.shape[1:], power_of_two(x.shape[2]), eps is not None]
    for _ in range(MOST_HEADS - len(parts)):
        given += [None, None, None, None, 0.0, 0]
        sizes += [0, 0, 0, False]

    def run(plan: TilePlan) -> None:
        _turn_heads_kernel[(sum(tokens * part.x.shape[1] for part in parts),)](
            position, cos, sin, len(cos), tokens, *given, *sizes, cos.shape[1], back, **options(plan.warps)
        )

    launch(job_of("turn_heads", "", (max(part.x.shape[2] for part in parts),), parts[0].x), run)
    written = tuple(part.out for part in parts)
    bump_versions(*written)
    return written
