"""A Richards curve inside a kernel (kernels/richards.py has its five parameters).

An element needs five values, computed once per program:

    f = gain · σ + offset        σ = (1 + 2^u)^(−1/nu)        u = rate · x + place

With w the gradient of f, r = 2^u / (1 + 2^u) and d = w σ r, dx = steep · d for steep = −gain · rate · ln 2 / nu. Five sums
over all elements determine the gradients of all parameters: Σ d·x, Σ d, Σ wσ · log2(1 + 2^u), Σ wσ, Σ w. A program
computes the sums that the learned parameters need; `deliver_curves` adds them and computes the gradients of `free`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....kernels.accumulate import deliver
from ..richards import LEAST, NAMES, POSITIVE, Curve

SUMS = 8  # five, and room to a power of two
PARTS = 512  # programs whose sums are added at a time: as many as most launches have, for each round waits for memory

# Places in Curve.constants
_NU, _K, _M, _GAIN, _BIAS = (tl.constexpr(i) for i in range(5))
_VALUES = tl.constexpr(5)
_TAIL = tl.constexpr(10)
_POSITIVE = tl.constexpr(tuple(name in POSITIVE for name in NAMES))
_LEAST = tl.constexpr(LEAST)


@triton.jit
def _parameter(free_ptr, CURVE: tl.constexpr, WHICH: tl.constexpr):
    PLACE: tl.constexpr = CURVE[WHICH]
    VALUE: tl.constexpr = CURVE[_VALUES + WHICH]
    if PLACE < 0:
        p = tl.full((), VALUE, tl.float32)
    else:
        p = tl.load(free_ptr + PLACE).to(tl.float32)
        if _POSITIVE[WHICH]:
            e = tl.exp(-tl.abs(p))
            # below 2e-4, 1 + e has lost digits of e, and e − e²/2 is exact to the last
            p = _LEAST + tl.maximum(p, 0.0) + tl.where(e < 2e-4, e * (1.0 - 0.5 * e), tl.log(1.0 + e))
    return p


@triton.jit
def numbers(free_ptr, CURVE: tl.constexpr):
    """Return (rate, place, −1 / nu, gain, offset, steep)."""
    nu = _parameter(free_ptr, CURVE, _NU)
    rate = _parameter(free_ptr, CURVE, _K)
    if CURVE[_TAIL]:
        rate *= nu
    gain = _parameter(free_ptr, CURVE, _GAIN)
    offset = _parameter(free_ptr, CURVE, _BIAS)
    place = rate * _parameter(free_ptr, CURVE, _M)
    rate = -rate
    bent = -1.0 / nu
    return (
        rate * 1.4426950408889634,
        place * 1.4426950408889634,
        bent,
        gain,
        offset,
        gain * rate * bent,
    )  # 1 / ln 2


@triton.jit
def _log2_of_1_and(e, DTYPE: tl.constexpr):
    """Return log2(1 + e) for e from 0 to 1, with a relative error of 1e-7; 1.3e-6 for fp16 results, and 6e-5 for bf16.

    The GPU computes few exponentials and logarithms per cycle; polynomials run on other units.
    """
    if tl.float32 == DTYPE:
        p = 0.11287620668087887 + e * (-0.04257843342855279 + e * 0.007551843253441593)
        p = 0.48069343923458685 + e * (-0.3584114783496546 + e * (0.27565136256534006 + e * (-0.19713766524740137 + e * p)))
        p = 1.4426949981656463 + e * (-0.7213402427366691 + e * p)
    elif tl.float16 == DTYPE:
        p = 0.21528567920575625 + e * (-0.09579842879337903 + e * 0.02040144849017436)
        p = 1.442693211976278 + e * (-0.7211595025471458 + e * (0.4776685921787274 + e * (-0.3390897321312084 + e * p)))
    else:
        p = 0.44189782793671634 + e * (-0.2271186014069445 + e * 0.059651388683530086)
        p = 1.442613173423698 + e * (-0.7169870374380309 + e * p)
    return e * p


@triton.jit
def sigma_of(x, rate, place, bent, DTYPE: tl.constexpr):
    """Return (σ, r, log2(1 + 2^u)). Exponents are never above 0, so nothing overflows.

    −1 times |u| is an operand modifier of the exponential; `-` in Triton is 0 − |u|, an instruction.
    """
    u = rate * x + place
    length = tl.maximum(u, 0.0) + _log2_of_1_and(tl.exp2(-1.0 * tl.abs(u)), DTYPE)
    return tl.exp2(bent * length), tl.exp2(u - length), length


@triton.jit
def value_of(sigma, gain, offset, CURVE: tl.constexpr):
    """Return f. A compiler cannot drop + 0, since −0 + 0 is 0."""
    f = gain * sigma
    if CURVE[_BIAS] >= 0 or CURVE[_VALUES + _BIAS] != 0:
        f += offset
    return f


@triton.jit
def _inside(t, COUNT: tl.constexpr):
    """Return sums of eight neighbours each, which one thread holds: COUNT / 8 of a tile's COUNT elements."""
    WIDE: tl.constexpr = 8 if COUNT >= 8 else COUNT
    return tl.sum(tl.reshape(t, (COUNT // WIDE, WIDE)), 1)


@triton.jit
def no_sums(COUNT: tl.constexpr):
    zero = tl.zeros([COUNT // 8 if COUNT >= 8 else 1], tl.float32)
    return zero, zero, zero, zero, zero


@triton.jit
def add_sums(sums, w, s, d, x, length, COUNT: tl.constexpr, CURVE: tl.constexpr):
    """Add the sums of a tile to `sums`: w is the gradient of f, s = w σ and d = s r."""
    line, place, bend, height, level = sums
    NU: tl.constexpr = CURVE[_NU] >= 0
    STRETCH: tl.constexpr = CURVE[_K] >= 0
    MOVE: tl.constexpr = CURVE[_M] >= 0
    GAIN: tl.constexpr = CURVE[_GAIN] >= 0
    BIAS: tl.constexpr = CURVE[_BIAS] >= 0
    TAIL: tl.constexpr = CURVE[_TAIL]
    if STRETCH or (NU and TAIL):
        line += _inside(d * x, COUNT)
    if STRETCH or MOVE or (NU and TAIL):
        place += _inside(d, COUNT)
    if NU:
        bend += _inside(s * length, COUNT)
    if GAIN:
        height += _inside(s, COUNT)
    if BIAS:
        level += _inside(w, COUNT)
    return line, place, bend, height, level


@triton.jit
def put_sums(parts_ptr, sums):
    """Store a program's sums."""
    line, place, bend, height, level = sums
    tl.store(parts_ptr, tl.sum(line, 0))
    tl.store(parts_ptr + 1, tl.sum(place, 0))
    tl.store(parts_ptr + 2, tl.sum(bend, 0))
    tl.store(parts_ptr + 3, tl.sum(height, 0))
    tl.store(parts_ptr + 4, tl.sum(level, 0))


@triton.jit
def _give(out_ptr, free_ptr, gradient, CURVE: tl.constexpr, WHICH: tl.constexpr):
    PLACE: tl.constexpr = CURVE[WHICH]
    if PLACE >= 0:
        if _POSITIVE[WHICH]:  # the slope of softplus
            gradient *= 1.0 / (1.0 + tl.exp(-tl.load(free_ptr + PLACE).to(tl.float32)))
        tl.store(out_ptr + PLACE, gradient)


@triton.jit
def _finish(parts_ptr, free_ptr, out_ptr, programs, step, CURVE: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr):
    """Compute out, the gradient of free: the programs' sums, times the derivatives of the five values."""
    col = tl.arange(0, SUMS)
    total = tl.zeros([PARTS, SUMS], tl.float32)
    for first in range(0, programs, PARTS):
        row = first + tl.arange(0, PARTS)
        total += tl.load(
            parts_ptr + row[:, None] * step + col[None], mask=(row < programs)[:, None] & (col < 5)[None], other=0.0
        )
    sums = tl.sum(total, 0)
    line, place = tl.sum(tl.where(col == 0, sums, 0.0), 0), tl.sum(tl.where(col == 1, sums, 0.0), 0)
    bend, height = tl.sum(tl.where(col == 2, sums, 0.0), 0), tl.sum(tl.where(col == 3, sums, 0.0), 0)
    level = tl.sum(tl.where(col == 4, sums, 0.0), 0)
    nu, k, m = _parameter(free_ptr, CURVE, _NU), _parameter(free_ptr, CURVE, _K), _parameter(free_ptr, CURVE, _M)
    gain = _parameter(free_ptr, CURVE, _GAIN)
    steep = k
    if CURVE[_TAIL]:
        steep = k * nu
    # from here on gradients: of t's factor of x, and of t itself
    line, place = -gain / nu * line, -gain / nu * place
    of_steep = m * place - line
    of_nu, of_k = gain * 0.6931471805599453 / (nu * nu) * bend, of_steep  # ln 2
    if CURVE[_TAIL]:
        of_nu, of_k = of_nu + k * of_steep, nu * of_steep
    _give(out_ptr, free_ptr, of_nu, CURVE, _NU)
    _give(out_ptr, free_ptr, of_k, CURVE, _K)
    _give(out_ptr, free_ptr, steep * place, CURVE, _M)
    _give(out_ptr, free_ptr, height, CURVE, _GAIN)
    _give(out_ptr, free_ptr, level, CURVE, _BIAS)


@triton.jit(do_not_specialize=["programs"])
def _curve_sums_kernel(parts_ptr, first_ptr, second_ptr, first_out_ptr, second_out_ptr, programs, CURVES: tl.constexpr,
                       FIRST: tl.constexpr, SECOND: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """Run one program per curve, of one or two."""
    if tl.program_id(0) == 0:
        _finish(parts_ptr, first_ptr, first_out_ptr, programs, CURVES * SUMS, FIRST, PARTS, SUMS)
    elif CURVES == 2:
        _finish(parts_ptr + SUMS, second_ptr, second_out_ptr, programs, CURVES * SUMS, SECOND, PARTS, SUMS)


def deliver_curves(
    parts: Tensor, frees: Sequence[Tensor | None], curves: Sequence[Curve], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Call `accumulate.deliver` for each needed gradient of `frees`. parts (P, curves, SUMS) are the sums of P programs."""
    terms = zip(frees, gradients(parts, frees, curves), needed)
    return tuple(None if free is None or sums is None or not need else deliver(free, sums) for free, sums, need in terms)


def gradients(parts: Tensor, frees: Sequence[Tensor | None], curves: Sequence[Curve]) -> list[Tensor | None]:
    """Return the gradients of `frees` in fp32. For a curve without learned parameters, None, the pointer is that of `parts`,
    which is not accessed."""
    outs = [None if free is None else torch.empty(free.shape, device=free.device, dtype=torch.float32) for free in frees]
    if any(free is not None for free in frees):
        pointers = [parts if t is None else t.contiguous() for t in (frees[0], frees[-1], outs[0], outs[-1])]
        _curve_sums_kernel[(len(curves),)](
            parts, *pointers, parts.shape[0], len(curves), curves[0].constants, curves[-1].constants, PARTS, SUMS, num_warps=4
        )
    return outs
