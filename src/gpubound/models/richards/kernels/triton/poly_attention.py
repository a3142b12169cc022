"""Polynomial attention in tiles: no T × T tensor is stored, and backward recomputes each tile (_poly_tiles.py).

A decoding step splits a row's keys over programs, and a second kernel adds their sums in a fixed order.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....device import interpreted
from .....kernels.accumulate import deliver
from .....kernels.plans.types import AttentionPlan, cdiv, job_of, power_of_two
from .....kernels.triton._launch import bump_versions, first_order_only, launch
from ..plans import WalkPlan
from ._poly_tiles import (
    _bent,
    _coefficients,
    _dot,
    _even_power,
    _poly_coefficients_kernel,
    _poly_forward_kernel,
    _poly_keys_kernel,
    _poly_queries_kernel,
    _tile,
    _weigh,
    stretches,
)


class _Form(NamedTuple):
    """Options of a call."""

    degree: int
    soft_clip: float
    window: int
    causal: bool

    def constants(self, gates: Tensor | None, q: Tensor, k: Tensor, keys: bool) -> dict[str, Any]:
        windowed = self.window > 0
        return {
            "HEADS": q.shape[2], "GROUP": q.shape[2] // k.shape[2], "STRETCHES": stretches(keys, windowed, self.causal),
            "DIM": q.shape[3], "DP": max(16, power_of_two(q.shape[3])), "DEGREE": self.degree, "CLIP": self.soft_clip > 0,
            "FAST": q.dtype == torch.bfloat16 and not interpreted(), "GATED": gates is not None, "WINDOW": windowed,
            "CAUSAL": self.causal, "WIDE": interpreted(),
        }  # fmt: skip

    def numbers(self, q: Tensor) -> tuple:
        """Return tokens, window; small, over, top; steep, alpha. A kernel takes the first two or all three groups. Scores are
        x with s = rest · x, where rest is from 1/2 to 1 (`_shrunk`)."""
        alpha = q.shape[3] ** -0.5
        small = 2.0 ** -math.floor(math.log2(q.shape[3]) / 2)
        rest = alpha / small
        clip = self.soft_clip or rest  # what f is multiplied by to be s̃
        top, steep = clip**self.degree, self.degree * clip ** (self.degree - 1)
        return q.shape[1], self.window, small, rest / clip, top, steep, alpha


def _dense_last(*tensors: Tensor) -> list[Tensor]:
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _launch(kernel: Any, way: str, tiled: Tensor, tensors: list, sums: bool, q: Tensor, numbers: tuple, constants: dict) -> Any:
    """Launch a kernel. tiled (B, T, heads, D): the tensor of which a program owns a tile. Return its sums (2, programs)."""
    strides = [step for t in tensors[:3] for step in t.stride()[:3]]

    def run(plan: WalkPlan) -> Tensor | None:
        programs = cdiv(tiled.shape[1], plan.own) * tiled.shape[0] * tiled.shape[2]
        parts = [torch.empty(2, programs, device=q.device, dtype=torch.float32)] if sums else []
        kernel[(programs,)](
            *(q if t is None else t for t in tensors), *parts, *strides, *numbers, **constants, OWN=plan.own, N=plan.other,
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        return parts[0] if parts else None

    return launch(job_of("poly_attention", way, (q.shape[3],), q), run)


class _PolyAttention(torch.autograd.Function):
    """Autograd function. ctx has the Parameters for their main_grad, as in layers/linear_product.py."""

    @staticmethod
    def forward(ctx, q, k, v, coefficients, gates, form):
        q, k, v = _dense_last(q, k, v)
        gates = None if gates is None else gates.contiguous()
        y = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        *numbers, _, _ = form.numbers(q)
        constants = form.constants(gates, q, k, False)
        _launch(_poly_forward_kernel, "forward", q, [q, k, v, gates, coefficients, y], False, q, tuple(numbers), constants)
        ctx.save_for_backward(q, k, v, coefficients, gates)
        ctx.owner, ctx.form = coefficients, form
        return y

    @staticmethod
    def backward(ctx, dy):
        first_order_only("poly_attention")
        q, k, v, coefficients, gates = ctx.saved_tensors
        form, dy = ctx.form, dy.contiguous()
        dq, dk, dv = (torch.empty(t.shape, device=q.device, dtype=q.dtype) for t in (q, k, v))
        dgates = None if gates is None else torch.empty_like(gates)
        given, numbers = [q, k, v, gates, coefficients, dy], form.numbers(q)
        sums = _launch(
            _poly_queries_kernel, "queries", q, [*given, dq, dgates], True, q, numbers, form.constants(gates, q, k, False)
        )
        _launch(_poly_keys_kernel, "keys", k, [*given, dk, dv], False, q, numbers, form.constants(gates, q, k, True))
        dcoefficients = None
        if ctx.needs_input_grad[3]:
            gradient = torch.empty(3, device=q.device, dtype=torch.float32)
            _poly_coefficients_kernel[(1,)](sums, coefficients, gradient, sums.shape[1], 1024)
            dcoefficients = deliver(ctx.owner, gradient)
        return dq, dk, dv, dcoefficients, dgates, None


def poly_attention(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, gates: Tensor | None = None, degree: int = 3,
    soft_clip: float = 0.0, window: int = 0, causal: bool = True,
) -> Tensor:  # fmt: skip
    return _PolyAttention.apply(q, k, v, coefficients, gates, _Form(degree, soft_clip, window, causal))


@triton.jit
def _weights(s, factor, shift, over, DEGREE: tl.constexpr, CLIP: tl.constexpr, FAST: tl.constexpr):
    f, _ = _bent(s, over, CLIP, FAST)
    return _even_power(f, DEGREE) * f * factor + shift


@triton.jit(do_not_specialize=["places", "window"])
def _poly_step_kernel(q_ptr, k_ptr, v_ptr, cache_k, cache_v, position_ptr, coefficient_ptr, part_ptr, places, window, alpha,
                      over, top, KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
                      N: tl.constexpr, DEGREE: tl.constexpr, CLIP: tl.constexpr, FAST: tl.constexpr, WINDOW: tl.constexpr,
                      WIDE: tl.constexpr):  # fmt: skip
    b, kv, split, splits = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1), tl.num_programs(1)
    g, d, n = tl.arange(0, G), tl.arange(0, DP), tl.arange(0, N)
    inside, heads = d < DIM, (g < GROUP)[:, None] & (d < DIM)[None]
    position = tl.load(position_ptr + b)
    known = (position >= 0) & (position < places)
    at = tl.where(known, position, 0)
    begin = 0
    if WINDOW:
        begin = tl.maximum(at + 1 - window, 0)
    chunk = tl.cdiv(tl.cdiv(at + 1 - begin, splits), N) * N
    lo = begin + split * chunk
    hi = tl.minimum(lo + chunk, at)  # the keys of this part but the token's own
    a, c, scale = _coefficients(coefficient_ptr)
    factor, shift = scale * a * top, scale * c
    mine = (b * KV + kv) * GROUP * DIM + g[:, None] * DIM + d[None]
    q = tl.load(q_ptr + mine, mask=heads, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    base = (tl.cast(b, tl.int64) * places * KV + kv) * DIM
    acc = tl.zeros([G, DP], tl.float32)
    for start in range(lo, hi, N):
        k = _tile(cache_k + base, start, KV * DIM, hi, N, DIM, DP, WIDE)
        s = _dot(q, tl.trans(k)) * alpha
        phi = tl.where((start + n < hi)[None], _weights(s, factor, shift, over, DEGREE, CLIP, FAST), 0.0)
        acc = _weigh(phi, _tile(cache_v + base, start, KV * DIM, hi, N, DIM, DP, WIDE), acc)
    if known & (lo <= at) & (at < lo + chunk):
        new = (b * KV + kv) * DIM + d
        k, v = tl.load(k_ptr + new, mask=inside, other=0.0), tl.load(v_ptr + new, mask=inside, other=0.0)
        to = base + tl.cast(at, tl.int64) * (KV * DIM) + d
        tl.store(cache_k + to, k, mask=inside)
        tl.store(cache_v + to, v, mask=inside)
        s = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None], 1) * alpha
        acc += _weights(s, factor, shift, over, DEGREE, CLIP, FAST)[:, None] * v.to(tl.float32)[None]
    tl.store(part_ptr + split * (tl.num_programs(0) * GROUP * DIM) + mine, acc, mask=heads)


@triton.jit(do_not_specialize=["places", "splits"])
def _poly_joined_kernel(part_ptr, gate_ptr, position_ptr, y_ptr, places, splits, HEADS: tl.constexpr, DIM: tl.constexpr,
                        DP: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    row, d = tl.program_id(0), tl.arange(0, DP)
    acc = tl.zeros([DP], tl.float32)
    for split in range(splits):
        acc += tl.load(part_ptr + (split * tl.num_programs(0) + row) * DIM + d, mask=d < DIM, other=0.0)
    if GATED:
        acc *= tl.load(gate_ptr + row).to(tl.float32)
    position = tl.load(position_ptr + row // HEADS)
    acc = tl.where((position >= 0) & (position < places), acc, float("nan"))
    tl.store(y_ptr + row * DIM + d, acc.to(y_ptr.dtype.element_ty), mask=d < DIM)


MOST_SPLITS = 32  # programs that share a row's keys


@torch.no_grad()
def poly_attention_step(
    q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, position: Tensor, coefficients: Tensor,
    gates: Tensor | None = None, degree: int = 3, soft_clip: float = 0.0, window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (B, H, D), (_, L, K, _) = q.shape, cache_k.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    y, clip = torch.empty(q.shape, device=q.device, dtype=q.dtype), soft_clip or 1.0
    DP, job = max(16, power_of_two(D)), job_of("poly_attention_step", "", (H // K, D // 2, K, q.element_size()), cache_k)

    def run(plan: AttentionPlan) -> None:
        splits = min(MOST_SPLITS, cdiv(L, plan.keys), cdiv(4 * job.chip.sms, B * K))
        parts = torch.empty(splits, B, H, D, device=q.device, dtype=torch.float32)
        _poly_step_kernel[(B * K, splits)](
            q, k, v, cache_k, cache_v, position, coefficients, parts, L, window, D**-0.5, 1 / clip, clip**degree, K, H // K,
            max(16, power_of_two(H // K)), D, DP, plan.keys, degree, soft_clip > 0,
            q.dtype == torch.bfloat16 and not interpreted(), window > 0, interpreted(),
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        given = q if gates is None else gates.contiguous()
        _poly_joined_kernel[(B * H,)](parts, given, position, y, L, splits, H, D, DP, gates is not None, num_warps=1)

    launch(job, run)
    bump_versions(cache_k, cache_v)
    return y, cache_k, cache_v
