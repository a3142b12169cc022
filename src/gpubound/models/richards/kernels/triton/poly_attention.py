"""Polynomial attention in tiles: no T × T tensor is stored, and backward recomputes each tile.

A decoding step splits a row's keys over programs, and a second kernel adds their sums in a fixed order.

Over whole sequences, forward, a program owns a tile of queries of one head and walks along the keys, as flash attention does,
but without a maximum and a sum. Backward has two kernels, without atomics, so that every run has the same bits:

    queries   dq, the gates' gradients, and the sums that a, b and scale need, a pair for each program
    keys      dk and dv, over all query heads of a key head

With u_ij = dy_i · v_j and f the score, or its tanh under a clip, a gradient is u f^(p−1) f′ times factors of the row or of the
whole, which are applied at the end.

Masked tiles are skipped. Of the others most are *plain*: every pair counts. Tiles at the edge of the visible range also compute
masks. The walk so has three ranges, of which a kernel compiles those that its form of attention can have:

    0 edge | 1 plain | 2 edge
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....device import interpreted
from .....kernels.accumulate import deliver
from .....kernels.plans.types import AttentionPlan, cdiv, job_of, power_of_two
from .....kernels.triton._launch import bump_versions, first_order_only, launch
from ..plans import WalkPlan


def _stretches(keys: bool, windowed: bool, causal: bool) -> int:
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
    visible = distance == distance
    if CAUSAL:
        visible = distance >= 0
    if WINDOW:
        visible &= (distance < window) & (distance > -window)
    return visible


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
def _queries_stretch(acc, power, total, q, dy, query, begin, end, k_ptr, v_ptr, k_row, v_row, tokens, window, over,
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
        total += tl.sum(u, 1)
        acc = _weigh(bent * slope, k, acc)
    return acc, power, total


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
    power, total = tl.zeros([OWN], tl.float32), tl.zeros([OWN], tl.float32)
    for part in tl.static_range(3):
        if (STRETCHES >> part) % 2 == 1:
            acc, power, total = _queries_stretch(acc, power, total, q, dy, query, bounds[part], bounds[part + 1], k_ptr, v_ptr,
                                                 k_row, v_row, tokens, window, over, part % 2 == 0, N, DIM, DP, DEGREE, CLIP,
                                                 FAST, WINDOW, CAUSAL, WIDE)  # fmt: skip
    power *= top
    _keep(_head(dq_ptr, b, head, tokens64 * dense, DIM), own, dense, acc * (gain * alpha)[:, None], tokens, OWN, DIM, DP)
    if GATED:
        token = own + tl.arange(0, OWN)
        at = (tl.cast(b, tl.int64) * tokens + token) * HEADS + head
        dgate = scale * (a * power + c * total)
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=token < tokens)
        power, total = power * gates, total * gates
    tl.store(sums_ptr + tl.program_id(0), tl.sum(power, 0))
    tl.store(sums_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(total, 0))


@triton.jit(do_not_specialize=["programs"])
def _poly_coefficients_kernel(sums_ptr, coefficient_ptr, gradient_ptr, programs, BLOCK: tl.constexpr):
    """Compute the gradients of a, b and scale from every program's Σ dφ s̃^p and Σ dφ, added in a fixed order."""
    i = tl.arange(0, BLOCK)
    power, total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, programs, BLOCK):
        mask = start + i < programs
        power += tl.load(sums_ptr + start + i, mask=mask, other=0.0)
        total += tl.load(sums_ptr + programs + start + i, mask=mask, other=0.0)
    a, c, scale = _coefficients(coefficient_ptr)
    powers, totals = tl.sum(power, 0), tl.sum(total, 0)
    tl.store(gradient_ptr, scale * powers)
    tl.store(gradient_ptr + 1, scale * totals)
    tl.store(gradient_ptr + 2, a * powers + c * totals)


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
            visible = _visible(query, key, window, WINDOW, CAUSAL)
            phi, ds = tl.where(visible, phi, 0.0), tl.where(visible, ds, 0.0)
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


