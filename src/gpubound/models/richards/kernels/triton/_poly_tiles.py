"""What polynomial attention's kernels share: a score, bent, and its powers; the tiles that a program walks; the distance term.

A program owns a tile of tokens of one head and walks along the tiles of the others: queries along keys, keys along queries.
Tiles that nobody sees are skipped. Of the rest most are *plain*: every pair counts, and none is near enough for the table of
distances. The others, at the edge of what is visible or under the table's band, pay for masks and for the term. The walk so has
five stretches, of which a kernel compiles those that its form of attention can have:

    0 edge | 1 plain | 2 under the band | 3 plain | 4 edge
"""

import triton
import triton.language as tl


def stretches(keys: bool, related: bool, windowed: bool, causal: bool) -> int:
    """Which of the five there can be, a bit each. `keys`: of a walk of keys along queries."""
    before, behind = windowed or (causal and keys), windowed or (causal and not keys)
    if not related:
        return 1 * before + 8 + 16 * behind
    first, last = causal and keys, causal and not keys  # the band then begins, or ends, at the edge itself
    return 1 * (before and not first) + 2 * (not first) + 4 + 8 * (not last) + 16 * (behind and not last)


@triton.jit
def _walk(own, OWN: tl.constexpr, N: tl.constexpr, tokens, window, nearest, farthest, KEYS: tl.constexpr,
          RELATED: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Where the five stretches begin, and where the last one ends: multiples of N, which never fall.

    With e = own − other, pairs count from −window to window, or up to or from 0 if causal; the band is where e is `nearest` to
    `farthest`.
    """
    low, high = 0, 0
    if not CAUSAL or KEYS:
        low = 1 - window
    if not (CAUSAL and KEYS):
        high = window - 1
    begin, plain = 0, 0
    if WINDOW or (CAUSAL and KEYS):
        begin = tl.maximum(own - high, 0) // N * N
        plain = tl.cdiv(tl.maximum(own + OWN - 1 - high, 0), N) * N
    if RELATED and CAUSAL and KEYS:
        plain = begin
    end = tl.cdiv(tokens, N) * N
    edge = end
    if WINDOW or (CAUSAL and not KEYS):
        end = tl.minimum(end, tl.cdiv(own + OWN - low, N) * N)
        edge = tl.maximum(own - low + 1, 0) // N * N
    plain = tl.minimum(tl.maximum(plain, begin), end)
    band, after = plain, plain
    if RELATED:
        band = tl.minimum(tl.maximum(tl.maximum(own - farthest, 0) // N * N, plain), end)
        after = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(own + OWN - nearest, 0), N) * N, band), end)
    edge = tl.minimum(tl.maximum(edge, after), end)
    return begin, plain, band, after, edge, end


@triton.jit
def _tile(ptr, start, stride, tokens, N: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr):
    """Rows start to start + N of one head: (N, DP), and zeros where there is nothing. Zeros add to no sum, whatever their
    weight, so nothing else has to ask where the tokens end."""
    n, d = tl.arange(0, N), tl.arange(0, DP)
    mask = (start + n < tokens)[:, None]
    if DIM < DP:
        mask &= (d < DIM)[None]
    x = tl.load(ptr + tl.cast(start, tl.int64) * stride + n[:, None] * stride + d[None], mask=mask, other=0.0)
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        x = x.to(tl.float32)
    return x


@triton.jit
def _keep(ptr, start, stride, x, tokens, N: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr):
    n, d = tl.arange(0, N), tl.arange(0, DP)
    mask = (start + n < tokens)[:, None] & (d < DIM)[None]
    at = ptr + tl.cast(start, tl.int64) * stride + n[:, None] * stride + d[None]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _head(ptr, b, head, batch_stride, head_stride):
    return ptr + tl.cast(b, tl.int64) * batch_stride + tl.cast(head, tl.int64) * head_stride


@triton.jit
def _coefficients(ptr):
    return tl.load(ptr).to(tl.float32), tl.load(ptr + 1).to(tl.float32), tl.load(ptr + 2).to(tl.float32)


@triton.jit
def _dot(a, b, total=None):
    """In 16 bits on tensor cores; fp32 there as three products, whose error is that of fp32."""
    return tl.dot(a.to(b.dtype), b, total, input_precision="tf32x3")


@triton.jit
def _weigh(x, tile, total):
    """total + x · tile, for an x without a bound. fp16 ends at 65,504, which a fifth power of a score reaches, so there x is
    brought to 1 at most, by a power of two, and the product back."""
    if tile.dtype == tl.float16:
        unit = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1.0))))
        return total + _dot(x / unit, tile) * unit
    else:
        return _dot(x, tile, total)


@triton.jit
def _visible(query, key, window, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    distance = query - key
    seen = distance == distance
    if CAUSAL:
        seen = distance >= 0
    if WINDOW:
        seen &= (distance < window) & (distance > -window)
    return seen


@triton.jit
def _term_at(ptr, first, query, key, tokens, row_stride, back, rows):
    """Pointers to the pairs' terms, and which pairs have one. `first`: the least of the queries; offsets from its row on are
    small, and 64-bit ones would take half of a thread's registers."""
    row = query - key + back
    there = (row >= 0) & (row < rows) & (query < tokens)
    return ptr + tl.cast(first, tl.int64) * row_stride + ((query - first) * row_stride + row), there


@triton.jit
def _bent(s, over, CLIP: tl.constexpr, FAST: tl.constexpr):
    """(f, f′): f = tanh(z) of z = s · over if CLIP, f′ by z; else s itself and 1.

    FAST: the GPU's own tanh, good to 2^-11, one instruction where the other form has two of its kind: as many as softmax.
    """
    if not CLIP:
        return s, 1.0
    else:  # what follows a return is compiled, too
        z = s * over
        if FAST:
            f = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], tl.float32, True, 1)
        else:
            e = tl.exp2(tl.abs(z) * -2.8853900817779268)  # 2 / ln 2
            f = (1.0 - e) / (1.0 + e)
            f = tl.where(z < 0.0, -f, f)
        return f, 1.0 - f * f


@triton.jit
def _even_power(f, DEGREE: tl.constexpr):
    """f^(p−1)"""
    if DEGREE == 1:
        return 1.0
    else:
        low = f * f
        if DEGREE == 5:
            low = low * low
        if DEGREE == 7:
            low = low * low * low
        return low
