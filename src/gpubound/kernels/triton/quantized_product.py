"""Products of one decoding step with packed weights: of linear layers, and of a sparse MLP's experts (sums in _packed.py).

A program multiplies two rows of x at once, or one; further pairs are computed by concurrent programs, so that they share the
L2's copy of the weight. The PDL modes are those of decode_product.py.

For experts, a program multiplies one row of x by some rows of one expert, whose number it reads on the device; so a row gets
the same bits alone and in a batch. Gate and up are two sums of one program, over x that is then in the L1. The PDL modes are
those of experts.py, but `add_routed` reads no words before the wait.

Products of one decoding step for several rows (kernels/quantized_product.py): all rows of x at once, on tensor cores.

A program owns some rows of a weight, as in decode_product.py, and requests the first slices of them before it waits for x. Its
warps are placed along the columns, each with a separate range, and add their sums at the end: few rows of a weight and few of x
are one small product, which all warps would repeat otherwise.

Legend: S ranges, R rows of the weight, C columns of a range, B rows of x, TB of a tile; a slice is S C columns.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...device import interpreted
from ..gated import INFINITE
from ..packed_weights import Packed
from ..plans.types import ResidentPlan, job_of, power_of_two
from ._launch import _begin, _end, _wait, alignment, in_place, launch, launch_product, options
from ._math import capped
from ._packed import (
    _FP4_HALFWAY,
    _HALFWAY,
    _ONE,
    _chunks,
    _excess,
    _first,
    _number,
    _offset,
    _row_sums,
    _scale,
    _scales,
    _slots,
    _spacing,
    _sums_from,
    _values,
    _words,
)
from .decode_product import _gated, _norm_parts, _stacked
from .experts import _expert
from .gated import _limited


@triton.jit
def _bias(bias_ptr, row, rows, R: tl.constexpr, BIAS: tl.constexpr):
    if BIAS:
        return tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    return tl.zeros([R], tl.float32)


@triton.jit
def _norm_product_kernel(x_ptr, norm_ptr, w_ptr, scale_ptr, extra_ptr, bias_ptr, out_ptr, best_ptr, arg_ptr, one, eps, rows,
                         B: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                         WHOLE: tl.constexpr, BIAS: tl.constexpr, BEST: tl.constexpr, GAIN: tl.constexpr,
                         CAP: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    first = tl.program_id(0) * B  # of the rows of x, that this program multiplies
    row = tl.program_id(1) * R + tl.arange(0, R)
    in_range = row < rows
    offset = _bias(bias_ptr, row, rows, R, BIAS)
    sums = _row_sums(x_ptr + first * K, norm_ptr, w_ptr, scale_ptr, one, eps, rows, B, K, KIND, R, C, GAIN, WHOLE, DEPENDENT,
                     extra_ptr)  # fmt: skip
    for b in tl.static_range(B):
        y = sums[b] + offset
        if CAP > 0.0:
            y = capped(y, CAP)
        tl.store(out_ptr + (first + b) * rows.to(tl.int64) + row, y, mask=in_range)
        if BEST:
            y = tl.where(in_range, y, float("-inf"))
            top = tl.where(tl.sum((y != y).to(tl.int32), 0) > 0, float("nan"), tl.max(y, 0))
            at = (first + b) * tl.num_programs(1) + tl.program_id(1)
            tl.store(best_ptr + at, top)
            tl.store(arg_ptr + at, tl.program_id(1) * R + tl.argmax(y, 0))


@triton.jit
def _norm_gate_up_kernel(x_ptr, norm_ptr, w_ptr, scale_ptr, extra_ptr, bias_ptr, out_ptr, one, eps, rows, B: tl.constexpr,
                         K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
                         TURNS: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr, ACTIVATION: tl.constexpr,
                         DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    first = tl.program_id(0) * B  # of the rows of x, that this program multiplies
    row = tl.program_id(1) * R + tl.arange(0, R)
    offset = _bias(bias_ptr, row, rows, R, BIAS)
    sums = _row_sums(x_ptr + first * K, norm_ptr, w_ptr, scale_ptr, one, eps, rows, B, K, KIND, R, C, GAIN, WHOLE, DEPENDENT,
                     extra_ptr, TURNS)  # fmt: skip
    to = tl.program_id(1) * (R // 2) + tl.arange(0, R // 2)
    for b in tl.static_range(B):
        gate, up = tl.split(tl.reshape(sums[b] + offset, [R // 2, 2]))
        y = _gated(gate, up, ACTIVATION)
        tl.store(out_ptr + (first + b) * (rows // 2).to(tl.int64) + to, y.to(out_ptr.dtype.element_ty), mask=to < rows // 2)


@triton.jit
def _add_product_kernel(h_ptr, w_ptr, scale_ptr, extra_ptr, bias_ptr, x_ptr, one, rows, B: tl.constexpr, K: tl.constexpr,
                        KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr,
                        DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    first = tl.program_id(0) * B  # of the rows of x, that this program multiplies
    row = tl.program_id(1) * R + tl.arange(0, R)
    offset = _bias(bias_ptr, row, rows, R, BIAS)
    sums = _row_sums(h_ptr + first * K, h_ptr, w_ptr, scale_ptr, one, 0.0, rows, B, K, KIND, R, C, None, WHOLE, DEPENDENT,
                     extra_ptr)  # fmt: skip
    for b in tl.static_range(B):
        to = x_ptr + (first + b) * rows.to(tl.int64) + row
        tl.store(to, tl.load(to, mask=row < rows) + (sums[b] + offset), mask=row < rows)


@triton.jit
def _dequantize_kernel(w_ptr, scale_ptr, extra_ptr, out_ptr, one, rows, K: tl.constexpr, KIND: tl.constexpr,
                       TURNS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    SLOTS: tl.constexpr = _slots(KIND)
    WORDS: tl.constexpr = _spacing(KIND)
    N: tl.constexpr = _words(K, KIND)
    row, word = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    in_range = (row < rows)[:, None] & (word < N)[None]
    row = row.to(tl.int64)
    words = tl.load(w_ptr + row[:, None] * N + word[None], mask=in_range, other=0)
    SCALES: tl.constexpr = _scales(K, KIND)
    group = word // (4 * _chunks(K, KIND))
    at = row[:, None] * SCALES + group[None]
    scale = _scale(tl.load(scale_ptr + at, mask=in_range, other=0), KIND)
    offset = tl.load(extra_ptr + at, mask=in_range, other=0.0) if _offset(KIND) else 0.0
    to = out_ptr + ((row % TURNS) * (rows // TURNS) + row // TURNS)[:, None] * K
    for slot in tl.static_range(SLOTS):
        col = word // WORDS * (SLOTS * WORDS) + word % WORDS + slot * WORDS
        number = _number(words, one, slot, KIND, extra_ptr)
        if _values(KIND) == "e4m3":
            number = number * _HALFWAY * _HALFWAY
        elif _values(KIND) == "e2m1":
            number = number * _FP4_HALFWAY * _FP4_HALFWAY
        else:
            number -= _excess(slot, KIND)
        tl.store(to + col[None], (number * scale - offset).to(out_ptr.dtype.element_ty), mask=in_range & (col < K)[None])


@triton.jit
def _routed_gate_up_kernel(x_ptr, norm_ptr, w_ptr, scale_ptr, ids_ptr, out_ptr, one, eps, limit, experts, rows,
                           S: tl.constexpr, ACTIVATION: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
                           R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    N: tl.constexpr = _words(K, KIND)
    SCALES: tl.constexpr = _scales(K, KIND)
    _wait(DEPENDENT)
    _begin(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * R + tl.arange(0, R)
    expert, poison = _expert(ids_ptr + pair, experts)
    x_ptr += pair // S * K
    w_ptr += expert * 2 * rows * N
    scale_ptr += expert * 2 * rows * SCALES
    up_ptr, up_scale = w_ptr + rows * N, scale_ptr + rows * SCALES
    words, scale = _first(w_ptr, scale_ptr, rows, K, KIND, R, C, WHOLE)
    more, other = _first(up_ptr, up_scale, rows, K, KIND, R, C, WHOLE)
    gates = _sums_from(words, scale, x_ptr, norm_ptr, w_ptr, scale_ptr, one, eps, rows, 1, K, KIND, R, C, 0.0, WHOLE, 0)
    ups = _sums_from(more, other, x_ptr, norm_ptr, up_ptr, up_scale, one, eps, rows, 1, K, KIND, R, C, 0.0, WHOLE, 0)
    _end(DEPENDENT)
    gate, up = _limited(gates[0], ups[0], limit)
    y = _gated(gate, up, ACTIVATION) * poison
    tl.store(out_ptr + pair * rows + row, y.to(out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def _add_routed_kernel(h_ptr, w_ptr, scale_ptr, ids_ptr, weights_ptr, x_ptr, one, experts, rows, S: tl.constexpr,
                       K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
                       DEPENDENT: tl.constexpr):  # fmt: skip
    N: tl.constexpr = _words(K, KIND)
    SCALES: tl.constexpr = _scales(K, KIND)
    _begin(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * R + tl.arange(0, R)
    _wait(DEPENDENT)
    total = tl.zeros([R], tl.float32)
    for slot in tl.static_range(S):
        expert, poison = _expert(ids_ptr + b * S + slot, experts)
        weight = tl.load(weights_ptr + b * S + slot, cache_modifier=".cg") * poison
        w, scale = w_ptr + expert * rows * N, scale_ptr + expert * rows * SCALES
        h = h_ptr + (b * S + slot) * K
        sums = _row_sums(h, h, w, scale, one, 0.0, rows, 1, K, KIND, R, C, None, WHOLE, 0)
        total += sums[0] * weight
    _end(DEPENDENT)
    to = x_ptr + b * rows + row
    tl.store(to, tl.load(to, mask=row < rows, other=0.0) + total, mask=row < rows)


def _multiply(kernel: Any, use: str, weight: Packed, rows: int, across: int, dependent: int, *args: Any, **named: Any) -> None:
    """Launch a kernel over the weight, `across` programs for each range of `rows` of it."""
    words = weight.words.shape[1]
    job = job_of("packed_product", f"{weight.kind} {use}", (rows, weight.columns, words), weight.words)
    launch_product(kernel, job, words, across, dependent, *args, KIND=weight.kind, **named)


def _at_once(x: Tensor) -> int:
    """Rows of x that a program multiplies."""
    return 2 if x.shape[0] % 2 == 0 else 1


@in_place
def dequantize(weight, out, turns=1):
    grid = -(-weight.rows // 4), -(-weight.words.shape[1] // 256)
    _dequantize_kernel[grid](
        weight.words,
        weight.scale,
        weight.extra,
        out,
        _ONE,
        weight.rows,
        weight.columns,
        weight.kind,
        turns,
        4,
        256,
        num_warps=4,
    )
    return out


@in_place
def quantized_norm_product(x, norm, weight, bias, out, best, arg, dependent=0, cap=0.0):
    norm_weight, eps, gain = _norm_parts(norm)
    use, height = "qkv", None
    if best is not None:
        use, height = "head", power_of_two(-(-weight.rows // best.shape[1]))  # a partial maximum a program
    at_once, rows = _at_once(x), weight.rows
    _multiply(
        _norm_product_kernel, use, weight, rows, len(x) // at_once, dependent, x, norm_weight, weight.words, weight.scale,
        weight.extra, bias, out, best, arg, _ONE, eps, rows, height=height, B=at_once, BIAS=bias is not None,
        BEST=best is not None, GAIN=gain, CAP=cap,
    )  # fmt: skip
    return out, best, arg


@in_place
def quantized_norm_gate_up(x, norm, gate_up, bias, out, dependent=0, activation="silu", alternate=True):
    norm_weight, eps, gain = _norm_parts(norm)
    at_once, rows = _at_once(x), gate_up.rows
    _multiply(
        _norm_gate_up_kernel, "gate_up", gate_up, rows, len(x) // at_once, dependent, x, norm_weight,
        gate_up.words, gate_up.scale, gate_up.extra, bias, out, _ONE, eps, rows, B=at_once, TURNS=1 if alternate else 2,
        BIAS=bias is not None, GAIN=gain, ACTIVATION=activation,
    )  # fmt: skip
    return out


@in_place
def quantized_add_product(h, weight, bias, x, dependent=0):
    at_once, rows = _at_once(x), weight.rows
    _multiply(
        _add_product_kernel, "add", weight, rows, len(x) // at_once, dependent, h, weight.words, weight.scale,
        weight.extra, bias, x, _ONE, rows, B=at_once, BIAS=bias is not None,
    )  # fmt: skip
    return x


@in_place
def quantized_routed_gate_up(x, norm, gate_up, ids, out, dependent=0, limit=INFINITE, activation="silu"):
    rows = out.shape[2]
    _multiply(
        _routed_gate_up_kernel, "routed_gate_up", gate_up, rows, ids.numel(), dependent, x, norm.weight, gate_up.words,
        gate_up.scale, ids, out, _ONE, norm.eps, limit, gate_up.rows // (2 * rows), rows, S=ids.shape[1], ACTIVATION=activation,
    )  # fmt: skip
    return out


@in_place
def quantized_add_routed(h, down, ids, weights, x, dependent=0):
    rows = x.shape[1]
    _multiply(
        _add_routed_kernel, "add_routed", down, rows, len(x), dependent, h, down.words, down.scale, ids, weights, x,
        _ONE, down.rows // rows, rows, S=ids.shape[1],
    )  # fmt: skip
    return x


ROWS = 8  # of x, at least: the narrowest product of a tensor core


@triton.jit
def _slice(at, k, there, K: tl.constexpr, WHOLE: tl.constexpr):
    """(S, R, C) of the rows of weights that begin at `at`."""
    if WHOLE:
        return tl.load(at[None, :, None] + k[:, None, :])
    return tl.load(at[None, :, None] + k[:, None, :], mask=there[None, :, None] & (k < K)[:, None, :], other=0.0)


@triton.jit
def _rows(x_ptr, b, k, B, K: tl.constexpr, EVEN: tl.constexpr):
    """(S, TB, C) of x."""
    mask = (b < B)[None, :, None]
    if not EVEN:
        mask &= (k < K)[:, None, :]
    return tl.load(x_ptr + b[None, :, None] * K + k[:, None, :], mask=mask, other=0.0)


@triton.jit
def _gain(norm_ptr, k, K: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr):
    """(S, 1, C) of a norm's gain, which is GAIN + its weight."""
    if EVEN:
        gain = tl.load(norm_ptr + k)
    else:
        gain = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    return gain.to(tl.float32)[:, None, :] + GAIN


