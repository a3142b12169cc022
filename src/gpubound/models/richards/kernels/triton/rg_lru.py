"""Kernels of rg_lru in chunks: two launches each for forward and backward, or one if the text is a single chunk.

A thread has the states of a few channels, and reads a chunk token by token. The first launch reads every chunk from a state of
0 and stores its final state, E, and the log of the factor of an initial state, A. The second computes the state before its
chunk from the preceding chunks, h = exp(A) · h + E, and reads the chunk again.

Backward runs from the other end. With G_t = dh_t + a_{t+1} · G_{t+1}, and L for log a, s for √(1 − a²), g for σ(i):

    dx = G s g        di = G s x g (1 − g)        dL = G (a h_{t-1} − x g a² / s)

1 / s is unbounded as a approaches 1. r and λ need only dL · L, which is bounded: L / s goes to 0. h_{t-1} is read from the
forward's result, in its dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....kernels.plans.types import MatrixPlan, cdiv, job_of, power_of_two
from .....kernels.triton._launch import first_order_only, launch
from .....kernels.triton._math import sigmoid


@triton.jit
def _rate(decay_ptr, col, mask):
    """Return 8 ln σ(λ), and dL/dλ over L. For small e, ln(1 + e) is computed by its series: 1 + e would round e away.

    A number below fp32's least normal one (1.2e-38) would make what it meets fp64 in Triton 3.6.
    """
    decay = tl.load(decay_ptr + col, mask=mask, other=0.0).to(tl.float32)
    e = tl.exp(-tl.abs(decay))
    series = e * (1.0 - e * (0.5 - e * (1 / 3 - e * (0.25 - e * (0.2 - e * (1 / 6 - e * (1 / 7)))))))
    log_sigmoid = tl.minimum(decay, 0.0) - tl.where(e < 0.1, series, tl.log(1.0 + e))
    slope = tl.where(decay < 0.0, 1.0, e) / (1.0 + e)  # σ(−λ)
    return 8.0 * log_sigmoid, tl.where(log_sigmoid < 0.0, slope / tl.minimum(log_sigmoid, -2e-38), -1.0)


@triton.jit
def _forgets(r, rate):
    """Return (σ(r), log a, a, √(1 − a²)). For small y, 1 − exp(y) is computed by its series."""
    open_ = sigmoid(r)
    log_a = tl.maximum(rate * open_, -80.0)
    y = 2.0 * log_a
    series = y * (1.0 + y * (1 / 2 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720 + y * (1 / 5040)))))))
    share = tl.where(y > -0.5, -series, 1.0 - tl.exp(y))
    return open_, log_a, tl.exp(log_a), tl.sqrt(share)


@triton.jit
def _place(chunk, tokens, length, channels, BLOCK: tl.constexpr):
    """Return the program's channels and their mask, the first row of its text, its first token and the end of its tokens."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = chunk * length
    return col, col < channels, tl.program_id(2).to(tl.int64) * tokens, first, tl.minimum(first + length, tokens)


@triton.jit
def _three(packed_ptr, row, col, mask, channels):
    at = packed_ptr + row * 3 * channels + col
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    r = tl.load(at + channels, mask=mask, other=0.0).to(tl.float32)
    i = tl.load(at + 2 * channels, mask=mask, other=0.0).to(tl.float32)
    return x, r, i


@triton.jit
def _fold(h, end_ptr, left_ptr, col, mask, begin, count, step, channels):
    """Return the state after `count` chunks of this program's text, from chunk `begin` on, with the initial state h."""
    base = tl.program_id(2).to(tl.int64) * tl.num_programs(1)
    for number in range(count):
        at = (base + begin + number * step) * channels + col
        left = tl.load(left_ptr + at, mask=mask, other=0.0)
        h = tl.exp(left) * h + tl.load(end_ptr + at, mask=mask, other=0.0)
    return h


@triton.jit
def _keep(h, left, end_ptr, left_ptr, chunk, chunks, col, mask, channels):
    at = (tl.program_id(2).to(tl.int64) * chunks + chunk) * channels + col
    tl.store(end_ptr + at, h, mask=mask)
    tl.store(left_ptr + at, left, mask=mask)


