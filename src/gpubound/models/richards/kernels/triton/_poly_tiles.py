"""Kernels of polynomial attention over whole sequences, and the functions that they share with a decoding step.

Forward, a program owns a tile of queries of one head and walks along the keys, as flash attention does, but without a maximum
and a sum. Backward has two kernels, without atomics, so that every run has the same bits:

    queries   dq, the gates' gradients, and the sums that a, b and scale need, a pair for each program
    keys      dk and dv, over all query heads of a key head

With u_ij = dy_i · v_j and f the score, or its tanh under a clip, a gradient is u f^(p−1) f′ times factors of the row or of the
whole, which are applied at the end.

Masked tiles are skipped. Of the others most are *plain*: every pair counts. Tiles at the edge of the visible range also compute
masks. The walk so has three ranges, of which a kernel compiles those that its form of attention can have:

    0 edge | 1 plain | 2 edge
"""

import triton
import triton.language as tl


def stretches(keys: bool, windowed: bool, causal: bool) -> int:
    """Return a bit for each of the three ranges that can occur. keys: a program owns keys and walks along queries."""
    return 1 * (windowed or (causal and keys)) + 2 + 4 * (windowed or (causal and not keys))


@triton.jit
def _walk(own, OWN: tl.constexpr, N: tl.constexpr, tokens, window, KEYS: tl.constexpr, WINDOW: tl.constexpr,
          CAUSAL: tl.constexpr):  # fmt: skip
    """Return where the three ranges begin, and where the last one ends: non-decreasing multiples of N.

    With e = own − other, pairs count from −window to window, or up to or from 0 if causal.
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
    end = tl.cdiv(tokens, N) * N
    edge = end
    if WINDOW or (CAUSAL and not KEYS):
        end = tl.minimum(end, tl.cdiv(own + OWN - low, N) * N)
        edge = tl.maximum(own - low + 1, 0) // N * N
    plain = tl.minimum(tl.maximum(plain, begin), end)
    edge = tl.minimum(tl.maximum(edge, plain), end)
    return begin, plain, edge, end


@triton.jit
def _tile(ptr, start, stride, tokens, N: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr):
    """Return rows start to start + N of one head: (N, DP), with zeros beyond the last token. Zeros add nothing to a sum, so no
    other code needs a mask of the tokens."""
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
    """Multiply on tensor cores: 16 bits directly, fp32 as three products, whose error is that of fp32."""
    return tl.dot(a.to(b.dtype), b, total, input_precision="tf32x3")


@triton.jit
def _weigh(x, tile, total):
    """Return total + x · tile, for an unbounded x. A fifth power of a score can exceed fp16's 65,504, so in fp16 x is scaled to
    at most 1 by a power of two, and the product is scaled back."""
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
def _bent(s, over, CLIP: tl.constexpr, FAST: tl.constexpr):
    """Return (f, f′): tanh(z) of z = s · over and its derivative by z if CLIP; else s and 1.

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
    """Return f^(p−1)."""
    if DEGREE == 1:
        return 1.0
    else:
        low = f * f
        if DEGREE == 5:
            low = low * low
        if DEGREE == 7:
            low = low * low * low
        return low


@triton.jit
def _score(q, k, over, DEGREE: tl.constexpr, CLIP: tl.constexpr, FAST: tl.constexpr):
    """Return (f, f^(p−1), f′) of a tile q · kᵀ, or of k · qᵀ with queries along its columns. The owned tensor is `_shrunk`."""
    f, slope = _bent(_dot(q, tl.trans(k)), over, CLIP, FAST)
    return f, _even_power(f, DEGREE), slope


@triton.jit
def _shrunk(x, small):
    """Return x times a power of two near 1 / √D, which is exact: once per tile instead of once per score. The constants have
    the rest of √D."""
    return (x.to(tl.float32) * small).to(x.dtype)


@triton.jit
def _nothing(OWN: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr):
    """Return zeros as the result of a product. With plain zeros as initial accumulators, Hopper's products in a loop may be
    serialised (ptxas warning C7515)."""
    return tl.dot(tl.zeros([OWN, 16], KIND), tl.zeros([16, DP], KIND))


