"""Products of one decoding step for several rows (kernels/tiled_product.py): all rows of x at once, on tensor cores.

A program owns some rows of a weight, as in decode_product.py, and requests the first slices of them before it waits for x. Its
warps are placed along the columns, each with a separate range, and add their sums at the end: few rows of a weight and few of x
are one small product, which all warps would repeat otherwise.

Legend: S ranges, R rows of the weight, C columns of a range, B rows of x, TB of a tile; a slice is S C columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import interpreted
from ..decode_product import Norm
from ..plans import job_of, power_of_two
from ..plans.types import ResidentPlan
from ..tiled_product import PART
from ._launch import bump_versions, launch, options
from ._pdl import _begin, _end, _wait
from .decode_product import _gated, _norm_parts

ROWS = 8  # of x, at least: the narrowest product of a tensor core


@triton.jit
def _slice(at, k, there, K: tl.constexpr, WHOLE: tl.constexpr):
    """(S, R, C) of the rows of weights that begin at `at`."""
    if WHOLE:
        return tl.load(at[None, :, None] + k[:, None, :])
    return tl.load(at[None, :, None] + k[:, None, :], mask=there[None, :, None] & (k < K)[:, None, :], other=0.0)


@triton.jit
def _rows(x_ptr, b, k, B, K: tl.constexpr, EVEN: tl.constexpr):
    """(S, TB, C) of x."""
    mask = (b < B)[None, :, None]
    if not EVEN:
        mask &= (k < K)[:, None, :]
    return tl.load(x_ptr + b[None, :, None] * K + k[:, None, :], mask=mask, other=0.0)


@triton.jit
def _gain(norm_ptr, k, K: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr):
    """(S, 1, C) of a norm's gain, which is GAIN + its weight."""
    if EVEN:
        gain = tl.load(norm_ptr + k)
    else:
        gain = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    return gain.to(tl.float32)[:, None, :] + GAIN


