"""Recurrences: a scan over chunks by a program for each row and some columns of its state, which it holds in registers.

The backward runs the scan again for the states before each chunk, and then one of the gradients, from the last chunk to the
first. All other gradients are products of all chunks at once.

A step of the gated delta rule by a program for each row and value head, which holds the head's whole matrix.

The value heads of a key head convolve its q and k each by itself; the first of them writes their inputs to the ring.

A step of Mamba-2 by programs for each row and head, which hold the head's matrix.

The programs of a group's heads convolve its B and C each by itself; the first of them writes their inputs to the ring.

A short convolution by a program for each token and block of channels, which also writes its input to the ring.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans.types import cdiv, power_of_two
from ..recurrent import TINY
from ._launch import _apart, _begin, _convolved, _earlier, _end, _wait, at_once, first_order_only, in_place, options, warps_of

COLUMNS = 32  # of the state in a program
WARPS, STAGES = 4, 1  # two stages would ask for 262 kB of shared memory at widths of 128


@triton.jit
def _tile(ptr, at, row, col, rows, cols):
    """A tile (rows, columns) of the matrix number `at`, in fp32."""
    place = ptr + at * rows * cols + row[:, None] * cols + col[None]
    return tl.load(place, mask=(row < rows)[:, None] & (col < cols)[None], other=0.0).to(tl.float32)


@triton.jit
def _put(ptr, at, row, col, rows, cols, value):
    place = ptr + at * rows * cols + row[:, None] * cols + col[None]
    tl.store(place, value.to(ptr.dtype.element_ty), mask=(row < rows)[:, None] & (col < cols)[None])


@triton.jit
def _times(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _chunk_scan_kernel(u_ptr, w_ptr, q_ptr, p_ptr, k_ptr, decay_ptr, state_ptr, out_ptr, last_ptr, new_ptr, states_ptr, n,
                       L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    """new_ptr, states_ptr: what each chunk writes, and the state before it; or None."""
    r = tl.program_id(0).to(tl.int64)
    t, d, e = tl.arange(0, L), tl.arange(0, BD), tl.program_id(1) * BE + tl.arange(0, BE)
    S = _tile(state_ptr, r, d, e, D, E)
    for chunk in range(n):
        at = r * n + chunk
        if states_ptr is not None:
            _put(states_ptr, at, d, e, D, E, S)
        new = _tile(u_ptr, at, t, e, L, E)
        if w_ptr is not None:
            new -= _times(_tile(w_ptr, at, t, d, L, D), S, PRECISION)
        if new_ptr is not None:
            _put(new_ptr, at, t, e, L, E, new)
        if out_ptr is not None:
            o = _times(_tile(q_ptr, at, t, d, L, D), S, PRECISION)
            o += _times(_tile(p_ptr, at, t, t, L, L), new, PRECISION)
            _put(out_ptr, at, t, e, L, E, o)
        k = _tile(k_ptr, at, t, d, L, D)
        S = S * tl.load(decay_ptr + at).to(tl.float32) + _times(tl.trans(k), new, PRECISION)
    if last_ptr is not None:
        _put(last_ptr, r, d, e, D, E, S)


@triton.jit
def _chunk_scan_backward_kernel(dout_ptr, dlast_ptr, w_ptr, q_ptr, p_ptr, k_ptr, decay_ptr, dnew_ptr, dstates_ptr, dstate_ptr,
                                n, L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                                BE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of what each chunk writes, of the state after each chunk, and of the first state."""
    r = tl.program_id(0).to(tl.int64)
    t, d, e = tl.arange(0, L), tl.arange(0, BD), tl.program_id(1) * BE + tl.arange(0, BE)
    dS = _tile(dlast_ptr, r, d, e, D, E)
    for back in range(n):
        at = r * n + n - 1 - back
        _put(dstates_ptr, at, d, e, D, E, dS)
        dout = _tile(dout_ptr, at, t, e, L, E)
        p, k = _tile(p_ptr, at, t, t, L, L), _tile(k_ptr, at, t, d, L, D)
        dnew = _times(tl.trans(p), dout, PRECISION) + _times(k, dS, PRECISION)
        _put(dnew_ptr, at, t, e, L, E, dnew)
        q = _tile(q_ptr, at, t, d, L, D)
        dS = dS * tl.load(decay_ptr + at).to(tl.float32) + _times(tl.trans(q), dout, PRECISION)
        if w_ptr is not None:
            dS -= _times(tl.trans(_tile(w_ptr, at, t, d, L, D)), dnew, PRECISION)
    _put(dstate_ptr, r, d, e, D, E, dS)