@triton.jit
def _place(tokens, HEADS: tl.constexpr, OWN: tl.constexpr, LAST: tl.constexpr):
    """Return (first token, row of the batch, head) of a program, and the number of tokens in 64 bits.

    LAST: the last tokens have the longest walk, and so begin first.
    """
    tiles = tl.cdiv(tokens, OWN)
    tile, row = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if LAST:
        tile = tiles - 1 - tile
    return tile * OWN, row // HEADS, row % HEADS, tl.cast(tokens, tl.int64)


@triton.jit
def _gates(gate_ptr, b, start, head, tokens, HEADS: tl.constexpr, N: tl.constexpr):
    token = start + tl.arange(0, N)
    at = (tl.cast(b, tl.int64) * tokens + token) * HEADS + head
    return tl.load(gate_ptr + at, mask=token < tokens, other=0.0).to(tl.float32)


@triton.jit
def _forward_stretch(acc, q, query, begin, end, k_ptr, v_ptr, k_row, v_row, tokens, window, over, factor, shift,
                     EDGE: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, DEGREE: tl.constexpr,
                     CLIP: tl.constexpr, FAST: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
                     WIDE: tl.constexpr):  # fmt: skip
    for start in range(begin, end, N):
        key = (start + tl.arange(0, N))[None]
        f, low, _ = _score(q, _tile(k_ptr, start, k_row, tokens, N, DIM, DP, WIDE), over, DEGREE, CLIP, FAST)
        phi = low * f * factor + shift
        if EDGE:
            phi = tl.where(_visible(query, key, window, WINDOW, CAUSAL), phi, 0.0)
        acc = _weigh(phi, _tile(v_ptr, start, v_row, tokens, N, DIM, DP, WIDE), acc)
    return acc


