"""A head is a program: its channels, and once more each with its neighbour's value, which the first load brought near."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans.kinds import TilePlan, job_of, power_of_two
from ._launch import launch, options
from ._step import _begin, _wait


@triton.jit
def _gained(x_ptr, weight_ptr, i, inside):
    x = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["positions", "places"])
def _turn_heads_kernel(x_ptr, position_ptr, cos_ptr, sin_ptr, out_ptr, weight_ptr, slot_ptr, eps, heads, positions, places,
                       D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, NORMED: tl.constexpr,
                       BACK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _wait(DEPENDENT)  # a fence (_step.py)
    _begin(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    x_ptr += head * D
    i = tl.arange(0, C)
    inside = i < D
    place = tl.load(position_ptr + head // heads).to(tl.int64)
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
        slot = tl.load(slot_ptr + head // heads).to(tl.int64)
        inside = tl.where((slot >= 0) & (slot < places), i, D) < D
        to = slot * heads + head % heads
    tl.store(out_ptr + to * D + i, y.to(out_ptr.dtype.element_ty), mask=inside)


@torch.no_grad()
def turn_heads(
    x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, out: Tensor, weight: Tensor | None = None, eps: float | None = None,
    back: bool = False, slot: Tensor | None = None,
) -> Tensor:  # fmt: skip
    tokens, heads, width = x.shape

    def run(plan: TilePlan) -> None:
        _turn_heads_kernel[(tokens * heads,)](
            x, position, cos, sin, out, weight, slot, 0.0 if eps is None else eps, heads, len(cos), len(out), width,
            power_of_two(width), cos.shape[1], eps is not None, back, **options(plan.warps),
        )  # fmt: skip

    launch(job_of("turn_heads", "", (width,), x), run)
    return out
