"""Keys and values of a decoding step: those of new tokens, from their product, and tiles of the KV cache.

Heads are handled as halves, because that is how the rotation pairs them: dimensions i and i + D/2. Where it turns PAIRS pairs
alone, those of the first 2 PAIRS dimensions, the dimensions behind them are paired likewise, and stand still.
"""

import triton
import triton.language as tl

from ..decode_attention import TINY

_LEAST_SCALE = tl.constexpr(TINY)
_HALFWAY = tl.constexpr(1.5 * 2**23)  # added to a number and taken off again: what is left is whole


@triton.jit
def _halves(ptr, i, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Pointers to both halves of a head, from those to its dimensions `i`.

    The second is the first and a constant where all dimensions turn. With offsets of its own for each, attention took 80
    registers instead of 92, and a step of a 1b model a tenth longer.
    """
    if PAIRS == HALF:
        return ptr, ptr + HALF
    else:
        turned = i < PAIRS
        return ptr + tl.where(turned, 0, PAIRS), ptr + tl.where(turned, PAIRS, HALF)


@triton.jit
def _gain(norm_ptr, mask, OFFSET: tl.constexpr):
    gain = tl.load(norm_ptr, mask=mask, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        gain += OFFSET
    return gain


@triton.jit
def _factor(row_ptr, eps, WIDTH: tl.constexpr):
    """Return the factor of an RMSNorm over a full row, without the gain."""
    col = tl.arange(0, 1024)
    square = tl.zeros([1024], tl.float32)
    for start in range(0, WIDTH, 1024):
        x = tl.load(row_ptr + start + col, mask=start + col < WIDTH, other=0.0).to(tl.float32)
        square = tl.fma(x, x, square)
    return 1.0 / tl.sqrt(tl.sum(square, 0) / WIDTH + eps)


@triton.jit
def _head(row_ptr, head, norm_ptr, c, s, eps, mask, i, HALF: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr,
          OFFSET: tl.constexpr):  # fmt: skip
    """The halves of each head, whose first dimensions lie `head` (heads, 1) behind row_ptr, normed if the model does so, and
    turned. NORM: 0, 1 for one norm of every head, or the width of a row that is normed as a whole.

    Where two products are added it says which one the fused multiply-add takes: left to the compiler, a new token's key had
    other bits in its own program than in those of the tokens behind it.
    """
    first, second = _halves(row_ptr + head + i[None], i[None], HALF, PAIRS)
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    if NORM == 1:
        factor = 1.0 / tl.sqrt(tl.sum(tl.fma(a, a, b * b), 1) / (2 * HALF) + eps)[:, None]
        first, second = _halves(norm_ptr + i, i, HALF, PAIRS)
        a = a * factor * _gain(first, i < HALF, OFFSET)[None]
        b = b * factor * _gain(second, i < HALF, OFFSET)[None]
    elif NORM > 1:
        factor = _factor(row_ptr, eps, NORM)
        first, second = _halves(norm_ptr + head + i[None], i[None], HALF, PAIRS)
        a = a * factor * _gain(first, mask, OFFSET)
        b = b * factor * _gain(second, mask, OFFSET)
    return tl.fma(a, c, -(b * s)), tl.fma(b, c, a * s)


@triton.jit
def _rounded(x, scale, MOST: tl.constexpr):
    """The codes of x (1, HALF) as fp32 numbers. Of e4m3, three bits after the leading one are kept, and none below 2^-9."""
    level = tl.div_rn(x, scale[:, None])
    level = tl.where(level == level, level, 0.0)
    if MOST == 448.0:
        power = (level.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        magic = tl.maximum(power, 2.0**-6) * (0.125 * _HALFWAY)
    else:
        magic = _HALFWAY
    return (level + magic) - magic


@triton.jit
def _coded(a, b, MOST: tl.constexpr):
    """cached.encode of one key or value, by halves: (codes, codes, scale (1,)), all in fp32."""
    infinity = float("inf")
    size = tl.maximum(
        tl.where(tl.abs(a) < infinity, tl.abs(a), infinity), tl.where(tl.abs(b) < infinity, tl.abs(b), infinity)
    )  # of NaN too, which a maximum may leave out
    top = tl.max(size, 1)
    scale = tl.where(top < infinity, tl.maximum(top * (1 / MOST), _LEAST_SCALE), float("nan"))
    return _rounded(a, scale, MOST), _rounded(b, scale, MOST), scale


@triton.jit
def _new(row, k_ptr, k_norm, c, s, eps, kv, i, KV: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
         PAIRS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """k and v of the token whose product starts at `row`, as the cache holds them: (1, HALF) each half, and their scales."""
    D: tl.constexpr = 2 * HALF
    kind = k_ptr.dtype.element_ty
    one = (i < HALF)[None]
    keys = row + GROUP * KV * D
    new_v = keys + kv * D + i[None] + KV * D
    ka, kb = _head(keys, kv * D, k_norm, c, s, eps, one, i, HALF, PAIRS, NORM, OFFSET)
    va = tl.load(new_v, mask=one, other=0.0)
    vb = tl.load(new_v + HALF, mask=one, other=0.0)
    if MOST is None:
        return ka.to(kind), kb.to(kind), va.to(kind), vb.to(kind), 1.0, 1.0
    else:  # what follows a return is compiled, too
        ka, kb, ks = _coded(ka, kb, MOST)
        va, vb, vs = _coded(va.to(tl.float32), vb.to(tl.float32), MOST)
        return ka, kb, va, vb, ks, vs


@triton.jit
def _place(pages, row, place, mask, length, total, kv, KV: tl.constexpr, PAGE: tl.constexpr):
    """Return the offsets, in tokens, of positions of a row and KV head in the cache, and which of them exist.

    Of `total` pages a table may name one that there is not: the first is read for it, nothing written, and it counts as NaN.
    """
    if PAGE is None:
        return place, mask
    else:
        line = pages + row * tl.cdiv(length, PAGE) + place // PAGE
        page = tl.load(line, mask=mask, other=0, cache_modifier=".cg").to(tl.int64)
        in_range = (page >= 0) & (page < total)
        return (tl.where(in_range, page, 0) * KV + kv) * PAGE + place % PAGE, mask & in_range


@triton.jit
def _old(k_ptr, v_ptr, k_scale, v_scale, pages, row, place, live, i, inside, length, total, kv, KV: tl.constexpr,
         HALF: tl.constexpr, PAIRS: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """A tile of cached keys and values, those of the places that are live: (N, HALF) each half. Of codes, as KIND, with their
    scales (N,). A key that is live but not there (`_place`) is NaN.

    .cg: it may be asked for before a wait has emptied this multiprocessor's L1, which holds the scale of a key beside those of
    its neighbours, as they were a step ago.
    """
    at, in_range = _place(pages, row, place, live, length, total, kv, KV, PAGE)
    mask = live[:, None] & inside[None]
    tile = at[:, None] * (2 * HALF) + i[None]
    first, second = _halves(k_ptr + tile, i[None], HALF, PAIRS)
    ka = tl.load(first, mask=mask, other=0.0, cache_modifier=".cg")
    kb = tl.load(second, mask=mask, other=0.0, cache_modifier=".cg")
    va = tl.load(v_ptr + tile, mask=mask, other=0.0, cache_modifier=".cg")
    vb = tl.load(v_ptr + tile + HALF, mask=mask, other=0.0, cache_modifier=".cg")
    if KIND is None:
        if PAGE is not None:
            ka = tl.where((live & (in_range == 0))[:, None], float("nan"), ka)
        return ka, kb, va, vb, 1.0, 1.0
    else:
        lost: tl.constexpr = 0.0 if PAGE is None else float("nan")  # a key that is not live gets no score, whatever its scale
        ks = tl.load(k_scale + at, mask=in_range, other=lost, cache_modifier=".cg")
        vs = tl.load(v_scale + at, mask=in_range, other=0.0, cache_modifier=".cg")
        return ka.to(KIND), kb.to(KIND), va.to(KIND), vb.to(KIND), ks, vs


@triton.jit
def _angle(cos_ptr, sin_ptr, position, i, PAIRS: tl.constexpr):
    c = tl.load(cos_ptr + position * PAIRS + i, mask=i < PAIRS, other=1.0)[None]
    s = tl.load(sin_ptr + position * PAIRS + i, mask=i < PAIRS, other=0.0)[None]
    return c, s


@triton.jit
def _with_new(ka, kb, va, vb, ks, vs, t, place, live, first, qkv_ptr, row, k_ptr, k_norm, cos_ptr, sin_ptr, length, eps, kv, i,
              KV: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr,
              OFFSET: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """The tile with its row's new token t, wherever one of its places is that token's."""
    # a position beyond the table has no page: no key there is live
    c, s = _angle(cos_ptr, sin_ptr, tl.minimum(tl.maximum(first + t, 0), length - 1), i, PAIRS)
    new_row = qkv_ptr + (row * TOKENS + t) * (GROUP + 2) * KV * (2 * HALF)
    na, nb, ua, ub, ns, us = _new(new_row, k_ptr, k_norm, c, s, eps, kv, i, KV, GROUP, HALF, PAIRS, NORM, OFFSET, MOST)
    here = live & (place == first + t)
    if MOST is not None:
        ks, vs = tl.where(here, ns, ks), tl.where(here, us, vs)
        na, nb, ua, ub = na.to(KIND), nb.to(KIND), ua.to(KIND), ub.to(KIND)
    here = here[:, None]
    ka, kb = tl.where(here, na, ka), tl.where(here, nb, kb)
    return ka, kb, tl.where(here, ua, va), tl.where(here, ub, vb), ks, vs