@triton.jit(do_not_specialize=["window"])
def _poly_forward_kernel(q_ptr, k_ptr, v_ptr, gate_ptr, coefficient_ptr, y_ptr, q_batch, q_row, q_head, k_batch, k_row, k_head,
                         v_batch, v_row, v_head, tokens, window, small, over, top, HEADS: tl.constexpr, GROUP: tl.constexpr,
                         STRETCHES: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, DEGREE: tl.constexpr,
                         CLIP: tl.constexpr, FAST: tl.constexpr, GATED: tl.constexpr, WINDOW: tl.constexpr,
                         CAUSAL: tl.constexpr, WIDE: tl.constexpr, OWN: tl.constexpr, N: tl.constexpr):  # fmt: skip
    own, b, head, tokens64 = _place(tokens, HEADS, OWN, CAUSAL)
    query = (own + tl.arange(0, OWN))[:, None]
    a, c, scale = _coefficients(coefficient_ptr)
    q = _shrunk(_tile(_head(q_ptr, b, head, q_batch, q_head), own, q_row, tokens, OWN, DIM, DP, WIDE), small)
    k_ptr = _head(k_ptr, b, head // GROUP, k_batch, k_head)
    v_ptr = _head(v_ptr, b, head // GROUP, v_batch, v_head)
    bounds = _walk(own, OWN, N, tokens, window, False, WINDOW, CAUSAL)
    acc = _nothing(OWN, DP, q.dtype)
    for part in tl.static_range(3):
        if (STRETCHES >> part) % 2 == 1:
            acc = _forward_stretch(acc, q, query, bounds[part], bounds[part + 1], k_ptr, v_ptr, k_row, v_row, tokens, window,
                                   over, scale * a * top, scale * c, part % 2 == 0, N, DIM, DP, DEGREE, CLIP, FAST, WINDOW,
                                   CAUSAL, WIDE)  # fmt: skip
    if GATED:
        acc *= _gates(gate_ptr, b, own, head, tokens, HEADS, OWN)[:, None]
    row = HEADS * DIM
    _keep(_head(y_ptr, b, head, tokens64 * row, DIM), own, row, acc, tokens, OWN, DIM, DP)


@triton.jit
def _queries_stretch(acc, power, whole, q, dy, query, begin, end, k_ptr, v_ptr, k_row, v_row, tokens, window, over,
                     EDGE: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, DEGREE: tl.constexpr,
                     CLIP: tl.constexpr, FAST: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
                     WIDE: tl.constexpr):  # fmt: skip
    for start in range(begin, end, N):
        key = (start + tl.arange(0, N))[None]
        k = _tile(k_ptr, start, k_row, tokens, N, DIM, DP, WIDE)
        v = _tile(v_ptr, start, v_row, tokens, N, DIM, DP, WIDE)
        f, low, slope = _score(q, k, over, DEGREE, CLIP, FAST)
        u = _dot(dy, tl.trans(v))
        if EDGE:
            u = tl.where(_visible(query, key, window, WINDOW, CAUSAL), u, 0.0)
        bent = u * low  # times f it is u f^p
        power += tl.sum(bent * f, 1)
        whole += tl.sum(u, 1)
        acc = _weigh(bent * slope, k, acc)
    return acc, power, whole


@triton.jit(do_not_specialize=["window"])
def _poly_queries_kernel(q_ptr, k_ptr, v_ptr, gate_ptr, coefficient_ptr, dy_ptr, dq_ptr, dgate_ptr, sums_ptr, q_batch, q_row,
                         q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, tokens, window, small, over, top, steep, alpha,
                         HEADS: tl.constexpr, GROUP: tl.constexpr, STRETCHES: tl.constexpr, DIM: tl.constexpr,
                         DP: tl.constexpr, DEGREE: tl.constexpr, CLIP: tl.constexpr, FAST: tl.constexpr, GATED: tl.constexpr,
                         WINDOW: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr, OWN: tl.constexpr,
                         N: tl.constexpr):  # fmt: skip
    """steep: factor of a slope, other than u f^(p−1) f′ and scale · a. alpha: 1 / √D."""
    own, b, head, tokens64 = _place(tokens, HEADS, OWN, CAUSAL)
    query = (own + tl.arange(0, OWN))[:, None]
    a, c, scale = _coefficients(coefficient_ptr)
    dense = HEADS * DIM
    q = _shrunk(_tile(_head(q_ptr, b, head, q_batch, q_head), own, q_row, tokens, OWN, DIM, DP, WIDE), small)
    dy = _tile(_head(dy_ptr, b, head, tokens64 * dense, DIM), own, dense, tokens, OWN, DIM, DP, WIDE)
    k_ptr = _head(k_ptr, b, head // GROUP, k_batch, k_head)
    v_ptr = _head(v_ptr, b, head // GROUP, v_batch, v_head)
    gain = tl.zeros([OWN], tl.float32) + scale * a * steep
    if GATED:
        gates = _gates(gate_ptr, b, own, head, tokens, HEADS, OWN)
        gain *= gates
    bounds = _walk(own, OWN, N, tokens, window, False, WINDOW, CAUSAL)
    acc = _nothing(OWN, DP, q.dtype)
    power, whole = tl.zeros([OWN], tl.float32), tl.zeros([OWN], tl.float32)
    for part in tl.static_range(3):
        if (STRETCHES >> part) % 2 == 1:
            acc, power, whole = _queries_stretch(acc, power, whole, q, dy, query, bounds[part], bounds[part + 1], k_ptr, v_ptr,
                                                 k_row, v_row, tokens, window, over, part % 2 == 0, N, DIM, DP, DEGREE, CLIP,
                                                 FAST, WINDOW, CAUSAL, WIDE)  # fmt: skip
    power *= top
    _keep(_head(dq_ptr, b, head, tokens64 * dense, DIM), own, dense, acc * (gain * alpha)[:, None], tokens, OWN, DIM, DP)
    if GATED:
        token = own + tl.arange(0, OWN)
        at = (tl.cast(b, tl.int64) * tokens + token) * HEADS + head
        dgate = scale * (a * power + c * whole)
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=token < tokens)
        power, whole = power * gates, whole * gates
    tl.store(sums_ptr + tl.program_id(0), tl.sum(power, 0))
    tl.store(sums_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(whole, 0))


@triton.jit(do_not_specialize=["programs"])
def _poly_coefficients_kernel(sums_ptr, coefficient_ptr, gradient_ptr, programs, BLOCK: tl.constexpr):
    """Compute the gradients of a, b and scale from every program's Σ dφ s̃^p and Σ dφ, added in a fixed order."""
    i = tl.arange(0, BLOCK)
    power, whole = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, programs, BLOCK):
        mask = start + i < programs
        power += tl.load(sums_ptr + start + i, mask=mask, other=0.0)
        whole += tl.load(sums_ptr + programs + start + i, mask=mask, other=0.0)
    a, c, scale = _coefficients(coefficient_ptr)
    powers, wholes = tl.sum(power, 0), tl.sum(whole, 0)
    tl.store(gradient_ptr, scale * powers)
    tl.store(gradient_ptr + 1, scale * wholes)
    tl.store(gradient_ptr + 2, a * powers + c * wholes)


@triton.jit
def _keys_stretch(dk, dv, k, v, key, b, head, begin, end, q_ptr, dy_ptr, gate_ptr, q_row, dy_row, tokens, window, over, factor,
                  shift, HEADS: tl.constexpr, EDGE: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
                  DEGREE: tl.constexpr, CLIP: tl.constexpr, FAST: tl.constexpr, GATED: tl.constexpr, WINDOW: tl.constexpr,
                  CAUSAL: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    for start in range(begin, end, N):
        query = (start + tl.arange(0, N))[None]
        q = _tile(q_ptr, start, q_row, tokens, N, DIM, DP, WIDE)
        dy = _tile(dy_ptr, start, dy_row, tokens, N, DIM, DP, WIDE)
        f, low, slope = _score(k, q, over, DEGREE, CLIP, FAST)
        u = _dot(v, tl.trans(dy))
        if GATED:
            gates = _gates(gate_ptr, b, start, head, tokens, HEADS, N)[None]
            phi = low * f * (factor * gates) + shift * gates
            u *= gates
        else:
            phi = low * f * factor + shift
        ds = u * low * slope
        if EDGE:
            seen = _visible(query, key, window, WINDOW, CAUSAL)
            phi, ds = tl.where(seen, phi, 0.0), tl.where(seen, ds, 0.0)
        dv = _weigh(phi, dy, dv)
        dk = _weigh(ds, q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["window"])
def _poly_keys_kernel(q_ptr, k_ptr, v_ptr, gate_ptr, coefficient_ptr, dy_ptr, dk_ptr, dv_ptr, q_batch, q_row, q_head, k_batch,
                      k_row, k_head, v_batch, v_row, v_head, tokens, window, small, over, top, steep, alpha,
                      HEADS: tl.constexpr, GROUP: tl.constexpr, STRETCHES: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
                      DEGREE: tl.constexpr, CLIP: tl.constexpr, FAST: tl.constexpr, GATED: tl.constexpr,
                      WINDOW: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr, OWN: tl.constexpr,
                      N: tl.constexpr):  # fmt: skip
    own, b, kv, tokens64 = _place(tokens, HEADS // GROUP, OWN, False)
    key = (own + tl.arange(0, OWN))[:, None]
    a, c, scale = _coefficients(coefficient_ptr)
    k = _shrunk(_tile(_head(k_ptr, b, kv, k_batch, k_head), own, k_row, tokens, OWN, DIM, DP, WIDE), small)
    v = _tile(_head(v_ptr, b, kv, v_batch, v_head), own, v_row, tokens, OWN, DIM, DP, WIDE)
    dense = HEADS * DIM
    bounds = _walk(own, OWN, N, tokens, window, True, WINDOW, CAUSAL)
    dk, dv = _nothing(OWN, DP, k.dtype), _nothing(OWN, DP, k.dtype)
    for of_group in range(GROUP):
        head = kv * GROUP + of_group
        heads_q = _head(q_ptr, b, head, q_batch, q_head)
        heads_dy = _head(dy_ptr, b, head, tokens64 * dense, DIM)
        for part in tl.static_range(3):
            if (STRETCHES >> part) % 2 == 1:
                dk, dv = _keys_stretch(dk, dv, k, v, key, b, head, bounds[part], bounds[part + 1], heads_q, heads_dy, gate_ptr,
                                       q_row, dense, tokens, window, over, scale * a * top, scale * c, HEADS, part % 2 == 0, N,
                                       DIM, DP, DEGREE, CLIP, FAST, GATED, WINDOW, CAUSAL, WIDE)  # fmt: skip
    mine = HEADS // GROUP * DIM
    dk *= scale * a * steep * alpha
    _keep(_head(dk_ptr, b, kv, tokens64 * mine, DIM), own, mine, dk, tokens, OWN, DIM, DP)
    _keep(_head(dv_ptr, b, kv, tokens64 * mine, DIM), own, mine, dv, tokens, OWN, DIM, DP)
