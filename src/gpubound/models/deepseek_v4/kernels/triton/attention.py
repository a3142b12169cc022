"""Kernels of sparse attention, of compressed keys and of the indexer.

Sparse attention: programs split a token's keys (split-K), and a second launch combines their partial results.

A program has 16 heads, which all multiply the same tile of keys. In 16 bits, a tile is loaded once, for scores and values. The
tiles of the ring come first, then those of the entries, gathered by ids or contiguous up to the limit. Tiles are assigned in
order, and a program without tiles reads no keys. A program writes its weighted sums, its largest score and its softmax weight.

The second launch has a program for each head, which adds the sums in order, with the sink in the divisor, and rotates the
result by the negative angles.

Kernel of turn_heads. A program computes one head, and loads each channel's pair partner a second time, from the cache.

Kernel of compress: pooling, norm, RoPE, and the update of pending products, in one launch for a decoding step.

A program has a window that the new tokens may fill, and m of the new tokens. It reads the window only if the window is full.
The softmax over the slots is an online softmax, in parallel over channels. Slots of older tokens are read from `pending`, which
other programs write: if new tokens could overwrite slots that a window still needs, pooling and writing are two launches.

Kernels of the indexer: one launch for the scores, and one for top-k, or two for long stores.

A program of `index_scores` multiplies a token's heads by a tile of keys on tensor cores, DEPTH channels at a time: in fp32,
which tensor cores do not support, 128 at once would spill. A tile after the limit reads no keys.

`index_topk` has one program per token. Scores are mapped to unsigned integers of the same order, and the k-th largest is found
two bits at a time: the program counts the integers that reach each of three thresholds, in one sum. After 16 rounds, all scores
above the k-th are chosen, and the first of those equal to it. A cumulative sum gives their indices in ids. A token with no more
than k visible entries chooses all.

The scores of one block stay in registers. In a longer store, each block has a program, which writes its k best; a second launch
chooses among these, which are in the order of their indices, so the result is the same. A single program would read all scores
18 times: 141 µs for 32,768. If a sequence ends in the first block, the second launch copies.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....device import interpreted
from .....kernels.plans.types import MatrixPlan, TilePlan, cdiv, job_of, power_of_two
from .....kernels.triton._launch import _begin, _wait, bump_versions, in_place, launch, options
from ..attention import MOST, MOST_HEADS


@triton.jit
def _slot(new_ptr, old_ptr, new_at, old_at, fresh, mask):
    """Load each slot's product: a new token's, or a pending one."""
    new = tl.load(new_ptr + new_at, mask=mask & fresh, other=0.0).to(tl.float32)
    return new + tl.load(old_ptr + old_at, mask=mask & ~fresh, other=0.0).to(tl.float32)


@triton.jit
def _turned(y, cos_ptr, sin_ptr, D: tl.constexpr, DP: tl.constexpr, PAIRS: tl.constexpr, BACK: tl.constexpr = False):
    """Rotate the last 2 · PAIRS of D channels, adjacent channels forming a pair. BACK: by the negative angles."""
    a, b = tl.split(tl.reshape(y, [DP // 2, 2]))
    angle = tl.arange(0, DP // 2) - (D // 2 - PAIRS)
    moving = (angle >= 0) & (angle < PAIRS)
    c = tl.load(cos_ptr + angle, mask=moving, other=1.0)
    s = tl.load(sin_ptr + angle, mask=moving, other=0.0)
    if BACK:
        s = -s
    return tl.reshape(tl.join(a * c - b * s, b * c + a * s), [DP])


@triton.jit
def _compress(position_ptr, cos_ptr, sin_ptr, tokens, kv_ptr, gate_ptr, old_kv_ptr, old_gate_ptr, store_ptr, bias_ptr, norm_ptr,
              eps, size, places, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, OFFSET: tl.constexpr,
              SLOTS: tl.constexpr, M: tl.constexpr, PAIRS: tl.constexpr, POOL: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """Process one window and M new tokens. M: tokens per window; R: slots per entry; SLOTS: slots at a time."""
    b, window = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(position_ptr + b)
    kv_ptr += b * tokens * W
    gate_ptr += b * tokens * W
    old_kv_ptr += b * size * W
    old_gate_ptr += b * size * W
    c = tl.arange(0, DP)
    if POOL:
        end = first + (M - 1 - first % M) + window * M
        if (first >= 0) & (end < first + tokens) & (end // M < places):
            peak, total = tl.full([DP], -1e30, tl.float32), tl.zeros([DP], tl.float32)
            mean = tl.zeros([DP], tl.float32)
            for start in range(0, R, SLOTS):
                slot = start + tl.arange(0, SLOTS)[:, None]
                place = end - R + 1 + slot
                col = c[None] + tl.where(slot >= M, W - D, 0)
                mask = (place >= 0) & (slot < R) & (c < D)[None]
                fresh = place >= first
                new_at, old_at = (place - first) * W + col, place % size * W + col
                z = _slot(gate_ptr, old_gate_ptr, new_at, old_at, fresh, mask)
                z += tl.load(bias_ptr + place % M * W + col, mask=mask, other=0.0).to(tl.float32)
                z = tl.where(mask, z, -1e30)
                new = tl.maximum(peak, tl.max(z, 0))
                share, fix = tl.where(mask, tl.exp(z - new[None]), 0.0), tl.exp(peak - new)
                total = total * fix + tl.sum(share, 0)
                mean = mean * fix + tl.sum(share * _slot(kv_ptr, old_kv_ptr, new_at, old_at, fresh, mask), 0)
                peak = new
            y = mean / tl.maximum(total, 1e-30)  # 0 beyond D, where all shares are 0
            gain = tl.load(norm_ptr + c, mask=c < D, other=0.0).to(tl.float32) + OFFSET
            y = y * tl.rsqrt(tl.sum(y * y, 0) / D + eps) * gain
            at = (end - M + 1) * PAIRS
            y = _turned(y, cos_ptr + at, sin_ptr + at, D, DP, PAIRS)
            to = store_ptr + (b * places + end // M) * D + c
            tl.store(to, y.to(store_ptr.dtype.element_ty), mask=c < D)
    if KEEP and first >= 0:
        for t in range(tl.maximum(window * M, tokens - size), tl.minimum(window * M + M, tokens)):
            at = (first + t) % size * W
            for start in range(0, W, DP):
                col = start + c
                kv = tl.load(kv_ptr + t * W + col, mask=col < W, other=0.0).to(tl.float32)
                gate = tl.load(gate_ptr + t * W + col, mask=col < W, other=0.0).to(tl.float32)
                tl.store(old_kv_ptr + at + col, kv.to(old_kv_ptr.dtype.element_ty), mask=col < W)
                tl.store(old_gate_ptr + at + col, gate.to(old_gate_ptr.dtype.element_ty), mask=col < W)


@triton.jit
def _compress_kernel(position_ptr, cos_ptr, sin_ptr, tokens, kv0, gate0, old_kv0, old_gate0, store0, bias0, norm0, eps0, size0,
                     places0, kv1, gate1, old_kv1, old_gate1, store1, bias1, norm1, eps1, size1, places1, R0: tl.constexpr,
                     D0: tl.constexpr, DP0: tl.constexpr, W0: tl.constexpr, OFFSET0: tl.constexpr, SLOTS0: tl.constexpr,
                     R1: tl.constexpr, D1: tl.constexpr, DP1: tl.constexpr, W1: tl.constexpr, OFFSET1: tl.constexpr,
                     SLOTS1: tl.constexpr, M: tl.constexpr, PAIRS: tl.constexpr, POOL: tl.constexpr, KEEP: tl.constexpr,
                     DEPENDENT: tl.constexpr):  # fmt: skip
    """Compress one or two parts. D1 0: one part."""
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    if tl.program_id(2) == 0:
        _compress(position_ptr, cos_ptr, sin_ptr, tokens, kv0, gate0, old_kv0, old_gate0, store0, bias0, norm0, eps0, size0,
                  places0, R0, D0, DP0, W0, OFFSET0, SLOTS0, M, PAIRS, POOL, KEEP)  # fmt: skip
    elif D1 > 0:
        _compress(position_ptr, cos_ptr, sin_ptr, tokens, kv1, gate1, old_kv1, old_gate1, store1, bias1, norm1, eps1, size1,
                  places1, R1, D1, DP1, W1, OFFSET1, SLOTS1, M, PAIRS, POOL, KEEP)  # fmt: skip


@in_place
def compress(parts, position, cos, sin):
    (rows, tokens), m, first = parts[0].kv.shape[:2], len(parts[0].bias), parts[0]
    slots = [part.kv.shape[2] // part.store.shape[2] * m for part in parts]
    arguments: list[Any] = []
    for kv, gate, pending, store, bias, norm in parts:
        arguments += [kv, gate, *pending, store, bias, norm.weight, norm.eps, pending.kv.shape[1], store.shape[1]]
    arguments += [None] * 7 + [0.0, 0, 0] if len(parts) < MOST else []
    apart = any(part.pending.kv.shape[1] < count + tokens - 1 for part, count in zip(parts, slots))
    steps = [(True, False), (False, True)] if apart else [(True, True)]

    def run(plan: TilePlan) -> None:
        sizes: list[Any] = []
        for part, count in zip(parts, slots):
            D, W = part.store.shape[2], part.kv.shape[2]
            wide = power_of_two(D)
            sizes += [count, D, wide, W, part.norm.offset, max(1, min(power_of_two(count), plan.elements // wide))]
        sizes += [0, 0, 0, 0, 0.0, 0] if len(parts) < MOST else []
        for pools, keeps in steps:
            _compress_kernel[(rows, cdiv(tokens, m), len(parts))](
                position, cos, sin, tokens, *arguments, *sizes, m, cos.shape[1], pools, keeps, **options(plan.warps)
            )

    launch(job_of("compress", "", (max(part.store.shape[2] for part in parts),), first.store), run)
    written = tuple(t for part in parts for t in (part.store, *part.pending))
    return written


@triton.jit
def _index_scores_kernel(q_ptr, k_ptr, w_ptr, limit_ptr, out_ptr, scale, places, tokens, H: tl.constexpr, HP: tl.constexpr,
                         D: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
                         DEPENDENT: tl.constexpr):  # fmt: skip
    """Compute the scores of one tile of entries. tokens: per row."""
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    n = tl.program_id(1).to(tl.int64)
    h, depth, s = tl.arange(0, HP), tl.arange(0, DEPTH), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    limit = tl.minimum(tl.load(limit_ptr + n), places)
    score = tl.full([BLOCK], float("-inf"), tl.float32)
    if tl.program_id(0) * BLOCK < limit:
        products = tl.zeros([HP, BLOCK], tl.float32)
        for start in tl.static_range(0, D, DEPTH):
            d = start + depth
            inside = (h < H)[:, None] & (d < D)[None]
            q = tl.load(q_ptr + (n * H + h[:, None]) * D + d[None], mask=inside, other=0.0)
            at = (n // tokens * places + s[None]) * D + d[:, None]
            k = tl.load(k_ptr + at, mask=(s < limit)[None] & (d < D)[:, None], other=0.0)
            if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
                q, k = q.to(tl.float32), k.to(tl.float32)
            products = tl.dot(q, k, products, input_precision="tf32x3")
        w = tl.load(w_ptr + n * H + h, mask=h < H, other=0.0) * scale
        total = tl.sum(tl.maximum(products, 0.0) * w[:, None], 0)
        score = tl.where(s < limit, tl.where(total == 0.0, 0.0, total), score)
    tl.store(out_ptr + n * places + s, score, mask=s < places)


@triton.jit
def _ordered(line, from_ptr, at, reach):
    """Load scores as uint32 keys of the same order: 0 for none and -inf; NaN as infinity. from_ptr: indices of the scores."""
    live = at < reach
    if from_ptr is not None:
        at = tl.load(from_ptr + at, mask=live, other=-1)
        live = at >= 0
    x = tl.load(line + at, mask=live, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), tl.where(x == 0.0, 0.0, x))
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    return tl.where(x == float("-inf"), tl.zeros_like(key), key)


@triton.jit
def _reaching(key, least, step):
    """Count the keys that reach least + step, + 2 step and + 3 step: three counts of 21 bits in one int64."""
    first = (key >= least + step).to(tl.int64)
    second, third = (key >= least + 2 * step).to(tl.int64), (key >= least + 3 * step).to(tl.int64)
    return tl.sum(first + (second << 21) + (third << 42), 0)


@triton.jit(do_not_specialize=["places", "span"])
def _index_topk_kernel(score_ptr, limit_ptr, from_ptr, ids_ptr, places, span, EACH: tl.constexpr, K: tl.constexpr,
                       KP: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
                       DEPENDENT: tl.constexpr):  # fmt: skip
    """Choose the top K of each slice of `span` scores, or of the EACH candidates per slice at from_ptr.

    WHOLE: a program's scores fit in one block."""
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, at, slot = score_ptr + n * places, tl.arange(0, BLOCK), tl.arange(0, KP)
    limit, first = tl.minimum(tl.load(limit_ptr + n), places), part * span
    to = ids_ptr + (n * tl.num_programs(1) + part) * K
    if from_ptr is None:
        line += first
        reach = tl.minimum(limit - first, span)
    else:
        from_ptr += n * tl.cdiv(places, span) * EACH
        reach = tl.cdiv(tl.maximum(limit, 0), span) * EACH
    key = _ordered(line, from_ptr, at, reach)
    least = tl.zeros([1], tl.uint32)  # the largest key that K keys reach, found from its highest bits down
    if reach > K:
        for bits in tl.static_range(16):
            step = tl.full([1], 1 << (30 - 2 * bits), tl.uint32)
            counts = tl.zeros([1], tl.int64)
            if WHOLE:
                counts += _reaching(key, least, step)
            else:
                for start in range(0, reach, BLOCK):
                    counts += _reaching(_ordered(line, from_ptr, start + at, reach), least, step)
            more = ((counts & 0x1FFFFF) >= K).to(tl.uint32) + (((counts >> 21) & 0x1FFFFF) >= K).to(tl.uint32)
            least += (more + ((counts >> 42) >= K).to(tl.uint32)) * step
    above = tl.zeros([1], tl.int32)
    for start in range(0, reach, BLOCK):
        if not WHOLE:
            key = _ordered(line, from_ptr, start + at, reach)
        above += tl.sum((key > least).to(tl.int32), 0)
    room = K - above  # for keys equal to `least`
    taken, equals = tl.zeros([1], tl.int32), tl.zeros([1], tl.int32)
    for start in range(0, reach, BLOCK):
        if not WHOLE:
            key = _ordered(line, from_ptr, start + at, reach)
        over, equal = (key > least).to(tl.int32), ((key == least) & (key > 0)).to(tl.int32)
        before = tl.cumsum(over + (equal << 16), 0)  # inclusive; a block has at most 2^15 entries
        equal_before = equals + (before >> 16) - equal
        place = taken + (before & 0xFFFF) - over + tl.minimum(equal_before, room)
        chosen = (over > 0) | ((equal > 0) & (equal_before < room))
        found = first + start + at
        if from_ptr is not None:
            found = tl.load(from_ptr + start + at, mask=chosen, other=-1)
        tl.store(to + place, found, mask=chosen)
        taken += tl.sum(over, 0)
        equals += tl.sum(equal, 0)
    count = taken + tl.minimum(equals, room)
    tl.store(to + slot, tl.full([KP], -1, tl.int32), mask=(slot < K) & (slot >= count))


