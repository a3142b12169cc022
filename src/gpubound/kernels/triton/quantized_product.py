"""The products of one decoding step over packed weights (packed.py): memory-bound, so a weight may cost few instructions.

At 4.3 TB/s an H200 reads 8.6e12 int4 weights a second and issues 132 · 128 · 1.75 GHz = 3e13 instructions of a lane: 3.4 a
weight, of which 1.7 may be integer ones, that have half the lanes. What one costs here, for a row of x and 16 rows of the
weight a program:

int4   a mask and an exponent put over it 1 (one LOP3), a shift 0.4, multiply and add 1: 2.4; 1.4 of them integer
int8   the same with a shift of 0.75, and twice the time for it
fp8    two shifts, a mask, multiply and add: 3.75 of 6.9; the bits of e4m3 are those of an fp32 number 2^120 times too small
all    x, its norm, square and sum, 5 each for all rows of a program: 0.3; the sums across lanes, 0.3

A program takes two rows of x at once, or one; of more, each pair is others' work, beside it, so that they share the L2's copy
of the weight. x stays in fp32. No conversion instruction, no shuffle, no shared memory but for the last sums. The norm rides
along as in decode_product.py, and launches depend on each other in the same modes. Counted in what Triton 3.6 makes for compute
capability 9.0: int4 3.4 instructions a weight in all with one row of x (hidden 4096, 16 rows a program), 5.0 with two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..packed import GROUP, Packed
from ..plans import Job, job_of, power_of_two
from ..plans.kinds import MatrixPlan
from ._launch import launch
from .decode_product import _begin, _end, _options, _wait

_ONE = 127 << 23  # the bits of 1.0
# x of an fp8 product is multiplied by 2^60 beforehand and its sum afterwards, so that neither leaves the range of fp32.
_HALFWAY = tl.constexpr(2.0**60)
_FP8_BITS = tl.constexpr(0x87F00000 - (1 << 32))  # the sign, four bits of exponent, three of mantissa, where fp32 has them
assert GROUP == 128  # which stands below as it is


@triton.jit
def _number(words, one, SLOT: tl.constexpr, KIND: tl.constexpr):
    """A slot of every word as fp32, with what `_excess` says too much; of fp8, 2^-120 of it.

    `one` holds the bits of 1.0. Were it a constant, the compiler would mask in one instruction and put the exponent over in
    another: LOP3 does both at once, but takes only one constant.
    """
    if KIND == "fp8":
        return (((words << (8 * SLOT)) >> 4) & _FP8_BITS).to(tl.float32, bitcast=True)
    SHOWN: tl.constexpr = 2 if KIND == "int4" else 1  # levels in the window of bits 15 to 22
    window: tl.constexpr = SLOT // SHOWN
    bits = words.to(tl.uint32, bitcast=True)
    if window == 1:
        bits = bits << 8
    elif window == 2:
        bits = bits >> 8
    elif window == 3:
        bits = (bits >> 16) | (bits << 16)
    lowest: tl.constexpr = 19 if SLOT % SHOWN < SHOWN - 1 else 15
    mask: tl.constexpr = (15 if KIND == "int4" else 255) << lowest
    return ((bits & mask) | (one + ((23 - lowest) << 23)).to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.jit
def _excess(SLOT: tl.constexpr, KIND: tl.constexpr):
    """2^e + the level that stands for zero."""
    if KIND == "int4":
        return 24.0 if SLOT % 2 == 0 else 264.0
    return 384.0


@triton.jit
def _vector(ptr, col, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + col).to(tl.float32)
    return tl.load(ptr + col, mask=col < K, other=0.0).to(tl.float32)


@triton.jit
def _products(words, one, x_ptr, norm_ptr, word, B: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
              C: tl.constexpr, EVEN: tl.constexpr, NORMED: tl.constexpr):  # fmt: skip
    """For each row of x, (the sums over every four words of a tile, before their scale: (R, C / 4); the squares of x (C,))."""
    SLOTS: tl.constexpr = 8 if KIND == "int4" else 4
    WORDS: tl.constexpr = 128 // SLOTS
    first = word // WORDS * 128 + word % WORDS
    products, excess, squares = (), (), ()
    for _ in tl.static_range(B):
        products += (tl.zeros([R, C], tl.float32),)
        excess += (tl.zeros([C], tl.float32),)
        squares += (tl.zeros([C], tl.float32),)
    for slot in tl.static_range(SLOTS):
        col = first + slot * WORDS
        number = _number(words, one, slot, KIND)
        so_far, products, excess, squares = (products, excess, squares), (), (), ()
        for b in tl.static_range(B):  # inside, or the numbers of all slots would have to be kept
            x = _vector(x_ptr + b * K, col, K, EVEN)
            if NORMED:
                squares += (so_far[2][b] + x * x,)
                x *= _vector(norm_ptr, col, K, EVEN)
            else:
                squares += (so_far[2][b],)
            if KIND == "fp8":
                x *= _HALFWAY
                excess += (so_far[1][b],)
            else:
                excess += (so_far[1][b] + x * _excess(slot, KIND),)
            products += (so_far[0][b] + number * x[None],)
    sums = ()
    for b in tl.static_range(B):
        total = tl.sum(tl.reshape(products[b], [R, C // 4, 4]), 2)
        if KIND != "fp8":
            total -= tl.sum(tl.reshape(excess[b], [C // 4, 4]), 1)[None]
        sums += (total,)
    return sums, squares


@triton.jit
def _tile(ptr, row, col, rows, there, ROW: tl.constexpr, WHOLE: tl.constexpr):
    """Of a matrix with ROW elements a row, at `col` in all of `row`, where the column is `there`."""
    at = ptr + row.to(tl.int64)[:, None] * ROW + col[None]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(row < rows)[:, None] & there[None], other=0)


@triton.jit
def _row_sums(x_ptr, norm_ptr, w_ptr, scale_ptr, one, eps, rows, B: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
              R: tl.constexpr, C: tl.constexpr, NORMED: tl.constexpr, WHOLE: tl.constexpr,
              DEPENDENT: tl.constexpr):  # fmt: skip
    """For each row of x, the sums (R,) of R rows of the weight."""
    SLOTS: tl.constexpr = 8 if KIND == "int4" else 4
    GROUPS: tl.constexpr = (K + 128 - 1) // 128
    N: tl.constexpr = GROUPS * (128 // SLOTS)  # words a row
    EVEN: tl.constexpr = N % C == 0 and K % 128 == 0
    SCALES: tl.constexpr = 1 if KIND == "fp8" else GROUPS  # a row
    CHUNKS: tl.constexpr = N // 4 if KIND == "fp8" else 128 // SLOTS // 4  # of four words that share a scale
    row = tl.program_id(1) * R + tl.arange(0, R)
    word, chunk = tl.arange(0, C), tl.arange(0, C // 4)
    words = _tile(w_ptr, row, word, rows, word < N, N, WHOLE)
    scale = _tile(scale_ptr, row, chunk // CHUNKS, rows, chunk < N // 4, SCALES, WHOLE)
    _wait(DEPENDENT)
    totals, squares = (), ()
    for _ in tl.static_range(B):
        totals += (tl.zeros([R, C // 4], tl.float32),)
        squares += (tl.zeros([C], tl.float32),)
    for start in range(0, N, C):
        parts, squared = _products(words, one, x_ptr, norm_ptr, start + word, B, K, KIND, R, C, EVEN, NORMED)
        so_far, totals, squares = (totals, squares), (), ()
        for b in tl.static_range(B):
            totals += (so_far[0][b] + parts[b] * scale.to(tl.float32),)
            squares += (so_far[1][b] + squared[b],)
        if start + C < N:
            at, part = start + C + word, (start + C) // 4 + chunk
            words = _tile(w_ptr, row, at, rows, at < N, N, WHOLE)
            scale = _tile(scale_ptr, row, part // CHUNKS, rows, part < N // 4, SCALES, WHOLE)
    _end(DEPENDENT)
    sums = ()
    for b in tl.static_range(B):
        sums += (_finished(totals[b], squares[b], eps, K, KIND, NORMED),)
    return sums


@triton.jit
def _finished(total, square, eps, K: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr):
    y = tl.sum(total, 1)
    if KIND == "fp8":
        y *= _HALFWAY
    if NORMED:
        y /= tl.sqrt(tl.sum(square, 0) / K + eps)
    return y


@triton.jit
def _bias(bias_ptr, row, rows, R: tl.constexpr, BIAS: tl.constexpr):
    if BIAS:
        return tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    return tl.zeros([R], tl.float32)


@triton.jit
def _norm_product_kernel(x_ptr, norm_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, best_ptr, arg_ptr, one, eps, rows,
                         B: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                         WHOLE: tl.constexpr, BIAS: tl.constexpr, BEST: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    first = tl.program_id(0) * B  # of the rows of x, that this program multiplies
    row = tl.program_id(1) * R + tl.arange(0, R)
    there = row < rows
    offset = _bias(bias_ptr, row, rows, R, BIAS)
    sums = _row_sums(x_ptr + first * K, norm_ptr, w_ptr, scale_ptr, one, eps, rows, B, K, KIND, R, C, True, WHOLE, DEPENDENT)
    for b in tl.static_range(B):
        y = sums[b] + offset
        tl.store(out_ptr + (first + b) * rows.to(tl.int64) + row, y, mask=there)
        if BEST:
            y = tl.where(there, y, float("-inf"))
            top = tl.where(tl.sum((y != y).to(tl.int32), 0) > 0, float("nan"), tl.max(y, 0))
            at = (first + b) * tl.num_programs(1) + tl.program_id(1)
            tl.store(best_ptr + at, top)
            tl.store(arg_ptr + at, tl.program_id(1) * R + tl.argmax(y, 0))


@triton.jit
def _norm_gate_up_kernel(x_ptr, norm_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, one, eps, rows, B: tl.constexpr,
                         K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
                         BIAS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    first = tl.program_id(0) * B  # of the rows of x, that this program multiplies
    row = tl.program_id(1) * R + tl.arange(0, R)
    offset = _bias(bias_ptr, row, rows, R, BIAS)
    sums = _row_sums(x_ptr + first * K, norm_ptr, w_ptr, scale_ptr, one, eps, rows, B, K, KIND, R, C, True, WHOLE, DEPENDENT)
    to = tl.program_id(1) * (R // 2) + tl.arange(0, R // 2)
    for b in tl.static_range(B):
        gate, up = tl.split(tl.reshape(sums[b] + offset, [R // 2, 2]))
        y = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_ptr + (first + b) * (rows // 2).to(tl.int64) + to, y.to(out_ptr.dtype.element_ty), mask=to < rows // 2)


@triton.jit
def _add_product_kernel(h_ptr, w_ptr, scale_ptr, bias_ptr, x_ptr, one, rows, B: tl.constexpr, K: tl.constexpr,
                        KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr,
                        DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    first = tl.program_id(0) * B  # of the rows of x, that this program multiplies
    row = tl.program_id(1) * R + tl.arange(0, R)
    offset = _bias(bias_ptr, row, rows, R, BIAS)
    sums = _row_sums(h_ptr + first * K, h_ptr, w_ptr, scale_ptr, one, 0.0, rows, B, K, KIND, R, C, False, WHOLE, DEPENDENT)
    for b in tl.static_range(B):
        to = x_ptr + (first + b) * rows.to(tl.int64) + row
        tl.store(to, tl.load(to, mask=row < rows) + (sums[b] + offset), mask=row < rows)


@triton.jit
def _dequantize_kernel(w_ptr, scale_ptr, out_ptr, one, rows, K: tl.constexpr, KIND: tl.constexpr, TURNS: tl.constexpr,
                       R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    SLOTS: tl.constexpr = 8 if KIND == "int4" else 4
    WORDS: tl.constexpr = 128 // SLOTS
    N: tl.constexpr = (K + 127) // 128 * WORDS
    row, word = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    there = (row < rows)[:, None] & (word < N)[None]
    row = row.to(tl.int64)
    words = tl.load(w_ptr + row[:, None] * N + word[None], mask=there, other=0)
    group = word * 0 if KIND == "fp8" else word // WORDS
    SCALES: tl.constexpr = 1 if KIND == "fp8" else N // WORDS
    scale = tl.load(scale_ptr + row[:, None] * SCALES + group[None], mask=there, other=0.0).to(tl.float32)
    to = out_ptr + ((row % TURNS) * (rows // TURNS) + row // TURNS)[:, None] * K
    for slot in tl.static_range(SLOTS):
        col = word // WORDS * 128 + word % WORDS + slot * WORDS
        number = _number(words, one, slot, KIND)
        if KIND == "fp8":
            number = number * _HALFWAY * _HALFWAY
        else:
            number -= _excess(slot, KIND)
        tl.store(to + col[None], (number * scale).to(out_ptr.dtype.element_ty), mask=there & (col < K)[None])


def _job(use: str, weight: Packed) -> Job:
    shape = weight.rows, weight.columns, weight.words.shape[1]
    return job_of("packed_product", f"{weight.kind} {use}", shape, weight.words)


def _at_once(x: Tensor) -> int:
    """Rows of x that a program multiplies."""
    return 2 if x.shape[0] % 2 == 0 else 1


def _grid(plan: MatrixPlan, weight: Packed, x: Tensor) -> tuple[int, int]:
    return x.shape[0] // _at_once(x), plan.along(weight.rows)


def _shape(plan: MatrixPlan, weight: Packed, x: Tensor) -> tuple:
    """B, K, KIND, R, C, WHOLE of the kernels."""
    whole = plan.whole(weight.rows, weight.words.shape[1])
    return _at_once(x), weight.columns, weight.kind, plan.rows, plan.columns, whole


@torch.no_grad()
def dequantize(weight: Packed, out: Tensor, turns: int = 1) -> Tensor:
    grid = -(-weight.rows // 4), -(-weight.words.shape[1] // 256)
    _dequantize_kernel[grid](
        weight.words, weight.scale, out, _ONE, weight.rows, weight.columns, weight.kind, turns, 4, 256, num_warps=4
    )
    return out


@torch.no_grad()
def quantized_norm_product(
    x: Tensor, norm: Tensor, eps: float, weight: Packed, bias: Tensor | None, out: Tensor, best: Tensor | None,
    arg: Tensor | None, dependent: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip

    def run(plan: MatrixPlan) -> None:
        if best is not None:
            plan = plan._replace(rows=power_of_two(-(-weight.rows // best.shape[1])))  # a partial maximum a program
        _norm_product_kernel[_grid(plan, weight, x)](
            x, norm, weight.words, weight.scale, bias if bias is not None else x, out, best if best is not None else x,
            arg if arg is not None else x, _ONE, eps, weight.rows, *_shape(plan, weight, x), bias is not None,
            best is not None, **_options(plan.warps, dependent),
        )  # fmt: skip

    launch(_job("head" if best is not None else "qkv", weight), run)
    return out, best, arg


@torch.no_grad()
def quantized_norm_gate_up(
    x: Tensor, norm: Tensor, eps: float, gate_up: Packed, bias: Tensor | None, out: Tensor, dependent: int = 0
) -> Tensor:

    def run(plan: MatrixPlan) -> None:
        _norm_gate_up_kernel[_grid(plan, gate_up, x)](
            x, norm, gate_up.words, gate_up.scale, bias if bias is not None else x, out, _ONE, eps, gate_up.rows,
            *_shape(plan, gate_up, x), bias is not None, **_options(plan.warps, dependent),
        )  # fmt: skip

    launch(_job("gate_up", gate_up), run)
    return out


@torch.no_grad()
def quantized_add_product(h: Tensor, weight: Packed, bias: Tensor | None, x: Tensor, dependent: int = 0) -> Tensor:

    def run(plan: MatrixPlan) -> None:
        _add_product_kernel[_grid(plan, weight, x)](
            h, weight.words, weight.scale, bias if bias is not None else x, x, _ONE, weight.rows, *_shape(plan, weight, h),
            bias is not None, **_options(plan.warps, dependent),
        )  # fmt: skip

    launch(_job("add", weight), run)
    return x
