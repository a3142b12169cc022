"""RMSNorm, alone or with the residual add inside. One pass over memory each way; fp32 inside, the tensors' dtype at the edges.

Backward: dx = rstd · (g − x̂ · mean(g · x̂)) with g = dy · weight and x̂ = x · rstd; dweight = Σ_rows dy · x̂, summed by each
program over its own rows, then over the programs, so that it is the same in every run (atomics would not be). What nobody asked
for is not computed: a frozen weight costs no sums (LoRA), an input without a gradient no store.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..accumulate import deliver_sum
from ._launch import first_order_only, rows_of, schedule


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(x_ptr, r_ptr, w_ptr, s_ptr, y_ptr, rstd_ptr, rows, eps,
                    COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                    ADD: tl.constexpr, WEIGHT: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * COLS + col[None]
    mask = (row < rows)[:, None] & (col < COLS)[None]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(r_ptr + at, mask=mask, other=0.0).to(tl.float32)
        s = x.to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + at, s, mask=mask)
        x = s.to(tl.float32)  # the norm of what was stored, so that forward and backward see one s
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / COLS + eps)
    y = x * rstd[:, None]
    if WEIGHT:
        y *= tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)[None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(dy_ptr, ds_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, rows,
                     COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                     ADD: tl.constexpr, WEIGHT: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr):  # fmt: skip
    col = tl.arange(0, BLOCK)
    if WEIGHT:
        w = tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * COLS + col[None]
        mask = (row < rows)[:, None] & (col < COLS)[None]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        x_hat = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * rstd
        if DX:
            g = dy
            if WEIGHT:
                g = dy * w[None]
            dx = rstd * (g - x_hat * (tl.sum(g * x_hat, 1) / COLS)[:, None])
            if ADD:
                dx += tl.load(ds_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if DW:
            dw += tl.sum(dy * x_hat, 0)
    if DW:
        tl.store(dw_ptr + tl.program_id(0) * COLS + col, dw, mask=col < COLS)


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, what was normed, rstd)."""
    rows, cols = rows_of(x)
    y, rstd = torch.empty_like(x), torch.empty(rows, device=x.device, dtype=torch.float32)
    s = x if residual is None else torch.empty_like(x)
    plan = schedule(cols, x.device)
    _forward_kernel[plan.grid(rows)](
        x, x if residual is None else residual, x if weight is None else weight.contiguous(), s, y, rstd, rows, eps,
        cols, plan.block, plan.rows, residual is not None, weight is not None, num_warps=plan.warps,
    )  # fmt: skip
    return y, s, rstd


def _backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, need_dx: bool, need_dw: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, the programs' parts of dweight in fp32), each None when not needed."""
    rows, cols = rows_of(x)
    plan = schedule(cols, x.device, backward=True)
    grid = plan.grid(rows)
    dx = torch.empty_like(x) if need_dx else None
    partial = torch.empty(*grid, cols, device=x.device, dtype=torch.float32) if need_dw else None
    _backward_kernel[grid](
        dy, dy if ds is None else ds, x, x if weight is None else weight.contiguous(), rstd,
        x if dx is None else dx, rstd if partial is None else partial, rows,
        cols, plan.block, plan.rows, ds is not None, weight is not None, need_dx, need_dw, num_warps=plan.warps,
    )  # fmt: skip
    return dx, partial


class _RMSNorm(torch.autograd.Function):
    """y, or (y, s) when there is a residual. An output nobody used has the gradient None."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        if not torch.compiler.is_compiling():  # dynamo knows no such call, and gives zeros
            ctx.set_materialize_grads(False)
        y, s, rstd = _forward(x.contiguous(), None if residual is None else residual.contiguous(), weight, eps)
        ctx.save_for_backward(s, weight, rstd)
        ctx.weight = weight  # under torch.utils.checkpoint the saved one comes back as a copy without its main_grad
        return y if residual is None else (y, s)

    @staticmethod
    def backward(ctx, dy, ds=None):
        first_order_only("rms_norm")
        if dy is None:
            return ds, ds, None, None
        x, weight, rstd = ctx.saved_tensors
        need_x, need_residual, need_dw, _ = ctx.needs_input_grad
        ds = None if ds is None else ds.contiguous()
        dx, partial = _backward(dy.contiguous(), ds, x, weight, rstd, need_x or need_residual, need_dw)
        return dx, dx if need_residual else None, None if partial is None else deliver_sum(ctx.weight, partial), None


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return _RMSNorm.apply(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _RMSNorm.apply(x, residual, weight, eps)
