"""Gated activations: out = f(gate) · up, one pass over memory each way, gate and up packed or apart.

Backward: dgate = dout · up · f'(gate) and dup = dout · f(gate), from the saved inputs. Packed inputs get one packed gradient.
It is a new tensor: written over the saved input it would save memory, but break a second backward and other users of the input.

`swiglu_backward` also recomputes the result in the same pass: a product that needs h for its weight gradient does not keep it.
It moves 12 bytes an element of h in bf16, 10 without h, and forward keeps 2 bytes less for backward.

`swiglu_product` and `swiglu_product_backward` are kernels of _gated_product.py on Hopper, and elsewhere cuBLAS's product and a
pass of the above.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import interpreted
from .. import gated as ops
from ..dispatch import SIXTEEN_BITS
from ..gated import INFINITE, LEAST_ROWS
from ..plans.types import TilePlan, cdiv, job_of, power_of_two
from ._launch import _begin, _wait, first_order_only, launch, options
from ._math import sigmoid


@triton.jit
def _activated(g, ACTIVATION: tl.constexpr):
    """(f(g), f'(g)), each without overflow: exp may become infinite, which the quotient takes to 0."""
    if ACTIVATION == "silu":
        s = sigmoid(g)
        return g * s, s * (1.0 + g * (1.0 - s))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh u) / 2 = sigmoid(2u), so gelu needs no tanh. 1.5957691 = 2 sqrt(2/pi), 0.0713548 = 0.044715 · that
        s = sigmoid(g * (1.5957691216057308 + 0.07135481282636 * g * g))
        return g * s, s + g * s * (1.0 - s) * (1.5957691216057308 + 3 * 0.07135481282636 * g * g)
    else:
        # 0.7071 = 1/sqrt(2); the density of the normal distribution has 0.39894 = 1/sqrt(2 pi)
        p = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        return g * p, p + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)


