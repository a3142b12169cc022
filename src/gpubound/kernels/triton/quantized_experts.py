"""A sparse MLP's products over packed weights: the chosen experts' rows of one packed weight, by quantized_product's sums.

A program multiplies one row of x by some rows of one expert, whose number it reads on the device; so a row gets the same bits
alone and in a batch. Gate and up are two sums of one program, over x that is then in the L1. Launches depend on each other as
in experts.py, but no words are read before the wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..packed import Packed
from ..plans import Job, job_of
from ..plans.kinds import MatrixPlan
from ._launch import launch
from .decode_product import _begin, _end, _options, _wait
from .experts import _expert
from .quantized_product import _ONE, _row_sums


@triton.jit
def _quantized_routed_gate_up_kernel(x_ptr, norm_ptr, w_ptr, scale_ptr, ids_ptr, out_ptr, one, eps, experts, rows,
                                     S: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                                     WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    GROUPS: tl.constexpr = (K + 127) // 128
    N: tl.constexpr = GROUPS * (16 if KIND == "int4" else 32)  # words a row
    SCALES: tl.constexpr = 1 if KIND == "fp8" else GROUPS  # a row
    _wait(DEPENDENT)
    _begin(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * R + tl.arange(0, R)
    expert, poison = _expert(ids_ptr + pair, experts)
    x_ptr += pair // S * K
    w_ptr += expert * 2 * rows * N
    scale_ptr += expert * 2 * rows * SCALES
    gates = _row_sums(x_ptr, norm_ptr, w_ptr, scale_ptr, one, eps, rows, 1, K, KIND, R, C, True, WHOLE, 0)
    w_ptr += rows * N
    scale_ptr += rows * SCALES
    ups = _row_sums(x_ptr, norm_ptr, w_ptr, scale_ptr, one, eps, rows, 1, K, KIND, R, C, True, WHOLE, 0)
    _end(DEPENDENT)
    gate = gates[0]
    y = gate / (1.0 + tl.exp(-gate)) * ups[0] * poison
    tl.store(out_ptr + pair * rows + row, y.to(out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def _quantized_add_routed_kernel(h_ptr, w_ptr, scale_ptr, ids_ptr, weights_ptr, x_ptr, one, experts, rows, S: tl.constexpr,
                                 K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
                                 DEPENDENT: tl.constexpr):  # fmt: skip
    GROUPS: tl.constexpr = (K + 127) // 128
    N: tl.constexpr = GROUPS * (16 if KIND == "int4" else 32)  # words a row
    SCALES: tl.constexpr = 1 if KIND == "fp8" else GROUPS  # a row
    _begin(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * R + tl.arange(0, R)
    _wait(DEPENDENT)
    total = tl.zeros([R], tl.float32)
    for slot in tl.static_range(S):
        expert, poison = _expert(ids_ptr + b * S + slot, experts)
        weight = tl.load(weights_ptr + b * S + slot, cache_modifier=".cg") * poison
        w, scale = w_ptr + expert * rows * N, scale_ptr + expert * rows * SCALES
        h = h_ptr + (b * S + slot) * K
        sums = _row_sums(h, h, w, scale, one, 0.0, rows, 1, K, KIND, R, C, False, WHOLE, 0)
        total += sums[0] * weight
    _end(DEPENDENT)
    to = x_ptr + b * rows + row
    tl.store(to, tl.load(to, mask=row < rows, other=0.0) + total, mask=row < rows)


def _job(use: str, weight: Packed, rows: int) -> Job:
    """A product with `rows` of a packed weight."""
    return job_of("packed_product", f"{weight.kind} {use}", (rows, weight.columns, weight.words.shape[1]), weight.words)


def _shape(plan: MatrixPlan, weight: Packed, rows: int) -> tuple:
    """K, KIND, R, C, WHOLE of the kernels."""
    return weight.columns, weight.kind, plan.rows, plan.columns, plan.whole(rows, weight.words.shape[1])


@torch.no_grad()
def quantized_routed_gate_up(
    x: Tensor, norm: Tensor, eps: float, gate_up: Packed, ids: Tensor, out: Tensor, dependent: int = 0
) -> Tensor:
    rows, slots = out.shape[2], ids.shape[1]

    def run(plan: MatrixPlan) -> None:
        _quantized_routed_gate_up_kernel[ids.numel(), plan.along(rows)](
            x, norm, gate_up.words, gate_up.scale, ids, out, _ONE, eps, gate_up.rows // (2 * rows), rows, slots,
            *_shape(plan, gate_up, rows), **_options(plan.warps, dependent),
        )  # fmt: skip

    launch(_job("routed_gate_up", gate_up, rows), run)
    return out


@torch.no_grad()
def quantized_add_routed(h: Tensor, down: Packed, ids: Tensor, weights: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    rows, slots = x.shape[1], ids.shape[1]

    def run(plan: MatrixPlan) -> None:
        _quantized_add_routed_kernel[len(x), plan.along(rows)](
            h, down.words, down.scale, ids, weights, x, _ONE, down.rows // rows, rows, slots, *_shape(plan, down, rows),
            **_options(plan.warps, dependent),
        )  # fmt: skip

    launch(_job("add_routed", down, rows), run)
    return x
