"""Functions shared by the kernels of a decoding step: dependent launch, and how they read x and weights.

Dependent launch (`dependent`): a kernel starts while the one before still runs and asks for its first weights, which depend on
nothing, before it waits for x. An EARLY kernel lets its own successor in at once, so that the weights of later kernels stream
in behind; a LATE one when it has its own weights, because where a weight keeps the GPU busy, successors only take its room; a
FENCE behind its wait.

What may be read before the wait. A wait ends when the launch before has ended, and all before that one. A launch begins when
every program of the one before has let it in or ended, which says nothing of older ones: where all are EARLY, several run at
once. But who lets its successor in behind its wait (FENCE, LATE, and a plain launch, which lets nobody in) has seen everything
before it end. So behind such a fence, however many launches later, what was written before the fence may be read at once:

weights, norms, tables      in every kernel: no step writes them
position, old keys, pages   in attention: the choice before wrote them; the q k v product of a span's first layer is the fence
sums of hc_write            the one before wrote them; the turn of heads and routed_gate_up are fences
the streams of a mailed one likewise
x of an AHEAD product       where a fence stands between it and who wrote x: the shared expert's down, behind routed_gate_up
ids of a down product       the choice of experts stands before routed_gate_up, which is a fence
x, qkv, gated, the new key  never: the launch before, or the one before that, writes them

All writes stand behind the wait: launches that still run may read what was there.
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
    """A tile of a weight of row length K: `rows` and `columns` of it are left from w_ptr on. WHOLE: the tile lies inside."""
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
    """Past the L1 where it is read before the wait: what empties the L1 is a wait on this multiprocessor."""
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
