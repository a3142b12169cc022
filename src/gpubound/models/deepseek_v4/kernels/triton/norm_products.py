"""Kernel of norm_products and send_products. A program has some rows of one weight and reads all of x, as in decode_product.py:
each weight is read once.

Rows of fp8 weights come first. Their programs multiply x, instead of the weight, by the scales of a block's columns: one
multiplication per column for all rows.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....kernels.decode_product import Norm
from .....kernels.peer_exchange import Mail
from .....kernels.plans import job_of
from .....kernels.triton._launch import bump_versions, launch_product
from .....kernels.triton._pdl import BEFORE, _begin, _end, _fresh_row, _gained, _products, _tile, _wait
from .....kernels.triton._peer_exchange import SCALARS, _addresses, _send, _stamp, mailed
from ..fp8_blocks import Fp8Blocks
from ..norm_products import MOST, MOST_CODED


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
def _put(out_ptr, at, total, square, eps, there, addresses, stamp, base, K: tl.constexpr, GAIN: tl.constexpr,
         BOXES: tl.constexpr):  # fmt: skip
    """Store the products of rows, divided by x's root mean square if x is normed. BOXES: number of inboxes that receive the
    products instead of out, at offset `base`; or 0."""
    y = tl.sum(total, 1)
    if GAIN is not None:
        y /= tl.sqrt(tl.sum(square, 0) / K + eps)
    if BOXES > 0:
        _send(addresses, base + at, y.to(tl.int32, bitcast=True), stamp, there)
    else:
        tl.store(out_ptr + at, y, mask=there)


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


@torch.no_grad()
def norm_products(x: Tensor, norm: Norm | None, weights: Sequence[Tensor | Fp8Blocks], out: Tensor) -> Tensor:
    _launch(x, norm, weights, out, None)
    bump_versions(out)
    return out


@torch.no_grad()
def send_products(x: Tensor, weight: Tensor | Fp8Blocks, mail: Mail) -> tuple[Tensor, ...]:
    _launch(x, None, [weight], None, mail)
    bump_versions(*mail.boxes)
    return mail.boxes


def _launch(
    x: Tensor, norm: Norm | None, weights: Sequence[Tensor | Fp8Blocks], out: Tensor | None, mail: Mail | None
) -> None:  # fmt: skip
    weight, eps, gain = (None, 0.0, None) if norm is None else norm
    coded = [one for one in weights if isinstance(one, Fp8Blocks)]
    plain = [one for one in weights if isinstance(one, Tensor)]
    width, parts = x.shape[-1], [one.shape[0] for one in weights]
    ends, sent = [*accumulate(parts)], mailed(mail)
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
