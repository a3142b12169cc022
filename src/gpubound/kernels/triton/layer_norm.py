"""LayerNorm. One pass over memory each way; fp32 inside, the tensors' dtype at the edges.

Backward: dx = rstd · (g − mean(g) − x̂ · mean(g · x̂)) with g = dy · weight and x̂ = (x − mean) · rstd; dweight = Σ_rows dy ·
x̂ and dbias = Σ_rows dy, summed by each program over its own rows, then over the programs: the same bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import job_of, power_of_two
from ..plans.kinds import RowPlan
from ._launch import first_order_only, launch, rows_of
from ._math import add_both
from ._sums import deliver_parts


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_forward_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, rows, eps,
                               COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                               HINT: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    col = tl.arange(0, BLOCK)
    if WEIGHT:  # before the row's sums, whose barriers no load is moved across
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
        mean = tl.sum(x, 1) / COLS
        centred = x - mean[:, None]  # two passes over registers: E[x²] − mean² cancels when the mean is large
        if BLOCK != COLS:
            centred = tl.where(mask, centred, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) / COLS + eps)
        y = centred * rstd[:, None]
        if WEIGHT:
            y *= w[None]
        if BIAS:
            y += b[None]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(mean_ptr + row, mean, mask=row < rows)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_backward_kernel(dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, parts_ptr, rows,
                                COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                                HINT: tl.constexpr, WEIGHT: tl.constexpr,
                                DX: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr):  # fmt: skip
    col = tl.arange(0, BLOCK)
    if WEIGHT:
        w = tl.load(w_ptr + col, mask=col < COLS, other=0.0).to(tl.float32)
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
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        x_hat = (x - mean) * rstd
        if DX:
            g = dy  # 0 where masked, so the sums below need no mask although x_hat is not 0 there
            if WEIGHT:
                g = dy * w[None]
            plain, with_x = tl.reduce((g, g * x_hat), 1, add_both)
            dx = rstd * (g - (plain / COLS)[:, None] - x_hat * (with_x / COLS)[:, None])
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if DW:
            dw += tl.sum(dy * x_hat, 0)
        if DB:
            db += tl.sum(dy, 0)
    parts_ptr += tl.program_id(0) * (DW + DB) * COLS + col
    if DW:
        tl.store(parts_ptr, dw, mask=col < COLS)
    if DB:
        tl.store(parts_ptr + DW * COLS, db, mask=col < COLS)


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd)."""
    rows, cols = rows_of(x)
    y = torch.empty_like(x)
    mean, rstd = torch.empty(2, rows, device=x.device, dtype=torch.float32).unbind(0)
    w, b = (x if t is None else t.contiguous() for t in (weight, bias))
    job = job_of("layer_norm", "forward", (cols, 0), x)

    def run(plan: RowPlan) -> None:
        _layer_norm_forward_kernel[plan.grid(rows, job)](
            x, w, b, y, mean, rstd, rows, eps, cols, power_of_two(cols), plan.rows, plan.stages, plan.hint,
            weight is not None, bias is not None, num_warps=plan.warps,
        )  # fmt: skip

    launch(job, run)
    return y, mean, rstd


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor | None, Tensor]:
    """(dx or None, the programs' parts of those of dweight and dbias that are needed)."""
    rows, cols = rows_of(x)
    sums = need_dw + need_db
    w = x if weight is None else weight.contiguous()
    dx = torch.empty_like(x) if need_dx else None
    job = job_of("layer_norm", "backward", (cols, sums), x)

    def run(plan: RowPlan) -> Tensor:
        grid = plan.grid(rows, job)
        parts = torch.empty(*grid, sums, cols, device=x.device, dtype=torch.float32)
        _layer_norm_backward_kernel[grid](
            dy, x, w, mean, rstd, x if dx is None else dx, parts, rows, cols, power_of_two(cols), plan.rows, plan.stages,
            plan.hint, weight is not None, need_dx, need_dw, need_db, num_warps=plan.warps,
        )  # fmt: skip
        return parts

    return dx, launch(job, run)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        x = x.contiguous()
        y, mean, rstd = _forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.weight, ctx.bias = weight, bias  # saved ones may come back without their main_grad (torch.utils.checkpoint)
        return y

    @staticmethod
    def backward(ctx, dy):
        first_order_only("layer_norm")
        x, weight, mean, rstd = ctx.saved_tensors
        need_dx, need_dw, need_db, _ = ctx.needs_input_grad
        dx, parts = _backward(dy.contiguous(), x, weight, mean, rstd, need_dx, need_dw, need_db)
        if not (need_dw or need_db):
            return dx, None, None, None
        delivered = deliver_parts(parts, [t for t, needed in ((ctx.weight, need_dw), (ctx.bias, need_db)) if needed])
        return dx, delivered[0] if need_dw else None, delivered[-1] if need_db else None, None


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return _LayerNorm.apply(x, weight, bias, eps)
