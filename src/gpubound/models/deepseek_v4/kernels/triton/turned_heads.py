"""Kernel of turn_heads. A program computes one head, and loads each channel's pair partner a second time, from the cache."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....kernels.plans.types import TilePlan, job_of, power_of_two
from .....kernels.triton._launch import bump_versions, launch, options
from .....kernels.triton._pdl import _begin, _wait
from ..turned_heads import MOST, TurnedHeads


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
    _wait(DEPENDENT)  # a fence (_pdl.py)
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
    for _ in range(MOST - len(parts)):
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
