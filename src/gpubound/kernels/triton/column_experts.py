"""Experts whose weights are stored by column: a program owns COLUMNS of an expert's weight, for one slot of one row.

Its loads are rows of COLUMNS neighbours, of C inputs at a time; the next tile is requested before the last one is used. With
slots in the grid, one row of a model of 2,880 columns has 360 programs. Another launch adds the slots' outputs, in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_product import Norm
from ._launch import bump_versions, options
from ._pdl import _begin, _end, _wait
from .experts import _expert

ROWS, GATE_UP_COLUMNS, DOWN_COLUMNS, WARPS = 64, 64, 32, 4
BLOCK = 512  # columns of a program that adds slots


@triton.jit
def _weight_tile(w_ptr, row, col, rows, columns, N: tl.constexpr):
    return tl.load(w_ptr + row[:, None] * N + col[None], mask=(row < rows)[:, None] & (col < columns)[None], other=0.0)


@triton.jit
def _column_gate_up_kernel(x_ptr, norm_ptr, w_ptr, bias_ptr, ids_ptr, out_ptr, eps, alpha, limit, experts, S: tl.constexpr,
                           K: tl.constexpr, N: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
                           DEPENDENT: tl.constexpr):  # fmt: skip
    first, pair = tl.program_id(0) * R, tl.program_id(1).to(tl.int64)
    row, col = tl.arange(0, C), tl.arange(0, R)
    _wait(DEPENDENT)
    _begin(DEPENDENT)
    expert, poison = _expert(ids_ptr + pair, experts)
    w_ptr += expert * K * N + first
    left = N - first
    total, square = tl.zeros([C, R], tl.float32), tl.zeros([C], tl.float32)
    w = _weight_tile(w_ptr, row, col, K, left, N)
    for start in range(0, K, C):
        x = tl.load(x_ptr + pair // S * K + start + row, mask=start + row < K, other=0.0)
        gain = tl.load(norm_ptr + start + row, mask=start + row < K, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * (x * gain)[:, None]
        square += x * x
        if start + C < K:
            w = _weight_tile(w_ptr + (start + C) * N, row, col, K - start - C, left, N)
    _end(DEPENDENT)
    bias = tl.load(bias_ptr + expert * N + first + col, mask=col < left, other=0.0).to(tl.float32)
    both = tl.sum(total, 0) / tl.sqrt(tl.sum(square, 0) / K + eps) + bias
    gate, up = tl.split(tl.reshape(both, [R // 2, 2]))
    gate, up = tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    y = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate)) * poison
    unit = tl.arange(0, R // 2)
    tl.store(out_ptr + pair * (N // 2) + first // 2 + unit, y.to(out_ptr.dtype.element_ty), mask=2 * unit < left)


@triton.jit
def _column_down_kernel(h_ptr, w_ptr, bias_ptr, ids_ptr, out_ptr, experts, K: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
                        R: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    first, pair = tl.program_id(0) * R, tl.program_id(1).to(tl.int64)
    row, col = tl.arange(0, C), tl.arange(0, R)
    _begin(DEPENDENT)
    expert, poison = _expert(ids_ptr + pair, experts)
    w_ptr += expert * K * N + first
    left = N - first
    total = tl.zeros([C, R], tl.float32)
    w = _weight_tile(w_ptr, row, col, K, left, N)
    _wait(DEPENDENT)
    for start in range(0, K, C):
        h = tl.load(h_ptr + pair * K + start + row, mask=start + row < K, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * h[:, None]
        if start + C < K:
            w = _weight_tile(w_ptr + (start + C) * N, row, col, K - start - C, left, N)
    _end(DEPENDENT)
    bias = tl.load(bias_ptr + expert * N + first + col, mask=col < left, other=0.0).to(tl.float32)
    tl.store(out_ptr + pair * N + first + col, (tl.sum(total, 0) + bias) * poison, mask=col < left)


@triton.jit
def _add_slots_kernel(y_ptr, shares_ptr, x_ptr, columns, S: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    _begin(DEPENDENT)
    b, col = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = col < columns
    _wait(DEPENDENT)
    _end(DEPENDENT)
    x = tl.load(x_ptr + b * columns + col, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(S):
        share = tl.load(shares_ptr + b * S + slot, cache_modifier=".cg")
        total += share * tl.load(y_ptr + (b * S + slot) * columns + col, mask=inside, other=0.0)
    tl.store(x_ptr + b * columns + col, x + total, mask=inside)


@torch.no_grad()
def column_gate_up(
    x: Tensor, norm: Norm, gate_up: Tensor, bias: Tensor, ids: Tensor, out: Tensor, alpha: float, limit: float,
    dependent: int = 0,
) -> Tensor:  # fmt: skip
    experts, hidden, columns = gate_up.shape
    _column_gate_up_kernel[(triton.cdiv(columns, GATE_UP_COLUMNS), ids.numel())](
        x, norm.weight, gate_up, bias, ids, out, norm.eps, alpha, limit, experts, ids.shape[1], hidden, columns, ROWS,
        GATE_UP_COLUMNS, **options(WARPS, dependent),
    )  # fmt: skip
    bump_versions(out)
    return out


@torch.no_grad()
def column_down(h: Tensor, down: Tensor, bias: Tensor, ids: Tensor, out: Tensor, dependent: int = 0) -> Tensor:
    experts, units, columns = down.shape
    _column_down_kernel[(triton.cdiv(columns, DOWN_COLUMNS), ids.numel())](
        h, down, bias, ids, out, experts, units, columns, ROWS, DOWN_COLUMNS, **options(WARPS, dependent)
    )
    bump_versions(out)
    return out


@torch.no_grad()
def add_slots(y: Tensor, shares: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    rows, slots, columns = y.shape
    _add_slots_kernel[(triton.cdiv(columns, BLOCK), rows)](y, shares, x, columns, slots, BLOCK, **options(4, dependent))
    bump_versions(x)
    return x
