"""Choice of the next token and the step of a row.

`sample` has three launches. The programs of the first take a chunk of a row each. They read its logits once, for the largest
and the sum of exponentials, before and after penalty and temperature. The second has a program a row: by those it draws a
chunk, or takes the one with the largest logit, and then a token of it. The third, if asked for, does so for rows under top-k,
top-p or min-p, which it reads itself: one pass is for the largest, another sets candidates aside, the thresholds are searched
and the race is run among them. In one launch with the second, the registers of a search left room for a row a multiprocessor:
of 256 rows without, 17 us (H200). Disabled settings are skipped at run time, by their values on the device. Chunks are of one
size, so that a row's bits do not depend on how many others there are.

Of a row that it reads, results are kept for each lane until the end: reductions over a program are rare. Values are scaled so
that the largest is 0. With 32 bits of noise an E_v is between 1.2e-10 and 22.9, so a token below log(1.2e-10 / 22.9) = -26.0
loses to the largest whatever is drawn: no threshold needs to be searched below FLOOR.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import cdiv, power_of_two
from ..sampling import CHUNK, Rows, Settings, changed
from ._launch import in_place, options

FLOOR = tl.constexpr(-27.0)
LOG2_E = tl.constexpr(1.4426950408889634)
NOBODY = tl.constexpr(2**31 - 1)  # above every token
# A pass of the search divides its interval by four, so 48 divide 27 by 2^96. Two scaled values are never closer than that.
PASSES = tl.constexpr(48)


@triton.jit
def _lead(value, token, best, arg):
    """The larger of two by value, the lower token of equals; NaN is the largest, and stays."""
    ahead = (value > best) | (value != value) | ((value == best) & (token < arg))
    ahead = ahead & (best == best)
    return tl.where(ahead, value, best), tl.where(ahead, token, arg)


@triton.jit
def _leader(best, arg):
    """(the largest, its token) of a tile of leads; the largest is NaN if one of them is."""
    top = tl.max(best)
    token = tl.min(tl.where(best == top, arg, NOBODY))
    broken = tl.max((best != best).to(tl.int32))
    return tl.where(broken != 0, float("nan"), top), token


@triton.jit
def _largest(best_ptr, arg_ptr, P, BLOCK: tl.constexpr):
    """(the largest, its token) of P partial maxima, as a product with the head leaves them."""
    best, arg = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], NOBODY, tl.int32)
    for start in range(0, P, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(best_ptr + i, mask=i < P, other=float("-inf"))
        best, arg = _lead(value, tl.load(arg_ptr + i, mask=i < P, other=NOBODY), best, arg)
    return _leader(best, arg)


@triton.jit
def _penalised(z, past_ptr, penalty, i, V):
    """The logits z of tokens `i` with the penalty."""
    if past_ptr is not None:  # noqa: SIM102  this is a constant of the compiler, the penalty a number on the device
        if penalty != 1.0:
            seen = tl.load(past_ptr + i, mask=i < V, other=0)
            z = tl.where(seen != 0, tl.where(z > 0, tl.div_rn(z, penalty), z * penalty), z)
    return z


@triton.jit
def _logits(logits_ptr, past_ptr, penalty, i, V):
    """Logits `i` with the penalty; -inf beyond the vocabulary."""
    return _penalised(tl.load(logits_ptr + i, mask=i < V, other=float("-inf")).to(tl.float32), past_ptr, penalty, i, V)


@triton.jit
def _quads(BLOCK: tl.constexpr):
    """0..BLOCK-1 as (BLOCK / 4, 4). Four neighbours share a draw of noise, are in one thread, and are moved together."""
    return 4 * tl.arange(0, BLOCK // 4)[:, None] + tl.arange(0, 4)[None]


@triton.jit
def _set_aside(values_ptr, quads_ptr, logits_ptr, past_ptr, penalty, top, inverse, V, low, BLOCK: tl.constexpr):
    """Write the quads with a value from `low` up in columns, one for each lane of quads: (how many in each, in the longest).

    A lane asks no other where to write, so this costs a pass and no more; a scan over the tile for dense lists costs several.
    """
    lane = tl.arange(0, BLOCK // 4)
    count = tl.zeros([BLOCK // 4], tl.int32)
    for start in range(0, V, BLOCK):
        z = (_logits(logits_ptr, past_ptr, penalty, start + _quads(BLOCK), V) - top) * inverse
        keep = tl.max(z, 1) >= low
        tl.store(values_ptr + (count * BLOCK)[:, None] + _quads(BLOCK), z, mask=keep[:, None])
        tl.store(quads_ptr + count * (BLOCK // 4) + lane, start // 4 + lane, mask=keep)
        count += keep.to(tl.int32)
    tl.debug_barrier()
    return count, tl.max(count, 0)


@triton.jit
def _aside(values_ptr, count, i, BLOCK: tl.constexpr):
    """The i-th quads of all lanes; -inf where a lane has fewer."""
    return tl.load(values_ptr + i * BLOCK + _quads(BLOCK), mask=(i < count)[:, None], other=float("-inf"))


@triton.jit
def _search(values_ptr, count, depth, low, target, by_mass, BLOCK: tl.constexpr):
    """Return the largest value with `target` tokens, or `target` of the mass, at or above it; at least `low`, at most 0.

    The answer is in [low, high), and all values of that range are in [bottom, high). Each pass tries three thresholds between,
    and computes the smallest and the largest value there. It ends when those are equal, or when a threshold has the target
    exactly: mostly after five to ten passes.
    """
    bottom = low
    high = tl.full([], 1e-6, tl.float32)
    step = 0
    going = True
    while going & (step < PASSES):
        quarter = (high - bottom) * 0.25
        first, second, third = bottom + quarter, bottom + 2 * quarter, bottom + 3 * quarter
        above_first = tl.zeros([BLOCK // 4, 4], tl.float32)
        above_second = tl.zeros([BLOCK // 4, 4], tl.float32)
        above_third = tl.zeros([BLOCK // 4, 4], tl.float32)
        least = tl.full([BLOCK // 4, 4], float("inf"), tl.float32)
        most = tl.full([BLOCK // 4, 4], float("-inf"), tl.float32)
        for i in range(depth):
            z = _aside(values_ptr, count, i, BLOCK)
            share = tl.where(by_mass, tl.exp(z), 1.0)
            above_first += tl.where(z >= first, share, 0.0)
            above_second += tl.where(z >= second, share, 0.0)
            above_third += tl.where(z >= third, share, 0.0)
            inside = (z >= bottom) & (z < high)
            least = tl.minimum(least, tl.where(inside, z, float("inf")))
            most = tl.maximum(most, tl.where(inside, z, float("-inf")))
        have_first, have_second, have_third = tl.sum(above_first), tl.sum(above_second), tl.sum(above_third)
        smallest, largest = tl.min(least), tl.max(most)
        exact = (have_first == target) | (have_second == target) | (have_third == target)
        going = (smallest < largest) & (exact == 0)
        low = tl.where(have_first >= target, first, low)
        low = tl.where(have_second >= target, second, low)
        low = tl.where(have_third >= target, third, low)
        high = tl.where(have_third < target, third, high)
        high = tl.where(have_second < target, second, high)
        high = tl.where(have_first < target, first, high)
        bottom = tl.maximum(low, smallest)
        step += 1
    return tl.minimum(low, 0.0)


@triton.jit
def _keep(values_ptr, quads_ptr, logits_ptr, past_ptr, penalty, top, inverse, V, leads, top_k, top_p, min_p,
          BLOCK: tl.constexpr):  # fmt: skip
    """Set aside what top-k, top-p and min-p may keep: (count, depth, the smallest value kept or something just below it).

    The largest value of each lane, `leads`, bounds the threshold from below: k lanes at or above a value are at least k tokens
    there, and the mass of these tokens alone is at most all of it. What is set aside is then little more than what is kept.
    """
    lane = tl.arange(0, BLOCK)
    tl.store(values_ptr + lane, (leads - top) * inverse)
    tl.debug_barrier()
    few, nucleus = (top_k > 0) & (top_k < V), top_p < 1.0
    target = top_k.to(tl.float32)
    least = tl.where(min_p > 0.0, tl.minimum(tl.log(tl.maximum(min_p, 1e-30)), 0.0), FLOOR)
    low = least
    if few | nucleus:
        if few == 0:
            mass = tl.zeros([BLOCK], tl.float32)
            for start in range(0, V, BLOCK):
                mass += tl.exp((_logits(logits_ptr, past_ptr, penalty, start + lane, V) - top) * inverse)
            target = top_p * tl.sum(mass, 0)
        one = tl.full([BLOCK // 4], 1, tl.int32)
        low = _search(values_ptr, one, 1, tl.full([], FLOOR, tl.float32), target, few == 0, BLOCK)
    count, depth = _set_aside(values_ptr, quads_ptr, logits_ptr, past_ptr, penalty, top, inverse, V, low, BLOCK)
    if few:
        low = _search(values_ptr, count, depth, low, target, False, BLOCK)
        held = tl.zeros([BLOCK // 4, 4], tl.float32)
        for i in range(depth):
            z = _aside(values_ptr, count, i, BLOCK)
            held += tl.where(z >= low, tl.exp(z), 0.0)
        target = top_p * tl.sum(held)
    if nucleus:
        low = _search(values_ptr, count, depth, low, target, True, BLOCK)
    return count, depth, tl.maximum(low, least)


@triton.jit
def _noise(seed, position, row, quad, STREAM: tl.constexpr = 0):
    """32 bits for each token of the quads: counter `quad` has a word for each of its four. Philox 4x32-10: with products of 64
    bits, which are one instruction, where tl.philox has two for the halves."""
    c0, zero = quad.to(tl.uint32), (quad * 0).to(tl.uint32)
    c1, c2, c3 = zero + position.to(tl.uint32), zero + row.to(tl.uint32), zero + STREAM
    k0, k1 = seed.to(tl.uint64) & 0xFFFFFFFF, seed.to(tl.uint64) >> 32
    for _ in tl.static_range(10):
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (b >> 32).to(tl.uint32) ^ c1 ^ k0.to(tl.uint32), b.to(tl.uint32)
        c2, c3 = (a >> 32).to(tl.uint32) ^ c3 ^ k1.to(tl.uint32), a.to(tl.uint32)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [quad.shape[0], 4])


@triton.jit
def _exponential(bits):
    """-E for E = -log(1 - u), u = (bits + 1/2) / 2^32.

    All digits at both ends: 1 - u is counted from the other end of the bits, and small u have a series.
    """
    u = bits.to(tl.float32) * 2.0**-32 + 2.0**-33
    rest = (bits ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32 + 2.0**-33
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * (1.0 / 4 + u * (1.0 / 5)))))
    return tl.where(u < 1.0 / 32, -series, tl.log(rest))


@triton.jit
def _power(x):
    """exp(x): tl.exp takes five instructions, this two."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def _finish(bits, z):
    """When a token finishes, made negative so that the largest wins."""
    return _exponential(bits) * tl.exp(-tl.maximum(z, FLOOR))


