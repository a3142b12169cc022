"""The draw of one token from a row of logits: thresholds, and the race of kernels/sampling.py.

A row is read in tiles, and what a tile is asked is kept for each lane of it until the end: reductions over a program are rare.
Values are scaled so that the largest is 0. With 32 bits of noise an E_v lies between 1.2e-10 and 22.9, so a token below
log(1.2e-10 / 22.9) = -26.0 loses to the largest whatever is drawn: no threshold needs to be searched below FLOOR.
"""

import triton
import triton.language as tl

FLOOR = tl.constexpr(-27.0)
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
def _logits(logits_ptr, seen_ptr, penalty, i, V):
    """Logits `i` with the penalty; -inf beyond the vocabulary."""
    z = tl.load(logits_ptr + i, mask=i < V, other=float("-inf"))
    if seen_ptr is not None:  # noqa: SIM102  this is a constant of the compiler, the penalty a number on the device
        if penalty != 1.0:
            seen = tl.load(seen_ptr + i, mask=i < V, other=0)
            z = tl.where(seen != 0, tl.where(z > 0, tl.div_rn(z, penalty), z * penalty), z)
    return z


@triton.jit
def _quads(BLOCK: tl.constexpr):
    """0..BLOCK-1 as (BLOCK / 4, 4). Four neighbours share a draw of noise, are in one thread, and are moved together."""
    return 4 * tl.arange(0, BLOCK // 4)[:, None] + tl.arange(0, 4)[None]


@triton.jit
def _set_aside(values_ptr, quads_ptr, logits_ptr, seen_ptr, penalty, top, inverse, V, low, BLOCK: tl.constexpr):
    """Write the quads with a value from `low` up in columns, one for each lane of quads: (how many in each, in the longest).

    A lane asks no other where to write, so this costs a pass and no more; a scan over the tile for dense lists costs several.
    """
    lane = tl.arange(0, BLOCK // 4)
    count = tl.zeros([BLOCK // 4], tl.int32)
    for start in range(0, V, BLOCK):
        z = (_logits(logits_ptr, seen_ptr, penalty, start + _quads(BLOCK), V) - top) * inverse
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
    """The largest value with `target` tokens, or `target` of the mass, at or above it; at least `low`, at most 0.

    The answer lies in [low, high), all values there in [bottom, high). Each pass tries three between, and sees the smallest and
    the largest. It ends when those are equal, or when one tried has the target exactly: mostly after five to ten passes.
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
def _keep(values_ptr, quads_ptr, logits_ptr, seen_ptr, penalty, top, inverse, V, leads, top_k, top_p, min_p,
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
                mass += tl.exp((_logits(logits_ptr, seen_ptr, penalty, start + lane, V) - top) * inverse)
            target = top_p * tl.sum(mass, 0)
        one = tl.full([BLOCK // 4], 1, tl.int32)
        low = _search(values_ptr, one, 1, tl.full([], FLOOR, tl.float32), target, few == 0, BLOCK)
    count, depth = _set_aside(values_ptr, quads_ptr, logits_ptr, seen_ptr, penalty, top, inverse, V, low, BLOCK)
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
def _noise(seed, position, row, quad):
    """32 bits for each token of the quads: counter `quad` has a word for each of its four."""
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position, zero + row, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [quad.shape[0], 4])


@triton.jit
def _finish(bits, z):
    """When a token finishes, made negative so that the largest wins: E = -log(1 - u) for u = (bits + 1/2) / 2^32.

    All digits at both ends: 1 - u is counted from the other end of the bits, and small u have a series.
    """
    u = bits.to(tl.float32) * 2.0**-32 + 2.0**-33
    rest = (bits ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32 + 2.0**-33
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * (1.0 / 4 + u * (1.0 / 5)))))
    return tl.where(u < 1.0 / 32, -series, tl.log(rest)) * tl.exp(-tl.maximum(z, FLOOR))


@triton.jit
def _race(logits_ptr, seen_ptr, penalty, top, inverse, V, seed, position, row, BLOCK: tl.constexpr):
    """The first of all tokens."""
    best = tl.full([BLOCK // 4, 4], float("-inf"), tl.float32)
    arg = tl.full([BLOCK // 4, 4], NOBODY, tl.int32)
    for start in range(0, V, BLOCK):
        i = start + _quads(BLOCK)
        z = (_logits(logits_ptr, seen_ptr, penalty, i, V) - top) * inverse
        bits = _noise(seed, position, row, start // 4 + tl.arange(0, BLOCK // 4))
        best, arg = _lead(tl.where(z >= FLOOR, _finish(bits, z), float("-inf")), i, best, arg)
    _, token = _leader(best, arg)
    return token


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