@triton.jit
def _times(w, x, total, WIDE: tl.constexpr):
    """(S, R, TB): total + w xᵀ, x rounded to the dtype of w."""
    x = tl.permute(x.to(w.dtype), (0, 2, 1))
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        return tl.dot(w.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
    return tl.dot(w, x, total, input_precision="ieee")


@triton.jit
def _before(old, there, b, B):
    """Return the tensor that a product is added to, asked for together with x."""
    if old is None:
        before = 0.0
    else:
        before = tl.load(old, mask=there[:, None] & (b < B)[None], other=0.0)
    return before


@triton.jit
def _sums(x_ptr, norm_ptr, eps, at, there, old, B, TB: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
          WHOLE: tl.constexpr, GAIN: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """`_product` without tensor cores: all weights are asked for before x is there, and then all of x at once."""
    SLICES: tl.constexpr = (K + C - 1) // C
    b, k = tl.arange(0, TB), tl.arange(0, C)
    ws, gains, xs = (), (), ()
    for i in tl.static_range(SLICES):
        inside = i * C + k < K
        if WHOLE:
            ws += (tl.load(at[:, None] + i * C + k[None]),)
        else:
            ws += (tl.load(at[:, None] + i * C + k[None], mask=there[:, None] & inside[None], other=0.0),)
        if GAIN is not None:
            gains += (tl.load(norm_ptr + i * C + k, mask=inside, other=0.0).to(tl.float32) + GAIN,)
    _wait(DEPENDENT)
    before = _before(old, there, b, B)
    for i in tl.static_range(SLICES):
        mask = (b < B)[:, None] & (i * C + k < K)[None]
        xs += (tl.load(x_ptr + b[:, None] * K + i * C + k[None], mask=mask, other=0.0),)
    total, square = tl.zeros([R, TB, C], tl.float32), tl.zeros([TB, C], tl.float32)
    for _ in tl.static_range(SLICES):
        x = xs[0]
        x = x.to(tl.float32)
        if GAIN is not None:
            square += x * x
            x *= gains[0][None]
            gains = gains[1:]
        w = ws[0]
        total += w.to(tl.float32)[:, None, :] * x[None]
        ws = ws[1:]
        xs = xs[1:]
    _end(DEPENDENT)
    y = tl.sum(total, 2)
    if GAIN is not None:
        y /= tl.sqrt(tl.sum(square, 1) / K + eps)[None]
    return y + before


@triton.jit
def _dots(x_ptr, norm_ptr, eps, at, there, old, B, TB: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
          C: tl.constexpr, HELD: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, GAIN: tl.constexpr,
          WIDE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """`_product` on tensor cores."""
    SLICE: tl.constexpr = S * C
    SLICES: tl.constexpr = (K + SLICE - 1) // SLICE
    EVEN: tl.constexpr = K % SLICE == 0
    b, k = tl.arange(0, TB), tl.arange(0, S)[:, None] * C + tl.arange(0, C)[None]
    ws, xs, gains = (), (), ()
    for i in tl.static_range(HELD):
        if i < SLICES:
            ws += (_slice(at, i * SLICE + k, there, K, WHOLE),)
    if GAIN is not None:
        for i in tl.static_range(SLICES):
            gains += (_gain(norm_ptr, i * SLICE + k, K, EVEN, GAIN),)
    _wait(DEPENDENT)
    before = _before(old, there, b, B)
    for i in tl.static_range(AHEAD):
        if i < SLICES:
            xs += (_rows(x_ptr, b, i * SLICE + k, B, K, EVEN),)
    total, square = tl.zeros([S, R, TB], tl.float32), tl.zeros([TB], tl.float32)
    for i in tl.static_range(SLICES):
        x = xs[0]
        if GAIN is not None:
            x = x.to(tl.float32)
            square += tl.sum(tl.sum(x * x, 2), 0)
            x *= gains[i]
        total = _times(ws[0], x, total, WIDE)
        ws = ws[1:]
        xs = xs[1:]
        if i + HELD < SLICES:
            ws += (_slice(at, (i + HELD) * SLICE + k, there, K, WHOLE),)
        if i + AHEAD < SLICES:
            xs += (_rows(x_ptr, b, (i + AHEAD) * SLICE + k, B, K, EVEN),)
    _end(DEPENDENT)
    y = tl.sum(total, 0)
    if GAIN is not None:
        y /= tl.sqrt(square / K + eps)[None]
    return y + before


@triton.jit
def _product(x_ptr, norm_ptr, eps, at, there, old, B, TB: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
             C: tl.constexpr, HELD: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, GAIN: tl.constexpr,
             WIDE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """(R, TB): the rows of weights that begin at `at`, which are `there`, with all rows of x, normed if there is a GAIN, and
    added to what is at `old` (R, TB), if there is such.

    HELD slices of weights are asked for before x is there, and AHEAD of x are on their way. 0 held: without tensor cores.
    """
    if HELD == 0:
        y = _sums(x_ptr, norm_ptr, eps, at, there, old, B, TB, K, R, S * C, WHOLE, GAIN, DEPENDENT)
    else:
        y = _dots(x_ptr, norm_ptr, eps, at, there, old, B, TB, K, S, R, C, HELD, AHEAD, WHOLE, GAIN, WIDE, DEPENDENT)
    return y


@triton.jit
def _tiled_norm_product_kernel(x_ptr, norm_ptr, q_ptr, k_ptr, v_ptr, q_bias, k_bias, v_bias, out_ptr, best_ptr, arg_ptr,
                               eps, q_rows, k_rows, rows, B, TB: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
                               R: tl.constexpr, C: tl.constexpr,
                               HELD: tl.constexpr, AHEAD: tl.constexpr, BIAS: tl.constexpr, BEST: tl.constexpr,
                               WHOLE: tl.constexpr, GAIN: tl.constexpr, WIDE: tl.constexpr,
                               DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, b = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, TB)
    there, in_q, in_k = row < rows, row < q_rows, row < q_rows + k_rows
    of_k, of_v = row - q_rows, row - (q_rows + k_rows)
    at = tl.where(in_q, q_ptr + row.to(tl.int64) * K,
                  tl.where(in_k, k_ptr + of_k.to(tl.int64) * K, v_ptr + of_v.to(tl.int64) * K))  # fmt: skip
    y = _product(x_ptr, norm_ptr, eps, at, there, None, B, TB, K, S, R, C, HELD, AHEAD, WHOLE, GAIN, WIDE, DEPENDENT)
    if BIAS:
        bias = tl.where(in_q, q_bias + row, tl.where(in_k, k_bias + of_k, v_bias + of_v))
        y += tl.load(bias, mask=there, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + b.to(tl.int64)[None] * rows + row[:, None], y, mask=there[:, None] & (b < B)[None])
    if BEST:
        y = tl.where(there[:, None], y, float("-inf"))
        top = tl.where(tl.max((y != y).to(tl.int32), 0) > 0, float("nan"), tl.max(y, 0))
        part = b * tl.num_programs(0) + tl.program_id(0)
        tl.store(best_ptr + part, top, mask=b < B)
        tl.store(arg_ptr + part, tl.program_id(0) * R + tl.argmax(y, 0), mask=b < B)


@triton.jit
def _tiled_norm_gate_up_kernel(x_ptr, norm_ptr, gate_ptr, up_ptr, gate_bias, up_bias, out_ptr, eps, rows, B,
                               TB: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                               HELD: tl.constexpr, AHEAD: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr,
                               GAIN: tl.constexpr, ACTIVATION: tl.constexpr, WIDE: tl.constexpr,
                               DEPENDENT: tl.constexpr):  # fmt: skip
    """A program's rows are as many of gate and then of up."""
    _begin(DEPENDENT)
    HALF: tl.constexpr = R // 2
    first, both, b = tl.program_id(0) * HALF, tl.arange(0, R), tl.arange(0, TB)
    each = (first + both % HALF).to(tl.int64) * K
    at = tl.where(both < HALF, gate_ptr + each, up_ptr + each)
    there = first + both % HALF < rows
    y = _product(x_ptr, norm_ptr, eps, at, there, None, B, TB, K, S, R, C, HELD, AHEAD, WHOLE, GAIN, WIDE, DEPENDENT)
    gate, up = tl.split(tl.permute(tl.reshape(y, [2, HALF, TB]), (1, 2, 0)))
    row = first + tl.arange(0, HALF)
    if BIAS:
        gate += tl.load(gate_bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        up += tl.load(up_bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    y = _gated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + b.to(tl.int64)[None] * rows + row[:, None], y, mask=(row < rows)[:, None] & (b < B)[None])


@triton.jit
def _tiled_add_product_kernel(h_ptr, w_ptr, bias_ptr, x_ptr, copy_ptr, rows, B, TB: tl.constexpr, K: tl.constexpr,
                              S: tl.constexpr, R: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr, AHEAD: tl.constexpr,
                              BIAS: tl.constexpr, COPY: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
                              DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, b = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, TB)
    there, at = row < rows, w_ptr + row.to(tl.int64) * K
    to = b.to(tl.int64)[None] * rows + row[:, None]
    y = _product(h_ptr, h_ptr, 0.0, at, there, x_ptr + to, B, TB, K, S, R, C, HELD, AHEAD, WHOLE, None, WIDE, DEPENDENT)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)[:, None]
    inside = there[:, None] & (b < B)[None]
    tl.store(x_ptr + to, y, mask=inside)
    if COPY:
        tl.store(copy_ptr + to, y.to(copy_ptr.dtype.element_ty), mask=inside)


@torch.no_grad()
def tiled_norm_product(
    x: Tensor, norm: Norm | None, weight: Tensor, k_weight: Tensor | None, v_weight: Tensor | None, bias: Tensor | None,
    k_bias: Tensor | None, v_bias: Tensor | None, out: Tensor, best: Tensor | None = None, arg: Tensor | None = None,
    dependent: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    norm_weight, eps, gain = _norm_parts(norm)
    rows, (k, v) = out.shape[1], (w if w is not None else weight for w in (k_weight, v_weight))
    k_bias, v_bias = (b if b is not None else bias for b in (k_bias, v_bias))  # pointers of one type for tl.where
    _launch(
        _tiled_norm_product_kernel, weight, x, rows, dependent, x, norm_weight, weight, k, v, bias, k_bias, v_bias, out, best,
        arg, eps, len(weight), len(k), rows, height=None if best is None else PART, BIAS=bias is not None,
        BEST=best is not None, GAIN=gain,
    )  # fmt: skip
    bump_versions(out, best, arg)
    return out, best, arg


@torch.no_grad()
def tiled_norm_gate_up(
    x: Tensor, norm: Norm | None, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, out: Tensor,
    dependent: int = 0, activation: str = "silu",
) -> Tensor:  # fmt: skip
    norm_weight, eps, gain = _norm_parts(norm)
    _launch(
        _tiled_norm_gate_up_kernel, gate, x, 2 * len(gate), dependent, x, norm_weight, gate, up, gate_bias, up_bias, out, eps,
        len(gate), BIAS=gate_bias is not None, GAIN=gain, ACTIVATION=activation,
    )  # fmt: skip
    bump_versions(out)
    return out


@torch.no_grad()
def tiled_add_product(
    h: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, dependent: int = 0, copy: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    rows = len(weight)
    _launch(
        _tiled_add_product_kernel, weight, h, rows, dependent, h, weight, bias, x, copy, rows, BIAS=bias is not None,
        COPY=copy is not None,
    )  # fmt: skip
    bump_versions(x, copy)
    return x if copy is None else (x, copy)


def _launch(
    kernel: Any, weight: Tensor, x: Tensor, rows: int, dependent: int, *arguments: Any, height: int | None = None,
    **constants: Any,
) -> None:  # fmt: skip
    """rows: of all weights. height: of a program, where the plan does not choose it. None among the arguments is a tensor that
    this form does not read: the first stands in for it."""
    count, width = x.shape
    tall = max(ROWS, power_of_two(count))
    args = [arguments[0] if argument is None else argument for argument in arguments]

    def run(plan: ResidentPlan) -> None:
        plan = plan if height is None else plan._replace(rows=height)
        block = tall if plan.resident else power_of_two(count)
        kernel[(-(-rows // plan.rows),)](
            *args, count, TB=block, K=width, S=plan.warps, R=plan.rows, C=plan.columns // plan.warps, HELD=plan.resident,
            AHEAD=plan.ahead, WHOLE=rows % plan.rows == 0 and width % plan.columns == 0, WIDE=interpreted(), **constants,
            **options(plan.warps, dependent),
        )  # fmt: skip

    way = "normed" if constants.get("GAIN") is not None else ""
    launch(job_of("tiled_product", way, (rows, width, tall), weight), run)
