"""A step of the gated delta rule by a program for each row and value head, which holds the head's whole matrix.

The value heads of a key head convolve its q and k each by itself; the first of them writes their inputs to the ring.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta_rule import TINY, DeltaParameters, DeltaShape
from ..plans import power_of_two
from ._launch import bump_versions, options
from ._pdl import _begin, _end, _wait
from ._ring import _convolved

_TINY = tl.constexpr(TINY)


@triton.jit
def _delta_step_kernel(x_ptr, gates_ptr, position_ptr, ring_ptr, state_ptr, conv_ptr, a_ptr, dt_ptr, norm_ptr, eps, offset,
                       out_ptr, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, GROUPED: tl.constexpr,
                       PLACES: tl.constexpr, TAPS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                       DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, h = tl.program_id(0), tl.program_id(1)
    SHARE: tl.constexpr = H // N
    C: tl.constexpr = 2 * N * D + H * E
    n, j = h // SHARE, h % SHARE
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    in_key, in_value = d < D, e < E
    if GROUPED:
        q_at = n * (2 * D + 2 * SHARE * E)
        k_at = q_at + D
        v_at = k_at + D + j * E
        z_at = v_at + SHARE * E
        b_at = n * 2 * SHARE + j
        a_at = b_at + SHARE
    else:
        q_at = n * D
        k_at = N * D + n * D
        v_at = 2 * N * D + h * E
        z_at = C + h * E
        b_at = h
        a_at = H + h
    rate = -tl.exp(tl.load(a_ptr + h).to(tl.float32))
    shift = tl.load(dt_ptr + h).to(tl.float32)
    gain = tl.load(norm_ptr + e, mask=in_value, other=0.0).to(tl.float32) + offset
    _wait(DEPENDENT)
    _end(DEPENDENT)
    position = tl.load(position_ptr + row)
    x_ptr += row.to(tl.int64) * (C + H * E)
    gates_ptr += row.to(tl.int64) * 2 * H
    ring_ptr += row.to(tl.int64) * PLACES * C
    tile = state_ptr + (row.to(tl.int64) * H + h) * D * E + d[:, None] * E + e[None]
    both = in_key[:, None] & in_value[None]
    begun = tl.zeros([BD, BE], tl.int32) + position > 0
    S = tl.load(tile, mask=both & begun, other=0.0)  # asked for first: it is most of what is read
    first = tl.zeros([BD], tl.int32) + j == 0
    q = _convolved(x_ptr + q_at + d, ring_ptr, conv_ptr, None, n * D + d, in_key, position, first, C, PLACES, TAPS, BD)
    k = _convolved(x_ptr + k_at + d, ring_ptr, conv_ptr, None, N * D + n * D + d, in_key, position, first, C, PLACES, TAPS, BD)
    v = _convolved(x_ptr + v_at + e, ring_ptr, conv_ptr, None, 2 * N * D + h * E + e, in_value, position, in_value, C, PLACES,
                   TAPS, BE)  # fmt: skip
    q = q / tl.sqrt((tl.sum(q * q, 0) + _TINY) * D)
    k = k / tl.sqrt(tl.sum(k * k, 0) + _TINY)
    a = tl.load(gates_ptr + a_at) + shift
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    beta = 1.0 / (1.0 + tl.exp(-tl.load(gates_ptr + b_at)))
    S = S * tl.exp(rate * soft)
    change = beta * (v - tl.sum(S * k[:, None], 0))
    S = S + k[:, None] * change[None]
    o = tl.sum(S * q[:, None], 0)
    tl.store(tile, S, mask=both & (tl.zeros([BD, BE], tl.int32) + position >= 0))
    z = tl.load(x_ptr + z_at + e, mask=in_value, other=0.0)
    y = o / tl.sqrt(tl.sum(o * o, 0) / E + eps) * gain * (z / (1.0 + tl.exp(-z)))
    y = tl.where(tl.zeros([BE], tl.int32) + position >= 0, y, float("nan"))
    tl.store(out_ptr + (row.to(tl.int64) * H + h) * E + e, y.to(out_ptr.dtype.element_ty), mask=in_value)


@torch.no_grad()
def delta_step(
    x: Tensor, gates: Tensor, position: Tensor, ring: Tensor, state: Tensor, parameters: DeltaParameters, shape: DeltaShape,
    out: Tensor, dependent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    conv, a_log, dt, norm = parameters
    D, E = power_of_two(shape.key_width), power_of_two(shape.value_width)
    _delta_step_kernel[(len(x), shape.value_heads)](
        x, gates, position, ring, state, conv, a_log, dt, norm.weight, norm.eps, norm.offset, out, *shape, ring.shape[1],
        conv.shape[1], D, E, **options(8 if D * E > 8192 else 4, dependent),
    )  # fmt: skip
    bump_versions(out, ring, state)
    return out, ring, state
