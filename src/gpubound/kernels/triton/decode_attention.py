"""Attention of one token a row, or a few, in one launch: q and k normed and rotated, k and v cached, keys split over programs.

The programs of a row and kv head share the live keys in equal parts; the last to finish combines all of them, in their order,
so the bits do not depend on which that was. Only as many programs work as the live length needs: the cost follows it, not the
size of the cache. The program whose part ends with the new token reads its k and v from the product and caches them.

Each of several tokens of a row has separate programs, which compute the same bits as if it came alone. They cannot wait for
each other's writes to the cache, so they recompute the keys of the new tokens before theirs. Where other bits are allowed, the
queries of all tokens are one tile (`_together_kernel`).

The keys that rows share are read by another launch, for the queries of all of them in one tile; it leaves what they come to in
fp32. This launch overlaps with it, waits for it once a row's own keys are read, and a row's first part adds the two.

A cache may hold 8-bit values: tiles are multiplied as integers or e4m3, which bf16 holds exactly. The scales of keys are
applied to the scores, those of values to the weights. It may have pages, of which a table names those of each row: a position
is then looked up, and the bits are the same.

Heads are handled as halves, because the rotation pairs dimensions i and i + D/2. If it rotates PAIRS pairs only, those of the
first 2 PAIRS dimensions, the dimensions after them are paired likewise, and are not changed. A product's heads may have the
pairs interleaved: they are taken apart where they are read, so that the cache has one order.

NEW is how many heads of the product a KV head has besides its queries': key and value, a key that is the value too, or none.
Without one, the launch of an earlier layer has cached the new tokens' keys and values: all keys are read from the cache then,
after the wait.
"""

import torch
import triton
import triton.language as tl

from ...device import interpreted
from ..decode_attention import LARGEST, MANY, TINY, new_heads, written
from ..decode_product import EARLY, LATE, Norm, can_chain
from ..invariant import MEMBERS
from ..plans.types import AttentionPlan, cdiv, job_of, power_of_two
from ._launch import _begin, _wait, bump_versions, launch, options
from ._math import capped

_LEAST_SCALE = tl.constexpr(TINY)
_HALFWAY = tl.constexpr(1.5 * 2**23)  # added to a value and subtracted again, it rounds to an integer


