"""AdamW with both moments in 8 bits, in one pass: a row of a tile is a block of 256, so its scale is a sum within a warp.

18 bytes an element are moved with bf16 weights and masters, 30 by fp32 moments. Coding is arithmetic on the exponent bits: a
table of 256 numbers would be looked up 18 times an element, at several cycles a time where lanes read different lines.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .adamw import _planned, _rounded_at_random, _updated

ROWS = 8  # blocks of 256 a program


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _decode(codes, MOST: tl.constexpr):
    c = tl.abs(codes.to(tl.int32))
    bits = c.to(tl.float32).to(tl.int32, bitcast=True)
    power = tl.where(c == 0, 0, (bits >> 23) - 127)
    steps = c.to(tl.float32) * _power_of_two(-power) - 1.0 + _power_of_two(-power)
    x = (0.125 + 0.875 * steps) * _power_of_two(-3 * (MOST - power))
    x = tl.where(c == 0, 0.0, x)
    return tl.where(codes < 0, -x, x)


@triton.jit
def _encode(x, MOST: tl.constexpr):
    power = (x.to(tl.int32, bitcast=True) >> 23) - 126
    zeros = tl.minimum(tl.maximum(-power, 0) // 3, MOST)
    steps = _power_of_two(MOST - zeros)
    step = tl.floor((x * _power_of_two(3 * zeros) - 0.125) * (1.1428571428571428 * steps) + 0.5)
    return (steps - 1.0 + step).to(tl.int32)


@triton.jit
def _scales(x):
    """(the largest magnitude of each row, one over it); both 0 for a row of nothing."""
    scale = tl.max(tl.abs(x), 1)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    there = scale > 0
    return scale, tl.where(there, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(there, scale, 1.0)), 0.0)


@triton.jit
def _adamw8_kernel(weight_ptr, gradient_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, master_ptr, plan_ptr, n, blocks,
                   decay_until, seed, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, MASTER: tl.constexpr,
                   AT_RANDOM: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    if tl.load(plan_ptr) != 0.0:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        i = row.to(tl.int64)[:, None] * 256 + tl.arange(0, 256)[None, :]
        mask, there = i < n, row < blocks
        factor, decay, step_size, inverse_root = _planned(plan_ptr)
        p = tl.load((master_ptr if MASTER else weight_ptr) + i, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gradient_ptr + i, mask=mask, other=0.0) * factor
        m_scale = tl.load(m_scale_ptr + row, mask=there, other=0.0)
        v_scale = tl.load(v_scale_ptr + row, mask=there, other=0.0)
        m = _decode(tl.load(m_ptr + i, mask=mask, other=0), 6) * m_scale[:, None]
        v = _decode(tl.load(v_ptr + i, mask=mask, other=0), 7) * v_scale[:, None]
        p, m, v = _updated(p, g, m, v, i, decay_until, decay, step_size, inverse_root, BETA1, BETA2, EPS)

        m_scale, m_inverse = _scales(m)
        v_scale, v_inverse = _scales(v)
        m_code = _encode(tl.minimum(tl.abs(m) * m_inverse[:, None], 1.0), 6)
        v_code = _encode(tl.minimum(v * v_inverse[:, None], 1.0), 7)
        v_code = tl.where((v > 0) & (v_scale > 0)[:, None], tl.maximum(v_code, 1), v_code)
        tl.store(m_ptr + i, tl.where(m < 0, -m_code, m_code).to(tl.int8), mask=mask)
        tl.store(v_ptr + i, v_code.to(tl.uint8), mask=mask)
        tl.store(m_scale_ptr + row, m_scale, mask=there)
        tl.store(v_scale_ptr + row, v_scale, mask=there)
        if MASTER:
            tl.store(master_ptr + i, p, mask=mask)
        if AT_RANDOM:
            p = _rounded_at_random(p, i, plan_ptr, seed)
        tl.store(weight_ptr + i, p.to(weight_ptr.dtype.element_ty), mask=mask)


@torch.no_grad()
def adamw8(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, m_scale: Tensor, v_scale: Tensor, plan: Tensor,
    master: Tensor | None, betas: tuple[float, float], eps: float, decay_until: int, seed: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n, blocks = weight.numel(), m_scale.numel()
    if n:
        _adamw8_kernel[(triton.cdiv(blocks, ROWS),)](
            weight, gradient, m, v, m_scale, v_scale, master if master is not None else weight, plan, n, blocks,
            decay_until, seed or 0, *betas, eps, master is not None, seed is not None, ROWS, num_warps=8,
        )  # fmt: skip
    return weight, m, v, m_scale, v_scale