def _sizes(u: Tensor, q: Tensor, precise: bool) -> tuple[tuple[int, int], tuple]:
    """Return the grid of a scan, and its constants."""
    R, n, L, E = u.shape
    D = q.shape[-1]
    columns = min(COLUMNS if D <= 128 else 16, max(16, power_of_two(E)))
    return (R, triton.cdiv(E, columns)), (n, L, D, E, max(16, power_of_two(D)), columns, "tf32x3" if precise else "tf32")


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, w, q, p, k, decay, state, precise):
        inputs: list = [t if t is None else t.contiguous() for t in (u, w, q, p, k, decay, state)]
        grid, sizes = _sizes(u, q, precise)
        out, last = torch.empty_like(u, memory_format=torch.contiguous_format), torch.empty_like(inputs[-1])
        _chunk_scan_kernel[grid](*inputs, out, last, None, None, *sizes, num_warps=WARPS, num_stages=STAGES)
        ctx.reads, ctx.precise = w is not None, precise
        ctx.save_for_backward(*(t for t in inputs if t is not None))
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx, dout, dlast):
        first_order_only("chunk_scan")
        u, *rest = ctx.saved_tensors
        w, (q, p, k, decay, state) = (rest[0], rest[1:]) if ctx.reads else (None, rest)
        dout = torch.zeros_like(u) if dout is None else dout.contiguous()
        dlast = torch.zeros_like(state) if dlast is None else dlast.contiguous()
        (R, n, _, E), D = u.shape, q.shape[-1]
        grid, sizes = _sizes(u, q, ctx.precise)
        new, dnew, dstate = torch.empty_like(u), torch.empty_like(u), torch.empty_like(state)
        states, dstates = (torch.empty(R, n, D, E, device=u.device, dtype=u.dtype) for _ in range(2))
        how = {"num_warps": WARPS, "num_stages": STAGES}
        _chunk_scan_kernel[grid](u, w, q, p, k, decay, state, None, None, new, states, *sizes, **how)
        _chunk_scan_backward_kernel[grid](dout, dlast, w, q, p, k, decay, dnew, dstates, dstate, *sizes, **how)
        across = states.transpose(-1, -2)
        dw = None if w is None else -(dnew @ across)
        dk, ddecay = new @ dstates.transpose(-1, -2), (dstates * states).sum((-1, -2))
        return dnew, dw, dout @ across, dout @ new.transpose(-1, -2), dk, ddecay, dstate, None


def chunk_scan(u, w, q, p, k, decay, state, precise=True):
    return _ChunkScan.apply(u, w, q, p, k, decay, state, precise)


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


@in_place
def delta_step(x, position, ring, state, parameters, shape, out, dependent=0):
    conv, a_log, dt, norm = parameters
    D, E = power_of_two(shape.key_width), power_of_two(shape.value_width)
    _delta_step_kernel[(len(x), shape.value_heads)](
        x, position, ring, state, conv, a_log, dt, norm.weight, norm.eps, norm.offset, out, *shape, ring.shape[1],
        conv.shape[1], D, E, **options(warps_of(D, D * E), at_once(dependent)),
    )  # fmt: skip
    return out, ring, state


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


@in_place
def mamba_step(x, position, ring, state, parameters, shape, out, dependent=0):
    H, P, G, N, *factors = shape
    conv, bias, a_log, dt, skip = parameters
    BN = power_of_two(N)
    BP = min(power_of_two(P), max(16, MATRIX // BN))
    _mamba_step_kernel[(len(x), H, cdiv(P, BP))](
        x, position, ring, state, conv, bias, a_log, dt, skip, out, *factors, H, P, G, N, ring.shape[1], conv.shape[1], BP, BN,
        **options(warps_of(BN, BP * BN), at_once(dependent)),
    )  # fmt: skip
    return out, ring, state


BLOCK = 256  # channels of a program


@triton.jit
def _product(row_ptr, col, channels, inside, kind: tl.constexpr):
    """The input of the convolution of one token, as the ring holds it, in fp32."""
    gate = tl.load(row_ptr + col, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(row_ptr + 2 * channels + col, mask=inside, other=0.0).to(tl.float32)
    return (gate * value).to(kind).to(tl.float32)


@triton.jit
def _short_conv_kernel(x_ptr, position_ptr, ring_ptr, weight_ptr, bias_ptr, out_ptr, channels, PLACES: tl.constexpr,
                       TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, col = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, t = col < channels, row % TOKENS + tl.zeros([BLOCK], tl.int32)
    kind = ring_ptr.dtype.element_ty
    own = tl.load(weight_ptr + col * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(position_ptr + row, cache_modifier=".cg") + tl.zeros([BLOCK], tl.int32)  # before the fence: _launch.py
    _wait(DEPENDENT)
    _end(DEPENDENT)
    x_ptr += row.to(tl.int64) * 3 * channels
    ring_ptr += (row // TOKENS).to(tl.int64) * PLACES * channels
    x = _product(x_ptr, col, channels, inside, kind)
    total += own * x
    for j in tl.static_range(1, TAPS):
        tap = tl.load(weight_ptr + col * TAPS + TAPS - 1 - j, mask=inside, other=0.0).to(tl.float32)
        place = tl.maximum(position - j, 0) % PLACES
        before = tl.load(ring_ptr + place * channels + col, mask=inside & (position >= j) & (t < j), other=0.0).to(tl.float32)
        if TOKENS > 1:  # a token of the same step
            before += _product(x_ptr - j * 3 * channels, col, channels, inside & (t >= j), kind)
        total += tap * before
    y = total * tl.load(x_ptr + channels + col, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(position >= 0, y, float("nan"))
    tl.store(out_ptr + row.to(tl.int64) * channels + col, y.to(out_ptr.dtype.element_ty), mask=inside)
    here = ring_ptr + tl.maximum(position, 0) % PLACES * channels + col
    tl.store(here, x.to(kind), mask=inside & (position >= 0))


@in_place
def short_conv(x, position, ring, weight, bias, out, dependent=0):
    rows, slots, channels = ring.shape
    count = position.numel()
    _short_conv_kernel[(count, triton.cdiv(channels, BLOCK))](
        x, position, ring, weight, bias, out, channels, slots, weight.shape[1], count // rows, BLOCK,
        **options(4, at_once(dependent)),
    )  # fmt: skip
    return out, ring