@in_place
def index_scores(q, keys, weights, limit, scale, out):
    tokens, heads, width = q.shape
    places = keys.shape[1]

    def run(plan: TilePlan) -> None:
        _index_scores_kernel[(cdiv(places, plan.elements), tokens)](
            q, keys, weights, limit, out, scale, places, tokens // len(keys), heads, max(16, power_of_two(heads)), width,
            min(128 // q.element_size(), max(16, power_of_two(width))), plan.elements, interpreted(),
            **options(plan.warps),
        )  # fmt: skip

    launch(job_of("index_scores", "", (heads, width), keys), run)
    return out


@torch.no_grad()
def index_topk(scores, limit, ids):
    (tokens, places), slots = scores.shape, ids.shape[1]

    def run(plan: TilePlan) -> None:
        span = min(plan.elements, power_of_two(places))
        parts, each = cdiv(places, span), min(slots, span)

        def choose(among: Tensor | None, to: Tensor, programs: int, keep: int, reach: int) -> None:
            block = min(plan.elements, power_of_two(reach))
            _index_topk_kernel[(tokens, programs)](
                scores, limit, among, to, places, span, each, keep, power_of_two(keep), block, reach <= block,
                **options(max(1, min(plan.warps, block // 256))),
            )  # fmt: skip

        if parts == 1:
            return choose(None, ids, 1, slots, span)
        best = torch.empty(tokens, parts, each, device=ids.device, dtype=torch.int32)
        choose(None, best, parts, each, span)
        choose(best, ids, 1, slots, parts * each)

    launch(job_of("index_topk", "", (places,), scores), run)
    bump_versions(ids)
    return ids


NOTHING = tl.constexpr(-1e30)  # below every score; -inf would make NaN of -inf - -inf
MOST_KEYS = 32  # programs that share a token's keys
FEW = 16  # tokens up to which keys are split, equally in any such batch, for equal bits; otherwise one program has all keys
DEPTH = 32  # channels of an fp32 key that are multiplied at a time: 512 at once spill 5 KB per thread


@triton.jit
def _part(q_ptr, heads, key_ptr, at, live, scale, peak, weight, total, D: tl.constexpr, DP: tl.constexpr, DEPTH: tl.constexpr,
          WIDE: tl.constexpr):  # fmt: skip
    """Update the online softmax by one tile of keys, DEPTH channels of a key at a time."""
    d = tl.arange(0, DP)
    key = tl.load(key_ptr + at[:, None] * D + d[None], mask=live[:, None] & (d < D)[None], other=0.0)
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        key = key.to(tl.float32)
    if DEPTH < DP:
        score = tl.zeros([peak.shape[0], live.shape[0]], tl.float32)
        for start in tl.static_range(0, D, DEPTH):
            c = start + tl.arange(0, DEPTH)
            q = tl.load(q_ptr + c[None], mask=heads & (c < D)[None], other=0.0)
            stretch = tl.load(key_ptr + at[None] * D + c[:, None], mask=live[None] & (c < D)[:, None], other=0.0)
            score = tl.dot(q.to(key.dtype), stretch.to(key.dtype), score, input_precision="tf32x3")
    else:
        q = tl.load(q_ptr + d[None], mask=heads & (d < D)[None], other=0.0)
        score = tl.dot(q.to(key.dtype), tl.trans(key), input_precision="tf32x3")
    score = tl.where(live[None], score * scale, NOTHING)
    new = tl.maximum(peak, tl.max(score, 1))
    p, fix = tl.where(live[None], tl.exp(score - new[:, None]), 0.0), tl.exp(peak - new)
    total = tl.dot(p.to(key.dtype), key, total * fix[:, None], input_precision="tf32x3")
    return new, weight * fix + tl.sum(p, 1), total


@triton.jit
def _sparse_attention_kernel(q_ptr, position_ptr, ring_ptr, store_ptr, ids_ptr, limit_ptr, sum_ptr, weight_ptr, scale, tokens,
                             slots, places, WINDOW: tl.constexpr, STORED: tl.constexpr, CHOSEN: tl.constexpr, H: tl.constexpr,
                             HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr,
                             SPLITS: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Compute partial attention. tokens: per row. CHOSEN: ids per token; 0: a token attends to all entries before `limit`."""
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    h, d, i = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, DP), tl.arange(0, KEYS)
    position = tl.load(position_ptr + n)
    ring_ptr += n // tokens * slots * D
    near: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    tiles = near
    if STORED:
        store_ptr += n // tokens * places * D
        if CHOSEN > 0:
            entries = CHOSEN
        else:
            entries = tl.minimum(tl.maximum(tl.load(limit_ptr + n), 0), places)
        tiles = near + tl.cdiv(entries, KEYS)
    each = tl.cdiv(tiles, SPLITS)
    first = split * each
    last = tl.where(position >= 0, tl.minimum(first + each, tiles), 0)
    peak, weight = tl.full([HEADS], NOTHING, tl.float32), tl.zeros([HEADS], tl.float32)
    to = (n * SPLITS + split) * H + h
    if first < last:
        inside = (h < H)[:, None] & (d < D)[None]
        mine = q_ptr + (n * H + h[:, None]) * D
        total = tl.zeros([HEADS, DP], tl.float32)
        for tile in range(first, tl.minimum(last, near)):
            back = tile * KEYS + i
            live = (back < WINDOW) & (back <= position)
            at = tl.where(live, position - back, 0) % slots
            peak, weight, total = _part(
                mine, (h < H)[:, None], ring_ptr, at, live, scale, peak, weight, total, D, DP, DEPTH, WIDE
            )
        if STORED:
            for tile in range(tl.maximum(first, near), last):
                entry = (tile - near) * KEYS + i
                live = entry < entries
                if CHOSEN > 0:
                    entry = tl.load(ids_ptr + n * CHOSEN + entry, mask=live, other=-1)
                    live = (entry >= 0) & (entry < places)
                peak, weight, total = _part(
                    mine, (h < H)[:, None], store_ptr, entry, live, scale, peak, weight, total, D, DP, DEPTH, WIDE
                )
        tl.store(sum_ptr + to[:, None] * D + d[None], total, mask=inside)
    tl.store(weight_ptr + 2 * to, peak, mask=h < H)
    tl.store(weight_ptr + 2 * to + 1, weight, mask=h < H)


@triton.jit
def _sparse_combine_kernel(sum_ptr, weight_ptr, position_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, positions, H: tl.constexpr,
                           D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
                           PAIRS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Combine the partial results of one head. PAIRS 0: no rotation."""
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, d = tl.arange(0, SP), tl.arange(0, DP)
    part = (n * SPLITS + split) * H + h
    peak = tl.load(weight_ptr + 2 * part, mask=split < SPLITS, other=NOTHING)
    weight = tl.load(weight_ptr + 2 * part + 1, mask=split < SPLITS, other=0.0)
    sink = tl.load(sink_ptr + h).to(tl.float32)
    top = tl.maximum(tl.max(peak, 0), sink)
    fix = tl.exp(peak - top)
    mask = (weight > 0.0)[:, None] & (d < D)[None]  # a program without keys wrote no sums
    total = tl.sum(tl.load(sum_ptr + part[:, None] * D + d[None], mask=mask, other=0.0) * fix[:, None], 0)
    y = total / (tl.sum(weight * fix, 0) + tl.exp(sink - top))
    if PAIRS > 0:
        at = tl.minimum(tl.maximum(tl.load(position_ptr + n), 0), positions - 1).to(tl.int64) * PAIRS
        y = _turned(y, cos_ptr + at, sin_ptr + at, D, DP, PAIRS, True)
    tl.store(out_ptr + (n * H + h) * D + d, y.to(out_ptr.dtype.element_ty), mask=d < D)


@in_place
def sparse_attention(q, position, ring, window, sinks, scale, out, store=None, ids=None, limit=None, cos=None, sin=None):
    (N, H, D), (B, slots, _) = q.shape, ring.shape
    wide, places = max(16, power_of_two(D)), 0 if store is None else store.shape[1]
    chosen = 0 if ids is None else ids.shape[1]
    job = job_of("sparse_attention", "", (H, D), ring)
    depth, stages = (wide, 2) if ring.element_size() == 2 else (min(wide, DEPTH), 1)

    def run(plan: MatrixPlan) -> None:
        groups = cdiv(H, plan.rows)
        tiles = cdiv(window, plan.columns) + cdiv(chosen or places, plan.columns)
        splits = min(MOST_KEYS, tiles) if N <= FEW else 1
        sums = torch.empty(N, splits, H, D, device=q.device, dtype=torch.float32)
        weights = torch.empty(N, splits, H, 2, device=q.device, dtype=torch.float32)
        _sparse_attention_kernel[(N, groups, splits)](
            q, position, ring, ring if store is None else store, position if ids is None else ids,
            position if limit is None else limit, sums, weights, scale, N // B, slots, places, window, store is not None,
            chosen, H, plan.rows, D, wide, plan.columns, depth, splits, interpreted(), num_stages=stages,
            **options(plan.warps),
        )  # fmt: skip
        angles = (sinks, sinks) if cos is None or sin is None else (cos, sin)
        _sparse_combine_kernel[(N, H)](
            sums, weights, position, sinks, *angles, out, len(angles[0]), H, D, wide, splits, power_of_two(splits),
            0 if cos is None else cos.shape[1], **options(4),
        )  # fmt: skip

    launch(job, run)
    return out


@triton.jit
def _gained(x_ptr, weight_ptr, i, inside):
    x = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _turn_head(head, position_ptr, cos_ptr, sin_ptr, positions, x_ptr, out_ptr, weight_ptr, slot_ptr, eps, places,
               H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NORMED: tl.constexpr, P: tl.constexpr,
               BACK: tl.constexpr):  # fmt: skip
    x_ptr += head * D
    i = tl.arange(0, C)
    inside = i < D
    place = tl.load(position_ptr + head // H).to(tl.int64)
    known = (place >= 0) & (place < positions)
    place = tl.minimum(tl.maximum(place, 0), positions - 1)
    turning = inside & (i >= D - 2 * P)
    pair = place * P + (i - (D - 2 * P)) // 2
    first = (i - (D - 2 * P)) % 2 == 0
    cos = tl.load(cos_ptr + pair, mask=turning, other=1.0)
    sin = tl.load(sin_ptr + pair, mask=turning, other=0.0)
    x = _gained(x_ptr, weight_ptr, i, inside)
    other = _gained(x_ptr, weight_ptr, tl.where(first, i + 1, i - 1), turning)
    y = x * cos + tl.where(first != BACK, -other, other) * sin
    if NORMED:
        plain = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
        y *= 1.0 / tl.sqrt(tl.sum(plain * plain, 0) / D + eps)
    y = tl.where(known, y, float("nan"))
    to = head
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + head // H).to(tl.int64)
        inside = tl.where((slot >= 0) & (slot < places), i, D) < D
        to = slot * H + head % H
    tl.store(out_ptr + to * D + i, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["positions", "tokens", "p0", "p1", "p2"])
def _turn_heads_kernel(position_ptr, cos_ptr, sin_ptr, positions, tokens, x0, out0, w0, slot0, eps0, p0, x1, out1, w1, slot1,
                       eps1, p1, x2, out2, w2, slot2, eps2, p2, H0: tl.constexpr, D0: tl.constexpr, C0: tl.constexpr,
                       N0: tl.constexpr, H1: tl.constexpr, D1: tl.constexpr, C1: tl.constexpr, N1: tl.constexpr,
                       H2: tl.constexpr, D2: tl.constexpr, C2: tl.constexpr, N2: tl.constexpr, P: tl.constexpr,
                       BACK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Apply RMSNorm and RoPE to one head. H0 to H2: heads per token in each part, or 0."""
    _wait(DEPENDENT)  # a fence (_launch.py)
    _begin(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    if head < tokens * H0:
        _turn_head(head, position_ptr, cos_ptr, sin_ptr, positions, x0, out0, w0, slot0, eps0, p0, H0, D0, C0, N0, P, BACK)
    if H1 > 0:
        head -= tokens * H0
        if (head >= 0) & (head < tokens * H1):
            _turn_head(head, position_ptr, cos_ptr, sin_ptr, positions, x1, out1, w1, slot1, eps1, p1, H1, D1, C1, N1, P, BACK)
    if H2 > 0:
        head -= tokens * H1
        if head >= 0:
            _turn_head(head, position_ptr, cos_ptr, sin_ptr, positions, x2, out2, w2, slot2, eps2, p2, H2, D2, C2, N2, P, BACK)


@in_place
def turn_heads(parts, position, cos, sin, back=False):
    tokens, arguments, sizes = len(position), list[Any](), list[int]()
    for x, out, weight, eps, slot in parts:
        arguments += [x, out, weight, slot, 0.0 if eps is None else eps, len(out)]
        sizes += [*x.shape[1:], power_of_two(x.shape[2]), eps is not None]
    for _ in range(MOST_HEADS - len(parts)):
        arguments += [None, None, None, None, 0.0, 0]
        sizes += [0, 0, 0, False]

    def run(plan: TilePlan) -> None:
        _turn_heads_kernel[(sum(tokens * part.x.shape[1] for part in parts),)](
            position, cos, sin, len(cos), tokens, *arguments, *sizes, cos.shape[1], back, **options(plan.warps)
        )

    launch(job_of("turn_heads", "", (max(part.x.shape[2] for part in parts),), parts[0].x), run)
    written = tuple(part.out for part in parts)
    return written