@triton.jit
def _race_aside(values_ptr, quads_ptr, count, depth, floor, seed, position, row, BLOCK: tl.constexpr):
    """The first of the tokens that were set aside and are not below `floor`."""
    best = tl.full([BLOCK // 4, 4], float("-inf"), tl.float32)
    arg = tl.full([BLOCK // 4, 4], NOBODY, tl.int32)
    lane = tl.arange(0, BLOCK // 4)
    for i in range(depth):
        z = _aside(values_ptr, count, i, BLOCK)
        quad = tl.load(quads_ptr + i * (BLOCK // 4) + lane, mask=i < count, other=0)
        token = 4 * quad[:, None] + tl.arange(0, 4)[None]
        bits = _noise(seed, position, row, quad)
        best, arg = _lead(tl.where(z >= floor, _finish(bits, z), float("-inf")), token, best, arg)
    _, token = _leader(best, arg)
    return token


TILE = 4096  # elements of a row at a time, 4 a thread: a search keeps five numbers for each, and 1024 threads have 64 registers
CHUNK_WARPS, DRAW_WARPS = 4, 8  # of a program that reads a chunk, and of one that draws a chunk and its token
# One number a row is read or written here. Alignment gains nothing, and an `emitted` that is now and then aligned, such as the
# next place of a ring of tokens, would have the kernel compiled again in the middle of a capture.
ROWS = [f"{name}_ptr" for name in (*Rows._fields, *Settings._fields[:-1], "emitted", "logprob")]


@triton.jit
def _start(DEPENDENT: tl.constexpr):
    """Let the next kernel in, and wait for what the one before writes."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _finite(x):
    return (x > float("-inf")) & (x < float("inf"))  # false for NaN


@triton.jit
def _filtered(top_k, top_p, min_p, V):
    """Return whether some tokens cannot be drawn."""
    return ((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def _sums(x):
    return (x > 0.0) & (x < float("inf"))


LOWEST, HIGHEST = tl.constexpr(-3.4028234663852886e38), tl.constexpr(1e30)  # differences from them are no NaN


@triton.jit
def _mass(z, inverse):
    """(the largest logit, Σ exp((logit - it) · inverse)) of a chunk; the sum is 0 if all are -inf, no number if one is not."""
    top = tl.minimum(tl.maximum(tl.max(z, 0), LOWEST), HIGHEST)
    return top, tl.sum(_power((z - top) * inverse), 0)


@triton.jit
def _shrunk(before, after, inverse):
    """Return the factor of a sum that was relative to the value `before`, and is to `after`, which is larger or equal."""
    return _power(tl.maximum(before - after, -1e8) * inverse)  # times an inverse of 1e30 it is finite


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _chunks_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, penalty_ptr, alive_ptr, past_ptr, chunk_ptr,
                   stride, V, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Leave in chunk_ptr (rows, chunks, 4) the `_mass` of a chunk's logits, and that of them after penalty and temperature."""
    # the last chunks first, which the L2 may still hold: 256 rows take 50.5 us after the head instead of 53.7 (H200)
    b, chunk = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    logits_ptr += b * stride
    if past_ptr is not None:
        past_ptr += b * V
    _start(DEPENDENT)
    temperature, penalty = tl.load(temperature_ptr + b), tl.load(penalty_ptr + b)
    filtered = _filtered(tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), tl.load(min_p_ptr + b), V) & (temperature > 0.0)
    if (tl.load(alive_ptr + b) != 0) & (filtered == 0):
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        z = tl.load(logits_ptr + i, mask=i < V, other=float("-inf")).to(tl.float32)
        high, mass = _mass(z, 1.0)
        top, share = high, mass
        if (temperature != 1.0) | (penalty != 1.0):
            inverse = tl.where(temperature > 0.0, tl.div_rn(1.0, tl.maximum(temperature, 1e-30)), 1.0)
            top, share = _mass(_penalised(z, past_ptr, penalty, i, V), inverse)
        at = chunk_ptr + 4 * (b * tl.num_programs(1) + chunk)
        tl.store(at, high)
        tl.store(at + 1, mass)
        tl.store(at + 2, top)
        tl.store(at + 3, share)


@triton.jit
def _from_chunks(logits_ptr, past_ptr, penalty, chunk_ptr, chunks, temperature, inverse, seed, position, row, V,
                 CHUNKS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Draw a chunk and then a token of it, or take the largest: (the token, whether all logits are finite, the largest of them,
    Σ exp(logit - largest))."""
    i = _quads(CHUNKS)
    at, mask = chunk_ptr + 4 * i, i < chunks
    highs, tops = tl.load(at, mask=mask, other=LOWEST), tl.load(at + 2, mask=mask, other=LOWEST)
    highest, top = tl.max(highs), tl.max(tops)
    mass = tl.sum(tl.load(at + 1, mask=mask, other=0.0) * _shrunk(highs, highest, 1.0))
    share = tl.load(at + 3, mask=mask, other=0.0)
    token, good = 0, _sums(mass) & _sums(tl.sum(share))
    if good:
        rank = tops
        if temperature > 0.0:
            share *= _shrunk(tops, top, inverse)
            bits = _noise(seed, position, row, tl.arange(0, CHUNKS // 4), 1)
            rank = _exponential(bits) / tl.maximum(share, 1e-30)  # of a chunk without tokens later than any other
        _, chunk = _leader(rank, i)
        words = chunk * CHUNK + _quads(CHUNK)
        value = _logits(logits_ptr, past_ptr, penalty, words, V)
        if temperature > 0.0:
            quads = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
            value = _finish(_noise(seed, position, row, quads), (value - tl.max(value)) * inverse)
        _, token = _leader(value, words)
    return token, good, highest, mass


@triton.jit
def _logprob(logits_ptr, token, V, BLOCK: tl.constexpr):
    """log softmax(logits)[token]."""
    top = tl.full([BLOCK], -3e38, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + i, mask=i < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, z)
        mass = mass * tl.exp(top - higher) + tl.exp(z - higher)
        top = higher
    highest = tl.max(top, 0)
    return tl.load(logits_ptr + token).to(tl.float32) - highest - tl.log(tl.sum(mass * tl.exp(top - highest), 0))


@triton.jit
def _advance(b, token, good, token_ptr, position_ptr, alive_ptr, limit_ptr, bad_ptr, stops_ptr, emitted_ptr, past_ptr, V,
             stops, STOPS: tl.constexpr):  # fmt: skip
    """Advance an active row, as the reference's _advance does."""
    position = tl.load(position_ptr + b)
    goes_on = 0
    if good:
        s = tl.arange(0, STOPS)
        stop = tl.max((tl.load(stops_ptr + s, mask=s < stops, other=-1) == token).to(tl.int32), 0)
        goes_on = ((stop == 0) & (position + 2 < tl.load(limit_ptr + b))).to(tl.int32)
        tl.store(token_ptr + b, token)
        tl.store(position_ptr + b, position + goes_on)
        if past_ptr is not None:
            tl.store(past_ptr + token, 1, mask=(token >= 0) & (token < V))
    else:
        if tl.load(bad_ptr + b) == 0:
            tl.store(bad_ptr + b, position + 1)
    tl.store(alive_ptr + b, goes_on)
    tl.store(emitted_ptr + b, tl.where(good, token, -1))


@triton.jit
def _embedding(embed_ptr, x_ptr, token, words, H, BLOCK: tl.constexpr):
    """The token's row of the embedding; NaN for a token that has none."""
    known = (token >= 0) & (token < words)
    embed_ptr += tl.where(known, token, 0).to(tl.int64) * H
    for start in range(0, H, BLOCK):
        i = start + tl.arange(0, BLOCK)
        row = tl.load(embed_ptr + i, mask=i < H, other=0.0).to(tl.float32)
        tl.store(x_ptr + i, tl.where(known, row, float("nan")), mask=i < H)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _pick_kernel(best_ptr, arg_ptr, token_ptr, position_ptr, alive_ptr, limit_ptr, bad_ptr, stops_ptr, emitted_ptr, past_ptr,
                 embed_ptr, x_ptr, P, V, words, H, stops, STOPS: tl.constexpr, BLOCK: tl.constexpr,
                 DEPENDENT: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    if past_ptr is not None:
        past_ptr += b * V
    _start(DEPENDENT)
    token = tl.load(token_ptr + b)
    if tl.load(alive_ptr + b) != 0:
        top, first = _largest(best_ptr + b * P, arg_ptr + b * P, P, BLOCK)
        good = _finite(top)
        _advance(b, first, good, token_ptr, position_ptr, alive_ptr, limit_ptr, bad_ptr, stops_ptr, emitted_ptr, past_ptr,
                 V, stops, STOPS)  # fmt: skip
        token = tl.where(good, first, token)
    else:
        tl.store(emitted_ptr + b, -1)
    if embed_ptr is not None:
        _embedding(embed_ptr, x_ptr + b * H, token, words, H, BLOCK)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _sample_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, penalty_ptr, seed_ptr, row_ptr, token_ptr,
                   position_ptr, alive_ptr, limit_ptr, bad_ptr, stops_ptr, emitted_ptr, past_ptr, logprob_ptr, embed_ptr, x_ptr,
                   chunk_ptr, values_ptr, quads_ptr, stride, V, chunks, words, H, stops, CHUNKS: tl.constexpr,
                   CHUNK: tl.constexpr, STOPS: tl.constexpr, BLOCK: tl.constexpr, FILTERED: tl.constexpr,
                   DEPENDENT: tl.constexpr):  # fmt: skip
    """Give the rows under top-k, top-p or min-p their tokens (FILTERED), or the others."""
    b = tl.program_id(0).to(tl.int64)
    logits_ptr += b * stride
    values_ptr += b * tl.cdiv(V, BLOCK) * BLOCK
    quads_ptr += b * tl.cdiv(V, BLOCK) * (BLOCK // 4)
    if past_ptr is not None:
        past_ptr += b * V
    _start(DEPENDENT)
    temperature = tl.load(temperature_ptr + b)
    top_k, top_p, min_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), tl.load(min_p_ptr + b)
    if (_filtered(top_k, top_p, min_p, V) & (temperature > 0.0)).to(tl.int32) == FILTERED:
        token = tl.load(token_ptr + b)
        logprob = tl.full([], float("nan"), tl.float32)
        if tl.load(alive_ptr + b) != 0:
            inverse, penalty = tl.div_rn(1.0, tl.maximum(temperature, 1e-30)), tl.load(penalty_ptr + b)
            seed, position, row = tl.load(seed_ptr + b), tl.load(position_ptr + b), tl.load(row_ptr + b)
            if FILTERED:
                best = tl.full([BLOCK], float("-inf"), tl.float32)
                arg = tl.full([BLOCK], NOBODY, tl.int32)
                for start in range(0, V, BLOCK):
                    i = start + tl.arange(0, BLOCK)
                    best, arg = _lead(_logits(logits_ptr, past_ptr, penalty, i, V), i, best, arg)
                top, sampled = _leader(best, arg)
                good = _finite(top)
                if good:
                    count, depth, floor = _keep(values_ptr, quads_ptr, logits_ptr, past_ptr, penalty, top, inverse, V, best,
                                                top_k, top_p, min_p, BLOCK)  # fmt: skip
                    sampled = _race_aside(values_ptr, quads_ptr, count, depth, floor, seed, position, row, BLOCK)
                    if logprob_ptr is not None:
                        logprob = _logprob(logits_ptr, sampled, V, BLOCK)
            else:
                sampled, good, highest, mass = _from_chunks(logits_ptr, past_ptr, penalty, chunk_ptr + 4 * b * chunks, chunks,
                                                          temperature, inverse, seed, position, row, V, CHUNKS,
                                                          CHUNK)  # fmt: skip
                if (logprob_ptr is not None) & good:
                    logprob = tl.load(logits_ptr + sampled).to(tl.float32) - highest - tl.log(mass)
            _advance(b, sampled, good, token_ptr, position_ptr, alive_ptr, limit_ptr, bad_ptr, stops_ptr, emitted_ptr, past_ptr,
                     V, stops, STOPS)  # fmt: skip
            token = tl.where(good, sampled, token)
        else:
            tl.store(emitted_ptr + b, -1)
        if logprob_ptr is not None:
            tl.store(logprob_ptr + b, logprob)
        if embed_ptr is not None:
            _embedding(embed_ptr, x_ptr + b * H, token, words, H, BLOCK)


def _plan(columns: int, x: Tensor | None, stops: Tensor, dependent: bool) -> tuple[tuple, dict]:
    """(stops, STOPS, BLOCK) of both kernels, and the options of their launch. A tile is 4 elements a thread."""
    block = max(16, min(TILE, power_of_two(max(columns, 0 if x is None else x.shape[1]))))
    return (len(stops), power_of_two(max(1, len(stops))), block), options(max(1, block // 128), dependent)


@in_place
def pick(best, arg, rows, into, seen=None, dependent=False):
    shape, launch = _plan(best.shape[1], into.x, rows.stops, dependent)
    _pick_kernel[(len(best),)](
        best, arg, *rows, into.emitted, seen, into.embed, into.x, best.shape[1], 0 if seen is None else seen.shape[1],
        *_shape(into.embed), *shape, **launch,
    )  # fmt: skip
    written = changed(rows, into.emitted, seen, into.x)
    return written


@in_place
def sample(logits, rows, settings, into, logprob=None, dependent=False, filtered=True):
    *scalars, seen = settings
    emitted, embed, x = into
    (batch, words), device = logits.shape, logits.device
    shape, launch = _plan(words, x, rows.stops, dependent)
    chunk = min(CHUNK, max(16, power_of_two(words)))
    chunks = cdiv(words, chunk)
    masses = torch.empty(batch * chunks, 4, device=device, dtype=torch.float32)
    _chunks_kernel[(batch, chunks)](
        logits, *scalars[:5], rows.alive, seen, masses, logits.stride(0), words, chunk, **options(CHUNK_WARPS, dependent)
    )
    room = batch * cdiv(words, shape[2]) * shape[2] * filtered  # for what is set aside; at worst everything
    values = torch.empty(room, device=device, dtype=torch.float32)
    quads = torch.empty(room // 4, device=device, dtype=torch.int32)
    for searched in (False, True)[: 1 + filtered]:
        _sample_kernel[(batch,)](
            logits, *scalars, *rows, emitted, seen, logprob, embed, x, masses, values, quads, logits.stride(0), words, chunks,
            *_shape(embed), shape[0], max(4, power_of_two(chunks)), chunk, *shape[1:], searched,
            **(launch if searched else options(DRAW_WARPS, dependent)),
        )  # fmt: skip
    written = changed(rows, emitted, seen, logprob, x)
    return written


def _shape(embed: Tensor | None) -> tuple[int, int]:
    return (0, 0) if embed is None else (embed.shape[0], embed.shape[1])
