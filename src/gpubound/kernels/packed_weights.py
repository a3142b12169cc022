"""Weights in 8 or 4 bits, packed for cheap unpacking in a decoding step. `unpack` defines their values, in fp32.

int8, int4   n levels of a bf16 scale a row and 128 columns, symmetric about zero
fp8          e4m3 values times an fp32 scale a row
fp4          e2m1 values times a power of two a row and 32 columns, one byte e8m0: as models are published, nothing is rounded

Other kinds hold the numbers of quantised models as they were published, or a frozen base of layers/quantized_base.py:

int8, int4                 with scales in fp16 or fp32
int8_16, int8_32, int4_32  a scale a row and so many columns
uint8, uint4, ..._32       level · scale - offset: levels begin at 0, and each scale has an fp32 offset
fp8_rows, fp8_blocks       e4m3 in the order of memory, with an fp32 scale a row, or a row and 128 columns
nf4                        codes of quantize.py in their order, with an fp32 scale a row and 64 columns

A weight whose groups are not adjacent columns (GPTQ's act-order) is packed with its columns sorted by group, and keeps their
`order`. Products gather x in this order; dequantised weights have their columns where they were.

Rows are split into groups of 128 columns, the last padded with zeros. A group is 16 (int4, fp4) or 32 words of 32 bits with 8
or 4 columns each: slot t of word r holds column t · words + r. So adjacent words hold adjacent columns in the same slot: a
thread that reads four words, 16 bytes, multiplies each slot by adjacent elements of x, and nothing is interleaved. In fp4 the
four words that a thread reads hold 32 columns, which share a scale: slot t of the r-th of them holds column 4 t + r.

The position of a slot in its word is chosen for the unpacking. Its bits are masked in place and become mantissa bits of an fp32
value with a constant exponent, 2^e + n, so that a multiple of the sum of x is subtracted once for all rows. The further left
the bits are, the smaller is 2^e relative to n, and the less of fp32 is lost: bits 15 to 22 of the word, unshifted, shifted by 8
to either side, or rotated by 16, are one int8 or two int4 levels, with 2^e 256, or 16 and 256. fp8 is stored byte by byte, fp4
in groups of four bits.

`pack` makes no offsets: they are one more term per group and row in the kernel, and gain nothing. Of normal weights in groups
of 128, int4 with a signed scale that puts the group's extreme at −8, shrunk where that lowers the squared error, loses 9.7 % of
their spread; with extremes at ±7, 11.8 %; with a zero point from minimum and maximum, 10.0 %. int8 loses 0.65 %, fp8 2.6 %.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import require

KINDS = ("int8", "int4", "fp8")  # of `pack`, which rounds
GROUP = 128  # columns that a row is padded to a multiple of
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same with a minus
MX = 32  # columns of fp4 that share a scale
BIAS = 127  # of e8m0: a byte s is 2^(s - 127), and 255 is not a number
LEVELS = {"int8": 127, "int4": 8}  # levels from zero to a group's extreme; int4 gives it the side that has one more
# Of each slot: the bit of the word that is its lowest. Bits beyond the 31st go on at 0.
SLOTS_8, SLOTS_4 = (15, 7, 23, 31), (19, 15, 11, 7, 27, 23, 3, 31)


class Kind(NamedTuple):
    """Storage of a kind.

    spacing  slot t of the r-th of so many words holds column t · spacing + r; 1: columns are in the order of memory
    group    columns that share a scale; 0: all of a row
    zero     the level that is subtracted
    offset   whether each scale has an offset
    """

    bits: int
    values: str  # level, e4m3, e2m1 or nf4
    shifts: tuple[int, ...]
    spacing: int
    group: int = GROUP
    zero: int = 0
    offset: bool = False

    def words(self, columns: int) -> int:
        """Return the number of words of a row, which is padded unless its columns are in the order of memory."""
        slots = len(self.shifts)
        return -(-columns // slots) if self.spacing == 1 else -(-columns // GROUP) * GROUP // slots

    def scales(self, columns: int) -> int:
        """Return the number of scales of a row."""
        padded = columns if self.spacing == 1 else -(-columns // GROUP) * GROUP
        return -(-padded // self.group) if self.group else 1


TABLE = {
    "int8": Kind(8, "level", SLOTS_8, 32, zero=128),
    "int8_32": Kind(8, "level", SLOTS_8, 4, 32, zero=128),
    "int8_16": Kind(8, "level", SLOTS_8, 4, 16, zero=128),
    "uint8": Kind(8, "level", SLOTS_8, 32, offset=True),
    "uint8_32": Kind(8, "level", SLOTS_8, 4, 32, offset=True),
    "int4": Kind(4, "level", SLOTS_4, 16, zero=8),
    "int4_32": Kind(4, "level", SLOTS_4, 4, 32, zero=8),
    "uint4": Kind(4, "level", SLOTS_4, 16, offset=True),
    "uint4_32": Kind(4, "level", SLOTS_4, 4, 32, offset=True),
    "fp8": Kind(8, "e4m3", (24, 16, 8, 0), 32, 0),
    "fp8_rows": Kind(8, "e4m3", (0, 8, 16, 24), 1, 0),
    "fp8_blocks": Kind(8, "e4m3", (0, 8, 16, 24), 1),
    "fp4": Kind(4, "e2m1", (28, 24, 20, 16, 12, 8, 4, 0), 4, MX),
    "nf4": Kind(4, "nf4", (4, 0, 12, 8, 20, 16, 28, 24), 1, 64),
}
BITS = {name: kind.bits for name, kind in TABLE.items()}
ZERO = {name: kind.zero for name, kind in TABLE.items()}
# Shares of the scale that spans a whole group, of which the best in squared error is taken.
SHARES = {"int8": (1.0,), "int4": (1.0, 0.94, 0.88, 0.82, 0.76)}
LARGEST = 448.0  # of e4m3
MOST = 127 * 256  # of an x in 16 bits: its high byte has a sign, its low byte none
CHUNK = 1 << 24  # weights widened at a time


class Packed(NamedTuple):
    """A (rows, columns) weight. words: (rows, words) int32; scale: (rows, groups) bf16, for fp8 (rows, 1) fp32, for fp4
    (rows, 4 groups) uint8. extra: of a kind with offsets (rows, groups) fp32, of nf4 its sixteen numbers. order: (columns,)
    int32, the weight's column that each packed one is; None: the same."""

    words: Tensor
    scale: Tensor
    columns: int
    kind: str
    extra: Tensor | None = None
    order: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.words.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.words, self.scale, self.extra, self.order) if t is not None]

    def part(self, rows: slice) -> "Packed":
        """Some of the rows, over the same memory."""
        extra = self.extra[rows] if self.extra is not None and TABLE[self.kind].offset else self.extra
        return self._replace(words=self.words[rows], scale=self.scale[rows], extra=extra)

    def experts(self, ids: Tensor, rows: int) -> "Packed":
        """Return the weights of the experts `ids`, each of which has so many rows of this one."""
        words, scale = (t.unflatten(0, (-1, rows)).index_select(0, ids).flatten(0, 1) for t in self[:2])
        return self._replace(words=words, scale=scale)


