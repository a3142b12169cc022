"""Dynamic tanh, and a Richards curve in a norm's place: y = f(x) · weight + bias, alone or with the residual add inside.

A program walks over tiles of rows, as a norm's does (norms.py). With t = f(x), computed again, and g = dy · weight,

    dx = g · f'(x)        dweight = Σ_rows dy · t        dbias = Σ_rows dy

For tanh f' = alpha · (1 − t²), and dalpha = Σ g · (1 − t²) · x. A curve's sums are those of _curve.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....kernels.triton._launch import first_order_only
from .....kernels.triton._math import reciprocal
from .....kernels.triton._row_reduction import _columns, _tile, _tile_of, deliver_parts, walk
from ..curve import Curve
from ._curve import SUMS, add_sums, deliver_curves, no_sums, numbers, put_sums, sigma_of, value_of


@triton.jit
def _tanh(x, alpha, FP32: tl.constexpr):
    """(tanh z, 1 − tanh² z) for z = alpha · x, from e = exp(−2z). The slope 4e / (1 + e)² keeps its digits near ±1.

    Near 0, 1 − e loses them (at 1e-4, 3 of 7), so there FP32 takes the series, whose next term is below 6e-9 of the sum at
    0.15; it also divides, where `reciprocal` would be off by 3e-7. 16-bit inputs do without: that error is beyond their digits
    from 1e-4 up, and 14 instructions an element less are what keeps the kernel from being bound by them.
    """
    e = tl.exp2(x * (-2.8853900817779268 * alpha))  # 2 / ln 2
    bounded = tl.minimum(e, 8.507059173023462e37)  # 2^126: infinity times 0 would be NaN
    if FP32:
        over = 1.0 / (1.0 + bounded)
        z = alpha * x
        s = z * z
        small = z * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315))))
        t = tl.where(tl.abs(z) < 0.15, small, (1.0 - bounded) * over)
    else:
        over = reciprocal(1.0 + e)
        t = 2.0 * over - 1.0
    return t, 4.0 * (bounded * over) * over


@triton.jit(do_not_specialize=["rows"])
def _dynamic_tanh_forward_kernel(x_ptr, r_ptr, a_ptr, w_ptr, b_ptr, s_ptr, y_ptr, rows,
                                 COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                                 HINT: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, CURVE: tl.constexpr):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    if CURVE is None:
        alpha = tl.load(a_ptr).to(tl.float32)
    else:
        rate, place, bent, gain, offset, _steep = numbers(a_ptr, CURVE)
    w = _columns(w_ptr, COLS, BLOCK)
    if BIAS:
        b = _columns(b_ptr, COLS, BLOCK)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        _row, at, mask = _tile(first, rows, COLS, BLOCK, ROWS)
        x = _tile_of(x_ptr, at, mask, HINT)
        if ADD:
            x += _tile_of(r_ptr, at, mask, HINT)
            s = x.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + at, s, mask=mask)
            x = s.to(tl.float32)  # of what was stored, so that forward and backward see one s
        if CURVE is None:
            t, _slope = _tanh(x, alpha, tl.float32 == DTYPE)
        else:
            sigma, _r, _length = sigma_of(x, rate, place, bent, DTYPE)
            t = value_of(sigma, gain, offset, CURVE)
        y = t * w[None]
        if BIAS:
            y += b[None]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _dynamic_tanh_backward_kernel(dy_ptr, ds_ptr, x_ptr, a_ptr, w_ptr, dx_ptr, da_ptr, parts_ptr, rows,
                                  COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                                  HINT: tl.constexpr, ADD: tl.constexpr, SUMS: tl.constexpr, CURVE: tl.constexpr):  # fmt: skip
    """`da_ptr`: a number a program for alpha, or the sums of a curve, of which it has SUMS places."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    col = tl.arange(0, BLOCK)
    if CURVE is None:
        alpha = tl.load(a_ptr).to(tl.float32)
        da = tl.zeros([BLOCK], tl.float32)
    else:
        rate, place, bent, gain, offset, steep = numbers(a_ptr, CURVE)
        sums = no_sums(ROWS * BLOCK)
    w = _columns(w_ptr, COLS, BLOCK)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        _row, at, mask = _tile(first, rows, COLS, BLOCK, ROWS)
        dy = _tile_of(dy_ptr, at, mask, HINT)
        x = _tile_of(x_ptr, at, mask, HINT)
        g = dy * w[None]
        if CURVE is None:
            t, slope = _tanh(x, alpha, tl.float32 == DTYPE)
            d = g * slope
            dx = alpha * d
        else:
            sigma, r, length = sigma_of(x, rate, place, bent, DTYPE)
            t = value_of(sigma, gain, offset, CURVE)
            s = g * sigma
            d = s * r
            dx = steep * d
        if ADD:
            dx += _tile_of(ds_ptr, at, mask, HINT)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if SUMS:
            dw += tl.sum(dy * t, 0)
            db += tl.sum(dy, 0)
            if CURVE is None:
                da += tl.sum(d * x, 0)
            else:
                sums = add_sums(sums, g, s, d, x, length, ROWS * BLOCK, CURVE)
    if SUMS:
        if CURVE is None:
            tl.store(da_ptr + tl.program_id(0), tl.sum(da, 0))
        else:
            put_sums(da_ptr + tl.program_id(0) * SUMS, sums)
        parts_ptr += tl.program_id(0) * 2 * COLS + col
        tl.store(parts_ptr, dw, mask=col < COLS)
        tl.store(parts_ptr + COLS, db, mask=col < COLS)


