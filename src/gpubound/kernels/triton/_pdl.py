"""Functions shared by the kernels of a decoding step: programmatic dependent launch (PDL), and loads of x and of weights.

PDL (`dependent`): a kernel starts while its predecessor still runs and requests its first weights, which depend on no kernel,
before it waits for x. An EARLY kernel lets its successor start at once, so that the weights of later kernels stream early; a
LATE one after it has loaded its own weights, because where a weight keeps the GPU busy, successors only take its room; a FENCE
after its wait. In a LATE chain, kernels without weights (norms, activations, attention) are EARLY.

Reads before the wait. A wait ends when the previous launch, and all launches before it, have ended. A launch begins when every
program of its predecessor has triggered it or ended, which implies nothing about older launches: where all are EARLY, several
run at once. But a kernel that triggers its successor after its wait (FENCE, LATE, and a plain launch, which triggers none) has
seen all kernels before it end. So after such a fence, however many launches later, data written before the fence may be read
without a wait:

weights, norms, tables      in every kernel: no step writes them
position, old keys, pages   in attention: written by the previous token choice; the q k v product of the first layer is a fence
position, state             in recurrences: likewise; the matrix and the ring are as the previous step has left them
sums of hc_write            written by the previous hc_write; turn_heads and routed_gate_up are fences
the exchanged streams       likewise
x of an AHEAD product       if a fence is between it and the writer of x: the shared expert's down, after routed_gate_up
ids of a down product       written by the choice of experts before routed_gate_up, which is a fence
x, qkv, gated, the new key  never: written by the previous launch, or the one before that

All writes come after the wait: launches that still run may read the old values.
"""

import triton
import triton.language as tl

from ..decode_product import AHEAD, EARLY, FENCE, LATE

AT_ONCE, AFTER, BEHIND, BEFORE = tl.constexpr(EARLY), tl.constexpr(LATE), tl.constexpr(FENCE), tl.constexpr(AHEAD)


@triton.jit
def _begin(DEPENDENT: tl.constexpr):
    if DEPENDENT == AT_ONCE or DEPENDENT == BEFORE:  # noqa: SIM109 - Triton knows no `in`
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _end(DEPENDENT: tl.constexpr):
    if DEPENDENT == AFTER:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _wait(DEPENDENT: tl.constexpr):
    if DEPENDENT > 0:
        tl.extra.cuda.gdc_wait()
    if DEPENDENT == BEHIND:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _tile(w_ptr, row, col, rows, columns, K: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of a weight of row length K: `rows` and `columns` of it are left from w_ptr on. WHOLE: no mask is needed."""
    at = w_ptr + row[:, None] * K + col[None]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(row < rows)[:, None] & (col < columns)[None], other=0.0)


@triton.jit
def _row(x_ptr, col, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x_ptr + col).to(tl.float32)
    return tl.load(x_ptr + col, mask=col < K, other=0.0).to(tl.float32)


@triton.jit
def _fresh_row(x_ptr, col, K: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr):
    """Bypass the L1 before the wait: only a wait on this multiprocessor invalidates the L1."""
    if DEPENDENT != BEFORE:
        return _row(x_ptr, col, K, EVEN)
    return tl.load(x_ptr + col, mask=col < K, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _gained(x, norm_ptr, col, K: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr):
    """x times a norm's gain, which is GAIN + its weight."""
    if GAIN is not None:
        gain = _row(norm_ptr, col, K, EVEN)
        if GAIN != 0.0:
            gain += GAIN
        x = x * gain
    return x


@triton.jit
def _products(x_ptr, norm_ptr, w_ptr, w, row, col, left, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
              WHOLE: tl.constexpr, GAIN: tl.constexpr, DEPENDENT: tl.constexpr = 0):  # fmt: skip
    """A row of x, times its norm's gain, with R rows of a weight, `left` of which are there, by column; and x's squares.

    w: the first tile of the weight, which was asked for before x was there."""
    EVEN: tl.constexpr = K % C == 0
    total, square = tl.zeros([R, C], tl.float32), tl.zeros([C], tl.float32)
    for start in range(0, K, C):
        x = _fresh_row(x_ptr + start, col, K - start, EVEN, DEPENDENT)
        total += w.to(tl.float32) * _gained(x, norm_ptr + start, col, K - start, EVEN, GAIN)[None]
        square += x * x
        if start + C < K:
            w = _tile(w_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
    return total, square
