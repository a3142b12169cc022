"""Norms over rows. One pass over memory each way; fp32 inside, the tensors' dtype at the edges.

A program walks over tiles of rows, and backward sums the small weights' gradients over its own (_row_reduction.py). With x̂ the
normed row and g = dy · weight,

    RMSNorm        dx = rstd · (g − x̂ · mean(g · x̂))              dweight = Σ_rows dy · x̂
    LayerNorm      dx = rstd · (g − mean(g) − x̂ · mean(g · x̂))    dweight = Σ_rows dy · x̂         dbias = Σ_rows dy

Only the required gradients are computed: a frozen weight costs no sums (LoRA), an input without a gradient no store.
"""

from itertools import pairwise
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import first_order_only
from ._math import add_both
from ._row_reduction import _columns, _tile, _tile_of, deliver_parts, walk


@triton.jit(do_not_specialize=["rows", "adjacent"])
def _norm_forward_kernel(x_ptr, r_ptr, w_ptr, b_ptr, s_ptr, y_ptr, mean_ptr, rstd_ptr, rows, eps, adjacent, gap,
                         COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HINT: tl.constexpr,
                         ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
                         OFFSET: tl.constexpr = 0.0):  # fmt: skip
    """gap: elements of x after each `adjacent` of its rows, as between two tokens' heads in a product of several weights."""
    if WEIGHT:
        w = _columns(w_ptr, COLS, BLOCK)
        if OFFSET != 0.0:
            w += OFFSET
    if BIAS:
        b = _columns(b_ptr, COLS, BLOCK)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, at, mask = _tile(first, rows, COLS, BLOCK, ROWS)
        x = _tile_of(x_ptr, at if gap is None else at + (row // adjacent).to(tl.int64)[:, None] * gap, mask, HINT)
        if ADD:
            x += _tile_of(r_ptr, at, mask, HINT)
            s = x.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + at, s, mask=mask)
            x = s.to(tl.float32)  # the norm of what was stored, so that forward and backward see one s
        if CENTRE:
            mean = tl.sum(x, 1) / COLS
            x = x - mean[:, None]  # two passes over registers: E[x²] − mean² cancels when the mean is large
            if BLOCK != COLS:
                x = tl.where(mask, x, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / COLS + eps)
        y = x * rstd[:, None]
        if WEIGHT:
            y *= w[None]
        if BIAS:
            y += b[None]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
        if CENTRE:
            tl.store(mean_ptr + row, mean, mask=row < rows)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(dy_ptr, ds_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, parts_ptr, rows,
                          COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HINT: tl.constexpr,
                          ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr,
                          DB: tl.constexpr, OFFSET: tl.constexpr = 0.0):  # fmt: skip
    col = tl.arange(0, BLOCK)
    if WEIGHT:
        w = _columns(w_ptr, COLS, BLOCK)
        if OFFSET != 0.0:
            w += OFFSET
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, at, mask = _tile(first, rows, COLS, BLOCK, ROWS)
        dy = _tile_of(dy_ptr, at, mask, HINT)
        x = _tile_of(x_ptr, at, mask, HINT)
        if ADD:  # before the row's sum, whose barrier no load is moved across
            ds = tl.load(ds_ptr + at, mask=mask, other=0.0, eviction_policy=HINT)
        if CENTRE:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        x_hat = (x - mean if CENTRE else x) * rstd
        if DX:
            g = dy  # 0 where masked, so the sums below need no mask although x_hat is not 0 there in general
            if WEIGHT:
                g = dy * w[None]
            if CENTRE:
                plain, with_x = tl.reduce((g, g * x_hat), 1, add_both)
                g = g - (plain / COLS)[:, None]
            else:
                with_x = tl.sum(g * x_hat, 1)
            dx = rstd * (g - x_hat * (with_x / COLS)[:, None])
            if ADD:
                dx += ds.to(tl.float32)
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


class _Norm(torch.autograd.Function):
    """LayerNorm where `centre`, else RMSNorm: y, or (y, s) when there is a residual. An unused output's gradient is None.

    A residual of fewer bits than x gets dx as its gradient, which autograd rounds.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, offset, centre, strided=False):
        if not torch.compiler.is_compiling():  # dynamo knows no such call, and gives zeros
            ctx.set_materialize_grads(False)
        r = None if residual is None else residual.contiguous()
        adjacent, gap = _gap(x) if strided else (1, 0)
        x = x if gap else x.contiguous()
        s, y = x if r is None else torch.empty_like(x), x.new_empty(x.shape) if r is None else torch.empty_like(r)
        w, b = (x if t is None else t.contiguous() for t in (weight, bias))
        rstd = torch.empty(prod(x.shape[:-1]), device=x.device, dtype=torch.float32)
        mean = torch.empty_like(rstd) if centre else None
        walk(
            _norm_forward_kernel, _op(centre, r), "forward", x, 0,
            (x, x if r is None else r, w, b, s, y, rstd if mean is None else mean, rstd), eps=eps, adjacent=adjacent,
            gap=gap or None, ADD=r is not None, CENTRE=centre, WEIGHT=weight is not None, BIAS=bias is not None, OFFSET=offset,
        )  # fmt: skip
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.offset = offset
        ctx.small = weight, bias  # under torch.utils.checkpoint the saved ones come back as copies without their main_grad
        return y if residual is None else (y, s)

    @staticmethod
    def backward(ctx, dy, ds=None):
        x, weight, mean, rstd = ctx.saved_tensors
        centre = mean is not None
        first_order_only(_op(centre, None))
        if dy is None:
            return ds, ds, None, None, None, None, None, None
        need_x, need_residual, need_dw, need_db, *_ = ctx.needs_input_grad
        need_dx, sums = need_x or need_residual, need_dw + need_db
        dy, ds = dy.contiguous(), None if ds is None else ds.contiguous()
        w, dx = x if weight is None else weight.contiguous(), torch.empty_like(x) if need_dx else None
        (parts,) = walk(
            _norm_backward_kernel, _op(centre, ds), "backward", x, sums if centre else 1,
            (dy, dy if ds is None else ds, x, w, rstd if mean is None else mean, rstd, x if dx is None else dx),
            [(sums, x.shape[-1])], ADD=ds is not None, CENTRE=centre, WEIGHT=weight is not None, DX=need_dx, DW=need_dw,
            DB=need_db, OFFSET=ctx.offset,
        )  # fmt: skip
        owners = [owner for owner, needed in zip(ctx.small, (need_dw, need_db)) if needed]
        args = deliver_parts(parts, owners) if owners else ()
        dw, db = args[0] if need_dw else None, args[-1] if need_db else None
        return dx, dx if need_residual else None, dw, db, None, None, None, None


def _gap(x: Tensor) -> tuple[int, int]:
    """Return how many rows of x (..., H, C) are adjacent, and how many elements lie between them and the next ones; 1 and 0
    of a tensor that is contiguous, or must be made so."""
    if x.is_contiguous() or x.dim() < 3 or x.stride(-1) != 1 or x.stride(-2) != x.shape[-1]:
        return 1, 0
    outer = [(size, step) for size, step in zip(x.shape[:-2], x.stride()[:-2]) if size > 1]  # of one, any step
    if any(before[1] != size * step for before, (size, step) in pairwise(outer)):
        return 1, 0
    return x.shape[-2], outer[-1][1] - x.shape[-2] * x.shape[-1]


def _op(centre: bool, residual: Tensor | None) -> str:
    """Return the op whose plan is used. `residual`: the residual, or the gradient of the sum with it."""
    return "layer_norm" if centre else "rms_norm" if residual is None else "add_rms_norm"


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    return _Norm.apply(x, None, weight, None, eps, offset, False, not torch.is_grad_enabled())  # else x is saved, without a gap


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _Norm.apply(x, residual, weight, None, eps, offset, False)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return _Norm.apply(x, None, weight, bias, eps, 0.0, True)