@triton.jit
def _tile(rows, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    ACROSS: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // ACROSS * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = (tl.program_id(0) % ACROSS * BLOCK + tl.arange(0, BLOCK))[None]
    mask = row < rows
    if COLS % BLOCK != 0:
        mask &= col < COLS
    return row, col, mask


@triton.jit
def _limited(gate, up, limit):
    """The gate as at most the limit, up within it; a NaN stays one."""
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def _gated_forward_kernel(gate_ptr, up_ptr, out_ptr, rows, gate_row, up_row, COLS: tl.constexpr, ROWS: tl.constexpr,
                          BLOCK: tl.constexpr, HINT: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
                          DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    row, col, mask = _tile(rows, COLS, ROWS, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row + col, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
    if LIMIT is not None:
        gate, up = _limited(gate, up, LIMIT)
    value, _ = _activated(gate, ACTIVATION)
    tl.store(out_ptr + row * COLS + col, (value * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward_kernel(dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, rows, dout_row, gate_row, up_row, dgate_row, dup_row,
                           COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HINT: tl.constexpr,
                           ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    row, col, mask = _tile(rows, COLS, ROWS, BLOCK)
    dout = tl.load(dout_ptr + row * dout_row + col, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + col, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
    dgate, dup = dout, dout
    if LIMIT is not None:  # beyond it, neither has an effect
        dgate, dup = tl.where(gate > LIMIT, 0.0, dout), tl.where(tl.abs(up) > LIMIT, 0.0, dout)
        gate, up = _limited(gate, up, LIMIT)
    value, slope = _activated(gate, ACTIVATION)
    tl.store(dgate_ptr + row * dgate_row + col, (dgate * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * dup_row + col, (dup * value).to(dup_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, h_ptr, rows, cols, dh_row, gate_row, d_row,
                            ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None]
    mask = (row < rows) & (col < cols)
    dh = tl.load(dh_ptr + row * dh_row + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * gate_row + col, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activated(gate, "silu")
    tl.store(dgate_ptr + row * d_row + col, (dh * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * d_row + col, (dh * value).to(dup_ptr.dtype.element_ty), mask=mask)
    tl.store(h_ptr + row * cols + col, (value * up).to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _clamped_glu_kernel(packed_ptr, dout_ptr, out_ptr, count, alpha, limit, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    """The unit, or in BACKWARD the packed gradient: pairs (gate, up) are read and written whole."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at, pair = first + tl.arange(0, BLOCK), 2 * first + tl.arange(0, 2 * BLOCK)
    packed = tl.load(packed_ptr + pair, mask=pair < 2 * count, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(packed, (BLOCK, 2)))
    g, u = _limited(gate, up, limit)
    s = sigmoid(alpha * g)
    if BACKWARD:
        dout = tl.load(dout_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        dgate = tl.where(gate > limit, 0.0, dout * (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s)))
        dup = tl.where(tl.abs(up) > limit, 0.0, dout * g * s)
        both = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,))
        tl.store(out_ptr + pair, both.to(out_ptr.dtype.element_ty), mask=pair < 2 * count)
    else:
        tl.store(out_ptr + at, ((u + 1.0) * g * s).to(out_ptr.dtype.element_ty), mask=at < count)


def _matrix(x: Tensor) -> Tensor:
    """`x` as rows of its last dimension, which is dense; a view where strides allow it."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is None:
        packed = _matrix(gate)
        half = packed.shape[1] // 2
        return packed[:, :half], packed[:, half:]
    return _matrix(gate), _matrix(up)


def _even(matrices: list[Tensor], elements: int) -> list[Tensor]:
    """The matrices as rows of `elements`, where all are dense and that many divide them: no row then ends inside a tile."""
    if all(x.is_contiguous() for x in matrices) and matrices[0].numel() % elements == 0:
        return [x.view(x.numel() // elements, elements) for x in matrices]
    return matrices


def _launch(kernel: Any, way: str, activation: str, limit: float, matrices: list[Tensor], strided: int) -> None:
    """`strided`: how many of the matrices, the first, the kernel reads by their own row strides."""

    def run(plan: TilePlan) -> None:
        tiled = _even(matrices, plan.elements)
        rows, cols = tiled[0].shape
        columns = min(plan.elements, power_of_two(max(cols, 1)))
        high = plan.elements // columns
        kernel[(cdiv(rows, high) * cdiv(cols, columns),)](
            *tiled, rows, *(x.stride(0) for x in tiled[:strided]), cols, high, columns, plan.hint, activation,
            None if limit == INFINITE else limit, **options(plan.warps),
        )  # fmt: skip

    launch(job_of("gated", way, (matrices[0].shape[1],), matrices[0]), run)


class _Gated(torch.autograd.Function):
    """apply(gate, up, activation, limit, op), or with a packed gate and None for up. `op` is whose call it is."""

    @staticmethod
    def forward(ctx, gate, up, activation, limit, op):
        ctx.save_for_backward(gate, *([] if up is None else [up]))
        ctx.activation, ctx.limit, ctx.op = activation, limit, op
        a, b = _halves(gate, up)
        out = torch.empty(*gate.shape[:-1], a.shape[1], device=gate.device, dtype=gate.dtype)
        _launch(_gated_forward_kernel, "forward", activation, limit, [a, b, _matrix(out)], 2)
        return out

    @staticmethod
    def backward(ctx, dout):
        first_order_only(ctx.op)
        gate, up = (*ctx.saved_tensors, None)[:2]
        dgate = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
        dup = None if up is None else torch.empty(up.shape, device=up.device, dtype=up.dtype)
        matrices = [_matrix(dout), *_halves(gate, up), *_halves(dgate, dup)]
        _launch(_gated_backward_kernel, "backward", ctx.activation, ctx.limit, matrices, 5)
        return dgate, dup, None, None, None


def swiglu(gate, up=None, limit=INFINITE):
    return _Gated.apply(gate, up, "silu", limit, "swiglu")


def geglu(gate, up=None, approximate="tanh"):
    return _Gated.apply(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu_erf", INFINITE, "geglu")


@torch.no_grad()
def swiglu_backward(dh, gate_up, overwrite=False):
    d, (gate, up) = _matrix(dh), _halves(gate_up, None)
    # A program has read its tiles before it writes others in their place.
    gradient, h = (
        x if overwrite and x.is_contiguous() else torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (gate_up, dh)
    )
    dgate, dup = _halves(gradient, None)
    rows, cols = gate.shape

    def run(plan: TilePlan) -> None:
        columns = min(plan.elements, power_of_two(cols))
        high = plan.elements // columns
        _swiglu_backward_kernel[(cdiv(rows, high), cdiv(cols, columns))](
            d, gate, up, dgate, dup, h, rows, cols, d.stride(0), gate.stride(0), dgate.stride(0), high, columns,
            num_warps=plan.warps,
        )  # fmt: skip

    launch(job_of("swiglu_backward", "backward", (cols,), gate_up), run)
    return gradient, h


WIDEST = 2048  # K of forward's kernel: 16,384 x 4,096 to 2 x 14,336 takes it 5.51 ms, cuBLAS and a pass 5.31 (H200, bf16)


def _hopper(x: Tensor, weight: Tensor, cols: int) -> Any:
    """Return the kernels for Hopper if they take a product of these rows, of which `cols` columns of h follow; else None."""
    if interpreted() or x.dtype not in SIXTEEN_BITS or x.shape[0] < LEAST_ROWS or cols % 128 or x.shape[1] % 64:
        return None
    dense = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, weight))
    if not dense or job_of("gated", "", (), x).chip.capability != 90:
        return None
    from . import _gated_product  # here, since Gluon's names differ between versions of Triton: the self-test reports it

    return _gated_product


@torch.no_grad()
def swiglu_product(x, weight):
    cols, width = weight.shape[0] // 2, x.shape[1]
    kernels = _hopper(x, weight, cols) if width <= WIDEST else None
    if kernels is None:
        gate_up = x @ weight.t()
        return gate_up, ops.swiglu(gate_up)
    gate_up, h = (torch.empty(x.shape[0], columns, device=x.device, dtype=x.dtype) for columns in (2 * cols, cols))
    kernels.swiglu_product(x, weight, gate_up, h)
    return gate_up, h


@torch.no_grad()
def swiglu_product_backward(g, weight, gate_up, overwrite=False):
    cols = weight.shape[1]
    kernels = _hopper(g, weight, cols) if gate_up.is_contiguous() else None
    if kernels is None:
        return ops.swiglu_backward(g @ weight, gate_up, overwrite)
    gradient = gate_up if overwrite else torch.empty_like(gate_up)
    h = torch.empty(g.shape[0], cols, device=g.device, dtype=g.dtype)
    kernels.swiglu_product_backward(g, weight, gate_up, gradient, h)
    return gradient, h


class _ClampedGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, alpha, limit):
        packed = packed.contiguous()
        ctx.save_for_backward(packed)
        ctx.options = alpha, limit
        out = torch.empty(*packed.shape[:-1], packed.shape[-1] // 2, device=packed.device, dtype=packed.dtype)
        _pairs("forward", packed, packed, out, alpha, limit)
        return out

    @staticmethod
    def backward(ctx, dout):
        first_order_only("clamped_glu")
        (packed,) = ctx.saved_tensors
        dpacked = torch.empty(packed.shape, device=packed.device, dtype=packed.dtype)
        _pairs("backward", packed, dout.contiguous(), dpacked, *ctx.options)
        return dpacked, None, None


def _pairs(way: str, packed: Tensor, dout: Tensor, out: Tensor, alpha: float, limit: float) -> None:
    count = packed.numel() // 2

    def run(plan: TilePlan) -> None:
        _clamped_glu_kernel[(cdiv(count, plan.elements),)](
            packed, dout, out, count, alpha, limit, plan.elements, way == "backward", num_warps=plan.warps
        )

    launch(job_of("clamped_glu", way, (packed.shape[-1],), packed), run)


def clamped_glu(packed, alpha, limit):
    return _ClampedGLU.apply(packed, alpha, limit)