def check_packed(op: str, weight: Packed, x: Tensor) -> None:
    """Check that the weight comes from `pack`, is on x's device and has all of its rows."""
    if weight.kind not in BITS:
        raise ValueError(f"{op}: the weight's kind must be one of {', '.join(BITS)}, got {weight.kind!r}; make it with pack.")
    kind, columns = TABLE[weight.kind], weight.columns
    why = "make it with pack, where x lies"
    require(op, "the weight's words", weight.words, torch.int32, (weight.rows, kind.words(columns)), x.device, why)
    dtype = {"e2m1": torch.uint8, "level": None}.get(kind.values, torch.float32)  # None: any floating-point one
    scales = weight.rows, kind.scales(columns)
    require(op, "the weight's scale", weight.scale, dtype, scales, x.device, why)
    if kind.offset or kind.values == "nf4":
        extra = (16,) if kind.values == "nf4" else scales
        require(op, "the weight's extra", cast(Tensor, weight.extra), torch.float32, extra, x.device, why)
    if weight.order is not None:
        require(op, "the weight's order", weight.order, torch.int32, (columns,), x.device, why)


def check_experts(op: str, name: str, weight: Packed, rows: int) -> None:
    if not rows or weight.rows % rows or not weight.rows:
        what = f"{name} has {weight.rows} rows, wanted {rows} for each expert"
        raise ValueError(f"{op}: {what}; pack the experts' weights as one, pack(stack.flatten(0, 1), kind).")
    if weight.extra is not None:
        raise ValueError(f"{op}: {name} is {weight.kind}, wanted a kind without offsets or a code table for experts.")
    if weight.order is not None:
        raise ValueError(f"{op}: {name} has its columns in another order, wanted experts with columns in place.")