@triton.jit
def _times(w, x, total, WIDE: tl.constexpr):
    """(S, R, TB): total + w xᵀ, x rounded to the dtype of w."""
    x = tl.permute(x.to(w.dtype), (0, 2, 1))
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        return tl.dot(w.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
    return tl.dot(w, x, total, input_precision="ieee")


@triton.jit
def _product(x_ptr, norm_ptr, eps, at, there, B, TB: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
             C: tl.constexpr, HELD: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, GAIN: tl.constexpr,
             WIDE: tl.constexpr, DEPENDENT: tl.constexpr, to_ptr=None, inside=None):  # fmt: skip
    """(R, TB): the rows of weights that begin at `at`, which are `there`, with all rows of x, normed if there is a GAIN.

    HELD slices of weights are asked for before x is there, and AHEAD of x are on their way. to_ptr: what the product is added
    to, which is asked for with x.
    """
    SLICE: tl.constexpr = S * C
    SLICES: tl.constexpr = (K + SLICE - 1) // SLICE
    EVEN: tl.constexpr = K % SLICE == 0
    b, k = tl.arange(0, TB), tl.arange(0, S)[:, None] * C + tl.arange(0, C)[None]
    ws, xs = (), ()
    for i in tl.static_range(HELD):
        if i < SLICES:
            ws += (_slice(at, i * SLICE + k, there, K, WHOLE),)
    _wait(DEPENDENT)
    for i in tl.static_range(AHEAD):
        if i < SLICES:
            xs += (_rows(x_ptr, b, i * SLICE + k, B, K, EVEN),)
    old = 0.0 if to_ptr is None else tl.load(to_ptr, mask=inside, other=0.0)
    total, square = tl.zeros([S, R, TB], tl.float32), tl.zeros([TB], tl.float32)
    for i in tl.static_range(SLICES):
        x = xs[0]
        if GAIN is not None:
            x = x.to(tl.float32)
            square += tl.sum(tl.sum(x * x, 2), 0)
            x *= _gain(norm_ptr, i * SLICE + k, K, EVEN, GAIN)
        total = _times(ws[0], x, total, WIDE)
        ws = ws[1:]
        xs = xs[1:]
        if i + HELD < SLICES:
            ws += (_slice(at, (i + HELD) * SLICE + k, there, K, WHOLE),)
        if i + AHEAD < SLICES:
            xs += (_rows(x_ptr, b, (i + AHEAD) * SLICE + k, B, K, EVEN),)
    _end(DEPENDENT)
    y = tl.sum(total, 0)
    if GAIN is not None:
        y /= tl.sqrt(square / K + eps)[None]
    return y + old


@triton.jit
def _tiled_norm_product_kernel(x_ptr, norm_ptr, q_ptr, k_ptr, v_ptr, q_bias, k_bias, v_bias, out_ptr, eps, q_rows, k_rows,
                               rows, B, TB: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                               HELD: tl.constexpr, AHEAD: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr,
                               GAIN: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
                               DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, b = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, TB)
    there, at = row < rows, _stacked(row, q_ptr, k_ptr, v_ptr, q_rows, k_rows, K, ALIGNED)
    y = _product(x_ptr, norm_ptr, eps, at, there, B, TB, K, S, R, C, HELD, AHEAD, WHOLE, GAIN, WIDE, DEPENDENT)
    if BIAS:
        bias = _stacked(row, q_bias, k_bias, v_bias, q_rows, k_rows, 1, 1)
        y += tl.load(bias, mask=there, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + b.to(tl.int64)[None] * rows + row[:, None], y, mask=there[:, None] & (b < B)[None])


@triton.jit
def _tiled_norm_gate_up_kernel(x_ptr, norm_ptr, gate_ptr, up_ptr, gate_bias, up_bias, out_ptr, eps, rows, B,
                               TB: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                               HELD: tl.constexpr, AHEAD: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr,
                               GAIN: tl.constexpr, ACTIVATION: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
                               DEPENDENT: tl.constexpr):  # fmt: skip
    """A program's rows are as many of gate and then of up."""
    _begin(DEPENDENT)
    HALF: tl.constexpr = R // 2
    first, both, b = tl.program_id(0) * HALF, tl.arange(0, R), tl.arange(0, TB)
    each = (first + both % HALF).to(tl.int64) * K
    at = tl.multiple_of(tl.where(both < HALF, gate_ptr + each, up_ptr + each), ALIGNED)
    there = first + both % HALF < rows
    y = _product(x_ptr, norm_ptr, eps, at, there, B, TB, K, S, R, C, HELD, AHEAD, WHOLE, GAIN, WIDE, DEPENDENT)
    gate, up = tl.split(tl.permute(tl.reshape(y, [2, HALF, TB]), (1, 2, 0)))
    row = first + tl.arange(0, HALF)
    if BIAS:
        gate += tl.load(gate_bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        up += tl.load(up_bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    y = _gated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + b.to(tl.int64)[None] * rows + row[:, None], y, mask=(row < rows)[:, None] & (b < B)[None])


@triton.jit
def _tiled_add_product_kernel(h_ptr, w_ptr, bias_ptr, x_ptr, copy_ptr, rows, B, keep, apart, TB: tl.constexpr, K: tl.constexpr,
                              S: tl.constexpr, R: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr, AHEAD: tl.constexpr,
                              BIAS: tl.constexpr, COPY: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
                              DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, b = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, TB)
    there, at = row < rows, w_ptr + row.to(tl.int64) * K
    to = b.to(tl.int64)[None] * rows + row[:, None]
    inside = there[:, None] & (b < B)[None]
    y = _product(h_ptr, h_ptr, 0.0, at, there, B, TB, K, S, R, C, HELD, AHEAD, WHOLE, None, WIDE, DEPENDENT, x_ptr + to, inside)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)[:, None]
    tl.store(x_ptr + to, y, mask=inside)
    if COPY:
        tl.store(copy_ptr + to, y.to(copy_ptr.dtype.element_ty), mask=inside)
    if keep is not None:
        tl.store(keep + b.to(tl.int64)[None] * apart + row[:, None], y, mask=inside)


@in_place
def tiled_norm_product(x, norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out, dependent=0):
    norm_weight, eps, gain = _norm_parts(norm)
    rows, (k, v) = out.shape[1], (w if w is not None else weight for w in (k_weight, v_weight))
    k_bias, v_bias = (b if b is not None else bias for b in (k_bias, v_bias))  # pointers of one type for tl.where
    _launch(
        _tiled_norm_product_kernel, weight, x, rows, dependent, x, norm_weight, weight, k, v, bias, k_bias, v_bias, out, eps,
        len(weight), len(k), rows, BIAS=bias is not None, GAIN=gain, ALIGNED=alignment(x.shape[1], weight, k, v),
    )  # fmt: skip
    return out


@in_place
def tiled_norm_gate_up(x, norm, gate, up, gate_bias, up_bias, out, dependent=0, activation="silu"):
    norm_weight, eps, gain = _norm_parts(norm)
    _launch(
        _tiled_norm_gate_up_kernel, gate, x, 2 * len(gate), dependent, x, norm_weight, gate, up, gate_bias, up_bias, out, eps,
        len(gate), BIAS=gate_bias is not None, GAIN=gain, ACTIVATION=activation, ALIGNED=alignment(x.shape[1], gate, up),
    )  # fmt: skip
    return out


@in_place
def tiled_add_product(h, weight, bias, x, dependent=0, copy=None, keep=None):
    rows = len(weight)
    _launch(
        _tiled_add_product_kernel, weight, h, rows, dependent, h, weight, bias, x, copy, rows, BIAS=bias is not None,
        COPY=copy is not None, keep=keep, apart=0 if keep is None else keep.stride(0),
    )  # fmt: skip
    written = tuple(to for to in (copy, keep) if to is not None)
    return (x, *written) if written else x


def _launch(kernel: Any, weight: Tensor, x: Tensor, rows: int, dependent: int, *arguments: Any, **constants: Any) -> None:
    """rows: of all weights. None among the arguments is a tensor that this form does not read: the first stands in for it."""
    count, width = x.shape
    tall = max(ROWS, power_of_two(count))
    args = [arguments[0] if argument is None else argument for argument in arguments]

    def run(plan: ResidentPlan) -> None:
        kernel[(-(-rows // plan.rows),)](
            *args, count, TB=tall, K=width, S=plan.warps, R=plan.rows, C=plan.columns // plan.warps, HELD=plan.resident,
            AHEAD=plan.ahead, WHOLE=rows % plan.rows == 0 and width % plan.columns == 0, WIDE=interpreted(), **constants,
            **options(plan.warps, dependent),
        )  # fmt: skip

    way = "normed" if constants.get("GAIN") is not None else ""
    launch(job_of("tiled_product", way, (rows, width, tall), weight), run)