class _Form(NamedTuple):
    """Options of a call."""

    degree: int
    soft_clip: float
    window: int
    causal: bool

    def constants(self, gates: Tensor | None, q: Tensor, k: Tensor, keys: bool) -> dict[str, Any]:
        windowed = self.window > 0
        return {
            "HEADS": q.shape[2], "GROUP": q.shape[2] // k.shape[2], "STRETCHES": _stretches(keys, windowed, self.causal),
            "DIM": q.shape[3], "DP": max(16, power_of_two(q.shape[3])), "DEGREE": self.degree, "CLIP": self.soft_clip > 0,
            "FAST": q.dtype == torch.bfloat16 and not interpreted(), "GATED": gates is not None, "WINDOW": windowed,
            "CAUSAL": self.causal, "WIDE": interpreted(),
        }  # fmt: skip

    def numbers(self, q: Tensor) -> tuple:
        """Return tokens, window; small, over, top; steep, alpha. A kernel takes the first two or all three groups. Scores are
        x with s = rest · x, where rest is from 1/2 to 1 (`_shrunk`)."""
        alpha = q.shape[3] ** -0.5
        small = 2.0 ** -math.floor(math.log2(q.shape[3]) / 2)
        rest = alpha / small
        clip = self.soft_clip or rest  # what f is multiplied by to be s̃
        top, steep = clip**self.degree, self.degree * clip ** (self.degree - 1)
        return q.shape[1], self.window, small, rest / clip, top, steep, alpha


def _dense_last(*tensors: Tensor) -> list[Tensor]:
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _launch(kernel: Any, way: str, tiled: Tensor, tensors: list, sums: bool, q: Tensor, numbers: tuple, constants: dict) -> Any:
    """Launch a kernel. tiled (B, T, heads, D): the tensor of which a program owns a tile. Return its sums (2, programs)."""
    strides = [step for t in tensors[:3] for step in t.stride()[:3]]

    def run(plan: WalkPlan) -> Tensor | None:
        programs = cdiv(tiled.shape[1], plan.own) * tiled.shape[0] * tiled.shape[2]
        parts = [torch.empty(2, programs, device=q.device, dtype=torch.float32)] if sums else []
        kernel[(programs,)](
            *(q if t is None else t for t in tensors), *parts, *strides, *numbers, **constants, OWN=plan.own, N=plan.other,
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        return parts[0] if parts else None

    return launch(job_of("poly_attention", way, (q.shape[3],), q), run)


class _PolyAttention(torch.autograd.Function):
    """Autograd function. ctx has the Parameters for their main_grad, as in layers/linear_product.py."""

    @staticmethod
    def forward(ctx, q, k, v, coefficients, gates, form):
        q, k, v = _dense_last(q, k, v)
        gates = None if gates is None else gates.contiguous()
        y = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        *numbers, _, _ = form.numbers(q)
        constants = form.constants(gates, q, k, False)
        _launch(_poly_forward_kernel, "forward", q, [q, k, v, gates, coefficients, y], False, q, tuple(numbers), constants)
        ctx.save_for_backward(q, k, v, coefficients, gates)
        ctx.owner, ctx.form = coefficients, form
        return y

    @staticmethod
    def backward(ctx, dy):
        first_order_only("poly_attention")
        q, k, v, coefficients, gates = ctx.saved_tensors
        form, dy = ctx.form, dy.contiguous()
        dq, dk, dv = (torch.empty(t.shape, device=q.device, dtype=q.dtype) for t in (q, k, v))
        dgates = None if gates is None else torch.empty_like(gates)
        inputs, numbers = [q, k, v, gates, coefficients, dy], form.numbers(q)
        sums = _launch(
            _poly_queries_kernel, "queries", q, [*inputs, dq, dgates], True, q, numbers, form.constants(gates, q, k, False)
        )
        _launch(_poly_keys_kernel, "keys", k, [*inputs, dk, dv], False, q, numbers, form.constants(gates, q, k, True))
        dcoefficients = None
        if ctx.needs_input_grad[3]:
            gradient = torch.empty(3, device=q.device, dtype=torch.float32)
            _poly_coefficients_kernel[(1,)](sums, coefficients, gradient, sums.shape[1], 1024)
            dcoefficients = deliver(ctx.owner, gradient)
        return dq, dk, dv, dcoefficients, dgates, None


def poly_attention(q, k, v, coefficients, gates=None, degree=3, soft_clip=0.0, window=0, causal=True):
    return _PolyAttention.apply(q, k, v, coefficients, gates, _Form(degree, soft_clip, window, causal))


@triton.jit
def _weights(s, factor, shift, over, DEGREE: tl.constexpr, CLIP: tl.constexpr, FAST: tl.constexpr):
    f, _ = _bent(s, over, CLIP, FAST)
    return _even_power(f, DEGREE) * f * factor + shift


@triton.jit(do_not_specialize=["places", "window"])
def _poly_step_kernel(q_ptr, k_ptr, v_ptr, cache_k, cache_v, position_ptr, coefficient_ptr, part_ptr, places, window, alpha,
                      over, top, KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
                      N: tl.constexpr, DEGREE: tl.constexpr, CLIP: tl.constexpr, FAST: tl.constexpr, WINDOW: tl.constexpr,
                      WIDE: tl.constexpr):  # fmt: skip
    b, kv, split, splits = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1), tl.num_programs(1)
    g, d, n = tl.arange(0, G), tl.arange(0, DP), tl.arange(0, N)
    inside, heads = d < DIM, (g < GROUP)[:, None] & (d < DIM)[None]
    position = tl.load(position_ptr + b)
    known = (position >= 0) & (position < places)
    at = tl.where(known, position, 0)
    begin = 0
    if WINDOW:
        begin = tl.maximum(at + 1 - window, 0)
    chunk = tl.cdiv(tl.cdiv(at + 1 - begin, splits), N) * N
    lo = begin + split * chunk
    hi = tl.minimum(lo + chunk, at)  # the keys of this part but the token's own
    a, c, scale = _coefficients(coefficient_ptr)
    factor, shift = scale * a * top, scale * c
    mine = (b * KV + kv) * GROUP * DIM + g[:, None] * DIM + d[None]
    q = tl.load(q_ptr + mine, mask=heads, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    base = (tl.cast(b, tl.int64) * places * KV + kv) * DIM
    acc = tl.zeros([G, DP], tl.float32)
    for start in range(lo, hi, N):
        k = _tile(cache_k + base, start, KV * DIM, hi, N, DIM, DP, WIDE)
        s = _dot(q, tl.trans(k)) * alpha
        phi = tl.where((start + n < hi)[None], _weights(s, factor, shift, over, DEGREE, CLIP, FAST), 0.0)
        acc = _weigh(phi, _tile(cache_v + base, start, KV * DIM, hi, N, DIM, DP, WIDE), acc)
    if known & (lo <= at) & (at < lo + chunk):
        new = (b * KV + kv) * DIM + d
        k, v = tl.load(k_ptr + new, mask=inside, other=0.0), tl.load(v_ptr + new, mask=inside, other=0.0)
        to = base + tl.cast(at, tl.int64) * (KV * DIM) + d
        tl.store(cache_k + to, k, mask=inside)
        tl.store(cache_v + to, v, mask=inside)
        s = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None], 1) * alpha
        acc += _weights(s, factor, shift, over, DEGREE, CLIP, FAST)[:, None] * v.to(tl.float32)[None]
    tl.store(part_ptr + split * (tl.num_programs(0) * GROUP * DIM) + mine, acc, mask=heads)


