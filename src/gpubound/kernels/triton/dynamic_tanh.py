"""Dynamic tanh: y = tanh(alpha · x) · weight + bias. One pass each way; only x is kept, the tanh is computed again.

Backward, with t = tanh(alpha · x) and d = dy · weight · (1 − t²): dx = alpha · d; dalpha = Σ d · x; dweight = Σ_rows dy · t;
dbias = Σ_rows dy. The sums run over each program's own rows, then over the programs: the same bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import job_of, power_of_two
from ..plans.kinds import RowPlan
from ._launch import first_order_only, launch, rows_of
from ._math import reciprocal
from ._sums import deliver_parts


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
def _dynamic_tanh_forward_kernel(x_ptr, a_ptr, w_ptr, b_ptr, y_ptr, rows,
                                 COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                                 HINT: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    col = tl.arange(0, BLOCK)
    alpha = tl.load(a_ptr).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
    if BIAS:
        b = tl.load(b_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * COLS + col[None]
        mask = (row < rows)[:, None]
        if BLOCK != COLS:
            mask &= (col < COLS)[None]
        x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
        t, _ = _tanh(x, alpha, x_ptr.dtype.element_ty == tl.float32)
        y = t * w[None]
        if BIAS:
            y += b[None]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _dynamic_tanh_backward_kernel(dy_ptr, x_ptr, a_ptr, w_ptr, dx_ptr, da_ptr, parts_ptr, rows,
                                  COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                                  HINT: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    col = tl.arange(0, BLOCK)
    alpha = tl.load(a_ptr).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
    da = tl.zeros([BLOCK], tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * COLS + col[None]
        mask = (row < rows)[:, None]
        if BLOCK != COLS:
            mask &= (col < COLS)[None]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
        t, slope = _tanh(x, alpha, x_ptr.dtype.element_ty == tl.float32)
        d = dy * w[None] * slope
        tl.store(dx_ptr + at, (alpha * d).to(dx_ptr.dtype.element_ty), mask=mask)
        if SUMS:
            da += tl.sum(d * x, 0)
            dw += tl.sum(dy * t, 0)
            db += tl.sum(dy, 0)
    if SUMS:
        tl.store(da_ptr + tl.program_id(0), tl.sum(da, 0))
        parts_ptr += tl.program_id(0) * 2 * COLS + col
        tl.store(parts_ptr, dw, mask=col < COLS)
        tl.store(parts_ptr + COLS, db, mask=col < COLS)


def _forward(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, cols = rows_of(x)
    y = torch.empty_like(x)
    w, b = weight.contiguous(), x if bias is None else bias.contiguous()
    job = job_of("dynamic_tanh", "forward", (cols, 0), x)

    def run(plan: RowPlan) -> None:
        _dynamic_tanh_forward_kernel[plan.grid(rows, job)](
            x, alpha, w, b, y, rows, cols, power_of_two(cols), plan.rows, plan.stages, plan.hint, bias is not None,
            num_warps=plan.warps,
        )  # fmt: skip

    launch(job, run)
    return y


def _backward(dy: Tensor, x: Tensor, alpha: Tensor, weight: Tensor, need_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, the programs' parts of dweight and dbias, and of dalpha); the parts are empty when none of them is needed."""
    rows, cols = rows_of(x)
    w, dx = weight.contiguous(), torch.empty_like(x)
    job = job_of("dynamic_tanh", "backward", (cols, 2), x)

    def run(plan: RowPlan) -> tuple[Tensor, Tensor]:
        grid = plan.grid(rows, job)
        da = torch.empty(*grid, device=x.device, dtype=torch.float32)
        parts = torch.empty(*grid, 2 if need_sums else 0, cols, device=x.device, dtype=torch.float32)
        _dynamic_tanh_backward_kernel[grid](
            dy, x, alpha, w, dx, da, parts, rows, cols, power_of_two(cols), plan.rows, plan.stages, plan.hint, need_sums,
            num_warps=plan.warps,
        )  # fmt: skip
        return parts, da

    return dx, *launch(job, run)


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
        dx, parts, da = _backward(dy.contiguous(), x, alpha, weight, any(needed))
        if not any(needed):
            return dx, None, None, None
        # Who is frozen or absent has a stand-in, without an accumulator, whose gradient is dropped.
        owners = [t if need else like.detach() for t, need, like in zip(ctx.small, needed, (alpha, weight, weight))]
        dw, db, dalpha = deliver_parts(parts, owners[1:], da, owners[0])
        return dx, *(g if need else None for g, need in zip((dalpha, dw, db), needed))


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _DynamicTanh.apply(x, alpha, weight, bias)
