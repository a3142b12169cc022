"""Kernel of norm_products and send_products. A program has some rows of one weight and reads all of x, as in decode_product.py:
each weight is read once.

Rows of fp8 weights come first. Their programs multiply x, instead of the weight, by the scales of a block's columns: one
multiplication per column for all rows.

Kernel of choose_experts. One warp finds a row's S largest scores without barriers. Further programs of the launch compute
the shared expert's activation.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .....kernels.decode_product import Norm
from .....kernels.peer_exchange import Mail
from .....kernels.plans import job_of
from .....kernels.plans.types import cdiv, power_of_two
from .....kernels.triton._launch import (
    BEFORE,
    _begin,
    _end,
    _fresh_row,
    _gained,
    _products,
    _row,
    _tile,
    _wait,
    in_place,
    launch_product,
    options,
)
from .....kernels.triton._packed import _ONE, _row_sums, _scales, _stride, _words
from .....kernels.triton.experts import _expert
from .....kernels.triton.gated import _activated, _limited
from .....kernels.triton.peer_exchange import SCALARS, _addresses, _mail_arguments, _send, _stamp
from .....kernels.triton.quantized_product import _inputs, _multiply
from ..products import LEAST, MOST, MOST_CODED, Fp8Blocks


@triton.jit
def _which(first, begun, w, w1, w2, w3, w4, w5, w6, w7, s1, s2, s3, s4, s5, s6, s7):
    """Return the weight that has row `first`, and the weight's first row."""
    w, begun = tl.where(first >= s1, w1, w), tl.where(first >= s1, s1, begun)
    w, begun = tl.where(first >= s2, w2, w), tl.where(first >= s2, s2, begun)
    w, begun = tl.where(first >= s3, w3, w), tl.where(first >= s3, s3, begun)
    w, begun = tl.where(first >= s4, w4, w), tl.where(first >= s4, s4, begun)
    w, begun = tl.where(first >= s5, w5, w), tl.where(first >= s5, s5, begun)
    w, begun = tl.where(first >= s6, w6, w), tl.where(first >= s6, s6, begun)
    return tl.where(first >= s7, w7, w), tl.where(first >= s7, s7, begun)


@triton.jit
def _which_coded(first, q, q1, q2, q3, z, z1, z2, z3, e1, e2, e3):
    """Return the codes, scales and first row of the fp8 weight that has row `first`."""
    q, z, begun = tl.where(first >= e1, q1, q), tl.where(first >= e1, z1, z), tl.where(first >= e1, e1, 0)
    q, z, begun = tl.where(first >= e2, q2, q), tl.where(first >= e2, z2, z), tl.where(first >= e2, e2, begun)
    return tl.where(first >= e3, q3, q), tl.where(first >= e3, z3, z), tl.where(first >= e3, e3, begun)


@triton.jit
def _put(out_ptr, at, total, square, eps, mask, addresses, stamp, base, K: tl.constexpr, GAIN: tl.constexpr,
         BOXES: tl.constexpr):  # fmt: skip
    """Store the products of rows, divided by x's root mean square if x is normed. BOXES: number of inboxes that receive the
    products instead of out, at offset `base`; or 0."""
    y = tl.sum(total, 1)
    if GAIN is not None:
        y /= tl.sqrt(tl.sum(square, 0) / K + eps)
    if BOXES > 0:
        _send(addresses, base + at, y.to(tl.int32, bitcast=True), stamp, mask)
    else:
        tl.store(out_ptr + at, y, mask=mask)