class _DynamicTanh(torch.autograd.Function):
    """`small` is alpha, or a curve's `free`. y, or (y, s) when there is a residual. An unused output's gradient is None."""

    @staticmethod
    def forward(ctx, x, residual, small, weight, bias, curve):
        if not torch.compiler.is_compiling():  # dynamo knows no such call, and gives zeros
            ctx.set_materialize_grads(False)
        x, r = x.contiguous(), None if residual is None else residual.contiguous()
        s, y = x if r is None else torch.empty_like(x), torch.empty_like(x)
        a, w, b = (x if t is None else t.contiguous() for t in (small, weight, bias))
        walk(
            _dynamic_tanh_forward_kernel, _op(r, curve), "forward", x, 0, (x, x if r is None else r, a, w, b, s, y),
            ADD=r is not None, BIAS=bias is not None, CURVE=None if curve is None else curve.constants,
        )  # fmt: skip
        ctx.save_for_backward(s, small, weight)
        ctx.curve = curve
        ctx.small = small, weight, bias  # saved ones may come back without their main_grad (torch.utils.checkpoint)
        return y if residual is None else (y, s)

    @staticmethod
    def backward(ctx, dy, ds=None):
        x, small, weight = ctx.saved_tensors
        curve = ctx.curve
        first_order_only(_op(None, curve))
        if dy is None:
            return ds, ds, None, None, None, None
        need_x, need_residual, *needed = ctx.needs_input_grad[:5]
        dy, ds = dy.contiguous(), None if ds is None else ds.contiguous()
        a, w, dx = x if small is None else small.contiguous(), weight.contiguous(), torch.empty_like(x)
        summed = any(needed)
        own, parts = walk(
            _dynamic_tanh_backward_kernel, _op(ds, curve), "backward", x, 2,
            (dy, dy if ds is None else ds, x, a, w, dx), [() if curve is None else (SUMS,), (2 if summed else 0, x.shape[-1])],
            ADD=ds is not None, SUMS=SUMS if summed else 0, CURVE=None if curve is None else curve.constants,
        )  # fmt: skip
        streams = dx if need_x else None, dx if need_residual else None
        if not summed:
            return *streams, None, None, None, None
        # Who is frozen or absent has a stand-in, without an accumulator, whose gradient is dropped.
        owners = [t if need else like.detach() for t, need, like in zip(ctx.small[1:], needed[1:], (weight, weight))]
        if curve is None:
            alpha = ctx.small[0] if needed[0] else small.detach()
            dw, db, da = deliver_parts(parts, owners, own, alpha)
        else:
            dw, db = deliver_parts(parts, owners) if any(needed[1:]) else (None, None)
            (da,) = deliver_curves(own[:, None], ctx.small[:1], [curve], needed[:1]) if needed[0] else (None,)
        return *streams, *(g if need else None for g, need in zip((da, dw, db), needed)), None


def _op(beside: Tensor | None, curve: Curve | None) -> str:
    """Whose plan it is. `beside`: the residual, or the gradient that comes back for the sum with it."""
    return ("" if beside is None else "add_") + ("dynamic_tanh" if curve is None else "richards_norm")


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _DynamicTanh.apply(x, None, alpha, weight, bias, None)


def add_dynamic_tanh(
    x: Tensor, residual: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _DynamicTanh.apply(x, residual, alpha, weight, bias, None)


def richards_norm(x: Tensor, free: Tensor | None, curve: Curve, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _DynamicTanh.apply(x, None, free, weight, bias, curve)


def add_richards_norm(
    x: Tensor, residual: Tensor, free: Tensor | None, curve: Curve, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _DynamicTanh.apply(x, residual, free, weight, bias, curve)
