"""The optimizer's update in three launches: partial sums of squares, one program that decides, one pass over all state.

Sums of squares are fp32 within a lane of a program and fp64 across programs, in an order fixed by the length alone, so the norm
is the same in every run. Bias corrections are powers by repeated squaring in fp64: 1 - 0.999 in fp32 is off by 6e-5.

With moments in 8 bits, a row of a tile is a block of 256, so its scale is a sum within a warp. 18 bytes an element are moved
with bf16 weights and masters, 30 by fp32 moments; 2 less with remainders. Coding is arithmetic on the exponent bits: a table
of 256 numbers would be looked up 18 times an element, at several cycles a time where lanes read different lines.
"""

import torch
import triton
import triton.language as tl

from ..plans import cdiv
from ._launch import bump_versions

PROGRAMS = 1024  # of the sum of squares: one wave of 8 warps on an H200, and the order of summation on every GPU
BLOCK = 4096
ROWS = 8  # blocks of 256 moments in 8 bits, a program


@triton.jit
def _adamw_squares_kernel(x_ptr, partial_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
        total += x * x
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _power(BASE: tl.constexpr, exponent):
    result = tl.full([], 1.0, tl.float64)
    factor = tl.full([], BASE, tl.float64)
    for _ in range(40):
        result = tl.where((exponent & 1) == 1, result * factor, result)
        factor = factor * factor
        exponent = exponent >> 1
    return result


@triton.jit
def _finite(x):
    return tl.abs(x) < 1e300  # false for NaN too


@triton.jit(do_not_specialize=["partials", "rates"])
def _adamw_plan_kernel(partial_ptr, totals_ptr, state_ptr, rates_ptr, plan_ptr, report_ptr, partials, rates,
                       BETA1: tl.constexpr, BETA2: tl.constexpr, WEIGHT_DECAY: tl.constexpr, CLIP: tl.constexpr,
                       GROWTH_INTERVAL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i = tl.arange(0, BLOCK)
    square = tl.sum(tl.load(partial_ptr + i, mask=i < partials, other=0.0).to(tl.float64), 0)
    loss_sum = tl.load(totals_ptr)
    items = tl.load(totals_ptr + 1)
    updates = tl.load(state_ptr)
    skipped = tl.load(state_ptr + 1)
    loss_scale = tl.load(state_ptr + 2)
    good_steps = tl.load(state_ptr + 3)

    one = tl.full([], 1.0, tl.float64)
    nothing = items <= 0
    unit = one / (tl.where(nothing, one, items) * loss_scale)
    norm = tl.sqrt(square.to(tl.float32)).to(tl.float64) * unit
    loss = tl.where(nothing, one * float("nan"), loss_sum * unit)
    apply = _finite(norm) & _finite(loss)

    update = updates + 1
    lr = tl.load(rates_ptr + tl.maximum(tl.minimum(updates.to(tl.int64), rates - 1), 0))
    factor = unit
    if CLIP is not None:
        factor = unit * tl.minimum(tl.full([], CLIP, tl.float64) / (norm + tl.full([], 1e-6, tl.float64)), one)
    c1 = one - _power(BETA1, update.to(tl.int64))
    c2 = one - _power(BETA2, update.to(tl.int64))
    tl.store(plan_ptr, apply.to(tl.float32))
    tl.store(plan_ptr + 1, factor.to(tl.float32))
    tl.store(plan_ptr + 2, (one - lr * tl.full([], WEIGHT_DECAY, tl.float64)).to(tl.float32))
    tl.store(plan_ptr + 3, (lr / c1).to(tl.float32))
    tl.store(plan_ptr + 4, 1.0 / tl.sqrt(c2.to(tl.float32)))
    tl.store(plan_ptr + 5, update.to(tl.float32))

    good_steps = tl.where(apply, good_steps + 1, tl.where(nothing, good_steps, 0.0))
    if GROWTH_INTERVAL > 0:
        grow = good_steps >= GROWTH_INTERVAL
        halve = (apply == 0) & (nothing == 0)
        loss_scale = tl.where(halve, loss_scale * 0.5, tl.where(grow, loss_scale * 2, loss_scale))
        good_steps = tl.where(grow, 0.0, good_steps)
    updates = tl.where(apply, update, updates)
    skipped = tl.where(apply | nothing, skipped, skipped + 1)
    tl.store(state_ptr, updates)
    tl.store(state_ptr + 1, skipped)
    tl.store(state_ptr + 2, loss_scale)
    tl.store(state_ptr + 3, good_steps)
    tl.store(report_ptr, loss)
    tl.store(report_ptr + 1, norm)
    tl.store(report_ptr + 2, items)
    tl.store(report_ptr + 3, skipped)
    tl.store(report_ptr + 4, lr)
    tl.store(report_ptr + 5, updates)
    tl.store(report_ptr + 6, loss_scale)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _planned(plan_ptr):
    """Load the scalars of `plan_update`: (factor of the gradient, decay, step size, one over the root of v's bias)."""
    return tl.load(plan_ptr + 1), tl.load(plan_ptr + 2), tl.load(plan_ptr + 3), tl.load(plan_ptr + 4)


@triton.jit
def _updated(p, g, m, v, i, decay_until, decay, step_size, inverse_root, BETA1: tl.constexpr, BETA2: tl.constexpr,
             EPS: tl.constexpr):  # fmt: skip
    """AdamW itself: (p, m, v) of elements `i` after one update.

    The last operation is an explicit fma: ptxas fused it with the division for masters and not for remainders, and the two
    would differ by a bit. Triton's -x is 0 - x, which is +0 for a step size of 0 and would take the sign of a weight of -0.
    """
    m += (1 - BETA1) * (g - m)
    v = BETA2 * v + (1 - BETA2) * g * g
    quotient = m / (tl.sqrt(v) * inverse_root + EPS)
    p = tl.fma(quotient, step_size * -1.0, tl.where(i < decay_until, p * decay, p))
    return p, m, v


@triton.jit
def _rounded_at_random(p, i, plan_ptr, seed):
    """`p` cut to bf16, up or down by chance: the same chance for the same element, update and seed."""
    update = tl.load(plan_ptr + 5).to(tl.int64).to(tl.uint32)
    high = (i >> 32).to(tl.uint32) ^ tl.cast(seed, tl.uint32)
    noise = _mix(i.to(tl.uint32) ^ _mix(update ^ _mix(high))) & 0xFFFF
    return ((p.to(tl.uint32, bitcast=True) + noise) >> 16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def _fp32_weight(weight_ptr, master_ptr, i, mask, MASTER: tl.constexpr, SPLIT: tl.constexpr):
    """Load the fp32 weight: the master if there is one, or the bf16 weight and its remainder.

    A negative remainder with a zero is that of a weight that the zero replaced; their sum would be NaN.
    """
    if SPLIT:
        high = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        remainder = tl.load(master_ptr + i, mask=mask, other=0).to(tl.int32)
        remainder = tl.where((high & 0x7FFFFFFF) == 0, tl.maximum(remainder, 0), remainder)
        p = (high + remainder).to(tl.float32, bitcast=True)
    else:
        p = tl.load((master_ptr if MASTER else weight_ptr) + i, mask=mask, other=0.0).to(tl.float32)
    return p


@triton.jit
def _put_weight(weight_ptr, master_ptr, plan_ptr, p, i, mask, seed, MASTER: tl.constexpr, SPLIT: tl.constexpr,
                AT_RANDOM: tl.constexpr):  # fmt: skip
    if SPLIT:
        bits = p.to(tl.int32, bitcast=True)
        high = tl.where(p == p, (bits + 0x8000) >> 16, 0x7FC0)
        remainder = tl.where(p == p, bits - (high << 16), 0)
        tl.store(master_ptr + i, remainder.to(tl.int16), mask=mask)
        tl.store(weight_ptr + i, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        if MASTER:
            tl.store(master_ptr + i, p, mask=mask)
        if AT_RANDOM:
            p = _rounded_at_random(p, i, plan_ptr, seed)
        tl.store(weight_ptr + i, p.to(weight_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["decay_until", "seed"])
def _adamw_kernel(weight_ptr, gradient_ptr, m_ptr, v_ptr, master_ptr, plan_ptr, n, decay_until, seed,
                  BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, MASTER: tl.constexpr,
                  SPLIT: tl.constexpr, AT_RANDOM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    if tl.load(plan_ptr) != 0.0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = i < n
        factor, decay, step_size, inverse_root = _planned(plan_ptr)
        p = _fp32_weight(weight_ptr, master_ptr, i, mask, MASTER, SPLIT)
        g = tl.load(gradient_ptr + i, mask=mask, other=0.0) * factor
        m = tl.load(m_ptr + i, mask=mask, other=0.0)
        v = tl.load(v_ptr + i, mask=mask, other=0.0)
        p, m, v = _updated(p, g, m, v, i, decay_until, decay, step_size, inverse_root, BETA1, BETA2, EPS)
        tl.store(m_ptr + i, m, mask=mask)
        tl.store(v_ptr + i, v, mask=mask)
        _put_weight(weight_ptr, master_ptr, plan_ptr, p, i, mask, seed, MASTER, SPLIT, AT_RANDOM)


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
    in_range = scale > 0
    return scale, tl.where(in_range, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(in_range, scale, 1.0)), 0.0)


@triton.jit
def _adamw8_kernel(weight_ptr, gradient_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, master_ptr, plan_ptr, n, blocks,
                   decay_until, seed, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, MASTER: tl.constexpr,
                   SPLIT: tl.constexpr, AT_RANDOM: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    if tl.load(plan_ptr) != 0.0:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        i = row.to(tl.int64)[:, None] * 256 + tl.arange(0, 256)[None, :]
        mask, in_range = i < n, row < blocks
        factor, decay, step_size, inverse_root = _planned(plan_ptr)
        p = _fp32_weight(weight_ptr, master_ptr, i, mask, MASTER, SPLIT)
        g = tl.load(gradient_ptr + i, mask=mask, other=0.0) * factor
        m_scale = tl.load(m_scale_ptr + row, mask=in_range, other=0.0)
        v_scale = tl.load(v_scale_ptr + row, mask=in_range, other=0.0)
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
        tl.store(m_scale_ptr + row, m_scale, mask=in_range)
        tl.store(v_scale_ptr + row, v_scale, mask=in_range)
        _put_weight(weight_ptr, master_ptr, plan_ptr, p, i, mask, seed, MASTER, SPLIT, AT_RANDOM)


@torch.no_grad()
def plan_update(gradient, totals, state, rates, betas, weight_decay, clip, growth_interval):
    n = gradient.numel()
    programs = max(1, min(PROGRAMS, cdiv(n, BLOCK)))
    partial = torch.empty(programs, device=gradient.device, dtype=torch.float32)
    plan = torch.empty(6, device=gradient.device, dtype=torch.float32)
    report = torch.empty(7, device=gradient.device, dtype=torch.float64)
    _adamw_squares_kernel[(programs,)](gradient, partial, n, BLOCK, num_warps=8)
    _adamw_plan_kernel[(1,)](
        partial, totals, state, rates, plan, report, programs, len(rates),
        *betas, weight_decay, clip, growth_interval, triton.next_power_of_2(programs), num_warps=4,
    )  # fmt: skip
    bump_versions(state)
    return plan, report


@torch.no_grad()
def adamw(weight, gradient, m, v, plan, master, betas, eps, decay_until, seed):
    n, split = weight.numel(), master is not None and master.dtype == torch.int16
    block = 2048 if weight.is_cuda else BLOCK
    if n:
        _adamw_kernel[(cdiv(n, block),)](
            weight, gradient, m, v, master if master is not None else weight, plan, n, decay_until, seed or 0,
            *betas, eps, master is not None, split, seed is not None, block, num_warps=8,
        )  # fmt: skip
    bump_versions(weight, m, v, master)
    return weight, m, v


@torch.no_grad()
def adamw8(weight, gradient, m, v, m_scale, v_scale, plan, master, betas, eps, decay_until, seed):
    n, blocks = weight.numel(), m_scale.numel()
    split = master is not None and master.dtype == torch.int16
    if n:
        _adamw8_kernel[(cdiv(blocks, ROWS),)](
            weight, gradient, m, v, m_scale, v_scale, master if master is not None else weight, plan, n, blocks,
            decay_until, seed or 0, *betas, eps, master is not None, split, seed is not None, ROWS, num_warps=8,
        )  # fmt: skip
    bump_versions(weight, m, v, m_scale, v_scale, master)
    return weight, m, v, m_scale, v_scale