@triton.jit(do_not_specialize=["tokens", "length"])
def _forward_ends_kernel(packed_ptr, decay_ptr, end_ptr, left_ptr, tokens, length, channels, BLOCK: tl.constexpr):
    chunk, chunks = tl.program_id(1), tl.num_programs(1) + 1  # the last chunk's is not needed
    col, mask, row, first, stop = _place(chunk, tokens, length, channels, BLOCK)
    rate, _slope = _rate(decay_ptr, col, mask)
    h, left = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for t in range(first, stop):
        x, r, i = _three(packed_ptr, row + t, col, mask, channels)
        _, log_a, a, s = _forgets(r, rate)
        h = a * h + s * sigmoid(i) * x
        left += log_a
    _keep(h, left, end_ptr, left_ptr, chunk, chunks, col, mask, channels)


@triton.jit(do_not_specialize=["tokens", "length"])
def _forward_kernel(packed_ptr, decay_ptr, state_ptr, end_ptr, left_ptr, out_ptr, last_ptr, tokens, length, channels,
                    BLOCK: tl.constexpr, STATE: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(1)
    col, mask, row, first, stop = _place(chunk, tokens, length, channels, BLOCK)
    rate, _slope = _rate(decay_ptr, col, mask)
    own = tl.program_id(2).to(tl.int64) * channels + col
    h = tl.load(state_ptr + own, mask=mask, other=0.0).to(tl.float32) if STATE else tl.zeros([BLOCK], tl.float32)
    h = _fold(h, end_ptr, left_ptr, col, mask, 0, chunk, 1, channels)
    for t in range(first, stop):
        x, r, i = _three(packed_ptr, row + t, col, mask, channels)
        _, _, a, s = _forgets(r, rate)
        h = a * h + s * sigmoid(i) * x
        tl.store(out_ptr + (row + t) * channels + col, h.to(out_ptr.dtype.element_ty), mask=mask)
    if chunk == tl.num_programs(1) - 1:
        tl.store(last_ptr + own, h, mask=mask)


@triton.jit(do_not_specialize=["tokens", "length"])
def _backward_ends_kernel(dout_ptr, packed_ptr, decay_ptr, end_ptr, left_ptr, tokens, length, channels, BLOCK: tl.constexpr):
    chunk, chunks = tl.program_id(1) + 1, tl.num_programs(1) + 1  # the first chunk's is not needed
    col, mask, row, first, stop = _place(chunk, tokens, length, channels, BLOCK)
    rate, _slope = _rate(decay_ptr, col, mask)
    g, left = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for back in range(stop - first):
        t = stop - 1 - back
        r = tl.load(packed_ptr + ((row + t) * 3 + 1) * channels + col, mask=mask, other=0.0).to(tl.float32)
        _, log_a, a, _ = _forgets(r, rate)
        g = a * (g + tl.load(dout_ptr + (row + t) * channels + col, mask=mask, other=0.0).to(tl.float32))
        left += log_a
    _keep(g, left, end_ptr, left_ptr, chunk, chunks, col, mask, channels)


@triton.jit(do_not_specialize=["tokens", "length"])
def _backward_kernel(dout_ptr, dlast_ptr, packed_ptr, decay_ptr, state_ptr, out_ptr, end_ptr, left_ptr, dpacked_ptr,
                     ddecay_ptr, dstate_ptr, tokens, length, channels, BLOCK: tl.constexpr, STATE: tl.constexpr,
                     LAST: tl.constexpr):  # fmt: skip
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    col, mask, row, first, stop = _place(chunk, tokens, length, channels, BLOCK)
    rate, slope = _rate(decay_ptr, col, mask)
    own = tl.program_id(2).to(tl.int64) * channels + col
    begin = tl.load(state_ptr + own, mask=mask, other=0.0).to(tl.float32) if STATE else tl.zeros([BLOCK], tl.float32)
    g = tl.load(dlast_ptr + own, mask=mask, other=0.0).to(tl.float32) if LAST else tl.zeros([BLOCK], tl.float32)
    g = _fold(g, end_ptr, left_ptr, col, mask, chunks - 1, chunks - 1 - chunk, -1, channels)
    total = tl.zeros([BLOCK], tl.float32)
    for back in range(stop - first):
        t = stop - 1 - back
        x, r, i = _three(packed_ptr, row + t, col, mask, channels)
        open_, log_a, a, s = _forgets(r, rate)
        gate = sigmoid(i)
        before = begin
        if t > 0:
            before = tl.load(out_ptr + (row + t - 1) * channels + col, mask=mask, other=0.0).to(tl.float32)
        g += tl.load(dout_ptr + (row + t) * channels + col, mask=mask, other=0.0).to(tl.float32)
        over = tl.where(s > 0.0, log_a / tl.where(s > 0.0, s, 1.0), 0.0)
        steep = g * a * (before * log_a - x * gate * a * over)  # dL · L
        steep = tl.where(rate * open_ < -80.0, 0.0, steep)
        at, dx, dgate = dpacked_ptr + (row + t) * 3 * channels + col, g * s * gate, g * s * x * gate * (1.0 - gate)
        tl.store(at, dx.to(dpacked_ptr.dtype.element_ty), mask=mask)
        tl.store(at + channels, (steep * (1.0 - open_)).to(dpacked_ptr.dtype.element_ty), mask=mask)
        tl.store(at + 2 * channels, dgate.to(dpacked_ptr.dtype.element_ty), mask=mask)
        total += steep
        g = a * g
    tl.store(ddecay_ptr + (tl.program_id(2).to(tl.int64) * chunks + chunk) * channels + col, total * slope, mask=mask)
    if STATE:  # noqa: SIM102 (a constant of the compilation first)
        if chunk == 0:
            tl.store(dstate_ptr + own, g, mask=mask)


def _launch(way: str, ends, kernel, packed: Tensor, inputs: list, outputs: list, operands: list, **constants: bool) -> Tensor:
    """Launch both kernels. Return partial sums (programs along the text, C), which `kernel` may write.

    inputs   what `ends` reads, and `kernel` after `operands`. operands, outputs: what `kernel` reads and writes besides
    """
    batch, tokens, channels = packed.shape[0], packed.shape[1], packed.shape[2] // 3
    partial: list[Tensor] = []

    def run(plan: MatrixPlan) -> None:
        length = min(plan.rows, tokens)
        chunks = cdiv(tokens, length)
        across = cdiv(channels, plan.columns)
        kept = torch.empty(2, batch * chunks, channels, device=packed.device, dtype=torch.float32)
        partial[:] = [kept[0]]
        sizes, options = (tokens, length, channels, plan.columns), {"num_warps": plan.warps}
        if chunks > 1:
            ends[(across, chunks - 1, batch)](*inputs, *kept, *sizes, **options)
        if way == "backward":
            partial[:] = [torch.empty_like(kept[0])]
        sums = partial if way == "backward" else []
        kernel[(across, chunks, batch)](*operands, *kept, outputs[0], *sums, *outputs[1:], *sizes, **constants, **options)

    launch(job_of("rg_lru", way, (power_of_two(tokens), channels), packed), run)
    return partial[0]


class _RGLRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, decay, state):
        packed, decay = packed.contiguous(), decay.contiguous()
        start = None if state is None else state.contiguous()
        batch, tokens, wide = packed.shape
        out = torch.empty(batch, tokens, wide // 3, device=packed.device, dtype=packed.dtype)
        last = torch.empty(batch, wide // 3, device=packed.device, dtype=torch.float32)
        operands = [packed, decay, packed if start is None else start]
        _launch(
            "forward", _forward_ends_kernel, _forward_kernel, packed, [packed, decay], [out, last], operands,
            STATE=start is not None,
        )  # fmt: skip
        ctx.save_for_backward(packed, decay, out, *([] if start is None else [start]))
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx, dout, dlast):
        first_order_only("rg_lru")
        packed, decay, out, start = (*ctx.saved_tensors, None)[:4]
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        gradient = torch.empty_like(packed)
        dstate = None if start is None else torch.empty_like(start)
        operands = [dout, dout if dlast is None else dlast.contiguous(), packed, decay, packed if start is None else start, out]
        partial = _launch(
            "backward", _backward_ends_kernel, _backward_kernel, packed, [dout, packed, decay],
            [gradient, gradient if dstate is None else dstate], operands, STATE=start is not None, LAST=dlast is not None,
        )  # fmt: skip
        return gradient, partial.sum(0).to(decay.dtype), dstate


def rg_lru(packed, decay, state=None):
    return _RGLRU.apply(packed, decay, state)