@triton.jit
def _halves(ptr, i, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Pointers to both halves of a head, from those to its dimensions `i`.

    If all dimensions rotate, the second is the first plus a constant. With separate offsets for each, attention took 80
    registers instead of 92, and a step of a 1b model a tenth longer.
    """
    if PAIRS == HALF:
        return ptr, ptr + HALF
    else:
        turned = i < PAIRS
        return ptr + tl.where(turned, 0, PAIRS), ptr + tl.where(turned, PAIRS, HALF)


@triton.jit
def _pairs(ptr, i, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Pointers as of `_halves`, to a head as the product has it, whose rotated pairs may be interleaved."""
    if INTERLEAVED:
        turned = i < PAIRS
        return ptr + tl.where(turned, i, PAIRS), ptr + tl.where(turned, i + 1, HALF)
    else:
        return _halves(ptr, i, HALF, PAIRS)


@triton.jit
def _gain(norm_ptr, mask, OFFSET: tl.constexpr):
    gain = tl.load(norm_ptr, mask=mask, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        gain += OFFSET
    return gain


@triton.jit
def _sum(ptr, mask, apart, TERMS: tl.constexpr):
    """The product, or the sum of its TERMS, which lie `apart`: in fp32, and read past the L1, for the launch may begin before
    what a wait does to it (_launch.py)."""
    y = tl.load(ptr, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    for part in tl.static_range(1, TERMS):
        y += tl.load(ptr + part * apart, mask=mask, other=0.0, cache_modifier=".cg")
    return y


@triton.jit
def _factor(row_ptr, eps, apart, TERMS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the factor of an RMSNorm over a full row, without the gain."""
    col = tl.arange(0, 1024)
    square = tl.zeros([1024], tl.float32)
    for start in range(0, WIDTH, 1024):
        x = _sum(row_ptr + start + col, start + col < WIDTH, apart, TERMS)
        square = tl.fma(x, x, square)
    return 1.0 / tl.sqrt(tl.sum(square, 0) / WIDTH + eps)


@triton.jit
def _head(row_ptr, head, norm_ptr, c, s, eps, mask, i, apart, TERMS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
          NORM: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """The halves of each head, whose first dimensions lie `head` (heads, 1) behind row_ptr, normed if the model does so, and
    turned. NORM: 0, 1 for one norm of every head, or the width of a row that is normed as a whole.

    Where two products are added it says which one the fused multiply-add takes: left to the compiler, a new token's key had
    other bits in its own program than in those of later tokens.
    """
    first, second = _pairs(row_ptr + head + i[None], i[None], HALF, PAIRS, INTERLEAVED)
    a, b = _sum(first, mask, apart, TERMS), _sum(second, mask, apart, TERMS)
    if NORM == 1:
        factor = 1.0 / tl.sqrt(tl.sum(tl.fma(a, a, b * b), 1) / (2 * HALF) + eps)[:, None]
        first, second = _pairs(norm_ptr + i, i, HALF, PAIRS, INTERLEAVED)
        a = a * factor * _gain(first, i < HALF, OFFSET)[None]
        b = b * factor * _gain(second, i < HALF, OFFSET)[None]
    elif NORM > 1:
        factor = _factor(row_ptr, eps, apart, TERMS, NORM)
        first, second = _pairs(norm_ptr + head + i[None], i[None], HALF, PAIRS, INTERLEAVED)
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
def _new(row, k_ptr, k_norm, c, s, eps, kv, i, apart, TERMS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr,
         HALF: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
         Q: tl.constexpr, V_EPS: tl.constexpr, NEW: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """k and v of the token whose product starts at `row`, as the cache holds them: (1, HALF) each half, and their scales."""
    D: tl.constexpr = 2 * HALF
    kind = k_ptr.dtype.element_ty
    one = (i < HALF)[None]
    keys = row + GROUP * KV * (Q * D)
    new_v = keys + kv * D + i[None] + (NEW - 1) * KV * D
    ka, kb = _head(keys, kv * D, k_norm, c, s, eps, one, i, apart, TERMS, HALF, PAIRS, NORM, OFFSET, INTERLEAVED)
    va, vb = _sum(new_v, one, apart, TERMS), _sum(new_v + HALF, one, apart, TERMS)
    if V_EPS > 0.0:
        factor = 1.0 / tl.sqrt(tl.sum(tl.fma(va, va, vb * vb), 1) / D + V_EPS)[:, None]
        va, vb = va * factor, vb * factor
    if MOST is None:
        return ka.to(kind), kb.to(kind), va.to(kind), vb.to(kind), 1.0, 1.0
    else:  # what follows a return is compiled, too
        ka, kb, ks = _coded(ka, kb, MOST)
        va, vb, vs = _coded(va, vb, MOST)
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
              apart, TERMS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
              NORM: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, Q: tl.constexpr, V_EPS: tl.constexpr,
              NEW: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """The tile with its row's new token t, wherever one of its places is that token's."""
    # a position beyond the table has no page: no key there is live
    c, s = _angle(cos_ptr, sin_ptr, tl.minimum(tl.maximum(first + t, 0), length - 1), i, PAIRS)
    new_row = qkv_ptr + (row * TOKENS + t) * (Q * GROUP + NEW) * KV * (2 * HALF)
    na, nb, ua, ub, ns, us = _new(new_row, k_ptr, k_norm, c, s, eps, kv, i, apart, TERMS, KV, GROUP, HALF, PAIRS, NORM, OFFSET,
                                  INTERLEAVED, Q, V_EPS, NEW, MOST)  # fmt: skip
    here = live & (place == first + t)
    if MOST is not None:
        ks, vs = tl.where(here, ns, ks), tl.where(here, us, vs)
        na, nb, ua, ub = na.to(KIND), nb.to(KIND), ua.to(KIND), ub.to(KIND)
    here = here[:, None]
    ka, kb = tl.where(here, na, ka), tl.where(here, nb, kb)
    return ka, kb, tl.where(here, ua, va), tl.where(here, ub, vb), ks, vs


NOTHING = tl.constexpr(-1e30)  # below every score; -inf would make NaN of -inf - -inf
# Parts that are loaded at once. H200, a step of 350m: at 150 tokens, 3 parts, 377 us by 4, 380 by 8, 397 all in one tile of
# three dimensions; at 4,200, 32 parts, 513 by 4 and 498 by 8. The kernel compiles in 1.9 s by 4, in 1.2 s with single ones.
TOGETHER = 4
MOST_TOGETHER = 64  # queries of a row and KV head that one tile takes; their sums are in registers


@triton.jit
def _part(qa, qb, m, weight, acc_a, acc_b, ka, kb, va, vb, ks, vs, live, CAP: tl.constexpr, KIND: tl.constexpr,
          WIDE: tl.constexpr, SINGLE: tl.constexpr = False):  # fmt: skip
    """Online softmax over one tile of keys, where they are `live` (1 or G, N). SINGLE: of one query, without tensor cores."""
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        ka, kb, va, vb = ka.to(tl.float32), kb.to(tl.float32), va.to(tl.float32), vb.to(tl.float32)
    kind = ka.dtype
    if SINGLE:
        score = tl.sum(qa * ka.to(tl.float32) + qb * kb.to(tl.float32), 1)[None]
    else:
        score = tl.dot(qa.to(kind), tl.trans(ka), input_precision="ieee")
        score = tl.dot(qb.to(kind), tl.trans(kb), score, input_precision="ieee")
    if KIND is not None:
        score *= ks[None]
    if CAP > 0.0:
        score = capped(score, CAP)
    score = tl.where(live, score, NOTHING)
    new = tl.maximum(m, tl.max(score, 1))
    p, fix = tl.exp(score - new[:, None]), tl.exp(m - new)
    weight = weight * fix + tl.sum(p, 1)
    if KIND is not None:
        p *= vs[None]
    if SINGLE:
        acc_a = acc_a * fix[:, None] + tl.sum(tl.trans(p) * va.to(tl.float32), 0)[None]
        acc_b = acc_b * fix[:, None] + tl.sum(tl.trans(p) * vb.to(tl.float32), 0)[None]
    else:
        acc_a = tl.dot(p.to(kind), va, acc_a * fix[:, None], input_precision="ieee")
        acc_b = tl.dot(p.to(kind), vb, acc_b * fix[:, None], input_precision="ieee")
    return new, weight, acc_a, acc_b


@triton.jit
def _plus_part(m, weight, acc_a, acc_b, line, mask, halves, i, other, HALF: tl.constexpr):
    """Add what another program left at `line` (G,): both halves of a sum, its largest score and its weight. other: the weight
    where `mask` (G,) is false, and `halves` (G, HP) is too."""
    D: tl.constexpr = 2 * HALF
    # .cg: what other programs wrote is in the L2, and this multiprocessor's L1 may hold the last step's
    their_m = tl.load(line + D, mask=mask, other=NOTHING, cache_modifier=".cg")
    their_weight = tl.load(line + D + 1, mask=mask, other=other, cache_modifier=".cg")
    their_a = tl.load(line[:, None] + i[None], mask=halves, other=0.0, cache_modifier=".cg")
    their_b = tl.load(line[:, None] + i[None] + HALF, mask=halves, other=0.0, cache_modifier=".cg")
    new = tl.maximum(m, their_m)
    fix, factor = tl.exp(m - new), tl.exp(their_m - new)
    weight = weight * fix + their_weight * factor
    acc_a = acc_a * fix[:, None] + their_a * factor[:, None]
    acc_b = acc_b * fix[:, None] + their_b * factor[:, None]
    return new, weight, acc_a, acc_b


@triton.jit
def _combined(mine, parts, g, i, heads, GROUP: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, HP: tl.constexpr,
              TOGETHER: tl.constexpr):  # fmt: skip
    """Combine all parts of a row and KV head, (G, HP) each half. A load from the L2 brings TOGETHER of them."""
    D: tl.constexpr = 2 * HALF
    m, weight = tl.full([G], NOTHING, tl.float32), tl.zeros([G], tl.float32)
    acc_a, acc_b = tl.zeros([G, HP], tl.float32), tl.zeros([G, HP], tl.float32)
    for start in range(0, parts, TOGETHER):
        for j in tl.static_range(TOGETHER):
            other = tl.zeros([G], tl.int32) + start + j
            line, in_range = mine + (other * GROUP + g) * (D + 2), (g < GROUP) & (other < parts)
            m, weight, acc_a, acc_b = _plus_part(
                m, weight, acc_a, acc_b, line, in_range, heads & in_range[:, None], i, 1.0, HALF
            )
    return acc_a / weight[:, None], acc_b / weight[:, None]


@triton.jit
def _store(to, gate, a, b, mask, HALF: tl.constexpr, Q: tl.constexpr):
    """Write the halves of some heads' outputs, times the sigmoids of their gates if they have any."""
    if Q == 2:
        a = a / (1.0 + tl.exp(-tl.load(gate, mask=mask, other=0.0).to(tl.float32)))
        b = b / (1.0 + tl.exp(-tl.load(gate + HALF, mask=mask, other=0.0).to(tl.float32)))
    tl.store(to, a.to(to.dtype.element_ty), mask=mask)
    tl.store(to + HALF, b.to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _shared_keys_kernel(qkv_ptr, position_ptr, k_ptr, v_ptr, k_scale, v_scale, pages, rows_ptr, counts_ptr, cos_ptr, sin_ptr,
                        q_norm, eps, scale, state_ptr, length_max, total, rows, apart, TERMS: tl.constexpr, KV: tl.constexpr,
                        GROUP: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, N: tl.constexpr,
                        PAIRS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
                        Q: tl.constexpr, NEW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr,
                        KIND: tl.constexpr, MEMBERS: tl.constexpr, OVERLAPPED: tl.constexpr):  # fmt: skip
    """Leave in state_ptr (rows, KV, GROUP, D + 2) what the keys that a group of rows shares come to: the queries of up to
    MEMBERS rows, G at once, over the keys of the one of them that is at the largest position. OVERLAPPED: the next launch may
    run at the same time. This one is plain: all launches before it have ended, which both read from."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    EACH: tl.constexpr = G // GROUP
    D: tl.constexpr = 2 * HALF
    tiles = tl.cdiv(MEMBERS, EACH)
    kv, tile, group = tl.program_id(0) % KV, tl.program_id(0) // KV % tiles, tl.program_id(0) // KV // tiles
    g, i, n = tl.arange(0, G), tl.arange(0, HP), tl.arange(0, N)
    inside, member = i < HALF, tile * EACH + g // GROUP
    row = tl.load(rows_ptr + group * MEMBERS + member, mask=(g // GROUP < EACH) & (member < MEMBERS), other=-1)
    here = (row >= 0) & (row < rows)
    position = tl.load(position_ptr + row, mask=here, other=-1)
    leader = tl.max(tl.where(here & (position == tl.max(position, 0)), row, -1), 0)
    if leader >= 0:
        end = tl.minimum(tl.load(counts_ptr + leader), length_max)  # before the queries are there, which the keys wait for
        row, head = tl.where(here, row, 0), kv * GROUP + g % GROUP
        heads = here[:, None] & inside[None]
        angle = tl.where((position >= 0) & (position < length_max), position, 0)[:, None] * PAIRS + i[None]
        c = tl.load(cos_ptr + angle, mask=(i < PAIRS)[None], other=1.0)
        s = tl.load(sin_ptr + angle, mask=(i < PAIRS)[None], other=0.0)
        first = (row * ((Q * GROUP + NEW) * KV) + head * Q)[:, None] * D
        qa, qb = _head(qkv_ptr, first, q_norm, c, s, eps, heads, i, apart, TERMS, HALF, PAIRS, NORM, OFFSET, INTERLEAVED)
        qa *= scale
        qb *= scale
        if PAGE is None:
            base = (leader * KV + kv).to(tl.int64) * length_max
            k_ptr += base * D
            v_ptr += base * D
            if KIND is not None:
                k_scale += base
                v_scale += base
        m, weight = tl.full([G], NOTHING, tl.float32), tl.zeros([G], tl.float32)
        acc_a, acc_b = tl.zeros([G, HP], tl.float32), tl.zeros([G, HP], tl.float32)
        for start in range(0, end, N):
            live = start + n < end
            ka, kb, va, vb, ks, vs = _old(k_ptr, v_ptr, k_scale, v_scale, pages, leader, start + n, live, i, inside, length_max,
                                          total, kv, KV, HALF, PAIRS, PAGE, KIND)  # fmt: skip
            m, weight, acc_a, acc_b = _part(
                qa, qb, m, weight, acc_a, acc_b, ka, kb, va, vb, ks, vs, live[None], CAP, KIND, WIDE
            )
        line = state_ptr + ((row * KV + kv) * GROUP + g % GROUP) * (D + 2)
        tl.store(line[:, None] + i[None], acc_a, mask=heads)
        tl.store(line[:, None] + i[None] + HALF, acc_b, mask=heads)
        tl.store(line + D, m, mask=here)
        tl.store(line + D + 1, weight, mask=here)


@triton.jit
def _decode_attention_kernel(qkv_ptr, position_ptr, k_ptr, v_ptr, k_scale, v_scale, pages, counts_ptr, parts_ptr, cos_ptr,
                             sin_ptr, q_norm, k_norm, sinks, eps, scale, part_ptr, count_ptr, state_ptr, out_ptr, length_max,
                             total, apart, TERMS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr,
                             G: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
                             WINDOW: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, K_NORM: tl.constexpr,
                             OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, Q: tl.constexpr, V_EPS: tl.constexpr,
                             NEW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
                             PAGE: tl.constexpr, MOST: tl.constexpr, KIND: tl.constexpr, TILES: tl.constexpr,
                             TOGETHER: tl.constexpr, AHEAD: tl.constexpr, SHARE: tl.constexpr,
                             DEPENDENT: tl.constexpr):  # fmt: skip
    """FEW: a power of two for GROUP, and G: for tensor cores. PAGE: places a page, or None. MOST: the largest code, and KIND:
    what codes are multiplied as; or None. TERMS: whose sum is qkv, `apart` in memory. TILES: of N keys, that a part has at
    least. Q: heads that a query head takes in the product, 2 with a gate. AHEAD: the first keys are asked for before the wait,
    for what a launch before the fence wrote is there (_launch.py). With counts_ptr, what `_shared_keys_kernel` leaves in
    state_ptr is added to the first part, and nothing else of a launch that may still run is read. Without parts_ptr, the grid
    has each row's parts. SHARE: programs of one query (GROUP is 1, and KV their number) that read the same head of the cache.
    """
    _begin(DEPENDENT)
    b, kv, split, splits = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1), tl.num_programs(1)
    if parts_ptr is not None:
        entry = tl.load(parts_ptr + b, cache_modifier=".cg")
        b, split = tl.where(entry < 0, 0, entry & 0xFFFF), tl.where(entry < 0, SPLITS, entry >> 16 & 0xFF)
        splits = tl.maximum(entry >> 24, 1)
    D: tl.constexpr = 2 * HALF
    OWN: tl.constexpr = KV // SHARE
    HEADS: tl.constexpr = GROUP * SHARE  # whose queries read one head of the cache, of a program the head `own`
    own = kv // SHARE
    g, i, n = tl.arange(0, G), tl.arange(0, HP), tl.arange(0, N)
    inside = i < HALF
    if not AHEAD and counts_ptr is None:
        _wait(DEPENDENT)
    # .cg here and below, and in `_old`: past an L1 that may hold what was there before
    position = tl.load(position_ptr + b, cache_modifier=".cg")
    known = (position >= 0) & (position < length_max)
    if TOKENS > 1:
        first = tl.load(position_ptr + b // TOKENS * TOKENS, cache_modifier=".cg")
        known &= (first >= 0) & (first < length_max)
    position = tl.where(known, position, 0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0)
    if counts_ptr is not None:
        begin = tl.load(counts_ptr + b)
        begin = tl.where((begin > 0) & (begin <= position), begin, 0)
    chunk = tl.cdiv(tl.cdiv(position + 1 - begin, splits), N * TILES) * (N * TILES)
    lo = begin + split * chunk
    parts = tl.where(known, tl.cdiv(position + 1 - begin, chunk), 0)
    hi = tl.minimum(lo + chunk, position if NEW > 0 else position + 1)  # the keys of this part, but not the token's new one
    old = hi  # up to `old`, tiles are in the cache completely; from `first` on, keys are new
    if TOKENS > 1 and NEW > 0:
        old = lo + tl.maximum(tl.minimum(hi, first) - lo, 0) // N * N
    if PAGE is None:
        base = (b // TOKENS * OWN + own).to(tl.int64) * length_max
        k_ptr += base * D
        v_ptr += base * D
        if MOST is not None:
            k_scale += base
            v_scale += base
    c, s = _angle(cos_ptr, sin_ptr, position, i, PAIRS)
    if AHEAD:
        live = lo + n < old
        ka, kb, va, vb, ks, vs = _old(k_ptr, v_ptr, k_scale, v_scale, pages, b // TOKENS, lo + n, live, i, inside, length_max,
                                      total, own, OWN, HALF, PAIRS, PAGE, KIND)  # fmt: skip
        if counts_ptr is None:
            _wait(DEPENDENT)
    to = out_ptr + (b * KV + kv) * GROUP * D + g[:, None] * D + i[None]
    heads = (g < GROUP)[:, None] & inside[None]
    if split < parts:
        row = qkv_ptr + b * (Q * GROUP * KV + NEW * OWN) * D
        gate = row + ((kv * GROUP + g) * Q + 1)[:, None] * D + i[None]
        qa, qb = _head(row, (kv * GROUP + g)[:, None] * (Q * D), q_norm, c, s, eps, heads, i, apart, TERMS, HALF, PAIRS, NORM,
                       OFFSET, INTERLEAVED)  # fmt: skip
        if AHEAD and TOKENS == 1 and NEW > 0:  # asked for with q, by all parts: who needs them would wait once more, at its end
            na, nb, ua, ub, ns, us = _new(row, k_ptr, k_norm, c, s, eps, own, i, apart, TERMS, OWN, HEADS, HALF, PAIRS, K_NORM,
                                          OFFSET, INTERLEAVED, Q, V_EPS, NEW, MOST)  # fmt: skip
        qa *= scale
        qb *= scale
        m, weight = tl.full([G], NOTHING, tl.float32), tl.zeros([G], tl.float32)
        if sinks is not None:  # as of a key without a value, in the first part
            sink = tl.load(sinks + kv * GROUP + g, mask=g < GROUP, other=0.0).to(tl.float32)
            m, weight = tl.where(split == 0, sink, m), tl.where(split == 0, 1.0, weight)
        acc_a, acc_b = tl.zeros([G, HP], tl.float32), tl.zeros([G, HP], tl.float32)
        if AHEAD:
            # An empty tile leaves weights of 1, which the first key that is live multiplies by 0: each part has one.
            m, weight, acc_a, acc_b = _part(
                qa, qb, m, weight, acc_a, acc_b, ka, kb, va, vb, ks, vs, live[None], CAP, KIND, WIDE, SHARE > 1
            )
            lo += N
        for start in range(lo, old, N):
            live = start + n < old
            ka, kb, va, vb, ks, vs = _old(k_ptr, v_ptr, k_scale, v_scale, pages, b // TOKENS, start + n, live, i, inside,
                                          length_max, total, own, OWN, HALF, PAIRS, PAGE, KIND)  # fmt: skip
            m, weight, acc_a, acc_b = _part(
                qa, qb, m, weight, acc_a, acc_b, ka, kb, va, vb, ks, vs, live[None], CAP, KIND, WIDE, SHARE > 1
            )
        if TOKENS > 1 and NEW > 0:
            for start in range(old, hi, N):
                place = start + n
                live = place < hi
                ka, kb, va, vb, ks, vs = _old(k_ptr, v_ptr, k_scale, v_scale, pages, b // TOKENS, place, live & (place < first),
                                              i, inside, length_max, total, own, OWN, HALF, PAIRS, PAGE, KIND)  # fmt: skip
                for t in range(TOKENS - 1):  # unrolled, five tokens 128 wide spill 350 to 1,900 bytes a thread
                    ka, kb, va, vb, ks, vs = _with_new(ka, kb, va, vb, ks, vs, t, place, live, first, qkv_ptr, b // TOKENS,
                                                       k_ptr, k_norm, cos_ptr, sin_ptr, length_max, eps, own, i, apart,
                                                       TERMS, OWN, HEADS, HALF, PAIRS, K_NORM, OFFSET, INTERLEAVED, Q, V_EPS,
                                                       NEW, TOKENS, MOST, KIND)  # fmt: skip
                m, weight, acc_a, acc_b = _part(
                    qa, qb, m, weight, acc_a, acc_b, ka, kb, va, vb, ks, vs, live[None], CAP, KIND, WIDE, SHARE > 1
                )
        if counts_ptr is not None:
            _wait(DEPENDENT)
            line = state_ptr + ((b * KV + kv) * GROUP + g) * (D + 2)
            begun = g < tl.where((split == 0) & (begin > 0), GROUP, 0)
            m, weight, acc_a, acc_b = _plus_part(
                m, weight, acc_a, acc_b, line, begun, begun[:, None] & inside[None], i, 0.0, HALF
            )
        if NEW > 0:  # noqa: SIM102  # without it, nothing below is compiled
            if split == parts - 1:
                if not AHEAD or TOKENS > 1:  # of several tokens they spill 16 bytes a thread if they are held all along
                    na, nb, ua, ub, ns, us = _new(row, k_ptr, k_norm, c, s, eps, own, i, apart, TERMS, OWN, HEADS, HALF, PAIRS,
                                                  K_NORM, OFFSET, INTERLEAVED, Q, V_EPS, NEW, MOST)  # fmt: skip
                at, in_range = _place(pages, b // TOKENS, position, True, length_max, total, own, OWN, PAGE)
                one = (i < tl.where(kv % SHARE == 0, HALF, 0))[None] & in_range
                place = at * D + i[None]
                kind = k_ptr.dtype.element_ty
                low, high = _halves(k_ptr + place, i[None], HALF, PAIRS)
                tl.store(low, na.to(kind), mask=one)
                tl.store(high, nb.to(kind), mask=one)
                tl.store(v_ptr + place, ua.to(kind), mask=one)
                tl.store(v_ptr + place + HALF, ub.to(kind), mask=one)
                score = tl.sum(qa * na.to(tl.float32) + qb * nb.to(tl.float32), 1)
                if MOST is not None:
                    if kv % SHARE == 0:
                        tl.store(k_scale + at + tl.arange(0, 1), ns, mask=in_range)
                        tl.store(v_scale + at + tl.arange(0, 1), us, mask=in_range)
                    score *= ns
                if CAP > 0.0:
                    score = capped(score, CAP)
                if PAGE is not None:
                    score = tl.where(in_range, score, float("nan"))
                new = tl.maximum(m, score)
                p, fix = tl.exp(score - new), tl.exp(m - new)
                weight = weight * fix + p
                if MOST is not None:
                    p *= us
                acc_a = acc_a * fix[:, None] + p[:, None] * ua.to(tl.float32)
                acc_b = acc_b * fix[:, None] + p[:, None] * ub.to(tl.float32)
                m = new
        if parts == 1:
            share = 1.0 / weight[:, None]  # a division takes eight instructions, and a thread has 64
            _store(to, gate, acc_a * share, acc_b * share, heads, HALF, Q)
        else:
            mine = part_ptr + (b * KV + kv) * SPLITS * GROUP * (D + 2)
            line = mine + (split * GROUP + g) * (D + 2)
            tl.store(line[:, None] + i[None], acc_a, mask=heads)
            tl.store(line[:, None] + i[None] + HALF, acc_b, mask=heads)
            tl.store(line + D, m, mask=g < GROUP)
            tl.store(line + D + 1, weight, mask=g < GROUP)
            tl.debug_barrier()  # every thread's stores before the one thread that counts
            if tl.atomic_add(count_ptr + b * KV + kv, 1, sem="acq_rel") == parts - 1:
                h = tl.arange(0, FEW)  # without the rows that tensor cores want: of two heads an eighth of the loads
                ours = kv * GROUP + h[:, None]
                mask = (h < GROUP)[:, None] & inside[None]
                low, high = _combined(mine, parts, h, i, mask, GROUP, HALF, FEW, HP, TOGETHER)
                _store(out_ptr + (b * KV * GROUP + ours) * D + i[None], row + (ours * Q + 1) * D + i[None], low, high, mask,
                       HALF, Q)  # fmt: skip
                tl.store(count_ptr + b * KV + kv, 0)
    elif (split == 0) & (known == 0):  # a place that the cache does not have
        nothing = tl.full([G, HP], float("nan"), tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(to, nothing, mask=heads)
        tl.store(to + HALF, nothing, mask=heads)


@triton.jit
def _together_kernel(qkv_ptr, position_ptr, k_ptr, v_ptr, k_scale, v_scale, pages, cos_ptr, sin_ptr, q_norm, k_norm, sinks, eps,
                     scale, part_ptr, count_ptr, out_ptr, length_max, total, KV: tl.constexpr, GROUP: tl.constexpr,
                     FEW: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, N: tl.constexpr,
                     SPLITS: tl.constexpr, WINDOW: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
                     INTERLEAVED: tl.constexpr, Q: tl.constexpr, V_EPS: tl.constexpr, NEW: tl.constexpr, CAP: tl.constexpr,
                     WIDE: tl.constexpr, TOKENS: tl.constexpr, FRESH: tl.constexpr, PAGE: tl.constexpr, MOST: tl.constexpr,
                     KIND: tl.constexpr, TILES: tl.constexpr, TOGETHER: tl.constexpr, AHEAD: tl.constexpr, APART: tl.constexpr,
                     DEPENDENT: tl.constexpr):  # fmt: skip
    """All TOKENS of a row: their queries are the rows of one tile, which reads the cached keys once. The last part adds the new
    keys, a tile of FRESH that each query sees up to its own. APART: beyond one part of cached keys it has none of these, and
    waits for no tile of them. H200, a step of 2, 3, 4 and 5 tokens of 135m at 300 keys: 507, 518, 526 and 533 us, and 496, 507,
    513 and 525 so; of 6 with 32 lines 567 and 583. Names as in `_decode_attention_kernel`."""
    _begin(DEPENDENT)
    b, kv, split, splits = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1), tl.num_programs(1) - APART
    D: tl.constexpr = 2 * HALF
    ROWS: tl.constexpr = TOKENS * GROUP
    LINE: tl.constexpr = (Q * GROUP + NEW) * KV * D  # of a token, in the product
    g, i, n, j = tl.arange(0, G), tl.arange(0, HP), tl.arange(0, N), tl.arange(0, FRESH)
    inside, mine, fresh = i < HALF, g < ROWS, j < TOKENS
    if not AHEAD:
        _wait(DEPENDENT)
    position_ptr += b * TOKENS
    first = tl.load(position_ptr, cache_modifier=".cg")
    query_place = tl.load(position_ptr + g // GROUP, mask=mine, other=-1, cache_modifier=".cg")
    new_place = tl.load(position_ptr + j, mask=fresh, other=-1, cache_modifier=".cg")
    there, known = (first >= 0) & (first < length_max), (new_place >= 0) & (new_place < length_max)
    nowhere = (query_place < 0) | (query_place >= length_max)
    first = tl.where(there, first, 0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first + 1 - WINDOW, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(first - begin, splits), N * TILES), 1) * (N * TILES)
    parts = tl.maximum(tl.cdiv(first - begin, chunk), 1)
    parts = tl.where(there, tl.where(parts > 1, parts + APART, 1), 0)
    lo = begin + split * chunk
    hi = tl.minimum(lo + chunk, first)
    if PAGE is None:
        base = (b * KV + kv).to(tl.int64) * length_max
        k_ptr += base * D
        v_ptr += base * D
        if MOST is not None:
            k_scale += base
            v_scale += base
    angle = tl.where(nowhere, 0, query_place)[:, None] * PAIRS + i[None]
    c = tl.load(cos_ptr + angle, mask=(i < PAIRS)[None], other=1.0)
    s = tl.load(sin_ptr + angle, mask=(i < PAIRS)[None], other=0.0)
    angle = tl.where(known, new_place, 0)[:, None] * PAIRS + i[None]
    new_c = tl.load(cos_ptr + angle, mask=(i < PAIRS)[None], other=1.0)
    new_s = tl.load(sin_ptr + angle, mask=(i < PAIRS)[None], other=0.0)
    live = lo + n < hi
    if AHEAD:
        ka, kb, va, vb, ks, vs = _old(k_ptr, v_ptr, k_scale, v_scale, pages, b, lo + n, live, i, inside, length_max, total, kv,
                                      KV, HALF, PAIRS, PAGE, KIND)  # fmt: skip
        _wait(DEPENDENT)
    row = qkv_ptr + b * TOKENS * LINE
    token, head = g // GROUP, kv * GROUP + g % GROUP
    heads = mine[:, None] & inside[None]
    gate = row + (token * LINE + (head * Q + 1) * D)[:, None] + i[None]
    to = out_ptr + ((b * TOKENS + token) * (KV * GROUP) + head)[:, None] * D + i[None]
    if split < parts:
        qa, qb = _head(row, (token * LINE + head * (Q * D))[:, None], q_norm, c, s, eps, heads, i, 0, 1, HALF, PAIRS, NORM,
                       OFFSET, INTERLEAVED)  # fmt: skip
        ones = fresh[:, None] & inside[None]
        keys = row + GROUP * KV * (Q * D)
        new_key = (j * LINE + kv * D)[:, None]
        na, nb = _head(keys, new_key, k_norm, new_c, new_s, eps, ones, i, 0, 1, HALF, PAIRS, NORM, OFFSET, INTERLEAVED)
        new_v = keys + (NEW - 1) * KV * D + new_key + i[None]
        ua, ub = _sum(new_v, ones, 0, 1), _sum(new_v + HALF, ones, 0, 1)
        if V_EPS > 0.0:
            normed = 1.0 / tl.sqrt(tl.sum(tl.fma(ua, ua, ub * ub), 1) / D + V_EPS)[:, None]
            ua, ub = ua * normed, ub * normed
        kind = k_ptr.dtype.element_ty
        ns, us = 1.0, 1.0
        if MOST is None:
            na, nb, ua, ub = na.to(kind), nb.to(kind), ua.to(kind), ub.to(kind)
        else:
            na, nb, ns = _coded(na, nb, MOST)
            ua, ub, us = _coded(ua, ub, MOST)
        qa *= scale
        qb *= scale
        m, weight = tl.full([G], NOTHING, tl.float32), tl.zeros([G], tl.float32)
        if sinks is not None:  # as of a key without a value, in the first part
            sink = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32)
            m, weight = tl.where(split == 0, sink, m), tl.where(split == 0, 1.0, weight)
        acc_a, acc_b = tl.zeros([G, HP], tl.float32), tl.zeros([G, HP], tl.float32)
        oldest = query_place - WINDOW if WINDOW > 0 else query_place * 0 - 1
        if AHEAD:
            if not APART or lo < hi:
                sees = live[None] & ((lo + n)[None] > oldest[:, None])
                m, weight, acc_a, acc_b = _part(qa, qb, m, weight, acc_a, acc_b, ka, kb, va, vb, ks, vs, sees, CAP, KIND, WIDE)
            lo += N
        for start in range(lo, hi, N):
            live = start + n < hi
            ka, kb, va, vb, ks, vs = _old(k_ptr, v_ptr, k_scale, v_scale, pages, b, start + n, live, i, inside, length_max,
                                          total, kv, KV, HALF, PAIRS, PAGE, KIND)  # fmt: skip
            sees = live[None] & ((start + n)[None] > oldest[:, None])
            m, weight, acc_a, acc_b = _part(qa, qb, m, weight, acc_a, acc_b, ka, kb, va, vb, ks, vs, sees, CAP, KIND, WIDE)
        if split == parts - 1:
            at, in_range = _place(pages, b, tl.where(known, new_place, 0), known, length_max, total, kv, KV, PAGE)
            written, spot = in_range[:, None] & inside[None], at[:, None] * D + i[None]
            low, high = _halves(k_ptr + spot, i[None], HALF, PAIRS)
            tl.store(low, na.to(kind), mask=written)
            tl.store(high, nb.to(kind), mask=written)
            tl.store(v_ptr + spot, ua.to(kind), mask=written)
            tl.store(v_ptr + spot + HALF, ub.to(kind), mask=written)
            if MOST is None:  # 0 times a value that is not finite is NaN, which must not reach those that do not see it
                fa, fb, both = na, nb, ua.to(tl.float32) - ua.to(tl.float32) + (ub.to(tl.float32) - ub.to(tl.float32))
                lost = tl.sum((both != 0.0).to(tl.int32), 1) > 0
                wa, wb = tl.where(lost[:, None], 0.0, ua).to(kind), tl.where(lost[:, None], 0.0, ub).to(kind)
                factor = 1.0
            else:
                tl.store(k_scale + at, ns, mask=in_range)
                tl.store(v_scale + at, us, mask=in_range)
                fa, fb, wa, wb = na.to(KIND), nb.to(KIND), ua.to(KIND), ub.to(KIND)
                lost = us != us
                factor = tl.where(lost, 0.0, us)
            if PAGE is not None:
                lost |= known & (in_range == 0)
            own = (j[None] <= token[:, None]) & known[None] & (new_place[None] > oldest[:, None])
            m, weight, acc_a, acc_b = _part(qa, qb, m, weight, acc_a, acc_b, fa, fb, wa, wb, ns, factor, own, CAP, KIND, WIDE)
            broken = tl.sum((own & lost[None]).to(tl.int32), 1) > 0
            weight = tl.where(broken | nowhere, float("nan"), weight)
        if parts == 1:
            share = 1.0 / weight[:, None]
            _store(to, gate, acc_a * share, acc_b * share, heads, HALF, Q)
        else:
            mine_ptr = part_ptr + (b * KV + kv) * SPLITS * ROWS * (D + 2)
            line = mine_ptr + (split * ROWS + g) * (D + 2)
            tl.store(line[:, None] + i[None], acc_a, mask=heads)
            tl.store(line[:, None] + i[None] + HALF, acc_b, mask=heads)
            tl.store(line + D, m, mask=mine)
            tl.store(line + D + 1, weight, mask=mine)
            tl.debug_barrier()  # every thread's stores before the one thread that counts
            if tl.atomic_add(count_ptr + b * KV + kv, 1, sem="acq_rel") == parts - 1:
                h = tl.arange(0, FEW)
                mask = (h < ROWS)[:, None] & inside[None]
                low, high = _combined(mine_ptr, parts, h, i, mask, ROWS, HALF, FEW, HP, TOGETHER)
                ours = ((b * TOKENS + h // GROUP) * (KV * GROUP) + kv * GROUP + h % GROUP)[:, None] * D
                theirs = (h // GROUP * LINE + ((kv * GROUP + h % GROUP) * Q + 1) * D)[:, None]
                _store(out_ptr + ours + i[None], row + theirs + i[None], low, high, mask, HALF, Q)
                tl.store(count_ptr + b * KV + kv, 0)
    elif (split == 0) & (there == 0):  # a place that the cache does not have
        nothing = tl.full([G, HP], float("nan"), tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(to, nothing, mask=heads)
        tl.store(to + HALF, nothing, mask=heads)


@torch.no_grad()
def decode_attention(qkv, position, cache, heads, scratch, out, dependent=0):
    _, KV, page, D = cache.k.shape
    cos, sin, q_norm, k_norm, scale, window, cap, interleaved, sinks, _, v_eps = heads
    partial, finished, tiles, most_keys, parts, many, together, by_query = scratch
    norms = [0 if norm is None else 1 if len(norm.weight) == D else len(norm.weight) for norm in (q_norm, k_norm)]
    (q_weight, eps, offset), (k_weight, *_) = (norm or Norm(qkv, 0.0) for norm in (q_norm, k_norm))  # qkv: any, not read
    splits, tokens = partial.shape[2], position.numel() // len(position)
    terms, apart = (len(qkv), qkv[0].numel()) if qkv.dim() == 3 else (1, 0)
    group, new = out.shape[1] // D // KV, new_heads(qkv, cache, out, heads)
    least, HP = power_of_two(group), max(16, power_of_two(D // 2))
    G = max(16, least)  # 16: the least that tensor cores take
    most, kind, itemsize = LARGEST.get(cache.k.dtype), None, cache.k.element_size()
    if most is not None:  # bf16 holds every code, and unlike fp16 the weights times any scale of the values
        kind, itemsize = (tl.float32, 4) if interpreted() or out.dtype == torch.float32 else (tl.bfloat16, 2)

    pages, shared, state, overlapping = page if cache.pages is not None else None, cache.shared, None, False
    if shared is not None:
        lines = max(16 if itemsize == 4 else 32, power_of_two(group))
        keys, warps = (64, 4) if D <= 128 else (16, 8)
        overlapping = can_chain(out.device) and not interpreted()
        state = torch.empty(len(position), KV, group, D + 2, device=out.device, dtype=torch.float32)
        _shared_keys_kernel[(len(shared.rows) * cdiv(MEMBERS, lines // group) * KV,)](
            qkv, position, *cache[:5], *shared, cos, sin, q_weight, eps, scale, state, len(cos), len(cache.k), len(position),
            apart, terms, KV, group, lines, D // 2, HP, keys, cos.shape[1], norms[0], offset, interleaved, heads.q_width, new,
            cap, interpreted(), pages, kind, MEMBERS, overlapping, num_warps=warps, num_stages=2,
        )  # fmt: skip

    way = "many" if many or position.numel() * KV >= MANY else "several" if tiles > 1 and tokens == 1 else ""
    plain = not dependent and way == "many" and cache.k.element_size() == 2 and D <= 128  # what was measured
    ahead = (new > 0 and (dependent == EARLY or plain)) or (by_query and dependent == LATE)
    together = together and tokens > 1 and new > 0 and max(norms) < 2 and group * tokens <= MOST_TOGETHER
    share, jobs = 1, (group * tokens if together else group, D // 2, KV, itemsize)
    at_once = 1 if tokens > 1 else 2 * TOGETHER if by_query else TOGETHER
    if by_query and not together:
        way, KV, share, group, least, G = "by query", KV * group, group, 1, 1, 1

    def along(plan: AttentionPlan) -> int:  # programs without a part take time
        return min(splits, cdiv(min(most_keys or len(cos), len(cos)), plan.keys * tiles))

    def run(plan: AttentionPlan) -> None:
        grid = (position.numel() * KV, along(plan)) if parts is None else (len(parts) * KV, 1)
        _decode_attention_kernel[grid](
            qkv, position, *cache[:5], None if shared is None else shared.counts, parts, cos, sin, q_weight, k_weight, sinks,
            eps, scale, partial, finished, state, out, len(cos), len(cache.k), apart, terms, KV, group, least, G, D // 2, HP,
            plan.keys, splits, window, cos.shape[1], *norms, offset, interleaved, heads.q_width, v_eps, new, cap,
            interpreted(), tokens, pages, most, kind, tiles, at_once, ahead, share,
            num_stages=plan.stages,
            **options(plan.warps, EARLY if dependent else LATE if overlapping else 0),
        )  # fmt: skip

    def run_together(plan: AttentionPlan) -> None:
        fresh, lines, programs = max(16, power_of_two(tokens)), power_of_two(group * tokens), along(plan)
        separate = way == "" and lines <= 16 and programs > 1 and splits > 2
        _together_kernel[(len(position) * KV, min(splits, programs + separate))](
            qkv, position, *cache[:5], cos, sin, q_weight, k_weight, sinks, eps, scale, partial, finished, out, len(cos),
            len(cache.k), KV, group, lines, max(16, lines), D // 2, HP, plan.keys, splits, window, cos.shape[1], norms[0],
            offset, interleaved, heads.q_width, v_eps, new, cap, interpreted(), tokens, fresh, pages, most, kind, tiles,
            TOGETHER, ahead, int(separate), num_stages=plan.stages, **options(plan.warps, dependent),
        )  # fmt: skip

    launch(job_of("decode_attention", way, jobs, cache.k), run_together if together else run)
    results = written(cache, out)
    bump_versions(*results)
    return results


quantized_decode_attention = decode_attention  # the cache says by its dtype what it holds
