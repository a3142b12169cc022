"""Products of one decoding step that share their sums (kernels/split_product.py): GEMMs whose tall operand is the weights.

A program has a range of the weights' rows and one of the ranges of their columns. Where that is a few slices, it asks for all
its weights before it waits for x. A prefetch of longer ranges into the L2 by bulk copies cost 5 to 15 %.

Legend: R rows of the weights, C columns of a slice, KS of a range, B rows of x, TB of a tile.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...device import interpreted
from ..plans import cdiv, job_of, power_of_two
from ..plans.types import SplitPlan
from ._launch import _begin, _end, _wait, alignment, in_place, launch, options
from .decode_product import _gated, _stacked


@triton.jit
def _weights(at, k, valid, end, WHOLE: tl.constexpr):
    """(R, C) of the rows that begin at `at`, up to column `end`."""
    if WHOLE:
        return tl.load(at[:, None] + k[None])
    return tl.load(at[:, None] + k[None], mask=valid[:, None] & (k < end)[None], other=0.0)


@triton.jit
def _input(x_ptr, b, k, end, B, K: tl.constexpr, EVEN: tl.constexpr, ALL: tl.constexpr):
    """(TB, C) of x."""
    at = x_ptr + b[:, None] * K + k[None]
    if ALL and EVEN:
        return tl.load(at)
    if EVEN:
        return tl.load(at, mask=(b < B)[:, None], other=0.0)
    return tl.load(at, mask=(b < B)[:, None] & (k < end)[None], other=0.0)


@triton.jit
def _plus(total, w, x, WIDE: tl.constexpr):
    """total + w xᵀ."""
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        return tl.dot(w.to(tl.float32), tl.trans(x).to(tl.float32), total, input_precision="ieee")
    return tl.dot(w, tl.trans(x), total, input_precision="ieee")


@triton.jit
def _range(x_ptr, at, valid, B, TB: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
           HELD: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, ALL: tl.constexpr, WIDE: tl.constexpr,
           DEPENDENT: tl.constexpr):  # fmt: skip
    """(R, TB): the rows of weights that begin at `at`, which are `valid`, times x, over this program's range of columns."""
    EVEN: tl.constexpr = KS % C == 0
    b, begin = tl.arange(0, TB), tl.program_id(1) * KS
    k, end = begin + tl.arange(0, C), begin + KS
    total = tl.zeros([R, TB], tl.float32)
    if HELD:
        ws, xs = (), ()
        for i in tl.static_range((KS + C - 1) // C):
            ws += (_weights(at, i * C + k, valid, end, WHOLE),)
        _wait(DEPENDENT)
        for i in tl.static_range((KS + C - 1) // C):
            xs += (_input(x_ptr, b, i * C + k, end, B, K, EVEN, ALL),)
        for i in tl.static_range((KS + C - 1) // C):
            total = _plus(total, ws[i], xs[i], WIDE)
    else:
        _wait(DEPENDENT)
        for i in tl.range(0, KS, C, num_stages=STAGES):
            x = _input(x_ptr, b, i + k, end, B, K, EVEN, ALL)
            total = _plus(total, _weights(at, i + k, valid, end, WHOLE), x, WIDE)
    _end(DEPENDENT)
    return total


@triton.jit
def _split_product_kernel(x_ptr, q_ptr, k_ptr, v_ptr, q_bias, k_bias, v_bias, out_ptr, q_rows, k_rows, rows, B,
                          TB: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                          HELD: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, ALL: tl.constexpr,
                          BIAS: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
                          DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, b = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, TB)
    valid, at = row < rows, _stacked(row, q_ptr, k_ptr, v_ptr, q_rows, k_rows, K, ALIGNED)
    y = _range(x_ptr, at, valid, B, TB, K, KS, R, C, HELD, STAGES, WHOLE, ALL, WIDE, DEPENDENT)
    if BIAS:  # noqa: SIM102 - this is a constant of the compiler
        if tl.program_id(1) == 0:
            bias = _stacked(row, q_bias, k_bias, v_bias, q_rows, k_rows, 1, 1)
            y += tl.load(bias, mask=valid, other=0.0).to(tl.float32)[:, None]
    to = (tl.program_id(1) * B + b).to(tl.int64)[:, None] * rows + row[None]
    tl.store(out_ptr + to, tl.trans(y), mask=(b < B)[:, None] & valid[None])


@triton.jit
def _split_gate_up_kernel(x_ptr, gate_ptr, up_ptr, gate_bias, up_bias, out_ptr, rows, B, TB: tl.constexpr, K: tl.constexpr,
                          R: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
                          ALL: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ALIGNED: tl.constexpr,
                          WIDE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """A program's rows are as many of gate and then of up."""
    _begin(DEPENDENT)
    HALF: tl.constexpr = R // 2
    first, both, b = tl.program_id(0) * HALF, tl.arange(0, R), tl.arange(0, TB)
    each = (first + both % HALF).to(tl.int64) * K
    at = tl.multiple_of(tl.where(both < HALF, gate_ptr + each, up_ptr + each), ALIGNED)
    y = _range(x_ptr, at, first + both % HALF < rows, B, TB, K, K, R, C, HELD, STAGES, WHOLE, ALL, WIDE, DEPENDENT)
    gate, up = tl.split(tl.permute(tl.reshape(y, [2, HALF, TB]), (1, 2, 0)))
    row = first + tl.arange(0, HALF)
    if BIAS:
        gate += tl.load(gate_bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        up += tl.load(up_bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    y = tl.trans(_gated(gate, up, ACTIVATION)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + b.to(tl.int64)[:, None] * rows + row[None], y, mask=(b < B)[:, None] & (row < rows)[None])


@in_place
def split_product(x, weight, k_weight, v_weight, bias, k_bias, v_bias, parts, dependent=0):
    k, v = (weight if w is None else w for w in (k_weight, v_weight))  # pointers of one type for tl.where
    biases = [(weight if bias is None else bias) if b is None else b for b in (bias, k_bias, v_bias)]
    number, _, rows = parts.shape
    _launch(
        _split_product_kernel, "", weight, x, rows, dependent, number, weight, k, v, *biases, parts, len(weight), len(k), rows,
        KS=x.shape[1] // number, BIAS=bias is not None, ALIGNED=alignment(x.shape[1], weight, k, v),
    )  # fmt: skip
    return parts


@in_place
def split_gate_up(x, gate, up, gate_bias, up_bias, out, dependent=0, activation="silu"):
    biases = [gate if b is None else b for b in (gate_bias, up_bias)]
    _launch(
        _split_gate_up_kernel, "gated", gate, x, 2 * len(gate), dependent, 1, gate, up, *biases, out, len(gate),
        BIAS=gate_bias is not None, ACTIVATION=activation, ALIGNED=alignment(x.shape[1], gate, up),
    )  # fmt: skip
    return out


def _launch(
    kernel: Any, way: str, weight: Tensor, x: Tensor, rows: int, dependent: int, number: int, *arguments: Any, **constants: Any
) -> None:
    """rows: of all weights; number: of parts."""
    count, width = x.shape
    tall, each = max(16, power_of_two(count)), width // number

    def run(plan: SplitPlan) -> None:
        aligned = rows % plan.rows == 0 and each % plan.columns == 0
        resident = plan.stages == 0 and number >= plan.parts  # longer ranges than the plan's may not fit
        kernel[(cdiv(rows, plan.rows), number)](
            x, *arguments, count, TB=tall, K=width, R=plan.rows, C=plan.columns, HELD=resident, STAGES=plan.stages or 2,
            WHOLE=aligned, ALL=count == tall, WIDE=interpreted(), **constants, **options(plan.warps, dependent),
        )  # fmt: skip

    launch(job_of("split_product", way, (rows, width, tall), weight), run)
