"""Quantisation of 16-bit values to 8 bits, row-major and transposed in one pass, and with a scale for each row.

The results of SwiGLU and of its backward are quantised without being stored in 16 bits. Bytes are transposed here, too.

Hopper multiplies 8-bit matrices only along the rows of both, so a value that is summed over once along its row (forward, or the
input's gradient) and once along its column (the weight's gradient) is needed in both layouts. A tile is rounded in registers
and stored twice, the second time through shared memory. The scale is known beforehand, so nothing is read twice; the largest
magnitude is kept for the next scale. A program reads the maximum before an atomic update: of 16,384 tiles a few dozen raise it.

Dequantisation of NF4: bound by memory, half a byte read and two written a number.

The sixteen values of the code are in one line of the L1, in sixteen banks: a warp's look-up is one load. A fused product would
repeat the look-up for every tile of x, so from some hundred tokens on it is faster to write the weights and multiply by
cuBLAS.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import interpreted
from ..plans.types import MatrixPlan, cdiv, job_of, power_of_two
from ..quantize import BLOCK, FINE, GROUP, LARGEST, dynamic_code, nf4_code
from ._launch import bump_versions, in_place, launch
from .gated import _activated, _halves, _matrix

_ROUND = "{{ .reg .b16 a, b; cvt.rn.satfinite.{0}.f32 a, $2, $1; cvt.rn.satfinite.{0}.f32 b, $4, $3; mov.b32 $0, {{a, b}}; }}"
STEPS = {torch.float8_e4m3fn: (2.0**-3, 2.0**-6), torch.float8_e5m2: (2.0**-2, 2.0**-14)}  # `_round` says of what
_E4M3, _E5M2 = tl.constexpr(_ROUND.format("e4m3x2")), tl.constexpr(_ROUND.format("e5m2x2"))


@triton.jit
def _note(values, state_ptr):
    largest = tl.max(tl.max(tl.abs(values), 1), 0)
    if largest > tl.load(state_ptr + 1):
        tl.atomic_max(state_ptr + 1, largest, sem="relaxed")


@triton.jit
def _round(values, inverse, q_ptr, LARGEST: tl.constexpr, STEPS: tl.constexpr):
    """STEPS, in the interpreter alone: (1 / steps in a power of two, the smallest normal number). Its cast loses the carry of
    a number that rounds up to a power of two, so there the numbers are rounded before it, by adding 1.5 · 2^23 steps.
    """
    scaled = tl.where(tl.abs(values) < float("inf"), values * inverse, float("nan"))
    if STEPS is None:
        q = _four_at_once(scaled, LARGEST).to(q_ptr.dtype.element_ty, bitcast=True)
    else:
        scaled = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), scaled)
        power = (scaled.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        magic = tl.maximum(power, STEPS[1]) * STEPS[0] * 12582912.0
        q = ((scaled + magic) - magic).to(q_ptr.dtype.element_ty)
    return q


@triton.jit
def _four_at_once(scaled, LARGEST: tl.constexpr):
    """The bits of `scaled` rounded to the format that ends at LARGEST, four numbers to a register.

    What lies beyond becomes LARGEST. Triton's own cast rounds two numbers into 16 bits. Where those are used twice, in a wide
    store and byte by byte for the transposed one, ptxas 12.8 and 12.9 read one use from a register that was never written
    (13.0 does not).
    """
    return tl.inline_asm_elementwise(
        _E4M3 if LARGEST == 448.0 else _E5M2, "=r,r,r,r,r", [scaled], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def _store(q, q_ptr, qt_ptr, row, col, row_end, col_end, rows, q_row, first, BOTH: tl.constexpr):
    """`q` at its columns from `first` on, and its transpose at the rows from `first` on."""
    mask = (row < row_end)[:, None] & (col < col_end)[None]
    tl.store(q_ptr + row[:, None] * q_row + (first + col)[None], q, mask=mask)
    if BOTH:
        mask = (col < col_end)[:, None] & (row < row_end)[None]
        tl.store(qt_ptr + (first + col).to(tl.int64)[:, None] * rows + row[None], tl.trans(q), mask=mask)


@triton.jit
def _at(ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, tl.program_id(1) * COLS + tl.arange(0, COLS)


@triton.jit
def _quantize_kernel(x_ptr, state_ptr, q_ptr, qt_ptr, rows, cols, x_row,
                     LARGEST: tl.constexpr, STEPS: tl.constexpr, BOTH: tl.constexpr,
                     ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    row, col = _at(ROWS, COLS)
    mask = (row < rows)[:, None] & (col < cols)[None]
    x = tl.load(x_ptr + row[:, None] * x_row + col[None], mask=mask, other=0.0).to(tl.float32)
    q = _round(x, 1.0 / tl.load(state_ptr), q_ptr, LARGEST, STEPS)
    _store(q, q_ptr, qt_ptr, row, col, rows, cols, rows, cols, 0, BOTH)
    _note(x, state_ptr)


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, state_ptr, q_ptr, qt_ptr, rows, cols, gate_row,
                   LARGEST: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    row, col = _at(ROWS, COLS)
    at = row[:, None] * gate_row + col[None]
    mask = (row < rows)[:, None] & (col < cols)[None]
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activated(gate, "silu")
    h = value * up
    q = _round(h, 1.0 / tl.load(state_ptr), q_ptr, LARGEST, STEPS)
    _store(q, q_ptr, qt_ptr, row, col, rows, cols, rows, cols, 0, True)
    _note(h, state_ptr)


@triton.jit
def _swiglu_backward_kernel(dh_ptr, gate_ptr, up_ptr, state_ptr, q_ptr, qt_ptr, rows, cols, dh_row, gate_row,
                            LARGEST: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    row, col = _at(ROWS, COLS)
    at = row[:, None] * gate_row + col[None]
    mask = (row < rows)[:, None] & (col < cols)[None]
    dh = tl.load(dh_ptr + row[:, None] * dh_row + col[None], mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activated(gate, "silu")
    inverse = 1.0 / tl.load(state_ptr)
    dgate = dh * up * slope
    dup = dh * value
    _store(_round(dgate, inverse, q_ptr, LARGEST, STEPS), q_ptr, qt_ptr, row, col, rows, cols, rows, 2 * cols, 0, True)
    _store(_round(dup, inverse, q_ptr, LARGEST, STEPS), q_ptr, qt_ptr, row, col, rows, cols, rows, 2 * cols, cols, True)
    _note(tl.maximum(tl.abs(dgate), tl.abs(dup)), state_ptr)


@triton.jit
def _rows_kernel(x_ptr, factor_ptr, q_ptr, scale_ptr, cols, x_row, LARGEST: tl.constexpr, STEPS: tl.constexpr,
                 FACTOR: tl.constexpr, C: tl.constexpr):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    x = tl.load(x_ptr + row * x_row + col, mask=col < cols, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor_ptr + col, mask=col < cols, other=0.0)
    largest = tl.max(tl.abs(x), 0)
    scale = tl.where(largest > 0, largest, LARGEST) * (1.0 / LARGEST)
    tl.store(scale_ptr + row, scale)
    tl.store(q_ptr + row * cols + col, _round(x, 1.0 / scale, q_ptr, LARGEST, STEPS), mask=col < cols)


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, rows, cols, R: tl.constexpr, C: tl.constexpr):
    row, col = _at(R, C)
    x = tl.load(x_ptr + row[:, None] * cols + col[None], mask=(row < rows)[:, None] & (col < cols)[None], other=0)
    mask = (col < cols)[:, None] & (row < rows)[None]
    tl.store(out_ptr + col.to(tl.int64)[:, None] * rows + row[None], tl.trans(x), mask=mask)


def _launch(
    kernel: Any, way: str, state: Tensor, dtype: torch.dtype, width: int, matrices: Sequence[Tensor], strides: Sequence[int],
    both: bool = True, **constants: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """(q of `width` columns, its transpose if `both`), from matrices of one shape."""
    (rows, cols), like = matrices[0].shape, matrices[0]
    q = torch.empty(rows, width, device=like.device, dtype=dtype)
    q_t = torch.empty(width, rows, device=like.device, dtype=dtype) if both else None
    steps = STEPS[dtype] if interpreted() else None

    def run(plan: MatrixPlan) -> None:
        kernel[cdiv(rows, plan.rows), cdiv(cols, plan.columns)](
            *matrices, state, q, q if q_t is None else q_t, rows, cols, *strides, **constants,
            LARGEST=LARGEST[dtype], STEPS=steps, ROWS=plan.rows, COLS=plan.columns, num_warps=plan.warps,
        )  # fmt: skip

    launch(job_of("quantize", way, (rows, cols), like), run)
    bump_versions(state)
    return q, q_t


@torch.no_grad()
def quantize(x, state, dtype, both=True):
    x = _matrix(x)
    return _launch(_quantize_kernel, "plain", state, dtype, x.shape[1], [x], [x.stride(0)], both, BOTH=both)


@torch.no_grad()
def quantize_swiglu(gate_up, state, dtype):
    gate, up = _halves(gate_up, None)
    return _launch(_swiglu_kernel, "swiglu", state, dtype, gate.shape[1], [gate, up], [gate.stride(0)])


@torch.no_grad()
def quantize_swiglu_backward(dh, gate_up, state, dtype):
    dh, (gate, up) = _matrix(dh), _halves(gate_up, None)
    matrices, strides = [dh, gate, up], [dh.stride(0), gate.stride(0)]
    return _launch(_swiglu_backward_kernel, "swiglu_backward", state, dtype, gate_up.shape[1], matrices, strides)


@torch.no_grad()
def quantize_rows(x, factor=None):
    x = _matrix(x)
    rows, cols = x.shape
    q, scale = torch.empty(rows, cols, device=x.device, dtype=FINE), torch.empty(rows, 1, device=x.device, dtype=torch.float32)
    block = max(512, power_of_two(cols))
    _rows_kernel[(rows,)](
        x, factor, q, scale, cols, x.stride(0), LARGEST=LARGEST[FINE], STEPS=STEPS[FINE] if interpreted() else None,
        FACTOR=factor is not None, C=block, num_warps=max(1, min(16, block // 1024)),
    )  # fmt: skip
    return q, scale


def transpose(x):
    rows, cols = x.shape
    out = torch.empty(cols, rows, device=x.device, dtype=x.dtype)
    _transpose_kernel[cdiv(rows, 128), cdiv(cols, 128)](x, out, rows, cols, R=128, C=128, num_warps=4)
    return out


BLOCKS = 64  # of a program


@triton.jit
def _dequantize_nf4_kernel(codes_ptr, absmax_ptr, scale_ptr, offset_ptr, code_ptr, dynamic_ptr, out_ptr, blocks,
                           B: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    block = tl.program_id(0) * B + tl.arange(0, B)
    in_range = block < blocks
    absmax = tl.load(absmax_ptr + block, mask=in_range, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + block // GROUP, mask=in_range, other=0.0)
    largest = tl.load(dynamic_ptr + absmax) * scale + tl.load(offset_ptr)
    block = block.to(tl.int64)
    at = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None]
    two = tl.load(codes_ptr + at, mask=in_range[:, None], other=0).to(tl.int32)
    numbers = tl.interleave(tl.load(code_ptr + (two >> 4)), tl.load(code_ptr + (two & 15)))
    to = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None]
    tl.store(out_ptr + to, (numbers * largest[:, None]).to(out_ptr.dtype.element_ty), mask=in_range[:, None])


@in_place
def dequantize_nf4(weight, out):
    blocks = len(weight.absmax)
    _dequantize_nf4_kernel[(cdiv(blocks, BLOCKS),)](
        *weight, nf4_code(out.device), dynamic_code(out.device), out, blocks, B=BLOCKS, BLOCK=BLOCK, GROUP=GROUP, num_warps=4
    )
    return out
