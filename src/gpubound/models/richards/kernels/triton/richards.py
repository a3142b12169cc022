"""Richards curves: y = f(x), the gated unit h = x1 · f_v(x1) · f_g(x2) of a packed [x1 | x2], and dynamic tanh in place of
a norm, y = tanh(alpha x) · weight + bias, alone or with the residual add fused.

Backward of the unit, from the saved input, with v = f_v(x1), g = f_g(x2) and slopes v', g':

    dx1 = dh · g · (v + x1 · v')        dx2 = dh · x1 · v · g'

The curves' gradients are sums of dh · x1 · g and dh · x1 · v. Programs stride over tiles, so a few hundred programs compute
the curves' parameters and sum their gradients (_curve.py). `richards_glu_backward` recomputes h in the same pass, as
`swiglu_backward` does.

In place of a norm, a program walks over tiles of rows, as in norms.py. With t = tanh(alpha x), recomputed, and g = dy · weight,

    dx = g · alpha · (1 − t²)        dalpha = Σ g · (1 − t²) · x        dweight = Σ_rows dy · t        dbias = Σ_rows dy
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....kernels.plans.types import cdiv, job_of, power_of_two
from .....kernels.triton._launch import first_order_only, launch
from .....kernels.triton._math import _columns, _tile, _tile_of, deliver_parts, reciprocal, walk
from .....kernels.triton.gated import _halves, _matrix
from ..plans import StridePlan
from ..richards import Curve
from ._curve import SUMS, add_sums, deliver_curves, gradients, no_sums, numbers, put_sums, sigma_of, value_of


@triton.jit
def _tile_at(tile, rows, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return (rows, columns, mask) of a tile. Consecutive tiles are in one row."""
    ACROSS: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    row = (tile // ACROSS * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = (tile % ACROSS * BLOCK + tl.arange(0, BLOCK))[None]
    mask = row < rows
    if COLS % BLOCK != 0:
        mask &= col < COLS
    return row, col, mask


@triton.jit
def _load(ptr, row, stride, col, mask, HINT: tl.constexpr):
    return tl.load(ptr + row * stride + col, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)


@triton.jit
def _store(ptr, row, stride, col, value, mask):
    tl.store(ptr + row * stride + col, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _richards_forward_kernel(x_ptr, free_ptr, y_ptr, rows, tiles, x_row, CURVE: tl.constexpr, COLS: tl.constexpr,
                             ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HINT: tl.constexpr):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    rate, place, bent, gain, offset, _steep = numbers(free_ptr, CURVE)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row, col, mask = _tile_at(tile, rows, COLS, ROWS, BLOCK)
        x = _load(x_ptr, row, x_row, col, mask, HINT)
        sigma, _r, _length = sigma_of(x, rate, place, bent, DTYPE)
        _store(y_ptr, row, COLS, col, value_of(sigma, gain, offset, CURVE), mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _richards_backward_kernel(dy_ptr, x_ptr, free_ptr, dx_ptr, parts_ptr, rows, tiles, dy_row, x_row, CURVE: tl.constexpr,
                              SUMS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                              STAGES: tl.constexpr, HINT: tl.constexpr):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    rate, place, bent, _gain, _offset, steep = numbers(free_ptr, CURVE)
    sums = no_sums(ROWS * BLOCK)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row, col, mask = _tile_at(tile, rows, COLS, ROWS, BLOCK)
        dy = _load(dy_ptr, row, dy_row, col, mask, HINT)
        x = _load(x_ptr, row, x_row, col, mask, HINT)
        sigma, r, length = sigma_of(x, rate, place, bent, DTYPE)
        s = dy * sigma
        d = s * r
        _store(dx_ptr, row, COLS, col, steep * d, mask)
        if SUMS:
            sums = add_sums(sums, dy, s, d, x, length, ROWS * BLOCK, CURVE)
    if SUMS:
        put_sums(parts_ptr + tl.program_id(0) * SUMS, sums)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _richards_glu_forward_kernel(x1_ptr, x2_ptr, v_ptr, g_ptr, h_ptr, rows, tiles, x_row, VALUE: tl.constexpr,
                                 GATE: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                                 STAGES: tl.constexpr, HINT: tl.constexpr):  # fmt: skip
    DTYPE: tl.constexpr = x1_ptr.dtype.element_ty
    v_rate, v_place, v_bent, v_gain, v_offset, _v_steep = numbers(v_ptr, VALUE)
    g_rate, g_place, g_bent, g_gain, g_offset, _g_steep = numbers(g_ptr, GATE)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row, col, mask = _tile_at(tile, rows, COLS, ROWS, BLOCK)
        x1 = _load(x1_ptr, row, x_row, col, mask, HINT)
        x2 = _load(x2_ptr, row, x_row, col, mask, HINT)
        v_sigma, _v_r, _v_length = sigma_of(x1, v_rate, v_place, v_bent, DTYPE)
        g_sigma, _g_r, _g_length = sigma_of(x2, g_rate, g_place, g_bent, DTYPE)
        v, g = value_of(v_sigma, v_gain, v_offset, VALUE), value_of(g_sigma, g_gain, g_offset, GATE)
        _store(h_ptr, row, COLS, col, x1 * v * g, mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _richards_glu_backward_kernel(dh_ptr, x1_ptr, x2_ptr, v_ptr, g_ptr, d1_ptr, d2_ptr, h_ptr, parts_ptr, rows, tiles, dh_row,
                                  x_row, d_row, VALUE: tl.constexpr, GATE: tl.constexpr, SUMS: tl.constexpr, H: tl.constexpr,
                                  COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                                  HINT: tl.constexpr):  # fmt: skip
    DTYPE: tl.constexpr = x1_ptr.dtype.element_ty
    v_rate, v_place, v_bent, v_gain, v_offset, v_steep = numbers(v_ptr, VALUE)
    g_rate, g_place, g_bent, g_gain, g_offset, g_steep = numbers(g_ptr, GATE)
    v_sums = no_sums(ROWS * BLOCK)
    g_sums = no_sums(ROWS * BLOCK)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row, col, mask = _tile_at(tile, rows, COLS, ROWS, BLOCK)
        dh = _load(dh_ptr, row, dh_row, col, mask, HINT)
        x1 = _load(x1_ptr, row, x_row, col, mask, HINT)
        x2 = _load(x2_ptr, row, x_row, col, mask, HINT)
        v_sigma, v_r, v_length = sigma_of(x1, v_rate, v_place, v_bent, DTYPE)
        g_sigma, g_r, g_length = sigma_of(x2, g_rate, g_place, g_bent, DTYPE)
        v, g = value_of(v_sigma, v_gain, v_offset, VALUE), value_of(g_sigma, g_gain, g_offset, GATE)
        at_x1 = dh * g
        held = x1 * v
        v_w, g_w = at_x1 * x1, dh * held
        v_s, g_s = v_w * v_sigma, g_w * g_sigma
        v_d, g_d = v_s * v_r, g_s * g_r
        _store(d1_ptr, row, d_row, col, at_x1 * v + v_steep * v_d, mask)
        _store(d2_ptr, row, d_row, col, g_steep * g_d, mask)
        if H:
            _store(h_ptr, row, COLS, col, held * g, mask)
        if SUMS:
            v_sums = add_sums(v_sums, v_w, v_s, v_d, x1, v_length, ROWS * BLOCK, VALUE)
            g_sums = add_sums(g_sums, g_w, g_s, g_d, x2, g_length, ROWS * BLOCK, GATE)
    if SUMS:
        parts_ptr += tl.program_id(0) * 2 * SUMS
        put_sums(parts_ptr, v_sums)
        put_sums(parts_ptr + SUMS, g_sums)


def _stride(kernel: Any, way: str, matrices: list[Tensor], reads: int, strided: list[Tensor], curves: list[Curve],
            summed: bool | None = None, **constants: Any) -> Tensor | None:  # fmt: skip
    """Launch over matrices of one shape, and return the kernel's sums.

    strided  matrices whose row strides the kernel takes
    summed   whether the sums are needed; None: the kernel has none
    reads    number of tensors that a tile is read from
    """
    rows, cols = strided[0].shape
    job = job_of("richards", way, (reads,), strided[0])

    def run(plan: StridePlan) -> Tensor | None:
        wide = min(plan.elements, power_of_two(cols))
        high = plan.elements // wide
        tiles = cdiv(rows, high) * cdiv(cols, wide)
        grid = plan.grid(tiles, job)
        parts = None
        own: list[Any] = []
        if summed is not None:
            parts = torch.empty(*grid, len(curves), SUMS, device=matrices[0].device, dtype=torch.float32)
            own = [parts]
            constants["SUMS"] = SUMS if summed else 0
        kernel[grid](
            *matrices, *own, rows, tiles, *(t.stride(0) for t in strided), *(curve.constants for curve in curves), COLS=cols,
            ROWS=high, BLOCK=wide, STAGES=plan.stages, HINT=plan.hint, **constants, num_warps=plan.warps,
        )  # fmt: skip
        return parts

    return launch(job, run)


def _or(free: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if free is None else free.contiguous()


class _Richards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, free, curve):
        m, y = _matrix(x), torch.empty(x.shape, device=x.device, dtype=x.dtype)
        _stride(_richards_forward_kernel, "forward", [m, _or(free, m), _matrix(y)], 1, [m], [curve])
        ctx.save_for_backward(x, free)
        ctx.curve, ctx.free = curve, free  # a saved one may come back without its main_grad (torch.utils.checkpoint)
        return y

    @staticmethod
    def backward(ctx, dy):
        first_order_only("richards")
        x, free = ctx.saved_tensors
        d, m, dx = _matrix(dy), _matrix(x), torch.empty(x.shape, device=x.device, dtype=x.dtype)
        need = ctx.needs_input_grad[1]
        matrices = [d, m, _or(free, m), _matrix(dx)]
        parts = _stride(_richards_backward_kernel, "backward", matrices, 2, [d, m], [ctx.curve], need)
        assert parts is not None
        return dx, deliver_curves(parts, [ctx.free], [ctx.curve], [need])[0] if need else None, None


def _glu_backward(
    dh: Tensor, packed: Tensor, frees: list[Tensor | None], curves: list[Curve], again: bool, summed: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradient of packed, h if it is needed, and the programs' sums of the curves."""
    d, (x1, x2) = _matrix(dh), _halves(packed, None)
    gradient = torch.empty(packed.shape, device=packed.device, dtype=packed.dtype)
    d1, d2 = _halves(gradient, None)
    h = torch.empty(dh.shape, device=dh.device, dtype=dh.dtype) if again else None
    matrices = [d, x1, x2, *(_or(free, x1) for free in frees), d1, d2, d if h is None else _matrix(h)]
    kernel = _richards_glu_backward_kernel
    parts = _stride(kernel, "backward", matrices, 3, [d, x1, d1], curves, summed, H=again)
    assert parts is not None
    return gradient, h, parts


class _RichardsGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, value_free, gate_free, value_curve, gate_curve):
        x1, x2 = _halves(packed, None)
        h = torch.empty(*packed.shape[:-1], x1.shape[1], device=packed.device, dtype=packed.dtype)
        matrices = [x1, x2, _or(value_free, x1), _or(gate_free, x1), _matrix(h)]
        _stride(_richards_glu_forward_kernel, "forward", matrices, 2, [x1], [value_curve, gate_curve])
        ctx.save_for_backward(packed, value_free, gate_free)
        ctx.curves, ctx.frees = [value_curve, gate_curve], [value_free, gate_free]  # as in _Richards
        return h

    @staticmethod
    def backward(ctx, dh):
        first_order_only("richards_glu")
        packed, *frees = ctx.saved_tensors
        need = ctx.needs_input_grad[1:3]
        gradient, _, parts = _glu_backward(dh, packed, frees, ctx.curves, False, any(need))
        gradients = deliver_curves(parts, ctx.frees, ctx.curves, need) if any(need) else (None, None)
        return gradient, *gradients, None, None


def richards(x, free, curve):
    return _Richards.apply(x, free, curve)


def richards_glu(packed, value_free, gate_free, value_curve, gate_curve):
    return _RichardsGLU.apply(packed, value_free, gate_free, value_curve, gate_curve)


@torch.no_grad()
def richards_glu_backward(dh, packed, value_free, gate_free, value_curve, gate_curve):
    frees, curves = [value_free, gate_free], [value_curve, gate_curve]
    gradient, h, parts = _glu_backward(dh, packed, frees, curves, True, any(free is not None for free in frees))
    assert h is not None
    value, gate = gradients(parts, frees, curves)
    return gradient, h, value, gate


@triton.jit
def _tanh(x, alpha, FP32: tl.constexpr):
    """Return (tanh z, 1 − tanh² z) for z = alpha · x, from e = exp(−2z). The slope 4e / (1 + e)² keeps its digits near ±1.

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
                                 HINT: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    alpha = tl.load(a_ptr).to(tl.float32)
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
        t, _slope = _tanh(x, alpha, tl.float32 == DTYPE)
        y = t * w[None]
        if BIAS:
            y += b[None]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _dynamic_tanh_backward_kernel(dy_ptr, ds_ptr, x_ptr, a_ptr, w_ptr, dx_ptr, da_ptr, parts_ptr, rows,
                                  COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                                  HINT: tl.constexpr, ADD: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """da_ptr: one value per program."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    col = tl.arange(0, BLOCK)
    alpha = tl.load(a_ptr).to(tl.float32)
    da = tl.zeros([BLOCK], tl.float32)
    w = _columns(w_ptr, COLS, BLOCK)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        _row, at, mask = _tile(first, rows, COLS, BLOCK, ROWS)
        dy = _tile_of(dy_ptr, at, mask, HINT)
        x = _tile_of(x_ptr, at, mask, HINT)
        g = dy * w[None]
        t, slope = _tanh(x, alpha, tl.float32 == DTYPE)
        d = g * slope
        dx = alpha * d
        if ADD:
            dx += _tile_of(ds_ptr, at, mask, HINT)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if SUMS:
            dw += tl.sum(dy * t, 0)
            db += tl.sum(dy, 0)
            da += tl.sum(d * x, 0)
    if SUMS:
        tl.store(da_ptr + tl.program_id(0), tl.sum(da, 0))
        parts_ptr += tl.program_id(0) * 2 * COLS + col
        tl.store(parts_ptr, dw, mask=col < COLS)
        tl.store(parts_ptr + COLS, db, mask=col < COLS)


class _DynamicTanh(torch.autograd.Function):
    """Autograd function of y, or of (y, s) with a residual."""

    @staticmethod
    def forward(ctx, x, residual, alpha, weight, bias):
        if not torch.compiler.is_compiling():  # dynamo knows no such call, and gives zeros
            ctx.set_materialize_grads(False)
        x, r = x.contiguous(), None if residual is None else residual.contiguous()
        s, y = x if r is None else torch.empty_like(x), torch.empty_like(x)
        a, w, b = (x if t is None else t.contiguous() for t in (alpha, weight, bias))
        walk(
            _dynamic_tanh_forward_kernel, _op(r), "forward", x, 0, (x, x if r is None else r, a, w, b, s, y),
            ADD=r is not None, BIAS=bias is not None,
        )  # fmt: skip
        ctx.save_for_backward(s, alpha, weight)
        ctx.small = alpha, weight, bias  # saved ones may come back without their main_grad (torch.utils.checkpoint)
        return y if residual is None else (y, s)

    @staticmethod
    def backward(ctx, dy, ds=None):
        x, alpha, weight = ctx.saved_tensors
        first_order_only("dynamic_tanh")
        if dy is None:
            return ds, ds, None, None, None
        need_x, need_residual, *needed = ctx.needs_input_grad
        dy, ds = dy.contiguous(), None if ds is None else ds.contiguous()
        a, w, dx = alpha.contiguous(), weight.contiguous(), torch.empty_like(x)
        summed = any(needed)
        own, parts = walk(
            _dynamic_tanh_backward_kernel, _op(ds), "backward", x, 2, (dy, dy if ds is None else ds, x, a, w, dx),
            [(), (2 if summed else 0, x.shape[-1])], ADD=ds is not None, SUMS=SUMS if summed else 0,
        )  # fmt: skip
        streams = dx if need_x else None, dx if need_residual else None
        if not summed:
            return *streams, None, None, None
        # Who is frozen or absent has a stand-in, without an accumulator, whose gradient is dropped.
        owners = [t if need else like.detach() for t, need, like in zip(ctx.small[1:], needed[1:], (weight, weight))]
        dw, db, da = deliver_parts(parts, owners, own, ctx.small[0] if needed[0] else alpha.detach())
        return *streams, *(g if need else None for g, need in zip((da, dw, db), needed))


def _op(beside: Tensor | None) -> str:
    """Return the op's name for its plan. beside: the residual, or the gradient of the sum with it."""
    return "dynamic_tanh" if beside is None else "add_dynamic_tanh"


def dynamic_tanh(x, alpha, weight, bias=None):
    return _DynamicTanh.apply(x, None, alpha, weight, bias)


def add_dynamic_tanh(x, residual, alpha, weight, bias=None):
    return _DynamicTanh.apply(x, residual, alpha, weight, bias)
