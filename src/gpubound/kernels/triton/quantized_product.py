"""Products of one decoding step with packed weights: of linear layers, and of a sparse MLP's experts (sums in _packed.py).

A program multiplies two rows of x at once, or one; further pairs are computed by concurrent programs, so that they share the
L2's copy of the weight. The PDL modes are those of decode_product.py.

For experts, a program multiplies one row of x by some rows of one expert, whose number it reads on the device; so a row gets
the same bits alone and in a batch. Gate and up are two sums of one program, over x that is then in the L1. The PDL modes are
those of experts.py, but `add_routed` reads no words before the wait.

Products of one decoding step for several rows (kernels/quantized_product.py): all rows of x at once, on tensor cores.

A program owns some rows of a weight, as in decode_product.py, and requests the first slices of them before it waits for x. Its
warps are placed along the columns, each with separate chunks, and add their sums at the end: few rows of a weight and few of x
are one small product, which all warps would repeat otherwise.

Legend: S warps, R rows of the weight, B rows of x, TB of a tile; a slice is a chunk of 32 columns for each warp.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import interpreted
from ..decode_product import FENCE, Norm, chain_mode
from ..gated import INFINITE
from ..packed_weights import Packed
from ..plans.types import ResidentPlan, job_of, power_of_two
from ._launch import _begin, _end, _wait, alignment, at_once, in_place, launch, launch_product, options
from ._math import capped
from ._packed import (
    _FP4_HALFWAY,
    _HALFWAY,
    _ONE,
    _chunks,
    _columns,
    _excess,
    _first,
    _loaded,
    _number,
    _offset,
    _round_kernel,
    _rounded_before,
    _row_sums,
    _scale,
    _scales,
    _slots,
    _spacing,
    _stride,
    _sums_from,
    _values,
    _words,
)
from .decode_product import _gated, _norm_parts, _stacked
from .experts import _clamped_unit, _expert
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
    sums = _row_sums(x_ptr + first * _stride(K, KIND), norm_ptr, w_ptr, scale_ptr, one, eps, rows, B, K, KIND, R, C, GAIN,
                     WHOLE, DEPENDENT, extra_ptr)  # fmt: skip
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
    sums = _row_sums(x_ptr + first * _stride(K, KIND), norm_ptr, w_ptr, scale_ptr, one, eps, rows, B, K, KIND, R, C, GAIN,
                     WHOLE, DEPENDENT, extra_ptr, TURNS)  # fmt: skip
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
    sums = _row_sums(h_ptr + first * _stride(K, KIND), h_ptr, w_ptr, scale_ptr, one, 0.0, rows, B, K, KIND, R, C, None,
                     WHOLE, DEPENDENT, extra_ptr)  # fmt: skip
    for b in tl.static_range(B):
        to = x_ptr + (first + b) * rows.to(tl.int64) + row
        tl.store(to, tl.load(to, mask=row < rows) + (sums[b] + offset), mask=row < rows)


@triton.jit
def _dequantize_kernel(w_ptr, scale_ptr, extra_ptr, order_ptr, out_ptr, one, rows, K: tl.constexpr, KIND: tl.constexpr,
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
        inside = in_range & (col < K)[None]
        if order_ptr is not None:
            col = tl.load(order_ptr + col, mask=col < K, other=0)
        number = _number(words, one, slot, KIND, extra_ptr)
        if _values(KIND) == "e4m3":
            number = number * _HALFWAY * _HALFWAY
        elif _values(KIND) == "e2m1":
            number = number * _FP4_HALFWAY * _FP4_HALFWAY
        else:
            number -= _excess(slot, KIND)
        tl.store(to + col[None], (number * scale - offset).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _routed_gate_up_kernel(x_ptr, norm_ptr, w_ptr, scale_ptr, ids_ptr, out_ptr, one, eps, limit, experts, rows,
                           S: tl.constexpr, ACTIVATION: tl.constexpr, GAIN: tl.constexpr, K: tl.constexpr,
                           KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
                           DEPENDENT: tl.constexpr):  # fmt: skip
    N: tl.constexpr = _words(K, KIND)
    SCALES: tl.constexpr = _scales(K, KIND)
    if not _rounded_before(KIND):
        _wait(DEPENDENT)
    _begin(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * R + tl.arange(0, R)
    expert, poison = _expert(ids_ptr + pair, experts)
    x_ptr += pair // S * _stride(K, KIND)
    w_ptr += expert * 2 * rows * N
    scale_ptr += expert * 2 * rows * SCALES
    up_ptr, up_scale = w_ptr + rows * N, scale_ptr + rows * SCALES
    words, scale = _first(w_ptr, scale_ptr, rows, K, KIND, R, C, WHOLE)
    more, other = _first(up_ptr, up_scale, rows, K, KIND, R, C, WHOLE)
    if _rounded_before(KIND):
        _wait(DEPENDENT)
    gates = _sums_from(words, scale, x_ptr, norm_ptr, w_ptr, scale_ptr, one, eps, rows, 1, K, KIND, R, C, GAIN, WHOLE, 0)
    ups = _sums_from(more, other, x_ptr, norm_ptr, up_ptr, up_scale, one, eps, rows, 1, K, KIND, R, C, GAIN, WHOLE, 0)
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
        h = h_ptr + (b * S + slot) * _stride(K, KIND)
        sums = _row_sums(h, h, w, scale, one, 0.0, rows, 1, K, KIND, R, C, None, WHOLE, 0)
        total += sums[0] * weight
    _end(DEPENDENT)
    to = x_ptr + b * rows + row
    tl.store(to, tl.load(to, mask=row < rows, other=0.0) + total, mask=row < rows)


@triton.jit
def _expert_sums(x_ptr, norm_ptr, w_ptr, scale_ptr, bias_ptr, id_ptr, one, eps, experts, rows, K: tl.constexpr,
                 KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, GAIN: tl.constexpr, WHOLE: tl.constexpr,
                 DEPENDENT: tl.constexpr):  # fmt: skip
    """Return the sums of R rows of an expert with their biases, and NaN in place of 1 for an id that no expert has.

    The expert's first words are requested before the wait: a fence is between the choice of experts and this launch.
    """
    expert, poison = _expert(id_ptr, experts)
    row, first = tl.program_id(1) * R + tl.arange(0, R), expert * rows
    w_ptr, scale_ptr = w_ptr + first * _words(K, KIND), scale_ptr + first * _scales(K, KIND)
    sums = _row_sums(x_ptr, norm_ptr, w_ptr, scale_ptr, one, eps, rows, 1, K, KIND, R, C, GAIN, WHOLE, DEPENDENT)
    return sums[0] + _bias(bias_ptr + first, row, rows, R, True), poison


@triton.jit
def _column_gate_up_kernel(x_ptr, norm_ptr, w_ptr, scale_ptr, bias_ptr, ids_ptr, out_ptr, one, eps, alpha, limit, experts, rows,
                           S: tl.constexpr, GAIN: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
                           C: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    if not _rounded_before(KIND):
        _wait(DEPENDENT)
    _begin(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    both, poison = _expert_sums(x_ptr + pair // S * _stride(K, KIND), norm_ptr, w_ptr, scale_ptr, bias_ptr, ids_ptr + pair, one,
                                eps, experts, rows, K, KIND, R, C, GAIN, WHOLE, DEPENDENT)  # fmt: skip
    y, unit = _clamped_unit(both, alpha, limit, R) * poison, tl.program_id(1) * (R // 2) + tl.arange(0, R // 2)
    tl.store(out_ptr + pair * (rows // 2) + unit, y.to(out_ptr.dtype.element_ty), mask=unit < rows // 2)


@triton.jit
def _column_down_kernel(h_ptr, w_ptr, scale_ptr, bias_ptr, ids_ptr, out_ptr, one, experts, rows, K: tl.constexpr,
                        KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
                        DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    h_ptr += pair * _stride(K, KIND)
    y, poison = _expert_sums(h_ptr, h_ptr, w_ptr, scale_ptr, bias_ptr, ids_ptr + pair, one, 0.0, experts, rows, K, KIND, R, C,
                             None, WHOLE, DEPENDENT)  # fmt: skip
    row = tl.program_id(1) * R + tl.arange(0, R)
    tl.store(out_ptr + pair * rows + row, y * poison, mask=row < rows)


def _multiply(kernel: Any, use: str, weight: Packed, rows: int, across: int, dependent: int, *args: Any, **named: Any) -> None:
    """Launch a kernel over the weight, `across` programs for each range of `rows` of it."""
    words = weight.words.shape[1]
    job = job_of("packed_product", f"{weight.kind} {use}", (rows, weight.columns, words), weight.words)
    launch_product(kernel, job, words, across, dependent, *args, KIND=weight.kind, **named)


def _rows_together(x: Tensor) -> int:
    """Return the number of rows of x that a program multiplies."""
    return 2 if x.shape[0] % 2 == 0 else 1


@in_place
def dequantize(weight, out, turns=1):
    grid = -(-weight.rows // 4), -(-weight.words.shape[1] // 256)
    _dequantize_kernel[grid](
        weight.words,
        weight.scale,
        weight.extra,
        weight.order,
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


@triton.jit
def _sort_kernel(x_ptr, gain_ptr, order_ptr, to_ptr, gain_to, count, K, C: tl.constexpr, NORM: tl.constexpr,
                 DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    column = tl.program_id(0) * C + tl.arange(0, C)
    inside = column < K
    order = tl.load(order_ptr + column, mask=inside, other=0)
    _wait(DEPENDENT)
    if NORM:
        tl.store(gain_to + column, tl.load(gain_ptr + order, mask=inside), mask=inside)
    for b in range(count):
        tl.store(to_ptr + b * K + column, tl.load(x_ptr + b * K + order, mask=inside), mask=inside)
    _end(DEPENDENT)


def _sorted(x: Tensor, norm: Norm | None, weight: Packed, dependent: int = 0) -> tuple[Tensor, Norm | None]:
    """Return x and its norm with their columns in the order of the packed weight's.

    A gather inside a product would read 32 lines of x where it reads one, again in each program. By torch, x and norm took two
    launches that no kernel of the chain overlaps: llama-8b in GPTQ decoded 276 tokens/s with act-order and 568 without (H200).
    """
    order = weight.order
    if order is None:
        return x, norm
    columns, gain = x.shape[1], x if norm is None else norm.weight  # x where the kernel reads none
    to, gain_to = torch.empty_like(x), torch.empty(columns, device=x.device, dtype=gain.dtype)
    _sort_kernel[(-(-columns // 512),)](
        x, gain, order, to, gain_to, len(x), columns, 512, NORM=norm is not None, **options(4, dependent)
    )
    return to, None if norm is None else norm._replace(weight=gain_to)


def _inputs(x: Tensor, norm: Norm | None, weight: Packed, dependent: int) -> tuple[Tensor, Tensor | None, float, float | None]:
    """Return x as a product with this weight reads it, with its columns in the weight's order or rounded, and `_norm_parts` of
    the norm that is left to the product: none where x is rounded.

    The launch that rounds the x of gate and up is a fence after the choice of experts.
    """
    x, norm = _sorted(x, norm, weight, dependent)
    if not _rounded_before(weight.kind):
        return x, *_norm_parts(norm)
    columns, kind = weight.columns, weight.kind
    rounded = torch.empty(x.numel() // columns, _stride(columns, kind), device=x.device, dtype=torch.int32)
    gains, eps, gain = _norm_parts(norm)
    mode = dependent or chain_mode()
    _round_kernel[(len(rounded),)](
        x, x if gains is None else gains, rounded, eps, K=columns, KIND=kind, C=min(512, power_of_two(weight.words.shape[1])),
        GAIN=gain, **options(4, mode and (at_once(mode) if norm is None else FENCE)),
    )  # fmt: skip
    return rounded, *_norm_parts(None)


@in_place
def quantized_norm_product(x, norm, weight, bias, out, best, arg, dependent=0, cap=0.0):
    x, norm_weight, eps, gain = _inputs(x, norm, weight, dependent)
    use, height = "qkv", None
    if best is not None:
        use, height = "head", power_of_two(-(-weight.rows // best.shape[1]))  # a partial maximum a program
    together, rows = _rows_together(x), weight.rows
    _multiply(
        _norm_product_kernel, use, weight, rows, len(x) // together, dependent, x, norm_weight, weight.words, weight.scale,
        weight.extra, bias, out, best, arg, _ONE, eps, rows, height=height, B=together, BIAS=bias is not None,
        BEST=best is not None, GAIN=gain, CAP=cap,
    )  # fmt: skip
    return out, best, arg


@in_place
def quantized_norm_gate_up(x, norm, gate_up, bias, out, dependent=0, activation="silu", alternate=True):
    x, norm_weight, eps, gain = _inputs(x, norm, gate_up, dependent)
    together, rows = _rows_together(x), gate_up.rows
    _multiply(
        _norm_gate_up_kernel, "gate_up", gate_up, rows, len(x) // together, dependent, x, norm_weight,
        gate_up.words, gate_up.scale, gate_up.extra, bias, out, _ONE, eps, rows, B=together, TURNS=1 if alternate else 2,
        BIAS=bias is not None, GAIN=gain, ACTIVATION=activation,
    )  # fmt: skip
    return out


@in_place
def quantized_add_product(h, weight, bias, x, dependent=0):
    h, *_ = _inputs(h, None, weight, dependent)
    together, rows = _rows_together(x), weight.rows
    _multiply(
        _add_product_kernel, "add", weight, rows, len(x) // together, dependent, h, weight.words, weight.scale,
        weight.extra, bias, x, _ONE, rows, B=together, BIAS=bias is not None,
    )  # fmt: skip
    return x


@in_place
def quantized_routed_gate_up(x, norm, gate_up, ids, out, dependent=0, limit=INFINITE, activation="silu"):
    rows = out.shape[2]
    x, norm_weight, eps, gain = _inputs(x, norm, gate_up, dependent)
    _multiply(
        _routed_gate_up_kernel, "routed_gate_up", gate_up, rows, ids.numel(), dependent, x, norm_weight, gate_up.words,
        gate_up.scale, ids, out, _ONE, eps, limit, gate_up.rows // (2 * rows), rows, S=ids.shape[1], ACTIVATION=activation,
        GAIN=gain,
    )  # fmt: skip
    return out


@in_place
def quantized_add_routed(h, down, ids, weights, x, dependent=0):
    rows = x.shape[1]
    h, *_ = _inputs(h, None, down, dependent)
    _multiply(
        _add_routed_kernel, "add_routed", down, rows, len(x), dependent, h, down.words, down.scale, ids, weights, x,
        _ONE, down.rows // rows, rows, S=ids.shape[1],
    )  # fmt: skip
    return x


@in_place
def quantized_column_gate_up(x, norm, gate_up, bias, ids, out, alpha, limit, dependent=0):
    rows = bias.shape[1]
    x, norm_weight, eps, gain = _inputs(x, norm, gate_up, dependent)
    _multiply(
        _column_gate_up_kernel, "column_gate_up", gate_up, rows, ids.numel(), dependent, x, norm_weight, gate_up.words,
        gate_up.scale, bias, ids, out, _ONE, eps, alpha, limit, len(bias), rows, S=ids.shape[1], GAIN=gain,
    )  # fmt: skip
    return out


@in_place
def quantized_column_down(h, down, bias, ids, out, dependent=0):
    rows = bias.shape[1]
    h, *_ = _inputs(h, None, down, dependent)
    _multiply(
        _column_down_kernel, "column_down", down, rows, ids.numel(), dependent, h, down.words, down.scale, bias, ids, out, _ONE,
        len(bias), rows,
    )  # fmt: skip
    return out


ROWS = 8  # of x, at least: the narrowest product of a tensor core
_OR_AND = tl.constexpr("lop3.b32 $0, $1, $2, $3, 0xF8;")  # $1 | ($2 & $3)
CHUNK = tl.constexpr(32)  # columns of a row that four threads load, 16 bytes each, and multiply
# Of a tile that is loaded, threads go along the contiguous dimension, and then along the others from the first one on. Since
# Triton 3.7 from the last one on.
FROM_THE_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


@triton.jit
def _eights(R: tl.constexpr):
    """0 to R - 1 in eights, (8, R / 8) or (R / 8, 8): threads go along eight rows next to the columns."""
    if FROM_THE_FIRST:
        return tl.arange(0, R // 8)[None] * 8 + tl.arange(0, 8)[:, None]
    else:  # what follows a return is compiled, too
        return tl.arange(0, R // 8)[:, None] * 8 + tl.arange(0, 8)[None]


@triton.jit
def _fragments(tile, N: tl.constexpr, S: tl.constexpr):
    """(S, 8 N, CHUNK) of a tile as it was loaded, rows as of `_eights`, with S chunks of their columns between its dimensions.

    A tensor core sums in any order of the columns. In this one a thread holds the operands' elements already, and neither goes
    through shared memory: of two products of 16 columns, four threads have two times two columns each.
    """
    if FROM_THE_FIRST:
        tile = tl.permute(tl.reshape(tile, [8, S, N, 4, 2, 2, 2]), (1, 2, 0, 4, 5, 3, 6))
    else:
        tile = tl.permute(tl.reshape(tile, [N, S, 8, 4, 2, 2, 2]), (1, 0, 2, 4, 5, 3, 6))
    return tl.reshape(tile, [S, N * 8, CHUNK])


@triton.jit
def _sixteens(tile, N: tl.constexpr, S: tl.constexpr):
    """(S, 8 N, 16) of a tile as it was loaded, of 16 columns: `_fragments` of one product, of which four threads have four
    columns each."""
    if FROM_THE_FIRST:
        tile = tl.permute(tl.reshape(tile, [8, S, N, 4, 2, 2]), (1, 2, 0, 4, 3, 5))
    else:
        tile = tl.permute(tl.reshape(tile, [N, S, 8, 4, 2, 2]), (1, 0, 2, 4, 3, 5))
    return tl.reshape(tile, [S, N * 8, 16])


@triton.jit
def _unpacked(words, one, scale, offset, extra_ptr, SLOT: tl.constexpr, KIND: tl.constexpr):
    """Return the weights in a slot of each word, in fp32."""
    number = _number(words, one, SLOT, KIND, extra_ptr)
    if _values(KIND) == "level":
        return tl.fma(number, scale, -(_excess(SLOT, KIND) * scale + offset))
    if _values(KIND) == "e4m3":
        return number * _HALFWAY * (_HALFWAY * scale)
    if _values(KIND) == "e2m1":
        return number * _FP4_HALFWAY * (_FP4_HALFWAY * scale)
    return number * scale


@triton.jit
def _matmul_kernel(x_ptr, w_ptr, scale_ptr, extra_ptr, bias_ptr, out_ptr, one, rows, count, TB: tl.constexpr, K: tl.constexpr,
                   KIND: tl.constexpr, S: tl.constexpr, R: tl.constexpr, TURNS: tl.constexpr, BIAS: tl.constexpr,
                   ADD: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """R rows of the weight times TB of x. Sixteen words of a row, of four threads, are a product of 16 columns a slot."""
    N: tl.constexpr = _words(K, KIND)
    SCALES: tl.constexpr = _scales(K, KIND)
    SLOTS: tl.constexpr = _slots(KIND)
    WORDS: tl.constexpr = _spacing(KIND)
    EVEN: tl.constexpr = N % (16 * S) == 0
    WHOLE: tl.constexpr = EVEN and _columns(N, KIND) == K
    first, each = tl.program_id(0) * TB, (tl.program_id(1) * R + _eights(R))[:, None, :, None]
    word = tl.arange(0, S)[None, :, None, None] * 16 + tl.arange(0, 16)[None, None, None, :]
    b = tl.minimum(first + _eights(TB), count - 1).to(tl.int64)[:, None, :, None]
    valid, each = each < rows, tl.minimum(each, rows - 1).to(tl.int64)
    four = tl.arange(0, S)[None, :, None, None] * 4 + (tl.arange(0, 16) // 4)[None, None, None, :]
    w_ptr, x_ptr, scale_ptr = w_ptr + each * N + word, x_ptr + b * K, scale_ptr + each * SCALES
    extra_ptr = extra_ptr + each * SCALES if _offset(KIND) else extra_ptr
    words = tl.load(w_ptr, mask=valid & (word < N), other=0)
    total = tl.zeros([S, R, TB], tl.float32)
    for start in range(0, N, 16 * S):
        asked, at = words, start + word
        if N > 16 * S:  # before these are multiplied
            words = tl.load(w_ptr + (start + 16 * S), mask=valid & (at + 16 * S < N), other=0)
        group = (start // 4 + four) // _chunks(K, KIND)
        if not EVEN:
            group = tl.minimum(group, SCALES - 1)  # of words that meet an x of 0
        scale = _scale(_loaded(scale_ptr + group), KIND)
        offset = _loaded(extra_ptr + group) if _offset(KIND) else 0.0
        for slot in tl.static_range(SLOTS):
            column = at // WORDS * (SLOTS * WORDS) + at % WORDS + slot * WORDS
            x_at = x_ptr + column
            if WORDS > 1:  # a thread loads the four columns that it multiplies, and not eight, of which four are a neighbour's
                x_at = tl.max_contiguous(x_at, (1, 1, 1, 4))
            x = tl.load(x_at) if WHOLE else tl.load(x_at, mask=column < K, other=0.0)
            w = _unpacked(asked, one, scale, offset, extra_ptr, slot, KIND).to(x.dtype)
            w, x = _sixteens(w, R // 8, S), tl.permute(_sixteens(x, TB // 8, S), (0, 2, 1))
            if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
                w, x = w.to(tl.float32), x.to(tl.float32)
            total = tl.dot(w, x, total, input_precision="ieee")
    y, row, b = tl.sum(total, 0), tl.program_id(1) * R + tl.arange(0, R), first + tl.arange(0, TB)
    to = row if TURNS == 1 else row % TURNS * (rows // TURNS) + row // TURNS
    if BIAS:
        y += tl.load(bias_ptr + to, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    inside, out_ptr = (row < rows)[:, None] & (b < count)[None], out_ptr + b.to(tl.int64)[None] * rows + to[:, None]
    if ADD:
        y += tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=inside)


MOST_TOGETHER = 64  # rows of x of a program
# From so many rows of a weight or of x on, programs of four warps have 32 of a weight; otherwise of eight warps 16. H200, int4,
# us with 8 rows of x, and with 32: 28,672 x 4,096 weights 34.5 and 39.2, 67.1 and 119.6; 4,096 x 14,336 40.9 and 23.0, 54.6 and
# 49.3; 4,096 x 4,096 12.5 and 8.8, 18.2 and 19.3.
MANY_WEIGHTS, MANY_ROWS = 16384, 32


@in_place
def quantized_matmul(x, weight, bias, out, turns=1, add=False):
    x, _ = _sorted(x, None, weight)
    (count, width), rows = x.shape, weight.rows
    tall = min(max(ROWS, power_of_two(count)), MOST_TOGETHER)
    high, warps = (32, 4) if rows >= MANY_WEIGHTS or tall >= MANY_ROWS else (16, 8)
    warps = min(warps, power_of_two(-(-weight.words.shape[1] // 16)))
    _matmul_kernel[-(-count // tall), -(-rows // high)](
        x, weight.words, weight.scale, weight.words if weight.extra is None else weight.extra, x if bias is None else bias, out,
        _ONE, rows, count, TB=tall, K=width, KIND=weight.kind, S=warps, R=high, TURNS=turns, BIAS=bias is not None, ADD=add,
        WIDE=interpreted(), num_warps=warps, num_stages=1,
    )  # fmt: skip
    return out


@triton.jit
def _asked(at, k, mask, first: tl.constexpr, SLICE: tl.constexpr, K: tl.constexpr):
    """Ask for the slice of columns from `first` on."""
    if first + SLICE > K:
        mask = mask & (k < K - first)
    return tl.load(at + first, mask=mask, other=0.0)


@triton.jit
def _row_slice(x_ptr, k, first: tl.constexpr, SLICE: tl.constexpr, K: tl.constexpr):
    """Ask for a slice of rows of x. Beyond the row it has other columns of the same row, which meet a weight of 0: a load
    without a mask asks for nothing else first."""
    if first + SLICE <= K:
        x = tl.load(x_ptr + (k + first))
    elif first > 0:
        x = tl.load(x_ptr + tl.where(k < K - first, k + first, k))
    else:
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
    return x


@triton.jit
def _ordered_after(x, others, B):
    """Return x, after all of `others` have been loaded: x | other & 0, where the compiler does not know that B >> 8 is 0 (B is
    32 at most).

    It has the first products wait for their x before it asks for the other slices, to spare registers: a wait for the L2 each.
    """
    zero = tl.cast(B, tl.int32) >> 8  # a B of 1 is a constant
    for j in tl.static_range(1, len(others)):
        if x.dtype == tl.float32:
            bits, other = x.to(tl.int32, bitcast=True), others[j].to(tl.int32, bitcast=True)
            x = tl.inline_asm_elementwise(_OR_AND, "=r,r,r,r", [bits, other, zero], tl.int32, True, 1)
            x = x.to(tl.float32, bitcast=True)
        else:
            x = tl.inline_asm_elementwise(_OR_AND, "=r,r,r,r", [x, others[j], zero.to(tl.int16)], x.dtype, True, 2)
    return x


@triton.jit
def _product(x_ptr, norm_ptr, eps, at, mask, B, TB: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
             HELD: tl.constexpr, AHEAD: tl.constexpr, GAIN: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr,
             to_ptr=None, inside=None):  # fmt: skip
    """(R, TB): the rows of weights that begin at `at`, as of `_eights`, in `mask`, with all rows of x, normed if there
    is a GAIN.

    HELD slices of weights are asked for before x is there, and AHEAD of x are on their way. to_ptr: what the product is added
    to, which is asked for with x.
    """
    SLICE: tl.constexpr = S * CHUNK
    SLICES: tl.constexpr = (K + SLICE - 1) // SLICE
    k = tl.arange(0, S)[None, :, None, None] * CHUNK + tl.arange(0, CHUNK)[None, None, None, :]
    b, eight_k = tl.minimum(_eights(TB), B - 1)[:, None, :, None], k + 0 * _eights(8)[:, None, :, None]
    at, mask = at[:, None, :, None] + k, mask[:, None, :, None]
    x_ptr, gain_ptr = x_ptr + b * K, norm_ptr + eight_k
    ws, xs, gains = (), (), ()
    for i in tl.static_range(HELD):
        if i < SLICES:
            ws += (_asked(at, k, mask, i * SLICE, SLICE, K),)
            if GAIN is not None:
                gains += (_asked(gain_ptr, eight_k, eight_k >= 0, i * SLICE, SLICE, K),)
    _wait(DEPENDENT)
    for i in tl.static_range(AHEAD):
        if i < SLICES:
            xs += (_row_slice(x_ptr, k, i * SLICE, SLICE, K),)
    total, square = tl.zeros([S, R, TB], tl.float32), 0.0
    if to_ptr is not None:  # in the first products: added at the end, it was asked for after them, and then waited for
        total = tl.where((tl.arange(0, S) == 0)[:, None, None], tl.load(to_ptr, mask=inside, other=0.0)[None], total)
    for i in tl.static_range(SLICES):
        x = _ordered_after(xs[0], xs, B) if i == 0 and not WIDE else xs[0]
        if GAIN is not None:
            x, gain = x.to(tl.float32), gains[0].to(tl.float32)
            if (i + 1) * SLICE > K:
                x = tl.where(k < K - i * SLICE, x, 0.0)
            square += x * x
            x *= gain if GAIN == 0.0 else gain + GAIN
            gains = gains[1:]
        w, x = _fragments(ws[0], R // 8, S), tl.permute(_fragments(x.to(ws[0].dtype), TB // 8, S), (0, 2, 1))
        if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
            w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, x, total, input_precision="ieee")
        ws = ws[1:]
        xs = xs[1:]
        if i + HELD < SLICES:
            ws += (_asked(at, k, mask, (i + HELD) * SLICE, SLICE, K),)
            if GAIN is not None:
                gains += (_asked(gain_ptr, eight_k, eight_k >= 0, (i + HELD) * SLICE, SLICE, K),)
        if i + AHEAD < SLICES:
            xs += (_row_slice(x_ptr, k, (i + AHEAD) * SLICE, SLICE, K),)
    _end(DEPENDENT)
    y = tl.sum(total, 0)
    if GAIN is not None:
        square = tl.sum(tl.sum(square, 3), 1)
        if FROM_THE_FIRST:
            square = tl.permute(square, (1, 0))
        y /= tl.sqrt(tl.reshape(square, [TB]) / K + eps)[None]
    return y + 0.0  # else two stores of y make two conversions of its layout (Triton 3.6)


@triton.jit
def _tiled_norm_product_kernel(x_ptr, norm_ptr, q_ptr, k_ptr, v_ptr, q_bias, k_bias, v_bias, out_ptr, eps, q_rows, k_rows,
                               rows, B, TB: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
                               HELD: tl.constexpr, AHEAD: tl.constexpr, BIAS: tl.constexpr,
                               GAIN: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
                               DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, b, each = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, TB), tl.program_id(0) * R + _eights(R)
    at = _stacked(each, q_ptr, k_ptr, v_ptr, q_rows, k_rows, K, (ALIGNED, ALIGNED))
    y = _product(x_ptr, norm_ptr, eps, at, each < rows, B, TB, K, S, R, HELD, AHEAD, GAIN, WIDE, DEPENDENT)
    mask = row < rows
    if BIAS:
        bias = _stacked(row, q_bias, k_bias, v_bias, q_rows, k_rows, 1, 1)
        y += tl.load(bias, mask=mask, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + b.to(tl.int64)[None] * rows + row[:, None], y, mask=mask[:, None] & (b < B)[None])


@triton.jit
def _tiled_norm_gate_up_kernel(x_ptr, norm_ptr, gate_ptr, up_ptr, gate_bias, up_bias, out_ptr, eps, rows, B,
                               TB: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
                               HELD: tl.constexpr, AHEAD: tl.constexpr, BIAS: tl.constexpr,
                               GAIN: tl.constexpr, ACTIVATION: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
                               DEPENDENT: tl.constexpr):  # fmt: skip
    """A program's rows are eight of gate and eight of up alternately, so that a thread has both sums of a row."""
    _begin(DEPENDENT)
    HALF: tl.constexpr = R // 2
    first, both, b = tl.program_id(0) * HALF, _eights(R), tl.arange(0, TB)
    local = first + both // 16 * 8 + both % 8
    each = local.to(tl.int64) * K
    at = tl.multiple_of(tl.where(both % 16 < 8, gate_ptr + each, up_ptr + each), (ALIGNED, ALIGNED))
    y = _product(x_ptr, norm_ptr, eps, at, local < rows, B, TB, K, S, R, HELD, AHEAD, GAIN, WIDE, DEPENDENT)
    gate, up = tl.split(tl.permute(tl.reshape(y, [R // 16, 2, 8, TB]), (0, 2, 3, 1)))
    gate, up = tl.reshape(gate, [HALF, TB]), tl.reshape(up, [HALF, TB])
    row = first + tl.arange(0, HALF)
    if BIAS:
        gate += tl.load(gate_bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        up += tl.load(up_bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    y = _gated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + b.to(tl.int64)[None] * rows + row[:, None], y, mask=(row < rows)[:, None] & (b < B)[None])


@triton.jit
def _tiled_add_product_kernel(h_ptr, w_ptr, bias_ptr, x_ptr, copy_ptr, rows, B, keep, apart, TB: tl.constexpr, K: tl.constexpr,
                              S: tl.constexpr, R: tl.constexpr, HELD: tl.constexpr, AHEAD: tl.constexpr,
                              BIAS: tl.constexpr, COPY: tl.constexpr, WIDE: tl.constexpr,
                              DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, b, each = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, TB), tl.program_id(0) * R + _eights(R)
    mask, at = row < rows, w_ptr + each.to(tl.int64) * K
    to = b.to(tl.int64)[None] * rows + row[:, None]
    inside = mask[:, None] & (b < B)[None]
    y = _product(h_ptr, h_ptr, 0.0, at, each < rows, B, TB, K, S, R, HELD, AHEAD, None, WIDE, DEPENDENT, x_ptr + to, inside)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=mask, other=0.0).to(tl.float32)[:, None]
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
            *args, count, TB=tall, K=width, S=plan.warps, R=plan.rows, HELD=plan.resident,
            AHEAD=plan.ahead, WIDE=interpreted(), **constants, **options(plan.warps, dependent),
        )  # fmt: skip

    way = "normed" if constants.get("GAIN") is not None else ""
    launch(job_of("tiled_product", way, (rows, width, tall), weight), run)
