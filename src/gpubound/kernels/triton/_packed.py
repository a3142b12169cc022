"""Sums of x times the rows of a packed weight (packed_weights.py): memory-bound, so a weight may cost few instructions.

At 4.3 TB/s an H200 reads 8.6e12 int4 weights a second and issues 132 · 128 · 1.75 GHz = 3e13 instructions of a lane: 3.4 a
weight, of which 1.7 may be integer ones, that have half the lanes. Counted in what Triton 3.9 makes for compute capability 9.0,
for a row of x (gate and up of 28,672 x 4,096, then a down product of 14,336 columns): int4 2.6 and 3.1 a weight, int8 2.8
and 2.3.

levels        integers, four of which one instruction multiplies and adds (dp4a). A thread rounds the x of its four words, 32
              columns of int4, to 16 bits of their largest magnitude: an error of 2e-5 of normal x, and of an outlier's
              neighbours alone. High and low bytes are separate sums. So a word takes a shift, two masks and four dp4a. Each
              level put under an exponent and multiplied in fp32 took 3.9 and 7.0 instructions a weight of int4, and 255
              registers of the former program in place of 165
fp8           two shifts, a mask, multiply and add: 3.75 of 6.9; bits of e4m3 are those of an fp32 number 2^120 times too small
fp4           integers, too: 12 + twice a number is a byte, and two permutations look up four of them. x has 24 bits, as exact
              as fp32, and is rounded by a launch before: in each program that took a quarter of all instructions. By Triton 3.6
              2.9 a weight with 8 rows a program, 3.4 with 4; bits put in place and multiplied in fp32 took 5.0 to 5.5
nf4           a shift, a mask, and a load of one of sixteen numbers: of a quarter the rate of a multiplication
offset of levels from 0: the sum of x over four words, 1 for all rows of a program; one product for every four words
x             its norm, square, sum, and rounding, for all rows of a program

No shuffle, and no shared memory but for the last sums. The norm rides along as in decode_product.py.
"""

import triton
import triton.language as tl

from ..packed_weights import MOST, TABLE
from ._launch import _begin, _end, _row, _wait

_ONE = 127 << 23  # the bits of 1.0
_MOST = tl.constexpr(float(MOST))
_LEAST = tl.constexpr(1e-30)  # the largest of four words, at least: its reciprocal is finite
_MOST_24 = tl.constexpr(float((1 << 22) - 1))  # of an x in 24 bits
_ROUNDING = tl.constexpr(1.5 * 2.0**23)  # added to a number, its lowest bits are the rounded number
_ROUNDING_BITS = tl.constexpr(0x4B400000)
# Four codes of fp4 select bytes of 12 + twice 0, 0.5, 1, 1.5, 2, 3, 4, 6; of 12 - twice them where a code has its sign.
_CODES = tl.constexpr(
    "{ .reg .b32 plus, minus; prmt.b32 plus, $2, 0x18141210, $1; xor.b32 minus, $1, 0x8888;"
    " prmt.b32 minus, $3, 0x00040608, minus; or.b32 $0, plus, minus; }"
)
_PLUS, _MINUS = tl.constexpr(0x0F0E0D0C), tl.constexpr(0x090A0B0C)  # bytes of the first four
# x of an fp8 product is multiplied by 2^60 beforehand and its sum afterwards, so that neither leaves the range of fp32.
_HALFWAY = tl.constexpr(2.0**60)
_FP8_BITS = tl.constexpr(0x87F00000 - (1 << 32))  # the sign, four bits of exponent, three of mantissa, where fp32 has them
_FP4_BITS = tl.constexpr(0x81C00000 - (1 << 32))  # the sign, two bits of exponent, one of mantissa
_FP4_HALFWAY = tl.constexpr(2.0**63)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.constexpr_function
def _slots(kind):
    """Weights in a word."""
    return len(TABLE[kind].shifts)


@triton.constexpr_function
def _spacing(kind):
    """Words between two slots of a word."""
    return TABLE[kind].spacing


@triton.constexpr_function
def _values(kind):
    return TABLE[kind].values


@triton.constexpr_function
def _offset(kind):
    return TABLE[kind].offset


@triton.constexpr_function
def _words(columns, kind):
    """Return the number of words of a row."""
    return TABLE[kind].words(columns)


