"""Kernel of compress: pooling, norm, RoPE, and the update of pending products, in one launch for a decoding step.

A program has a window that the new tokens may fill, and m of the new tokens. It reads the window only if the window is full.
The softmax over the slots is an online softmax, in parallel over channels. Slots of older tokens are read from `pending`, which
other programs write: if new tokens could overwrite slots that a window still needs, pooling and writing are two launches.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....kernels.plans.types import TilePlan, cdiv, job_of, power_of_two
from .....kernels.triton._launch import bump_versions, launch, options
from .....kernels.triton._pdl import _begin, _wait
from ..compressor import MOST, Windows


@triton.jit
def _slot(new_ptr, old_ptr, new_at, old_at, fresh, mask):
    """Load each slot's product: a new token's, or a pending one."""
    new = tl.load(new_ptr + new_at, mask=mask & fresh, other=0.0).to(tl.float32)
    return new + tl.load(old_ptr + old_at, mask=mask & ~fresh, other=0.0).to(tl.float32)


@triton.jit
def _turned(y, cos_ptr, sin_ptr, D: tl.constexpr, DP: tl.constexpr, PAIRS: tl.constexpr, BACK: tl.constexpr = False):
    """Rotate the last 2 · PAIRS of D channels, adjacent channels forming a pair. BACK: by the negative angles."""
    a, b = tl.split(tl.reshape(y, [DP // 2, 2]))
    angle = tl.arange(0, DP // 2) - (D // 2 - PAIRS)
    moving = (angle >= 0) & (angle < PAIRS)
    c = tl.load(cos_ptr + angle, mask=moving, other=1.0)
    s = tl.load(sin_ptr + angle, mask=moving, other=0.0)
    if BACK:
        s = -s
    return tl.reshape(tl.join(a * c - b * s, b * c + a * s), [DP])


@triton.jit
def _compress(position_ptr, cos_ptr, sin_ptr, tokens, kv_ptr, gate_ptr, old_kv_ptr, old_gate_ptr, store_ptr, bias_ptr, norm_ptr,
              eps, size, places, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, OFFSET: tl.constexpr,
              SLOTS: tl.constexpr, M: tl.constexpr, PAIRS: tl.constexpr, POOL: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """Process one window and M new tokens. M: tokens per window; R: slots per entry; SLOTS: slots at a time."""
    b, window = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(position_ptr + b)
    kv_ptr += b * tokens * W
    gate_ptr += b * tokens * W
    old_kv_ptr += b * size * W
    old_gate_ptr += b * size * W
    c = tl.arange(0, DP)
    if POOL:
        end = first + (M - 1 - first % M) + window * M
        if (first >= 0) & (end < first + tokens) & (end // M < places):
            peak, total = tl.full([DP], -1e30, tl.float32), tl.zeros([DP], tl.float32)
            mean = tl.zeros([DP], tl.float32)
            for start in range(0, R, SLOTS):
                slot = start + tl.arange(0, SLOTS)[:, None]
                place = end - R + 1 + slot
                col = c[None] + tl.where(slot >= M, W - D, 0)
                mask = (place >= 0) & (slot < R) & (c < D)[None]
                fresh = place >= first
                new_at, old_at = (place - first) * W + col, place % size * W + col
                z = _slot(gate_ptr, old_gate_ptr, new_at, old_at, fresh, mask)
                z += tl.load(bias_ptr + place % M * W + col, mask=mask, other=0.0).to(tl.float32)
                z = tl.where(mask, z, -1e30)
                new = tl.maximum(peak, tl.max(z, 0))
                share, fix = tl.where(mask, tl.exp(z - new[None]), 0.0), tl.exp(peak - new)
                total = total * fix + tl.sum(share, 0)
                mean = mean * fix + tl.sum(share * _slot(kv_ptr, old_kv_ptr, new_at, old_at, fresh, mask), 0)
                peak = new
            y = mean / tl.maximum(total, 1e-30)  # 0 beyond D, where all shares are 0
            gain = tl.load(norm_ptr + c, mask=c < D, other=0.0).to(tl.float32) + OFFSET
            y = y * tl.rsqrt(tl.sum(y * y, 0) / D + eps) * gain
            at = (end - M + 1) * PAIRS
            y = _turned(y, cos_ptr + at, sin_ptr + at, D, DP, PAIRS)
            to = store_ptr + (b * places + end // M) * D + c
            tl.store(to, y.to(store_ptr.dtype.element_ty), mask=c < D)
    if KEEP and first >= 0:
        for t in range(tl.maximum(window * M, tokens - size), tl.minimum(window * M + M, tokens)):
            at = (first + t) % size * W
            for start in range(0, W, DP):
                col = start + c
                kv = tl.load(kv_ptr + t * W + col, mask=col < W, other=0.0).to(tl.float32)
                gate = tl.load(gate_ptr + t * W + col, mask=col < W, other=0.0).to(tl.float32)
                tl.store(old_kv_ptr + at + col, kv.to(old_kv_ptr.dtype.element_ty), mask=col < W)
                tl.store(old_gate_ptr + at + col, gate.to(old_gate_ptr.dtype.element_ty), mask=col < W)


@triton.jit
def _compress_kernel(position_ptr, cos_ptr, sin_ptr, tokens, kv0, gate0, old_kv0, old_gate0, store0, bias0, norm0, eps0, size0,
                     places0, kv1, gate1, old_kv1, old_gate1, store1, bias1, norm1, eps1, size1, places1, R0: tl.constexpr,
                     D0: tl.constexpr, DP0: tl.constexpr, W0: tl.constexpr, OFFSET0: tl.constexpr, SLOTS0: tl.constexpr,
                     R1: tl.constexpr, D1: tl.constexpr, DP1: tl.constexpr, W1: tl.constexpr, OFFSET1: tl.constexpr,
                     SLOTS1: tl.constexpr, M: tl.constexpr, PAIRS: tl.constexpr, POOL: tl.constexpr, KEEP: tl.constexpr,
                     DEPENDENT: tl.constexpr):  # fmt: skip
    """Compress one or two parts. D1 0: one part."""
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    if tl.program_id(2) == 0:
        _compress(position_ptr, cos_ptr, sin_ptr, tokens, kv0, gate0, old_kv0, old_gate0, store0, bias0, norm0, eps0, size0,
                  places0, R0, D0, DP0, W0, OFFSET0, SLOTS0, M, PAIRS, POOL, KEEP)  # fmt: skip
    elif D1 > 0:
        _compress(position_ptr, cos_ptr, sin_ptr, tokens, kv1, gate1, old_kv1, old_gate1, store1, bias1, norm1, eps1, size1,
                  places1, R1, D1, DP1, W1, OFFSET1, SLOTS1, M, PAIRS, POOL, KEEP)  # fmt: skip


@torch.no_grad()
def compress(parts: Sequence[Windows], position: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    (rows, tokens), m, first = parts[0].kv.shape[:2], len(parts[0].bias), parts[0]
    slots = [part.kv.shape[2] // part.store.shape[2] * m for part in parts]
    given: list[Any] = []
    for kv, gate, pending, store, bias, norm in parts:
        given += [kv, gate, *pending, store, bias, norm.weight, norm.eps, pending.kv.shape[1], store.shape[1]]
    given += [None] * 7 + [0.0, 0, 0] if len(parts) < MOST else []
    apart = any(part.pending.kv.shape[1] < count + tokens - 1 for part, count in zip(parts, slots))
    steps = [(True, False), (False, True)] if apart else [(True, True)]

    def run(plan: TilePlan) -> None:
        sizes: list[Any] = []
        for part, count in zip(parts, slots):
            D, W = part.store.shape[2], part.kv.shape[2]
            wide = power_of_two(D)
            sizes += [count, D, wide, W, part.norm.offset, max(1, min(power_of_two(count), plan.elements // wide))]
        sizes += [0, 0, 0, 0, 0.0, 0] if len(parts) < MOST else []
        for pools, keeps in steps:
            _compress_kernel[(rows, cdiv(tokens, m), len(parts))](
                position, cos, sin, tokens, *given, *sizes, m, cos.shape[1], pools, keeps, **options(plan.warps)
            )

    launch(job_of("compress", "", (max(part.store.shape[2] for part in parts),), first.store), run)
    written = tuple(t for part in parts for t in (part.store, *part.pending))
    bump_versions(*written)
    return written
