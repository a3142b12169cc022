"""RMSNorm, alone or with the residual add inside. One pass over memory each way; fp32 inside, the tensors' dtype at the edges.

Backward: dx = rstd · (g − x̂ · mean(g · x̂)) with g = dy · weight and x̂ = x · rstd; dweight = Σ_rows dy · x̂, summed by each
program over its own rows, then over the programs, so that it is the same in every run (atomics would not be). What nobody asked
for is not computed: a frozen weight costs no sums (LoRA), an input without a gradient no store.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import job_of, power_of_two
from ..plans.kinds import RowPlan
from ._launch import first_order_only, launch, rows_of
from ._sums import deliver_parts


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_forward_kernel(x_ptr, r_ptr, w_ptr, s_ptr, y_ptr, rstd_ptr, rows, eps,
                             COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                             HINT: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr,
                             OFFSET: tl.constexpr = 0.0):  # fmt: skip
    col = tl.arange(0, BLOCK)
    if WEIGHT:  # before the row's sum, whose barrier no load is moved across
        w = tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
        if OFFSET != 0.0:
            w += OFFSET
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * COLS + col[None]
        mask = (row < rows)[:, None]
        if BLOCK != COLS:
            mask &= (col < COLS)[None]
        x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
        if ADD:
            x += tl.load(r_ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
            s = x.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + at, s, mask=mask)
            x = s.to(tl.float32)  # the norm of what was stored, so that forward and backward see one s
        rstd = tl.rsqrt(tl.sum(x * x, 1) / COLS + eps)
        y = x * rstd[:, None]
        if WEIGHT:
            y *= w[None]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward_kernel(dy_ptr, ds_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, rows,
                              COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                              HINT: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr,
                              DX: tl.constexpr, DW: tl.constexpr, OFFSET: tl.constexpr = 0.0):  # fmt: skip
    col = tl.arange(0, BLOCK)
    if WEIGHT:
        w = tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
        if OFFSET != 0.0:
            w += OFFSET
    dw = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * COLS + col[None]
        mask = (row < rows)[:, None]
        if BLOCK != COLS:
            mask &= (col < COLS)[None]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
        if ADD:  # before the row's sum, whose barrier no load is moved across
            ds = tl.load(ds_ptr + at, mask=mask, other=0.0, eviction_policy=HINT)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        x_hat = x * rstd
        if DX:
            g = dy
            if WEIGHT:
                g = dy * w[None]
            dx = rstd * (g - x_hat * (tl.sum(g * x_hat, 1) / COLS)[:, None])
            if ADD:
                dx += ds.to(tl.float32)
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if DW:
            dw += tl.sum(dy * x_hat, 0)
    if DW:
        tl.store(dw_ptr + tl.program_id(0) * COLS + col, dw, mask=col < COLS)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, what was normed, rstd)."""
    rows, cols = rows_of(x)
    y, rstd = torch.empty_like(x), torch.empty(rows, device=x.device, dtype=torch.float32)
    s = x if residual is None else torch.empty_like(x)
    w = x if weight is None else weight.contiguous()
    job = job_of("rms_norm" if residual is None else "add_rms_norm", "forward", (cols, 0), x)

    def run(plan: RowPlan) -> None:
        _rms_norm_forward_kernel[plan.grid(rows, job)](
            x, x if residual is None else residual, w, s, y, rstd, rows, eps, cols, power_of_two(cols), plan.rows, plan.stages,
            plan.hint, residual is not None, weight is not None, offset, num_warps=plan.warps,
        )  # fmt: skip

    launch(job, run)
    return y, s, rstd


def _backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, need_dx: bool, need_dw: bool, offset: float
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, the programs' parts of dweight), each None when not needed."""
    rows, cols = rows_of(x)
    w = x if weight is None else weight.contiguous()
    dx = torch.empty_like(x) if need_dx else None
    job = job_of("rms_norm" if ds is None else "add_rms_norm", "backward", (cols, 1), x)

    def run(plan: RowPlan) -> Tensor | None:
        grid = plan.grid(rows, job)
        parts = torch.empty(*grid, 1, cols, device=x.device, dtype=torch.float32) if need_dw else None
        _rms_norm_backward_kernel[grid](
            dy, dy if ds is None else ds, x, w, rstd, x if dx is None else dx, rstd if parts is None else parts, rows, cols,
            power_of_two(cols), plan.rows, plan.stages, plan.hint, ds is not None, weight is not None, need_dx, need_dw, offset,
            num_warps=plan.warps,
        )  # fmt: skip
        return parts

    return dx, launch(job, run)


class _RMSNorm(torch.autograd.Function):
    """y, or (y, s) when there is a residual. An output nobody used has the gradient None."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset):
        if not torch.compiler.is_compiling():  # dynamo knows no such call, and gives zeros
            ctx.set_materialize_grads(False)
        y, s, rstd = _forward(x.contiguous(), None if residual is None else residual.contiguous(), weight, eps, offset)
        ctx.save_for_backward(s, weight, rstd)
        ctx.offset = offset
        ctx.weight = weight  # under torch.utils.checkpoint the saved one comes back as a copy without its main_grad
        return y if residual is None else (y, s)

    @staticmethod
    def backward(ctx, dy, ds=None):
        first_order_only("rms_norm")
        if dy is None:
            return ds, ds, None, None, None
        x, weight, rstd = ctx.saved_tensors
        need_x, need_residual, need_dw, *_ = ctx.needs_input_grad
        ds = None if ds is None else ds.contiguous()
        dx, parts = _backward(dy.contiguous(), ds, x, weight, rstd, need_x or need_residual, need_dw, ctx.offset)
        dw = None if parts is None else deliver_parts(parts, [ctx.weight])[0]
        return dx, dx if need_residual else None, dw, None, None


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    return _RMSNorm.apply(x, None, weight, eps, offset)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _RMSNorm.apply(x, residual, weight, eps, offset)
