"""Dynamic tanh: y = tanh(alpha · x) · weight + bias. One pass each way; only x is kept, the tanh is computed again.

Backward, with t = tanh(alpha · x) and d = dy · weight · (1 − t²): dx = alpha · d; dalpha = Σ d · x; dweight = Σ_rows dy · t;
dbias = Σ_rows dy. The sums run over each program's own rows, then over the programs: the same bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..accumulate import deliver
from ._launch import first_order_only, rows_of, schedule


@triton.jit
def _tanh(z, SERIES: tl.constexpr):
    """(tanh z, 1 − tanh² z) from e = exp(−2|z|) <= 1, which cannot overflow; the slope 4e / (1 + e)² keeps its digits where
    tanh is near 1.

    Near 0, 1 − e loses them (at 1e-4, 3 of 7), so there SERIES takes the series, whose next term is below 6e-9 of the sum at
    0.15. 16-bit inputs do without: the error of 6e-8 is beyond their digits from 1.5e-5 up, and the sum is bound by arithmetic.
    """
    e = tl.exp2(-2.8853900817779268 * tl.abs(z))  # 2 / ln 2
    over = 1.0 / (1.0 + e)
    t = (1.0 - e) * over
    t = tl.where(z < 0, -t, t)
    if SERIES:
        s = z * z
        small = z * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315))))
        t = tl.where(tl.abs(z) < 0.15, small, t)
    return t, 4.0 * e * over * over


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(x_ptr, a_ptr, w_ptr, b_ptr, y_ptr, rows,
                    COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * COLS + col[None]
    mask = (row < rows)[:, None] & (col < COLS)[None]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    t, _ = _tanh(tl.load(a_ptr).to(tl.float32) * x, x_ptr.dtype.element_ty == tl.float32)
    y = t * tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)[None]
    if BIAS:
        y += tl.load(b_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)[None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(dy_ptr, x_ptr, a_ptr, w_ptr, dx_ptr, da_ptr, sums_ptr, rows,
                     COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    col = tl.arange(0, BLOCK)
    alpha = tl.load(a_ptr).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
    da = tl.zeros([BLOCK], tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * COLS + col[None]
        mask = (row < rows)[:, None] & (col < COLS)[None]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        t, slope = _tanh(alpha * x, x_ptr.dtype.element_ty == tl.float32)
        d = dy * w[None] * slope
        tl.store(dx_ptr + at, (alpha * d).to(dx_ptr.dtype.element_ty), mask=mask)
        if SUMS:
            da += tl.sum(d * x, 0)
            dw += tl.sum(dy * t, 0)
            db += tl.sum(dy, 0)
    if SUMS:
        tl.store(da_ptr + tl.program_id(0), tl.sum(da, 0))
        sums_ptr += tl.program_id(0) * 2 * COLS + col
        tl.store(sums_ptr, dw, mask=col < COLS)
        tl.store(sums_ptr + COLS, db, mask=col < COLS)


def _forward(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, cols = rows_of(x)
    y = torch.empty_like(x)
    plan = schedule(cols, x.device, heavy=True)
    _forward_kernel[plan.grid(rows)](
        x, alpha, weight.contiguous(), x if bias is None else bias.contiguous(), y, rows,
        cols, plan.block, plan.rows, bias is not None, num_warps=plan.warps,
    )  # fmt: skip
    return y


def _backward(
    dy: Tensor, x: Tensor, alpha: Tensor, weight: Tensor, need_sums: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """(dx, (dalpha, dweight, dbias) in fp32, or None when none of them is needed)."""
    rows, cols = rows_of(x)
    plan = schedule(cols, x.device, backward=True, sums=2)
    grid = plan.grid(rows)
    dx = torch.empty_like(x)
    da = torch.empty(*grid, device=x.device, dtype=torch.float32)
    partial = torch.empty(*grid, 2 if need_sums else 0, cols, device=x.device, dtype=torch.float32)
    _backward_kernel[grid](
        dy, x, alpha, weight.contiguous(), dx, da, partial, rows, cols, plan.block, plan.rows, need_sums, num_warps=plan.warps
    )
    if not need_sums:
        return dx, None
    dw, db = partial.sum(0).unbind(0)
    return dx, (da.sum().view(alpha.shape), dw, db)


class _DynamicTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha, weight, bias):
        x = x.contiguous()
        ctx.save_for_backward(x, alpha, weight)
        ctx.small = alpha, weight, bias  # saved ones may come back without their main_grad (torch.utils.checkpoint)
        return _forward(x, alpha, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        first_order_only("dynamic_tanh")
        needed = ctx.needs_input_grad[1:]
        x, alpha, weight = ctx.saved_tensors
        dx, sums = _backward(dy.contiguous(), x, alpha, weight, any(needed))
        if sums is None:
            return dx, None, None, None
        return dx, *(deliver(p, g) if need else None for p, g, need in zip(ctx.small, sums, needed))


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _DynamicTanh.apply(x, alpha, weight, bias)
