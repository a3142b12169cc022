"""The indexer: one launch for the scores, one for the choice.

A program of `index_scores` multiplies a token's heads with a tile of keys on tensor cores, DEPTH numbers of them at a time: in
fp32, which no tensor core takes, 128 at once would spill. A tile behind the limit reads nothing.

`index_topk` is one program a token. Scores become unsigned numbers of the same order, and the k-th largest is found two bits
at a time: of three thresholds, the program counts how many numbers reach each, in one sum. After 16 rounds everything above it
is taken, and of those equal to it the first. Where each goes follows from one running count. Those of one block stay
in registers; of more, each round reads all again, from the L1 or L2. A token that sees no more than k entries takes all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import interpreted
from ..plans.kinds import TilePlan, job_of, power_of_two
from ._launch import launch


@triton.jit
def _index_scores_kernel(q_ptr, k_ptr, w_ptr, limit_ptr, out_ptr, scale, places, tokens, H: tl.constexpr, HP: tl.constexpr,
                         D: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """`tokens` of a row."""
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
def _ordered(line, at, limit):
    """Scores as uint32 of the same order: 0 where there is none or it is -inf; NaN as infinity."""
    x = tl.load(line + at, mask=at < limit, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), tl.where(x == 0.0, 0.0, x))
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    return tl.where(x == float("-inf"), tl.zeros_like(key), key)


@triton.jit
def _reaching(key, least, step):
    """How many numbers reach least + step, + 2 step and + 3 step: three counts of 21 bits in one int64."""
    first = (key >= least + step).to(tl.int64)
    second, third = (key >= least + 2 * step).to(tl.int64), (key >= least + 3 * step).to(tl.int64)
    return tl.sum(first + (second << 21) + (third << 42), 0)


@triton.jit
def _index_topk_kernel(score_ptr, limit_ptr, ids_ptr, places, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
                       WHOLE: tl.constexpr):  # fmt: skip
    """WHOLE: a row's scores are one block."""
    n = tl.program_id(0).to(tl.int64)
    line, to, at, slot = score_ptr + n * places, ids_ptr + n * K, tl.arange(0, BLOCK), tl.arange(0, KP)
    limit = tl.minimum(tl.load(limit_ptr + n), places)
    key = _ordered(line, at, limit)
    least = tl.zeros([1], tl.uint32)  # the largest number that K numbers reach, found from its highest bits down
    if limit > K:
        for bits in tl.static_range(16):
            step = tl.full([1], 1 << (30 - 2 * bits), tl.uint32)
            counts = tl.zeros([1], tl.int64)
            if WHOLE:
                counts += _reaching(key, least, step)
            else:
                for start in range(0, limit, BLOCK):
                    counts += _reaching(_ordered(line, start + at, limit), least, step)
            more = ((counts & 0x1FFFFF) >= K).to(tl.uint32) + (((counts >> 21) & 0x1FFFFF) >= K).to(tl.uint32)
            least += (more + ((counts >> 42) >= K).to(tl.uint32)) * step
    above = tl.zeros([1], tl.int32)
    for start in range(0, limit, BLOCK):
        if not WHOLE:
            key = _ordered(line, start + at, limit)
        above += tl.sum((key > least).to(tl.int32), 0)
    room = K - above  # for those equal to `least`
    taken, equals = tl.zeros([1], tl.int32), tl.zeros([1], tl.int32)
    for start in range(0, limit, BLOCK):
        if not WHOLE:
            key = _ordered(line, start + at, limit)
        over, equal = (key > least).to(tl.int32), ((key == least) & (key > 0)).to(tl.int32)
        before = tl.cumsum(over + (equal << 16), 0)  # this one counted; a block has at most 2^15 places
        equal_before = equals + (before >> 16) - equal
        place = taken + (before & 0xFFFF) - over + tl.minimum(equal_before, room)
        chosen = (over > 0) | ((equal > 0) & (equal_before < room))
        tl.store(to + place, start + at, mask=chosen)
        taken += tl.sum(over, 0)
        equals += tl.sum(equal, 0)
    found = taken + tl.minimum(equals, room)
    tl.store(to + slot, tl.full([KP], -1, tl.int32), mask=(slot < K) & (slot >= found))


@torch.no_grad()
def index_scores(q: Tensor, keys: Tensor, weights: Tensor, limit: Tensor, scale: float, out: Tensor) -> Tensor:
    tokens, heads, width = q.shape
    places = keys.shape[1]

    def run(plan: TilePlan) -> None:
        _index_scores_kernel[(triton.cdiv(places, plan.elements), tokens)](
            q, keys, weights, limit, out, scale, places, tokens // len(keys), heads, max(16, power_of_two(heads)), width,
            min(128 // q.element_size(), max(16, power_of_two(width))), plan.elements, interpreted(), num_warps=plan.warps,
        )  # fmt: skip

    launch(job_of("index_scores", "", (heads, width), keys), run)
    return out


@torch.no_grad()
def index_topk(scores: Tensor, limit: Tensor, ids: Tensor) -> Tensor:
    (tokens, places), slots = scores.shape, ids.shape[1]

    def run(plan: TilePlan) -> None:
        block = min(plan.elements, power_of_two(places))
        _index_topk_kernel[(tokens,)](
            scores, limit, ids, places, slots, power_of_two(slots), block, places <= block,
            num_warps=max(1, min(plan.warps, block // 256)),
        )  # fmt: skip

    launch(job_of("index_topk", "", (places,), scores), run)
    return ids