@triton.jit
def _coded_rows(x_ptr, norm_ptr, w_ptr, scale_ptr, out_ptr, eps, first, left, rows, step, addresses, stamp, base,
                B: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ACROSS: tl.constexpr, WHOLE: tl.constexpr,
                GAIN: tl.constexpr, BOXES: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Multiply R rows of an fp8 weight. ACROSS: columns of a block."""
    row, col = tl.arange(0, R), tl.arange(0, C)
    EVEN: tl.constexpr = K % C == 0
    w, scale = _tile(w_ptr, row, col, left, K, K, WHOLE), tl.load(scale_ptr + col // ACROSS, mask=col < K, other=0.0)
    if DEPENDENT != BEFORE:
        _wait(DEPENDENT)
    for b in tl.static_range(B):
        if b > 0 and C < K:
            w = _tile(w_ptr, row, col, left, K, K, WHOLE)
            scale = tl.load(scale_ptr + col // ACROSS, mask=col < K, other=0.0)
        total, square = tl.zeros([R, C], tl.float32), tl.zeros([C], tl.float32)
        for start in range(0, K, C):
            x = _fresh_row(x_ptr + b * step + start, col, K - start, EVEN, DEPENDENT)
            total += w.to(tl.float32) * (_gained(x, norm_ptr + start, col, K - start, EVEN, GAIN) * scale)[None]
            square += x * x
            if start + C < K:
                at = start + C + col
                w = _tile(w_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
                scale = tl.load(scale_ptr + at // ACROSS, mask=at < K, other=0.0)
        if b == B - 1:
            _end(DEPENDENT)
        if b == 0 and DEPENDENT == BEFORE:
            _wait(DEPENDENT)
        to = b * rows.to(tl.int64) + first + row
        _put(out_ptr, to, total, square, eps, row < left, addresses, stamp, base, K, GAIN, BOXES)


@triton.jit
def _plain_rows(x_ptr, norm_ptr, w_ptr, out_ptr, eps, first, left, rows, step, addresses, stamp, base, B: tl.constexpr,
                K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr, GAIN: tl.constexpr,
                BOXES: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    row, col = tl.arange(0, R), tl.arange(0, C)
    w = _tile(w_ptr, row, col, left, K, K, WHOLE)
    if DEPENDENT != BEFORE:
        _wait(DEPENDENT)
    for b in tl.static_range(B):
        if b > 0 and C < K:
            w = _tile(w_ptr, row, col, left, K, K, WHOLE)
        total, square = _products(x_ptr + b * step, norm_ptr, w_ptr, w, row, col, left, K, R, C, WHOLE, GAIN,
                                  DEPENDENT)  # fmt: skip
        if b == B - 1:
            _end(DEPENDENT)
        if b == 0 and DEPENDENT == BEFORE:
            _wait(DEPENDENT)
        to = b * rows.to(tl.int64) + first + row
        _put(out_ptr, to, total, square, eps, row < left, addresses, stamp, base, K, GAIN, BOXES)


@triton.jit(do_not_specialize=["s1", "s2", "s3", "s4", "s5", "s6", "s7", "e1", "e2", "e3", "coded", "rows", "span", "step",
                               *SCALARS])  # fmt: skip
def _norm_products_kernel(x_ptr, norm_ptr, w0, w1, w2, w3, w4, w5, w6, w7, q0, q1, q2, q3, z0, z1, z2, z3, out_ptr, eps, s1, s2,
                          s3, s4, s5, s6, s7, e1, e2, e3, coded, rows, span, step, boxes, state, number, sender, room,
                          B: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, CODED: tl.constexpr,
                          PLAIN: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, WHOLE: tl.constexpr,
                          GAIN: tl.constexpr, BOXES: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Multiply R rows of one weight.

    s1 to s7      first rows in `out` of the second and later weights; the end of `out` for absent weights
    e1 to e3      the same for fp8 weights, which end at row `coded`
    span          rows per group; a group reads K of a token's `step` values of x
    DOWN, ACROSS  rows and columns of a block
    """
    _begin(DEPENDENT)
    first = tl.program_id(0) * R
    x_ptr += first // span * K
    is_coded = first < coded
    addresses, stamp, base = first, first, sender * room
    if BOXES > 0:
        addresses, stamp = _addresses(boxes, BOXES), _stamp(state, number)
    if CODED and is_coded:
        q_ptr, z_ptr, begun = _which_coded(first, q0, q1, q2, q3, z0, z1, z2, z3, e1, e2, e3)
        q_ptr += (first - begun).to(tl.int64) * K
        z_ptr += (first - begun) // DOWN * ((K + ACROSS - 1) // ACROSS)
        _coded_rows(x_ptr, norm_ptr, q_ptr, z_ptr, out_ptr, eps, first, coded - first, rows, step, addresses, stamp, base,
                    B, K, R, C, ACROSS, WHOLE, GAIN, BOXES, DEPENDENT)  # fmt: skip
    if PLAIN and ((not CODED) or (not is_coded)):
        w_ptr, begun = _which(first, coded, w0, w1, w2, w3, w4, w5, w6, w7, s1, s2, s3, s4, s5, s6, s7)
        w_ptr += (first - begun).to(tl.int64) * K
        _plain_rows(x_ptr, norm_ptr, w_ptr, out_ptr, eps, first, rows - first, rows, step, addresses, stamp, base, B, K, R, C,
                    WHOLE, GAIN, BOXES, DEPENDENT)  # fmt: skip


@in_place
def norm_products(x, norm, weights, out):
    _launch(x, norm, weights, out, None)
    return out


@in_place
def send_products(x, weight, mail):
    _launch(x, None, [weight], None, mail)
    return mail.boxes


def _launch(
    x: Tensor, norm: Norm | None, weights: Sequence[Tensor | Fp8Blocks], out: Tensor | None, mail: Mail | None
) -> None:  # fmt: skip
    weight, eps, gain = (None, 0.0, None) if norm is None else norm
    coded = [one for one in weights if isinstance(one, Fp8Blocks)]
    plain = [one for one in weights if isinstance(one, Tensor)]
    width, parts = x.shape[-1], [one.shape[0] for one in weights]
    ends, sent = [*accumulate(parts)], _mail_arguments(mail)
    rows = ends[-1]
    begun = ends[len(coded) - 1] if coded else 0
    blocks = coded[0].block if coded else (1, 1)
    groups = x.shape[1] if x.dim() == 3 else 1
    # A program's rows are in one weight, in one block, and in one group.
    apart = [*parts, *([blocks[0]] if coded else []), *([rows // groups] if groups > 1 else [])]
    codes, scales = (_filled(some, MOST_CODED) for some in ([one.codes for one in coded], [one.scale for one in coded]))
    job = job_of("product", "qkv", (rows, width, *apart), plain[0] if plain else coded[0].codes)
    launch_product(
        _norm_products_kernel, job, width, 1, 0, x, weight, *_filled(plain, MOST), *codes, *scales, out, eps,
        *_until(ends[len(coded) :], rows, MOST - 1), *_until(ends[: len(coded)], begun, MOST_CODED - 1), begun, rows,
        rows // groups, groups * width, *(sent[key] for key in ("boxes", "state", "number", "sender", "room")), B=len(x),
        CODED=bool(coded), PLAIN=bool(plain), DOWN=blocks[0], ACROSS=blocks[1], GAIN=gain, BOXES=sent["BOXES"],
    )  # fmt: skip


def _filled(some: Sequence[Tensor], count: int) -> list[Tensor | None]:
    """Pad the list to `count` with its first tensor."""
    return [*some, *[some[0] if some else None] * (count - len(some))]


def _until(ends: Sequence[int], end: int, count: int) -> list[int]:
    """Return the first rows of `count` weights after the first; absent weights begin at `end`."""
    return [*ends, *[end] * count][:count]


WARP = 1024  # experts per warp
WIDE = 512  # columns of the shared expert per program
_TAKEN = tl.constexpr(-(1 << 31))  # below every score


@triton.jit
def _score(logit):
    """Return √softplus. For a small e, 1 + e loses its digits; log(1 + e) · e / ((1 + e) - 1) corrects the loss."""
    logit = logit.to(tl.float32)
    e = tl.exp(-tl.abs(logit))
    whole = 1.0 + e
    log1p = tl.where(whole == 1.0, e, tl.log(whole) * (e / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.sqrt(tl.where(logit > 0.0, logit, 0.0) + log1p)


@triton.jit
def _ranked(logits_ptr, correction_ptr, i, experts):
    """Return int32 keys in the order of score + correction. A NaN counts as infinite."""
    mask = i < experts
    score = _score(tl.load(logits_ptr + i, mask=mask, other=0.0))
    score += tl.load(correction_ptr + i, mask=mask, other=0.0).to(tl.float32)
    score = tl.where(score != score, float("inf"), tl.where(score == 0.0, 0.0, score))
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(mask, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _TAKEN)


@triton.jit
def _best(logits_ptr, correction_ptr, slot, experts, S: tl.constexpr, E: tl.constexpr):
    """Return the S experts of the largest keys, ties going to the lowest index.

    Two 32-bit warp reductions are one instruction each; a 64-bit reduction is ten shuffles.
    """
    e = tl.arange(0, E)
    rank, found = _ranked(logits_ptr, correction_ptr, e, experts), slot * 0 - 1
    for nth in tl.static_range(S):
        first = tl.min(tl.where(rank == tl.max(rank, 0), e, E), 0)
        found = tl.where(slot == nth, first, found)
        rank = tl.where(e == first, _TAKEN, rank)
    return found


@triton.jit
def _gated_part(gate_ptr, up_ptr, out_ptr, gate_row, up_row, limit, part, I: tl.constexpr, WIDE: tl.constexpr):
    ACROSS: tl.constexpr = (I + WIDE - 1) // WIDE
    b, col = (part // ACROSS).to(tl.int64), part % ACROSS * WIDE + tl.arange(0, WIDE)
    mask = col < I
    gate = tl.load(gate_ptr + b * gate_row + col, mask=mask, other=0.0)
    gate, up = _limited(gate, tl.load(up_ptr + b * up_row + col, mask=mask, other=0.0), limit)
    value, _ = _activated(gate, "silu")
    tl.store(out_ptr + b * I + col, value * up, mask=mask)


@triton.jit(do_not_specialize=["rows", "experts"])
def _choose_experts_kernel(logits_ptr, correction_ptr, table_ptr, token_ptr, scale, ids_ptr, shares_ptr, rows, experts,
                           gate_ptr, up_ptr, out_ptr, gate_row, up_row, limit, S: tl.constexpr, SP: tl.constexpr,
                           E: tl.constexpr, LEAST: tl.constexpr, I: tl.constexpr, WIDE: tl.constexpr,
                           DEPENDENT: tl.constexpr):  # fmt: skip
    """Choose experts, and compute the shared expert's activation. I 0: no activation.

    The kernel is a fence (_launch.py): the next launch, the experts' gate and up, starts after the wait, as it cannot prefetch
    weights before the experts are chosen. If its programs started while earlier launches ran, they were unevenly distributed
    over multiprocessors (four H200s: 14.3 us a layer instead of 10.6)."""
    _wait(DEPENDENT)
    _begin(DEPENDENT)
    if tl.program_id(0) >= rows:
        if I > 0:
            _gated_part(gate_ptr, up_ptr, out_ptr, gate_row, up_row, limit, tl.program_id(0) - rows, I, WIDE)
    else:
        b = tl.program_id(0).to(tl.int64)
        logits_ptr += b * experts
        slot = tl.arange(0, SP)
        if table_ptr is not None:
            token = tl.load(token_ptr + b)
            i = tl.load(table_ptr + token * S + slot, mask=slot < S, other=-1).to(tl.int32)
        else:
            i = _best(logits_ptr, correction_ptr, slot, experts, S, E)
        known = (i >= 0) & (i < experts)
        score = tl.where(known, _score(tl.load(logits_ptr + i, mask=known, other=0.0)), float("nan"))
        whole = tl.sum(tl.where(slot < S, score, 0.0), 0) + LEAST
        tl.store(ids_ptr + b * S + slot, i, mask=slot < S)
        tl.store(shares_ptr + b * S + slot, score / whole * scale, mask=slot < S)


@in_place
def choose_experts(logits, correction, table, token, scale, ids, shares, gated=None):
    (rows, experts), slots = logits.shape, ids.shape[1]
    beside: tuple[Any, ...] = (None, None, None, 0, 0, 0.0)
    block, width, made = power_of_two(experts), 0, tuple[Tensor, ...]()
    if gated is not None:
        gate, up, limit, out = gated
        width, beside, made = out.shape[1], (gate, up, out, gate.stride(0), up.stride(0), limit), (out,)
    _choose_experts_kernel[(rows + rows * cdiv(width, WIDE),)](
        logits, correction, table, token, scale, ids, shares, rows, experts, *beside, slots, power_of_two(slots), block, LEAST,
        width, WIDE, **options(max(1, block // WARP)),
    )  # fmt: skip
    return ids, shares, *made


@triton.jit
def _routed_down_kernel(h_ptr, down_ptr, ids_ptr, weights_ptr, out_ptr, stacked, rows, K: tl.constexpr, R: tl.constexpr,
                        C: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    first, pair = tl.program_id(0) * R, tl.program_id(1).to(tl.int64)
    row, col = tl.arange(0, R), tl.arange(0, C)
    EVEN: tl.constexpr = K % C == 0
    left = rows - first
    expert, poison = _expert(ids_ptr + pair, stacked)
    w_ptr = down_ptr + (expert * rows + first) * K
    w = _tile(w_ptr, row, col, left, K, K, WHOLE)
    weight = tl.load(weights_ptr + pair, cache_modifier=".cg") * poison
    _wait(DEPENDENT)
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, K, C):
        total += w.to(tl.float32) * _row(h_ptr + pair * K + start, col, K - start, EVEN)[None]
        if start + C < K:
            w = _tile(w_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
    _end(DEPENDENT)
    tl.store(out_ptr + pair * rows + first + row, tl.sum(total, 1) * weight, mask=row < left)


@triton.jit
def _quantized_routed_down_kernel(h_ptr, w_ptr, scale_ptr, ids_ptr, weights_ptr, out_ptr, one, experts, rows, K: tl.constexpr,
                        KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
                        DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * R + tl.arange(0, R)
    expert, poison = _expert(ids_ptr + pair, experts)
    w = w_ptr + expert * rows * _words(K, KIND)
    scale = scale_ptr + expert * rows * _scales(K, KIND)
    weight = tl.load(weights_ptr + pair, cache_modifier=".cg") * poison
    h = h_ptr + pair * _stride(K, KIND)
    sums = _row_sums(h, h, w, scale, one, 0.0, rows, 1, K, KIND, R, C, None, WHOLE, DEPENDENT)
    tl.store(out_ptr + pair * rows + row, sums[0] * weight, mask=row < rows)


@in_place
def routed_down(h, down, ids, weights, out, dependent=0):
    experts, rows, width = down.shape
    launch_product(
        _routed_down_kernel, job_of("product", "routed_down", (rows, width, rows), down), width, ids.numel(), dependent, h,
        down, ids, weights, out, experts, rows,
    )  # fmt: skip
    return out


@in_place
def quantized_routed_down(h, down, ids, weights, out, dependent=0):
    rows = out.shape[2]
    h, *_ = _inputs(h, None, down, dependent)
    _multiply(
        _quantized_routed_down_kernel, "routed_down", down, rows, ids.numel(), dependent, h, down.words, down.scale, ids,
        weights, out, _ONE, down.rows // rows, rows,
    )  # fmt: skip
    return out
