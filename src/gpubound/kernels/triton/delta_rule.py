"""A step of the gated delta rule by a program for each row and value head, which holds the head's whole matrix.

The value heads of a key head convolve its q and k each by itself; the first of them writes their inputs to the ring.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta_rule import TINY, DeltaParameters, DeltaShape
from ..plans import power_of_two
from ._launch import _apart, _begin, _convolved, _earlier, _end, _wait, at_once, bump_versions, options, warps_of

_TINY = tl.constexpr(TINY)


@triton.jit
def _delta_step_kernel(x_ptr, position_ptr, ring_ptr, state_ptr, conv_ptr, a_ptr, dt_ptr, norm_ptr, eps, offset,
                       out_ptr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                       GROUPED: tl.constexpr, PLACES: tl.constexpr, TAPS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                       DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    SHARE: tl.constexpr = H // N
    C: tl.constexpr = 2 * N * D + H * E
    n, j = h // SHARE, h % SHARE
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    part, in_value = tl.arange(0, 2)[:, None], e < E
    if GROUPED:
        q_at = n * (2 * D + 2 * SHARE * E)
        k_at = q_at + D
        v_at = k_at + D + j * E
        z_at = v_at + SHARE * E
        b_at = C + H * E + n * 2 * SHARE + j
        a_at = b_at + SHARE
    else:
        q_at = n * D
        k_at = N * D + n * D
        v_at = 2 * N * D + h * E
        z_at = C + h * E
        b_at = C + H * E + h
        a_at = b_at + H
    # Written before the last fence (_launch.py): the position by the choice of a token, the rest by the step before.
    position = tl.load(position_ptr + row, cache_modifier=".cg")
    tile = state_ptr + (row * H + h) * D * E + d[:, None] * E + e[None]
    inside = (d < D)[:, None] & in_value[None]
    S = tl.load(tile, mask=inside, other=0.0, cache_modifier=".cg")
    ring_ptr += row * PLACES * C
    qk_channel, in_key = part * (N * D) + n * D + d[None], (d < D)[None] & (part < 2)
    v_channel = 2 * N * D + h * E + e
    qk_own, qk_before = _earlier(ring_ptr, conv_ptr, None, qk_channel, in_key, position, C, PLACES, TAPS)
    v_own, v_before = _earlier(ring_ptr, conv_ptr, None, v_channel, in_value, position, C, PLACES, TAPS)
    S = tl.where(tl.zeros([BD, BE], tl.int32) + position > 0, S, 0.0)
    rate = -tl.exp(tl.load(a_ptr + h).to(tl.float32))
    shift = tl.load(dt_ptr + h).to(tl.float32)
    gain = tl.load(norm_ptr + e, mask=in_value, other=0.0).to(tl.float32) + offset
    _wait(DEPENDENT)
    _end(DEPENDENT)
    x_ptr += row * (C + H * E + 2 * H)
    a = tl.load(x_ptr + a_at).to(tl.float32) + shift
    b = tl.load(x_ptr + b_at).to(tl.float32)
    z = tl.load(x_ptr + z_at + e, mask=in_value, other=0.0).to(tl.float32)
    qk_at = x_ptr + q_at + part * (k_at - q_at) + d[None]
    qk = _convolved(qk_at, qk_own, qk_before, ring_ptr, qk_channel, in_key, position, 0 * qk_channel + j == 0, C, PLACES)
    v = _convolved(x_ptr + v_at + e, v_own, v_before, ring_ptr, v_channel, in_value, position, in_value, C, PLACES)
    q, k = _apart(qk / tl.sqrt((tl.sum(qk * qk, 1)[:, None] + _TINY) * tl.where(part == 0, D, 1)), part, 0)
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    decay, beta = tl.exp(rate * soft), 1.0 / (1.0 + tl.exp(-b))
    # Both sums are over the old matrix, since S'ᵀ q = decay Sᵀ q + (k q) change: out, which others wait for, goes first.
    change = beta * (v - decay * tl.sum(S * k[:, None], 0))
    o = decay * tl.sum(S * q[:, None], 0) + tl.sum(q * k, 0) * change
    y = o / tl.sqrt(tl.sum(o * o, 0) / E + eps) * gain * (z / (1.0 + tl.exp(-z)))
    y = tl.where(tl.zeros([BE], tl.int32) + position >= 0, y, float("nan"))
    tl.store(out_ptr + (row * H + h) * E + e, y.to(out_ptr.dtype.element_ty), mask=in_value)
    S = S * decay + k[:, None] * change[None]
    tl.store(tile, S, mask=inside & (tl.zeros([BD, BE], tl.int32) + position >= 0))


@torch.no_grad()
def delta_step(
    x: Tensor, position: Tensor, ring: Tensor, state: Tensor, parameters: DeltaParameters, shape: DeltaShape, out: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    conv, a_log, dt, norm = parameters
    D, E = power_of_two(shape.key_width), power_of_two(shape.value_width)
    _delta_step_kernel[(len(x), shape.value_heads)](
        x, position, ring, state, conv, a_log, dt, norm.weight, norm.eps, norm.offset, out, *shape, ring.shape[1],
        conv.shape[1], D, E, **options(warps_of(D, D * E), at_once(dependent)),
    )  # fmt: skip
    bump_versions(out, ring, state)
    return out, ring, state