@torch.no_grad()
def pack(weight: Tensor, kind: str, device: torch.device | None = None) -> Packed:
    """Round a matrix, on `device` or where it is. Rows are independent of each other; a part at a time is wide in memory."""
    if kind not in KINDS:
        raise ValueError(f"pack: kind: got {kind!r}, wanted one of {', '.join(KINDS)}.")
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        raise ValueError(f"pack: weight: got {weight.dtype} {tuple(weight.shape)}, wanted a floating-point matrix.")
    rows, columns = weight.shape
    device = device or weight.device
    groups, slots = -(-columns // GROUP), 32 // BITS[kind]
    words = torch.empty(rows, groups * GROUP // slots, device=device, dtype=torch.int32)
    fp8 = kind == "fp8"
    scale = torch.empty(rows, 1 if fp8 else groups, device=device, dtype=torch.float32 if fp8 else torch.bfloat16)
    for part, into, scales in zip(*(t.split(max(1, CHUNK // columns)) for t in (weight, words, scale))):
        padded = F.pad(part.to(device).float(), (0, groups * GROUP - columns)).view(len(part), groups, GROUP)
        levels, part_scales = _to_fp8(padded) if fp8 else _to_levels(padded, kind)
        scales.copy_(part_scales)
        into.copy_(_to_words(levels.view(len(part), groups, slots, -1), TABLE[kind].shifts).flatten(1))
    return Packed(words, scale, columns, kind)


@torch.no_grad()
def pack_fp4(codes: Tensor, scales: Tensor) -> Packed:
    """The numbers of a published file, as they are: codes (rows, columns / 2), a byte of two e2m1 numbers, the first one in the
    lower half; scales (rows, columns / 32) e8m0."""
    codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
    if codes.dim() != 2 or scales.shape != (len(codes), codes.shape[1] * 2 // MX) or codes.shape[1] * 2 % MX:
        raise ValueError(
            f"pack_fp4: got codes {tuple(codes.shape)} and scales {tuple(scales.shape)}, wanted (rows, columns / 2) and (rows, "
            f"columns / {MX}), of columns that are a multiple of {MX}."
        )
    rows, columns = len(codes), 2 * codes.shape[1]
    beyond = -columns % GROUP
    words = torch.empty(rows, TABLE["fp4"].words(columns), device=codes.device, dtype=torch.int32)
    for part, into in zip(*(t.split(max(1, CHUNK // columns)) for t in (codes, words))):
        levels = torch.stack([part & 0xF, part >> 4], -1).flatten(1)
        padded = F.pad(levels, (0, beyond)).view(len(part), -1, MX // 4, 4)  # (rows, groups of 32, slots, words)
        into.copy_(_to_words(padded.to(torch.int32), TABLE["fp4"].shifts).flatten(1))
    return Packed(words, F.pad(scales, (0, beyond // MX), value=BIAS), columns, "fp4")


def pack_stacked(weights: list[Tensor], kind: str, device: torch.device | None = None) -> Packed:
    """One packed weight of several below each other."""
    parts = [pack(weight, kind, device) for weight in weights]
    if len(parts) == 1:
        return parts[0]
    return parts[0]._replace(words=torch.cat([p.words for p in parts]), scale=torch.cat([p.scale for p in parts]))


def pack_gate_up(gate: Tensor, up: Tensor, kind: str, device: torch.device | None = None) -> Packed:
    """Row 2i is gate's row i, row 2i + 1 up's."""
    parts = [pack(weight, kind, device) for weight in (gate, up)]
    words, scale = (torch.stack([p[i] for p in parts], 1).flatten(0, 1) for i in range(2))  # type: ignore[misc]
    return parts[0]._replace(words=words, scale=scale)


@torch.no_grad()
def pack_levels(levels: Tensor, scale: Tensor, kind: str, offset: Tensor | None = None) -> Packed:
    """Pack published numbers, of which none is rounded: level · scale - offset, or (level - zero) · scale of a kind without.

    levels         (rows, columns) uint8, from 0
    scale, offset  (rows, groups): a divisor of the columns; the kind's groups repeat them
    """
    (rows, columns), about = levels.shape, TABLE[kind]
    scales_per_row, groups = scale.shape[1], -(-columns // about.group)
    if about.values != "level" or (offset is not None) != about.offset:
        raise ValueError(f"pack_levels: kind: got {kind!r}, wanted one of levels, with offsets where these are passed.")
    if scales_per_row > 1 and columns % (scales_per_row * about.group):
        raise ValueError(
            f"pack_levels: scale: got {scales_per_row} a row of {columns} columns for {kind!r}, wanted groups of a multiple of "
            f"{about.group} columns."
        )

    def spread(t: Tensor) -> Tensor:
        each = t.expand(rows, groups) if scales_per_row == 1 else t.repeat_interleave(groups // scales_per_row, 1)
        return F.pad(each, (0, about.scales(columns) - groups)).contiguous()

    words = torch.empty(rows, about.words(columns), device=levels.device, dtype=torch.int32)
    slots = len(about.shifts)
    for part, into in zip(*(t.split(max(1, CHUNK // columns)) for t in (levels, words))):
        blocks = F.pad(part, (0, -columns % GROUP), value=about.zero).view(len(part), -1, slots, about.spacing)
        into.copy_(_to_words(blocks.to(torch.int32), about.shifts).flatten(1))
    return Packed(words, spread(scale), columns, kind, None if offset is None else spread(offset.float()))


def join_packed(parts: Sequence[Packed], words: Tensor | None = None) -> Packed:
    """Return one packed weight of several of one kind below each other. words: their words, where they are adjacent already"""
    first = parts[0]
    if len(parts) == 1:
        return first
    extra = first.extra
    if extra is not None and TABLE[first.kind].offset:
        extra = torch.cat([part.extra for part in parts if part.extra is not None])
    scale = torch.cat([part.scale for part in parts])
    return first._replace(words=torch.cat([p.words for p in parts]) if words is None else words, scale=scale, extra=extra)


@torch.no_grad()
def unpack(packed: Packed) -> Tensor:
    """Unpack a weight to fp32: the definition of every product with it."""
    kind, columns = TABLE[packed.kind], packed.columns
    blocks, mask = packed.words.view(packed.rows, -1, kind.spacing), (1 << kind.bits) - 1
    levels = torch.stack([_turned(blocks, shift) & mask for shift in kind.shifts], 2).flatten(1)  # (rows, padded columns)
    if kind.values == "level":
        values = (levels - kind.zero).float()
    elif kind.values == "e4m3":
        values = levels.to(torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        table = packed.extra  # of nf4
        if kind.values == "e2m1":
            table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=levels.device, dtype=torch.float32)
        assert table is not None
        values = table[levels.long()]
    scale = packed.scale.view(torch.float8_e8m0fnu) if kind.values == "e2m1" else packed.scale
    values = _times(values, scale.float(), kind.group)
    if kind.offset:
        assert packed.extra is not None
        values = (values.unflatten(1, (-1, kind.group)) - packed.extra[..., None]).flatten(1)
    return restore_columns(values[:, :columns], packed.order)


def restore_columns(sorted_columns: Tensor, order: Tensor | None) -> Tensor:
    """Return a tensor (..., columns) with the columns of a packed weight as the weight has them."""
    if order is None:
        return sorted_columns.contiguous()
    return torch.empty_like(sorted_columns).index_copy_(-1, order.long(), sorted_columns)


def round_inputs(x: Tensor, kind: str, order: Tensor | None = None) -> Tensor:
    """Return fp32 x (..., columns) as decoding kernels multiply it by levels of this kind: in 16 bits of the largest of the
    columns that four words hold. fp4 is multiplied by x in 24 bits, and other numbers by x itself."""
    about, columns = TABLE[kind], x.shape[-1]
    if about.values != "level":
        return x
    x = x if order is None else x.index_select(-1, order)
    parts = F.pad(x, (0, -columns % GROUP)).unflatten(-1, (-1, len(about.shifts), about.spacing // 4, 4))
    one = parts.abs().amax((-3, -1), keepdim=True).clamp_min(1e-30) / MOST
    return restore_columns(((parts / one).round() * one).flatten(-4)[..., :columns], order)


def _times(values: Tensor, scale: Tensor, group: int) -> Tensor:
    """Multiply values (rows, columns) by a scale a row and `group` columns, or a row."""
    if not group or scale.shape[1] * group == values.shape[1]:
        return (values.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)
    return values * scale.repeat_interleave(group, 1)[:, : values.shape[1]]


def _to_levels(padded: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(levels (rows, groups, 128) from 0, scales (rows, groups) in bf16)."""
    zero = ZERO[kind]
    extreme = padded.gather(2, padded.abs().argmax(2, keepdim=True))
    best, levels = torch.zeros_like(extreme), torch.zeros_like(padded)
    error = torch.full_like(extreme, torch.nan)
    for share in SHARES[kind]:
        scale = (extreme * (-share / LEVELS[kind])).bfloat16().float()
        tried = torch.where(scale == 0, 0, padded / scale).round_().clamp_(-zero, zero - 1)
        off = (tried * scale - padded).square_().sum(2, keepdim=True)
        better = ~(off >= error)  # the first is
        best, error = torch.where(better, scale, best), torch.where(better, off, error)
        levels = torch.where(better, tried, levels)
    return (levels + zero).to(torch.int32), best[..., 0]


def _to_fp8(padded: Tensor) -> tuple[Tensor, Tensor]:
    scale = padded.abs().amax((1, 2), keepdim=True) / LARGEST
    q = torch.where(scale == 0, 0, padded / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return q.view(torch.uint8).to(torch.int32), scale[..., 0]


def _to_words(levels: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """(rows, groups, slots, words) to (rows, groups, words)."""
    words = torch.zeros_like(levels[:, :, 0])
    for slot, shift in enumerate(shifts):
        level = levels[:, :, slot]
        words |= level << shift
        if shift > 24:  # what was shifted out goes on at bit 0; small levels lose nothing by it
            words |= level >> (32 - shift)
    return words


def _turned(words: Tensor, shift: int) -> Tensor:
    """Words turned right by `place` bits; the sign that >> drags along is masked off."""
    return ((words >> shift) & ((1 << (32 - shift)) - 1 if shift else -1)) | (words << (32 - shift) if shift else 0)
