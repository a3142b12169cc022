"""Attention of one token a row, or a few, in one launch: q and k normed and turned, k and v cached, keys split over programs.

The programs of a row and kv head share the live keys in equal parts; the last to finish combines all of them, in their order,
so the bits do not depend on which that was. Only as many programs work as the live length feeds: the cost follows it, not the
cache. The program whose part ends with the new token takes its k and v from the product and writes them to the cache.

Of several tokens a row, each has programs of its own, which do what they would do if it came alone, to the bit. They cannot
wait for one another to write to the cache, so they compute the keys of the new tokens before their own once more.

Heads are handled as halves, dimensions i and i + D/2, because that is how the rotation pairs them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import interpreted
from ..decoding import EARLY
from ._launch import power_of_two
from .decode_product import _begin, _options, _wait

WARPS = 4
KEYS = 64  # of a tile

NOTHING = tl.constexpr(-1e30)  # below every score; -inf would make NaN of -inf - -inf


@triton.jit
def _head(x_ptr, norm_ptr, c, s, eps, mask, i, HALF: tl.constexpr, NORM: tl.constexpr):
    """The halves of each head in a (heads, HALF) tile of pointers, normed if the model does so, and turned."""
    a = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        a = a * factor * tl.load(norm_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)[None]
        b = b * factor * tl.load(norm_ptr + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None]
    return a * c - b * s, b * c + a * s


@triton.jit
def _new(row, k_ptr, k_norm, c, s, eps, kv, i, KV: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """k and v of the token whose product starts at `row`, as the cache holds them: (1, HALF) each half."""
    D: tl.constexpr = 2 * HALF
    kind = k_ptr.dtype.element_ty
    one = (i < HALF)[None]
    new_k = row + GROUP * KV * D + kv * D + i[None]
    new_v = new_k + KV * D
    ka, kb = _head(new_k, k_norm, c, s, eps, one, i, HALF, NORM)
    va = tl.load(new_v, mask=one, other=0.0)
    vb = tl.load(new_v + HALF, mask=one, other=0.0)
    return ka.to(kind), kb.to(kind), va.to(kind), vb.to(kind)


@triton.jit
def _cached(k_ptr, v_ptr, at, mask, HALF: tl.constexpr):
    """A tile of cached keys and values: (N, HALF) each half."""
    ka = tl.load(k_ptr + at, mask=mask, other=0.0)
    kb = tl.load(k_ptr + at + HALF, mask=mask, other=0.0)
    va = tl.load(v_ptr + at, mask=mask, other=0.0)
    vb = tl.load(v_ptr + at + HALF, mask=mask, other=0.0)
    return ka, kb, va, vb


@triton.jit
def _angle(cos_ptr, sin_ptr, position, i, HALF: tl.constexpr):
    c = tl.load(cos_ptr + position * HALF + i, mask=i < HALF, other=0.0)[None]
    s = tl.load(sin_ptr + position * HALF + i, mask=i < HALF, other=0.0)[None]
    return c, s


@triton.jit
def _part(qa, qb, m, weight, acc_a, acc_b, ka, kb, va, vb, live, WIDE: tl.constexpr):
    """Online softmax over one tile of keys."""
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        ka, kb, va, vb = ka.to(tl.float32), kb.to(tl.float32), va.to(tl.float32), vb.to(tl.float32)
    kind = ka.dtype
    score = tl.dot(qa.to(kind), tl.trans(ka), input_precision="ieee")
    score = tl.dot(qb.to(kind), tl.trans(kb), score, input_precision="ieee")
    score = tl.where(live[None], score, NOTHING)
    new = tl.maximum(m, tl.max(score, 1))
    p, fix = tl.exp(score - new[:, None]), tl.exp(m - new)
    weight = weight * fix + tl.sum(p, 1)
    acc_a = tl.dot(p.to(kind), va, acc_a * fix[:, None], input_precision="ieee")
    acc_b = tl.dot(p.to(kind), vb, acc_b * fix[:, None], input_precision="ieee")
    return new, weight, acc_a, acc_b


@triton.jit
def _decode_attention_kernel(qkv_ptr, position_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_norm, k_norm, eps, scale, part_ptr,
                             count_ptr, out_ptr, length_max, KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
                             HALF: tl.constexpr, HP: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
                             NORM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
                             DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    b, kv, split = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1)
    D: tl.constexpr = 2 * HALF
    g, i, n = tl.arange(0, G), tl.arange(0, HP), tl.arange(0, N)
    inside = i < HALF
    _wait(DEPENDENT)
    position = tl.load(position_ptr + b)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0)
    chunk = tl.cdiv(tl.cdiv(position + 1 - begin, SPLITS), N) * N
    lo = begin + split * chunk
    parts = tl.cdiv(position + 1 - begin, chunk)
    if split < parts:
        hi = tl.minimum(lo + chunk, position)  # the keys of this part but the token's own
        c, s = _angle(cos_ptr, sin_ptr, position, i, HALF)
        row = qkv_ptr + b * (GROUP + 2) * KV * D
        heads = (g < GROUP)[:, None] & inside[None]
        qa, qb = _head(row + (kv * GROUP + g)[:, None] * D + i[None], q_norm, c, s, eps, heads, i, HALF, NORM)
        qa *= scale
        qb *= scale
        base = (b // TOKENS * KV + kv).to(tl.int64) * length_max * D
        k_ptr += base
        v_ptr += base
        m, weight = tl.full([G], NOTHING, tl.float32), tl.zeros([G], tl.float32)
        acc_a, acc_b = tl.zeros([G, HP], tl.float32), tl.zeros([G, HP], tl.float32)
        old, first = hi, position  # up to `old`, tiles lie in the cache whole; from `first` on, keys are new
        if TOKENS > 1:
            first = tl.load(position_ptr + b // TOKENS * TOKENS)
            old = lo + tl.maximum(tl.minimum(hi, first) - lo, 0) // N * N
        for start in range(lo, old, N):
            live = start + n < hi
            at = (start + n)[:, None] * D + i[None]
            ka, kb, va, vb = _cached(k_ptr, v_ptr, at, live[:, None] & inside[None], HALF)
            m, weight, acc_a, acc_b = _part(qa, qb, m, weight, acc_a, acc_b, ka, kb, va, vb, live, WIDE)
        if TOKENS > 1:
            for start in range(old, hi, N):
                place = start + n
                live = place < hi
                at = place[:, None] * D + i[None]
                ka, kb, va, vb = _cached(k_ptr, v_ptr, at, (live & (place < first))[:, None] & inside[None], HALF)
                for t in tl.static_range(TOKENS - 1):
                    # a place beyond the table is nobody's: no key there is live
                    tc, ts = _angle(cos_ptr, sin_ptr, tl.minimum(first + t, length_max - 1), i, HALF)
                    new_row = qkv_ptr + (b // TOKENS * TOKENS + t) * (GROUP + 2) * KV * D
                    na, nb, ua, ub = _new(new_row, k_ptr, k_norm, tc, ts, eps, kv, i, KV, GROUP, HALF, NORM)
                    here = (live & (place == first + t))[:, None]
                    ka, kb = tl.where(here, na, ka), tl.where(here, nb, kb)
                    va, vb = tl.where(here, ua, va), tl.where(here, ub, vb)
                m, weight, acc_a, acc_b = _part(qa, qb, m, weight, acc_a, acc_b, ka, kb, va, vb, live, WIDE)
        if split == parts - 1:
            ka, kb, va, vb = _new(row, k_ptr, k_norm, c, s, eps, kv, i, KV, GROUP, HALF, NORM)
            one = inside[None]
            place = position * D + i[None]
            tl.store(k_ptr + place, ka, mask=one)
            tl.store(k_ptr + place + HALF, kb, mask=one)
            tl.store(v_ptr + place, va, mask=one)
            tl.store(v_ptr + place + HALF, vb, mask=one)
            score = tl.sum(qa * ka.to(tl.float32) + qb * kb.to(tl.float32), 1)
            new = tl.maximum(m, score)
            p, fix = tl.exp(score - new), tl.exp(m - new)
            weight = weight * fix + p
            acc_a = acc_a * fix[:, None] + p[:, None] * va.to(tl.float32)
            acc_b = acc_b * fix[:, None] + p[:, None] * vb.to(tl.float32)
            m = new
        to = out_ptr + (b * KV + kv) * GROUP * D + g[:, None] * D + i[None]
        if parts == 1:
            tl.store(to, (acc_a / weight[:, None]).to(out_ptr.dtype.element_ty), mask=heads)
            tl.store(to + HALF, (acc_b / weight[:, None]).to(out_ptr.dtype.element_ty), mask=heads)
        else:
            mine = part_ptr + (b * KV + kv) * SPLITS * GROUP * (D + 2)
            line = mine + (split * GROUP + g) * (D + 2)
            tl.store(line[:, None] + i[None], acc_a, mask=heads)
            tl.store(line[:, None] + i[None] + HALF, acc_b, mask=heads)
            tl.store(line + D, m, mask=g < GROUP)
            tl.store(line + D + 1, weight, mask=g < GROUP)
            tl.debug_barrier()  # every thread's stores before the one thread that counts
            if tl.atomic_add(count_ptr + b * KV + kv, 1, sem="acq_rel") == parts - 1:
                m, weight = tl.full([G], NOTHING, tl.float32), tl.zeros([G], tl.float32)
                acc_a, acc_b = tl.zeros([G, HP], tl.float32), tl.zeros([G, HP], tl.float32)
                for other in range(parts):
                    line = mine + (other * GROUP + g) * (D + 2)
                    # .cg: what other programs wrote lies in the L2, and this multiprocessor's L1 may hold the last step's
                    their_m = tl.load(line + D, mask=g < GROUP, other=0.0, cache_modifier=".cg")
                    their_weight = tl.load(line + D + 1, mask=g < GROUP, other=1.0, cache_modifier=".cg")
                    their_a = tl.load(line[:, None] + i[None], mask=heads, other=0.0, cache_modifier=".cg")
                    their_b = tl.load(line[:, None] + i[None] + HALF, mask=heads, other=0.0, cache_modifier=".cg")
                    new = tl.maximum(m, their_m)
                    fix, factor = tl.exp(m - new), tl.exp(their_m - new)
                    weight = weight * fix + their_weight * factor
                    acc_a = acc_a * fix[:, None] + their_a * factor[:, None]
                    acc_b = acc_b * fix[:, None] + their_b * factor[:, None]
                    m = new
                tl.store(to, (acc_a / weight[:, None]).to(out_ptr.dtype.element_ty), mask=heads)
                tl.store(to + HALF, (acc_b / weight[:, None]).to(out_ptr.dtype.element_ty), mask=heads)
                tl.store(count_ptr + b * KV + kv, 0)


@torch.no_grad()
def decode_attention(
    qkv: Tensor, position: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
    k_norm: Tensor | None, eps: float, scale: float, window: int, partial: Tensor, count: Tensor, out: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _, KV, length, D = k_cache.shape
    tokens = position.numel() // len(k_cache)
    group = out.shape[1] // D // KV
    G, HP = max(16, power_of_two(group)), max(16, power_of_two(D // 2))  # 16: the least that tensor cores take
    _decode_attention_kernel[(position.numel() * KV, partial.shape[2])](
        qkv, position, k_cache, v_cache, cos, sin, q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv, eps, scale, partial, count, out, length, KV, group, G, D // 2, HP, KEYS,
        partial.shape[2], window, q_norm is not None, interpreted(), tokens, **_options(WARPS, EARLY if dependent else 0),
    )  # fmt: skip
    return out, k_cache, v_cache