@triton.constexpr_function
def _columns(words, kind):
    """Return the number of columns of a row of so many words, with those that pad it."""
    return words * len(TABLE[kind].shifts)


@triton.constexpr_function
def _scales(columns, kind):
    """Return the number of scales of a row."""
    return TABLE[kind].scales(columns)


@triton.constexpr_function
def _chunks(columns, kind):
    """Return the number of times four words that share a scale."""
    group = TABLE[kind].group
    return group // (4 * len(TABLE[kind].shifts)) if group else TABLE[kind].words(columns) // 4


@triton.constexpr_function
def _permutation(selector):
    return f"prmt.b32 $0, $1, $2, {selector:#06x};"


@triton.constexpr_function
def _load_of(bits):
    return f"ld.global.nc.b{bits} $0, [$1];"


@triton.jit
def _loaded(at):
    """Return what is at `at` in fp32, and a byte in int32. tl.load has another layout, and its conversion is a barrier."""
    TYPE: tl.constexpr = at.dtype.element_ty
    if _INTERPRETED:
        return tl.load(at).to(tl.int32 if tl.uint8 == TYPE else tl.float32)
    ASM: tl.constexpr = _load_of(TYPE.primitive_bitwidth)
    bits = tl.inline_asm_elementwise(ASM, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1)
    if tl.uint8 == TYPE:
        return bits
    elif tl.float32 == TYPE:
        return bits.to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _scale(stored, KIND: tl.constexpr):
    """Return the scale as fp32. A byte of fp4 is its exponent; 0 is 2^-127, and 255 is NaN."""
    if _values(KIND) != "e2m1":
        return stored.to(tl.float32)
    bits = stored.to(tl.int32)
    bits = tl.where(bits == 0, 1 << 22, tl.where(bits == 255, 0x7FC00000, bits << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _number(words, one, SLOT: tl.constexpr, KIND: tl.constexpr, extra_ptr=None):
    """A slot of every word as fp32, with what `_excess` says too much; of fp8 2^-120 of it, of fp4 2^-126.

    `one` holds the bits of 1.0. Were it a constant, the compiler would mask in one instruction and put the exponent over in
    another: LOP3 does both at once, but takes only one constant.
    """
    if _values(KIND) == "e4m3":  # to the top of the word, from its place there
        if _spacing(KIND) == 1:
            return (((words << (24 - 8 * SLOT)) >> 4) & _FP8_BITS).to(tl.float32, bitcast=True)
        return (((words << (8 * SLOT)) >> 4) & _FP8_BITS).to(tl.float32, bitcast=True)
    if _values(KIND) == "e2m1":
        return (((words << (4 * SLOT)) >> 6) & _FP4_BITS).to(tl.float32, bitcast=True)
    if _values(KIND) == "nf4":  # sixteen numbers in one line of the L1
        at = extra_ptr + ((words >> (4 * (SLOT ^ 1))) & 15)
        if _INTERPRETED:
            return tl.load(at)
        # tl.load has another layout, and Triton 3.6 converts 32 words by more shared memory than it reserves: writes out of it.
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    FOUR: tl.constexpr = _slots(KIND) == 8
    SHOWN: tl.constexpr = 2 if FOUR else 1  # levels in the window of bits 15 to 22
    window: tl.constexpr = SLOT // SHOWN
    bits = words.to(tl.uint32, bitcast=True)
    if window == 1:
        bits = bits << 8
    elif window == 2:
        bits = bits >> 8
    elif window == 3:
        bits = (bits >> 16) | (bits << 16)
    lowest: tl.constexpr = 19 if SLOT % SHOWN < SHOWN - 1 else 15
    mask: tl.constexpr = (15 if FOUR else 255) << lowest
    return ((bits & mask) | (one + ((23 - lowest) << 23)).to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.constexpr_function
def _excess(slot, kind):
    """2^e + the level of zero; 0 of numbers that are no levels."""
    if TABLE[kind].values != "level":
        return 0.0
    power = 256 if TABLE[kind].bits == 8 or slot % 2 else 16
    return float(power + TABLE[kind].zero)


@triton.jit
def _quarters(t, R: tl.constexpr, C: tl.constexpr):
    """Return the first, second, third and fourth of every four numbers of R rows: (R, C / 4) each, or (C / 4,) if R is 0."""
    if R == 0:
        even, odd = tl.split(tl.reshape(t, [C // 4, 2, 2]))
    else:
        even, odd = tl.split(tl.reshape(t, [R, C // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _dot4(words, x, total, SIGNED: tl.constexpr):
    """Return total + the products of the four bytes of words, which have no sign, and of x. SIGNED: x's have one."""
    if _INTERPRETED:
        for i in tl.static_range(4):
            byte = (x >> (8 * i)) & 255
            total += ((words >> (8 * i)) & 255) * (((byte ^ 128) - 128) if SIGNED else byte)
        return total
    ASM: tl.constexpr = "dp4a.u32.s32 $0, $1, $2, $3;" if SIGNED else "dp4a.u32.u32 $0, $1, $2, $3;"
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [words, x, total], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _permuted(a, b, SELECTOR: tl.constexpr):
    """Return four of the eight bytes of two words."""
    ASM: tl.constexpr = _permutation(SELECTOR)
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _bytes(a, b, c, d, COUNT: tl.constexpr):
    """Return the lowest bytes of four words as one word, their second bytes as another, and of COUNT 3 their third ones."""
    if _INTERPRETED:
        words = ()
        for i in tl.static_range(COUNT):
            first = ((a >> (8 * i)) & 255) | (((b >> (8 * i)) & 255) << 8)
            words += (first | (((c >> (8 * i)) & 255) << 16) | (((d >> (8 * i)) & 255) << 24),)
        return words
    first, other = _permuted(a, b, 0x5140), _permuted(c, d, 0x5140)
    words = (_permuted(first, other, 0x5410), _permuted(first, other, 0x7632))
    if COUNT == 3:
        words += (_permuted(_permuted(a, b, 0x0062), _permuted(c, d, 0x0062), 0x5410),)
    return words


@triton.jit
def _codes(words, tables_ptr):
    """Return the levels of the four lowest codes of fp4 in each word, as bytes: 12 + twice the number.

    A permutation by codes finds the levels of those without a sign, and 0 for others; one by inverted signs finds the others.
    The bytes that it permutes are loaded: constants, and sums of arguments, are moved into a register before each permutation.
    """
    if _INTERPRETED:
        levels = tl.zeros_like(words)
        for i in tl.static_range(4):
            code = (words >> (4 * i)) & 15
            size = code & 7
            twice = tl.where(size < 5, size, tl.where(size == 5, 6, 4 * size - 16))  # 0, 1, 2, 3, 4, 6, 8, 12
            levels |= tl.where(code > 7, 12 - twice, 12 + twice) << (8 * i)
        return levels
    tables = tl.load(tables_ptr), tl.load(tables_ptr + 1)
    return tl.inline_asm_elementwise(_CODES, "=r,r,r,r", [words, tables[0], tables[1]], tl.int32, True, 1)


@triton.jit
def _levels(words, tables_ptr, KIND: tl.constexpr):
    """Return words of four levels each, as bytes without a sign, times `_unit`: of eight slots 6, 2, 0, 4 and then 3, 1, 5, 7,
    of four slots 1, 0, 2, 3, of fp4 7, 6, 5, 4 and then 3, 2, 1, 0."""
    bits = words.to(tl.uint32, bitcast=True)
    if _values(KIND) == "e2m1":
        return _codes(words, tables_ptr), _codes((bits >> 16).to(tl.int32, bitcast=True), tables_ptr)
    elif _slots(KIND) == 8:
        mask: tl.constexpr = 0x78787878
        turned = (bits >> 4) | (bits << 28)
        return (bits & mask).to(tl.int32, bitcast=True), (turned & mask).to(tl.int32, bitcast=True)
    else:
        return (((bits >> 7) | (bits << 25)).to(tl.int32, bitcast=True),)


@triton.constexpr_function
def _unit(kind):
    """Return what a byte of `_levels` is for a level of 1, or a number of 1."""
    if TABLE[kind].values == "e2m1":
        return 2
    return 8 if TABLE[kind].bits == 4 else 1


@triton.constexpr_function
def _zero(kind):
    """Return the byte of `_levels` that encodes 0."""
    return 12 if TABLE[kind].values == "e2m1" else TABLE[kind].zero * _unit(kind)


@triton.constexpr_function
def _input_bytes(kind):
    """Return the number of bytes of an x as an integer. Published fp4 is multiplied as exactly as in fp32."""
    return 3 if TABLE[kind].values == "e2m1" else 2


@triton.jit
def _rounded_x(x_ptr, norm_ptr, first, K: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
               GAIN: tl.constexpr):  # fmt: skip
    """Return a row of x as integers of `_input_bytes`: the words of each byte, by one of four words and of `_levels`; the value
    of a 1 (C / 4,); the sums of each byte (C / 4,); the squares of x (C,)."""
    SLOTS: tl.constexpr = _slots(KIND)
    WORDS: tl.constexpr = _spacing(KIND)
    BYTES: tl.constexpr = _input_bytes(KIND)
    MOST: tl.constexpr = _MOST if BYTES == 2 else _MOST_24
    xs, square, most = (), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for slot in tl.static_range(SLOTS):
        col = first + slot * WORDS
        x = _row(x_ptr, col, K, EVEN)
        if GAIN is not None:
            square += x * x
            gain = _row(norm_ptr, col, K, EVEN)
            if GAIN != 0.0:
                gain += GAIN
            x *= gain
        most = tl.maximum(most, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
        xs += (_quarters(x, 0, C),)
    a, b, c, d = _quarters(most, 0, C)
    low = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    top = tl.maximum(low, tl.maximum(c, d, propagate_nan=tl.PropagateNan.ALL), propagate_nan=tl.PropagateNan.ALL)
    top = tl.maximum(top, _LEAST, propagate_nan=tl.PropagateNan.ALL)
    factor, ones = MOST / top, tl.full([C // 4], 0x01010101, tl.int32)
    sums, packed = (), ()
    for _ in tl.static_range(BYTES):
        sums += (tl.zeros([C // 4], tl.int32),)
    for j in tl.static_range(4):
        bits = ()
        for slot in tl.static_range(SLOTS):
            rounded = tl.fma(xs[slot][j], factor, _ROUNDING).to(tl.int32, bitcast=True)
            bits += (rounded if BYTES == 2 else rounded - _ROUNDING_BITS,)
        if _values(KIND) == "e2m1":
            groups = (_bytes(bits[7], bits[6], bits[5], bits[4], 3), _bytes(bits[3], bits[2], bits[1], bits[0], 3))
        elif SLOTS == 8:
            groups = (_bytes(bits[6], bits[2], bits[0], bits[4], 2), _bytes(bits[3], bits[1], bits[5], bits[7], 2))
        else:
            groups = (_bytes(bits[1], bits[0], bits[2], bits[3], 2),)
        for k in tl.static_range(SLOTS // 4):
            so_far, sums = sums, ()
            for i in tl.static_range(BYTES):
                sums += (_dot4(ones, groups[k][i], so_far[i], i == BYTES - 1),)
        packed += (groups,)
    return packed, top * (1 / MOST), sums, square


@triton.constexpr_function
def _rounded_before(kind):
    """Return whether a launch rounds x once, and not each program of a product."""
    return TABLE[kind].values == "e2m1"


@triton.constexpr_function
def _parts(kind):
    """Return how many times four words of a rounded x there are for every four words of a row of the weight."""
    return len(TABLE[kind].shifts) // 4 * _input_bytes(kind) + 1


@triton.constexpr_function
def _stride(columns, kind):
    """Return the elements between two rows of x. A rounded row is `_parts`, as long as a row of the weight each, then the
    factor of its products, the two words that `_codes` permutes, and one that aligns the next row."""
    return _parts(kind) * TABLE[kind].words(columns) + 4 if _rounded_before(kind) else columns


@triton.constexpr_function
def _number_of(word, group, byte, kind):
    """Return the index, among the integers that a rounded x has for four words of a weight, of one byte of a word's group of
    four slots. Word 4 has the sums of each byte, and the value of a 1."""
    return (word * (len(TABLE[kind].shifts) // 4) + group) * _input_bytes(kind) + byte


@triton.constexpr_function
def _position(word, group, byte, columns, kind):
    """Return the offset of that integer in a row of rounded x, for the row's first four words."""
    number = _number_of(word, group, byte, kind)
    return number // 4 * TABLE[kind].words(columns) + number % 4


@triton.jit
def _round_kernel(x_ptr, norm_ptr, out_ptr, eps, K: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, GAIN: tl.constexpr,
                  DEPENDENT: tl.constexpr):  # fmt: skip
    """Store a row of x as `_loaded_x` reads it, then its factor, of the norm or 1, and the words that `_codes` permutes."""
    N: tl.constexpr = _words(K, KIND)
    WORDS: tl.constexpr = _spacing(KIND)
    BYTES: tl.constexpr = _input_bytes(KIND)
    _begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    x_ptr, out_ptr = x_ptr + row * K, out_ptr + row * _stride(K, KIND)
    _wait(DEPENDENT)
    squares = tl.zeros([C], tl.float32)
    for start in range(0, N, C):
        word = start + tl.arange(0, C)
        first = word // WORDS * (_slots(KIND) * WORDS) + word % WORDS
        packed, value, sums, square = _rounded_x(x_ptr, norm_ptr, first, K, KIND, C, False, GAIN)
        squares += square
        four = start + tl.arange(0, C // 4) * 4
        for j in tl.static_range(4):
            for k in tl.static_range(_slots(KIND) // 4):
                for i in tl.static_range(BYTES):
                    tl.store(out_ptr + _position(j, k, i, K, KIND) + four, packed[j][k][i], mask=four < N)
        for i in tl.static_range(BYTES):
            tl.store(out_ptr + _position(4, 0, i, K, KIND) + four, sums[i], mask=four < N)
        tl.store(out_ptr + _position(4, 0, 3, K, KIND) + four, value.to(tl.int32, bitcast=True), mask=four < N)
    factor = 1.0
    if GAIN is not None:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    tl.store(out_ptr + _stride(K, KIND) - 4, tl.cast(factor, tl.float32).to(tl.int32, bitcast=True))
    tl.store(out_ptr + _stride(K, KIND) - 3, _PLUS)
    tl.store(out_ptr + _stride(K, KIND) - 2, _MINUS)
    _end(DEPENDENT)


@triton.jit
def _loaded_x(x_ptr, word, K: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr):
    """Load what `_rounded_x` returns of a row, as `_round_kernel` stored it."""
    N: tl.constexpr = _words(K, KIND)
    BYTES: tl.constexpr = _input_bytes(KIND)
    flat = ()
    for m in tl.static_range(_parts(KIND)):
        at = x_ptr + m * N + word
        flat += _quarters(tl.load(at) if N % C == 0 else tl.load(at, mask=word < N, other=0), 0, C)
    packed = ()
    for j in tl.static_range(4):
        groups = ()
        for k in tl.static_range(_slots(KIND) // 4):
            parts = ()
            for i in tl.static_range(BYTES):
                parts += (flat[_number_of(j, k, i, KIND)],)
            groups += (parts,)
        packed += (groups,)
    sums = ()
    for i in tl.static_range(BYTES):
        sums += (flat[_number_of(4, 0, i, KIND)],)
    return packed, flat[_number_of(4, 0, 3, KIND)].to(tl.float32, bitcast=True), sums, tl.zeros([C], tl.float32)


@triton.jit
def _joined(parts):
    """Return the number whose bytes were summed separately, the lowest first."""
    total = parts[0]
    for i in tl.static_range(1, len(parts)):
        total += parts[i] << (8 * i)
    return total


@triton.jit
def _level_products(words, x_ptr, norm_ptr, word, B: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
                    C: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr):  # fmt: skip
    """`_products` of levels, in integers."""
    WORDS: tl.constexpr = _spacing(KIND)
    ZERO: tl.constexpr = _zero(KIND)
    BYTES: tl.constexpr = _input_bytes(KIND)
    first = word // WORDS * (_slots(KIND) * WORDS) + word % WORDS
    packs, ones, sums_x, squares, parts = (), (), (), (), ()
    for b in tl.static_range(B):
        if _rounded_before(KIND):
            packed, value, sums, square = _loaded_x(x_ptr + b * _stride(K, KIND), word, K, KIND, C)
        else:
            packed, value, sums, square = _rounded_x(x_ptr + b * K, norm_ptr, first, K, KIND, C, EVEN, GAIN)
        packs += (packed,)
        ones += (value,)
        sums_x += (tl.cast(_joined(sums), tl.float32) * value,)
        squares += (square,)
        zeros = ()
        for i in tl.static_range(BYTES):
            zeros += (tl.zeros([R, C // 4], tl.int32) - (ZERO * sums[i])[None],)
        parts += (zeros,)
    four = _quarters(words, R, C)
    for j in tl.static_range(4):
        levels = _levels(four[j], x_ptr + _stride(K, KIND) - 3, KIND)
        for k in tl.static_range(_slots(KIND) // 4):
            so_far, parts = parts, ()
            for b in tl.static_range(B):
                more = ()
                for i in tl.static_range(BYTES):
                    more += (_dot4(levels[k], packs[b][j][k][i][None], so_far[b][i], i == BYTES - 1),)
                parts += (more,)
    totals = ()
    for b in tl.static_range(B):
        totals += (tl.cast(_joined(parts[b]), tl.float32) * (ones[b] * (1 / _unit(KIND)))[None],)
    return totals, sums_x, squares


@triton.jit
def _float_products(words, one, x_ptr, norm_ptr, word, extra_ptr, B: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
                    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr):  # fmt: skip
    """`_products` of numbers that are no levels, in fp32."""
    SLOTS: tl.constexpr = _slots(KIND)
    WORDS: tl.constexpr = _spacing(KIND)
    first = word // WORDS * (SLOTS * WORDS) + word % WORDS
    products, squares, none = (), (), ()
    for _ in tl.static_range(B):
        products += (tl.zeros([R, C], tl.float32),)
        squares += (tl.zeros([C], tl.float32),)
        none += (0.0,)
    for slot in tl.static_range(SLOTS):
        col = first + slot * WORDS
        number = _number(words, one, slot, KIND, extra_ptr)
        so_far, products, squares = (products, squares), (), ()
        for b in tl.static_range(B):  # inside, or the numbers of all slots would have to be kept
            x = _row(x_ptr + b * K, col, K, EVEN)
            if GAIN is not None:
                squares += (so_far[1][b] + x * x,)
                gain = _row(norm_ptr, col, K, EVEN)
                if GAIN != 0.0:
                    gain += GAIN
                x *= gain
            else:
                squares += (so_far[1][b],)
            if _values(KIND) == "e4m3":
                x *= _HALFWAY
            products += (so_far[0][b] + number * x[None],)
    sums = ()
    for b in tl.static_range(B):
        sums += (tl.sum(tl.reshape(products[b], [R, C // 4, 4]), 2),)
    return sums, none, squares


@triton.jit
def _products(words, one, x_ptr, norm_ptr, word, extra_ptr, B: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
              R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr):  # fmt: skip
    """For each row of x, (the sums over every four words of a tile, before their scale: (R, C / 4); those of x, for offsets
    (C / 4,); the squares of x (C,))."""
    if _values(KIND) == "level" or _values(KIND) == "e2m1":
        return _level_products(words, x_ptr, norm_ptr, word, B, K, KIND, R, C, EVEN, GAIN)
    else:
        return _float_products(words, one, x_ptr, norm_ptr, word, extra_ptr, B, K, KIND, R, C, EVEN, GAIN)


@triton.jit
def _tile(ptr, row, col, rows, mask, ROW: tl.constexpr, WHOLE: tl.constexpr):
    """Load a tile of a matrix with ROW elements a row, at `col` in all of `row`, where the column is in `mask`."""
    at = ptr + row.to(tl.int64)[:, None] * ROW + col[None]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(row < rows)[:, None] & mask[None], other=0)


@triton.jit
def _rows(rows, R: tl.constexpr, TURNS: tl.constexpr):
    """Return the rows of a program. TURNS: rows of two weights, one below the other, alternate; 1: of a single one."""
    row = tl.program_id(1) * R + tl.arange(0, R)
    if TURNS == 2:
        row = (row % 2) * (rows // 2) + row // 2 + tl.where(row < rows, 0, rows)  # beyond the last one as before
    return row


@triton.jit
def _first(w_ptr, scale_ptr, rows, K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
           WHOLE: tl.constexpr, TURNS: tl.constexpr = 1):  # fmt: skip
    """The first words of R rows of the weight, and their scales."""
    N: tl.constexpr = _words(K, KIND)
    SCALES: tl.constexpr = _scales(K, KIND)
    CHUNKS: tl.constexpr = _chunks(K, KIND)
    row = _rows(rows, R, TURNS)
    word, chunk = tl.arange(0, C), tl.arange(0, C // 4)
    words = _tile(w_ptr, row, word, rows, word < N, N, WHOLE)
    return words, _tile(scale_ptr, row, chunk // CHUNKS, rows, chunk < N // 4, SCALES, WHOLE)


@triton.jit
def _row_sums(x_ptr, norm_ptr, w_ptr, scale_ptr, one, eps, rows, B: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
              R: tl.constexpr, C: tl.constexpr, GAIN: tl.constexpr, WHOLE: tl.constexpr,
              DEPENDENT: tl.constexpr, extra_ptr=None, TURNS: tl.constexpr = 1):  # fmt: skip
    """For each row of x, the sums (R,) of R rows of the weight. TURNS: see `_rows`."""
    words, scale = _first(w_ptr, scale_ptr, rows, K, KIND, R, C, WHOLE, TURNS)
    _wait(DEPENDENT)
    return _sums_from(words, scale, x_ptr, norm_ptr, w_ptr, scale_ptr, one, eps, rows, B, K, KIND, R, C, GAIN, WHOLE,
                      DEPENDENT, extra_ptr, TURNS)  # fmt: skip


@triton.jit
def _sums_from(words, scale, x_ptr, norm_ptr, w_ptr, scale_ptr, one, eps, rows, B: tl.constexpr, K: tl.constexpr,
               KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr, GAIN: tl.constexpr, WHOLE: tl.constexpr,
               DEPENDENT: tl.constexpr, extra_ptr=None, TURNS: tl.constexpr = 1):  # fmt: skip
    """Continue `_sums` from the first words, which are loaded."""
    N: tl.constexpr = _words(K, KIND)
    EVEN: tl.constexpr = N % C == 0 and K % 128 == 0
    SCALES: tl.constexpr = _scales(K, KIND)
    CHUNKS: tl.constexpr = _chunks(K, KIND)
    row = _rows(rows, R, TURNS)
    word, chunk = tl.arange(0, C), tl.arange(0, C // 4)
    totals, squares = (), ()
    for _ in tl.static_range(B):
        totals += (tl.zeros([R, C // 4], tl.float32),)
        squares += (tl.zeros([C], tl.float32),)
    for start in range(0, N, C):
        asked, scale_asked = words, scale
        if N > C and start + C < N:  # before these are multiplied
            at, part = start + C + word, (start + C) // 4 + chunk
            words = _tile(w_ptr, row, at, rows, at < N, N, WHOLE)
            scale = _tile(scale_ptr, row, part // CHUNKS, rows, part < N // 4, SCALES, WHOLE)
        parts, xs, squared = _products(asked, one, x_ptr, norm_ptr, start + word, extra_ptr, B, K, KIND, R, C, EVEN, GAIN)
        if _offset(KIND):  # where the scale is
            group = (start // 4 + chunk) // CHUNKS
            offset = _tile(extra_ptr, row, group, rows, start // 4 + chunk < N // 4, SCALES, WHOLE)
        so_far, totals, squares = (totals, squares), (), ()
        for b in tl.static_range(B):
            scaled = parts[b] * _scale(scale_asked, KIND)
            if _offset(KIND):
                scaled -= offset * xs[b][None]
            totals += (so_far[0][b] + scaled,)
            squares += (so_far[1][b] + squared[b],)
    _end(DEPENDENT)
    sums = ()
    for b in tl.static_range(B):
        y = _finished(totals[b], squares[b], eps, K, KIND, GAIN)
        if _rounded_before(KIND):
            y *= tl.load(x_ptr + (b + 1) * _stride(K, KIND) - 4).to(tl.float32, bitcast=True)
        sums += (y,)
    return sums


@triton.jit
def _finished(total, square, eps, K: tl.constexpr, KIND: tl.constexpr, GAIN: tl.constexpr):
    y = tl.sum(total, 1)
    if _values(KIND) == "e4m3":
        y *= _HALFWAY
    if GAIN is not None:
        y /= tl.sqrt(tl.sum(square, 0) / K + eps)
    return y
