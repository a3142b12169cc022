"""RMSNorm, alone or with the residual add inside. One pass over memory each way; fp32 inside, the tensors' dtype at the edges.

Backward: dx = rstd · (g − x̂ · mean(g · x̂)) with g = dy · weight and x̂ = x · rstd; dweight = Σ_rows dy · x̂, summed by each program
over its own rows, then over the programs, so that it is the same in every run (atomics would not be).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import rows_of, schedule


@triton.jit
def _forward_kernel(x_ptr, r_ptr, w_ptr, s_ptr, y_ptr, rstd_ptr, rows, eps,
                    COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
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
    w = tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * rstd[:, None] * w[None]).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _backward_kernel(dy_ptr, ds_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, rows,
                     COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    col = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * COLS + col[None]
        mask = (row < rows)[:, None] & (col < COLS)[None]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        x_hat = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * rstd
        g = dy * w[None]
        dx = rstd * (g - x_hat * (tl.sum(g * x_hat, 1) / COLS)[:, None])
        if ADD:
            dx += tl.load(ds_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += tl.sum(dy * x_hat, 0)
    tl.store(dw_ptr + tl.program_id(0) * COLS + col, dw, mask=col < COLS)


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, what was normed, rstd)."""
    rows, cols = rows_of(x)
    y, rstd = torch.empty_like(x), torch.empty(rows, device=x.device, dtype=torch.float32)
    s = x if residual is None else torch.empty_like(x)
    plan = schedule(rows, cols)
    _forward_kernel[(triton.cdiv(rows, plan.rows),)](
        x, residual if residual is not None else x, weight, s, y, rstd, rows, eps,
        cols, plan.block, plan.rows, residual is not None, num_warps=plan.warps,
    )  # fmt: skip
    return y, s, rstd


def _backward(dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = rows_of(x)
    plan = schedule(rows, cols, backward=True)
    dx, partial = torch.empty_like(x), torch.empty(plan.programs, cols, device=x.device, dtype=torch.float32)
    _backward_kernel[(plan.programs,)](
        dy, ds if ds is not None else dy, x, weight, rstd, dx, partial, rows,
        cols, plan.block, plan.rows, ds is not None, num_warps=plan.warps,
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x, weight = x.contiguous(), weight.contiguous()
        y, _, rstd = _forward(x, None, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        return *_backward(dy.contiguous(), None, *ctx.saved_tensors), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        y, s, rstd = _forward(x.contiguous(), residual.contiguous(), weight.contiguous(), eps)
        ctx.save_for_backward(s, weight.contiguous(), rstd)
        return y, s

    @staticmethod
    def backward(ctx, dy, ds):
        dx, dw = _backward(dy.contiguous(), ds.contiguous(), *ctx.saved_tensors)
        return dx, dx, dw, None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return _RMSNorm.apply(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _AddRMSNorm.apply(x, residual, weight, eps)