@triton.jit(do_not_specialize=["places", "splits"])
def _poly_joined_kernel(part_ptr, gate_ptr, position_ptr, y_ptr, places, splits, HEADS: tl.constexpr, DIM: tl.constexpr,
                        DP: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    row, d = tl.program_id(0), tl.arange(0, DP)
    acc = tl.zeros([DP], tl.float32)
    for split in range(splits):
        acc += tl.load(part_ptr + (split * tl.num_programs(0) + row) * DIM + d, mask=d < DIM, other=0.0)
    if GATED:
        acc *= tl.load(gate_ptr + row).to(tl.float32)
    position = tl.load(position_ptr + row // HEADS)
    acc = tl.where((position >= 0) & (position < places), acc, float("nan"))
    tl.store(y_ptr + row * DIM + d, acc.to(y_ptr.dtype.element_ty), mask=d < DIM)


MOST_SPLITS = 32  # programs that share a row's keys


@torch.no_grad()
def poly_attention_step(q, k, v, cache_k, cache_v, position, coefficients, gates=None, degree=3, soft_clip=0.0, window=0):
    (B, H, D), (_, L, K, _) = q.shape, cache_k.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    y, clip = torch.empty(q.shape, device=q.device, dtype=q.dtype), soft_clip or 1.0
    DP, job = max(16, power_of_two(D)), job_of("poly_attention_step", "", (H // K, D // 2, K, q.element_size()), cache_k)

    def run(plan: AttentionPlan) -> None:
        splits = min(MOST_SPLITS, cdiv(L, plan.keys), cdiv(4 * job.chip.sms, B * K))
        parts = torch.empty(splits, B, H, D, device=q.device, dtype=torch.float32)
        _poly_step_kernel[(B * K, splits)](
            q, k, v, cache_k, cache_v, position, coefficients, parts, L, window, D**-0.5, 1 / clip, clip**degree, K, H // K,
            max(16, power_of_two(H // K)), D, DP, plan.keys, degree, soft_clip > 0,
            q.dtype == torch.bfloat16 and not interpreted(), window > 0, interpreted(),
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        given = q if gates is None else gates.contiguous()
        _poly_joined_kernel[(B * H,)](parts, given, position, y, L, splits, H, D, DP, gates is not None, num_warps=1)

    launch(job, run)
    bump_versions(cache_k, cache_v)
    return y, cache_k, cache_v
