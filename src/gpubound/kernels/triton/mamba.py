"""A step of Mamba-2 by programs for each row and head, which hold the head's matrix, and the norm of groups of heads.

The programs of a group's heads convolve its B and C each by itself; the first of them writes their inputs to the ring.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_product import Norm
from ..mamba import MambaParameters, MambaShape
from ..plans import cdiv, power_of_two
from ._launch import _apart, _begin, _convolved, _earlier, _end, _wait, at_once, bump_versions, options, warps_of

MATRIX = (
    8192  # numbers of a program: with 16,384 it takes 181 registers, and one program of 8 warps a multiprocessor (Triton 3.6)
)


@triton.jit
def _mamba_step_kernel(x_ptr, position_ptr, ring_ptr, state_ptr, conv_ptr, bias_ptr, a_ptr, dt_ptr, skip_ptr, out_ptr,
                       least, gate, rate, scale, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
                       PLACES: tl.constexpr, TAPS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
                       DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    SHARE: tl.constexpr = H // G
    INNER: tl.constexpr = H * P
    C: tl.constexpr = INNER + 2 * G * N
    p, n, part = tl.program_id(2) * BP + tl.arange(0, BP), tl.arange(0, BN), tl.arange(0, 2)
    in_head, in_state = p < P, n < N
    if P % BP == 0:  # what the compiler knows to be there takes 80 registers, not 110
        in_head = tl.arange(0, BP) < BP
    # Written before the last fence (_launch.py): the position by the choice of a token, the rest by the step before.
    position = tl.load(position_ptr + row, cache_modifier=".cg")
    tile = state_ptr + (row * H + h) * P * N + p[:, None] * N + n[None]
    inside = in_head[:, None] & in_state[None]
    S = tl.load(tile, mask=inside, other=0.0, cache_modifier=".cg")
    ring_ptr += row * PLACES * C
    x_channel, in_x = h * P + p[None] + 0 * part[:, None], in_head[None] & (part == 0)[:, None]  # a row of zeros (_apart)
    bc_channel, in_bc = INNER + (part[None] * G + h // SHARE) * N + n[:, None], in_state[:, None] & (part < 2)[None]
    x_own, x_before = _earlier(ring_ptr, conv_ptr, bias_ptr, x_channel, in_x, position, C, PLACES, TAPS)
    bc_own, bc_before = _earlier(ring_ptr, conv_ptr, bias_ptr, bc_channel, in_bc, position, C, PLACES, TAPS)
    S = tl.where(tl.zeros([BP, BN], tl.int32) + position > 0, S, 0.0)
    decay = -tl.exp(tl.load(a_ptr + h).to(tl.float32))
    shift = tl.load(dt_ptr + h).to(tl.float32)
    skip = tl.load(skip_ptr + h).to(tl.float32)
    _wait(DEPENDENT)
    _end(DEPENDENT)
    x_ptr += row * (INNER + C + H)
    inputs = x_ptr + INNER
    dt = tl.load(inputs + C + h).to(tl.float32) * rate + shift
    z = tl.load(x_ptr + h * P + p, mask=in_head, other=0.0).to(tl.float32) * gate
    x = _convolved(inputs + x_channel, x_own, x_before, ring_ptr, x_channel, in_x, position, in_x, C, PLACES)
    first = 0 * bc_channel + h % SHARE + tl.program_id(2) == 0
    bc = _convolved(inputs + bc_channel, bc_own, bc_before, ring_ptr, bc_channel, in_bc, position, first, C, PLACES)
    x = tl.sum(x, 0)
    b, c = _apart(bc, part[None], 1)
    dt = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(tl.minimum(dt, 20.0))))
    dt = tl.where(dt < least, least, dt)  # a NaN stays
    S = S * tl.exp(decay * dt) + (dt * x)[:, None] * b[None]
    y = tl.sum(S * c[None], 1) + skip * x
    y = tl.where(tl.zeros([BP], tl.int32) + position >= 0, y * z / (1.0 + tl.exp(-z)) * scale, float("nan"))
    tl.store(out_ptr + row * INNER + h * P + p, y.to(out_ptr.dtype.element_ty), mask=in_head)
    tl.store(tile, S, mask=inside & (tl.zeros([BP, BN], tl.int32) + position >= 0))


@triton.jit
def _grouped_norm_rows_kernel(x_ptr, weight_ptr, out_ptr, eps, offset, width, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                              DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    col = tl.arange(0, BLOCK)
    inside, at = col < SIZE, tl.program_id(1) * SIZE + col
    gain = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32) + offset
    _wait(DEPENDENT)
    _end(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * width
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps) * gain
    tl.store(out_ptr + row + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@torch.no_grad()
def mamba_step(
    x: Tensor, position: Tensor, ring: Tensor, state: Tensor, parameters: MambaParameters, shape: MambaShape, out: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    H, P, G, N, *factors = shape
    conv, bias, a_log, dt, skip = parameters
    BN = power_of_two(N)
    BP = min(power_of_two(P), max(16, MATRIX // BN))
    _mamba_step_kernel[(len(x), H, cdiv(P, BP))](
        x, position, ring, state, conv, bias, a_log, dt, skip, out, *factors, H, P, G, N, ring.shape[1], conv.shape[1], BP, BN,
        **options(warps_of(BN, BP * BN), at_once(dependent)),
    )  # fmt: skip
    bump_versions(out, ring, state)
    return out, ring, state


@torch.no_grad()
def grouped_norm_rows(x: Tensor, norm: Norm, groups: int, out: Tensor, dependent: int = 0) -> Tensor:
    rows, width = x.shape
    block = power_of_two(width // groups)
    _grouped_norm_rows_kernel[(rows, groups)](
        x, norm.weight, out, norm.eps, norm.offset, width, width // groups, block,
        **options(max(1, min(8, block // 512)), at_once(dependent)),
    )  # fmt: skip
    bump_versions(out)
    return out
