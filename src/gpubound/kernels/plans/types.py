"""Launch plans: how one launch is divided into programs. Pure data and pure functions.

A plan changes how fast a kernel is, and in which order it adds; never what it computes.
Each kind says how much shared memory the compiler will ask for, what its next smaller plan is, and which plans a search tries.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, Protocol, Self

import torch

from ...device import Chip, chip

ADAPTED = "adapted "  # before the way of a product that adds what adapters give


class Job(NamedTuple):
    """Launch that a plan is for."""

    op: str
    way: str  # forward or backward, or the use that a decoding step makes of a product
    shape: tuple[int, ...]  # what the op's rule reads (defaults.py)
    bytes: int  # of an element
    chip: Chip


def job_of(op: str, way: str, shape: tuple[int, ...], x: torch.Tensor) -> Job:
    """The job of a launch on tensors like `x`."""
    return Job(op, way, shape, x.element_size(), chip(x.device))


class Plan(Protocol):
    @property
    def warps(self) -> int: ...

    def shared(self, job: Job) -> int:
        """Bytes of shared memory that a program takes, but for what reductions and conversions need: at most SPARE more."""
        ...

    def smaller(self) -> Self | None:
        """The next plan that asks for less; None when this is the least."""
        ...

    @staticmethod
    def candidates(job: Job) -> "Iterator[Plan]":
        """The plans that a search tries: those that a GPU may run well."""
        ...


SPARE = 4096


def cdiv(n: int, size: int) -> int:
    """n / size, rounded up. On the host Triton's own takes 2.0 us, and an adapted linear layer asked it 15 times."""
    return -(-n // size)


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


class RowPlan(NamedTuple):
    """A norm's. Forward, a program visits one tile of rows, or strides; backward, a fixed crowd of programs strides over the
    rows, and each sums its own part of the weight gradient: the same bits in every run, which atomics do not give.

    A program that strides waits for memory and computes by turns. `stages` above 1 makes the compiler copy that many tiles,
    less one, into shared memory ahead of their turn, so that both go on at once.
    """

    rows: int  # of a tile
    each: int  # programs a multiprocessor, each striding over the rows; 0: as many programs as there are tiles
    warps: int
    stages: int = 1  # tiles in flight, this one counted
    hint: str = ""  # eviction policy of what is read once

    def grid(self, rows: int, job: Job) -> tuple[int]:
        tiles = -(-rows // self.rows)
        return (min(self.each * job.chip.sms, tiles) if self.each else tiles,)

    def shared(self, job: Job) -> int:
        tensors = (2 if job.way == "backward" else 1) + job.op.startswith("add_")  # that are read row by row
        return (self.stages - 1) * tensors * self.rows * power_of_two(job.shape[0]) * job.bytes

    def smaller(self) -> "RowPlan | None":
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        return self._replace(rows=self.rows // 2) if self.rows > 1 else None

    @staticmethod
    def candidates(job: Job) -> "Iterator[RowPlan]":
        """8 to 64 elements a thread and tensor: fewer leave threads without a whole 16-byte load, more spill."""
        block = power_of_two(job.shape[0])
        flights = ((1, ""), (2, ""), (3, ""), (4, ""), (1, "evict_first"), (3, "evict_first"))
        for rows, warps, (stages, hint) in product((1, 2, 4, 8), (1, 2, 4, 8, 16), flights):
            held = rows * block / (32 * warps)
            if not block // 1024 <= warps <= max(1, block // 128) or not 8 <= held <= (32 if hint or stages == 4 else 64):
                continue
            if job.way == "backward":
                yield from (RowPlan(rows, each, warps, stages, hint) for each in (1, 2, 3, 4, 6, 8) if each * warps <= 32)
            elif stages == 1:
                yield RowPlan(rows, 0, warps, 1, hint)
            elif stages == 3 and not hint:
                yield from (RowPlan(rows, each, warps, stages, hint) for each in (2, 4, 8) if each * warps <= 64)


class TilePlan(NamedTuple):
    """Plan of a kernel whose program takes a number of elements of any shape."""

    elements: int
    warps: int
    hint: str = ""

    def shared(self, job: Job) -> int:
        return 0

    def smaller(self) -> "TilePlan | None":
        return self._replace(elements=self.elements // 2) if self.elements > 32 * self.warps else None

    @staticmethod
    def candidates(job: Job) -> "Iterator[TilePlan]":
        """8 to 64 elements a thread; a loss's row of logits, a few of which are kept at a time, up to 128."""
        most = 2 * power_of_two(job.shape[0]) if job.op == "losses" else 32768 if job.op == "group_norm" else 16384
        hints = ("",) if job.op in ("losses", "swiglu_backward") else ("", "evict_first")
        tiles = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
        for elements, warps, hint in product(tiles, (1, 2, 4, 8, 16), hints):
            if elements <= most and 8 <= elements / (32 * warps) <= (128 if job.op == "losses" else 64):
                yield TilePlan(elements, warps, hint)


class StridePlan(NamedTuple):
    """Plan of an elementwise kernel whose programs stride over tiles. A few hundred of them compute something once, such as a
    curve's constants, or each sums something."""

    elements: int  # of a tile
    each: int  # programs a multiprocessor
    warps: int
    stages: int = 1  # tiles in flight, this one counted
    hint: str = ""

    def grid(self, tiles: int, job: Job) -> tuple[int]:
        return (max(1, min(self.each * job.chip.sms, tiles)),)

    def shared(self, job: Job) -> int:
        return (self.stages - 1) * job.shape[0] * self.elements * job.bytes

    def smaller(self) -> "StridePlan | None":
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        return self._replace(elements=self.elements // 2) if self.elements > 32 * self.warps else None

    @staticmethod
    def candidates(job: Job) -> "Iterator[StridePlan]":
        """8 or 16 elements a thread, up to 48 warps a multiprocessor, and of one tile in flight more that wait their turn."""
        for warps, each, held, stages in product((2, 4, 8), (2, 3, 4, 6, 8, 12, 16, 32, 64), (8, 16), (1, 2, 3)):
            if 12 <= each * warps <= (256 if stages == 1 else 48):
                yield from (StridePlan(32 * warps * held, each, warps, stages, hint) for hint in ("", "evict_first"))


class MatrixPlan(NamedTuple):
    """Plan of a kernel whose program takes rows and columns of a matrix, or rows that it reads tile by tile."""

    rows: int
    columns: int  # of a packed weight, words
    warps: int

    def along(self, rows: int) -> int:
        """Programs that share that many rows."""
        return -(-rows // self.rows)

    def whole(self, rows: int, columns: int) -> bool:
        """True when no tile reaches beyond a matrix of that size."""
        return rows % self.rows == 0 and columns % self.columns == 0

    def shared(self, job: Job) -> int:
        return 0

    def smaller(self) -> "MatrixPlan | None":
        return self._replace(columns=self.columns // 2) if self.columns > 32 else None

    @staticmethod
    def candidates(job: Job) -> "Iterator[MatrixPlan]":
        """Rows of a weight, and how far along them. No program may span two of its parts, or change the head's stretches."""
        if job.op == "quantize":
            yield from (MatrixPlan(*plan) for plan in product((64, 128), (64, 128), (4, 8)))
            return
        _, columns, *parts = job.shape
        packed = job.op == "packed_product"
        longest = power_of_two(parts[0] if packed else columns)
        apart = parts if len(parts) > 1 and not packed else []
        heights = (16,) if job.way.endswith("head") else (1, 2, 4, 8, 16)
        for height, wide, warps in product(heights, (128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
            if wide > longest or any(part % height for part in apart):
                continue
            if (4 if packed else 8) <= height * wide / (32 * warps) <= 128:
                yield MatrixPlan(height, wide, warps)


class RopePlan(NamedTuple):
    heads: int  # of a tile, at most
    tokens: int  # of a tile
    warps: int

    def shared(self, job: Job) -> int:
        return 0

    def smaller(self) -> "RopePlan | None":
        return self._replace(heads=self.heads // 2) if self.heads > 1 else None

    @staticmethod
    def candidates(job: Job) -> "Iterator[RopePlan]":
        pairs, most = job.shape
        for heads, tokens, warps in product((2, 4, 8, 16, 32), (1, 2, 4), (1, 2, 4)):
            if heads <= power_of_two(most) and 8 <= heads * tokens * power_of_two(pairs) / (32 * warps) <= 32:
                yield RopePlan(heads, tokens, warps)


class AttentionPlan(NamedTuple):
    """Plan of attention over a KV cache."""

    keys: int  # of a tile
    stages: int  # tiles in flight, this one counted
    warps: int

    def shared(self, job: Job) -> int:
        """Tiles of keys and values ahead of their turn, by halves; q and the weights where tensor cores read them. Codes are
        widened where they lie, those that are multiplied in fp32 (`wide`) in shared memory.
        """
        *sizes, _, wide = job.shape
        group, half = (max(16, power_of_two(n)) for n in sizes)
        ahead, codes = self.stages - 1, job.bytes == 1
        tiles = 4 * self.keys * half
        held = ahead * (tiles + 2 * self.keys * 4) + (4 * tiles if wide == 4 else 0) if codes else max(ahead, 1) * tiles * wide
        return held + group * (2 * half + self.keys) * wide

    def smaller(self) -> "AttentionPlan | None":
        if self.stages > 1:  # the same bits, which fewer keys would not give
            return self._replace(stages=self.stages - 1)
        return self._replace(keys=self.keys // 2) if self.keys > 16 else None

    @staticmethod
    def candidates(job: Job) -> "Iterator[AttentionPlan]":
        return (AttentionPlan(*plan) for plan in product((32, 64, 128), (2, 3, 4), (2, 4, 8)))


class WalkPlan(NamedTuple):
    """Plan of attention over sequences: a program owns tokens of a head, and reads the others tile by tile."""

    own: int
    other: int  # tokens of a tile that is walked along
    stages: int  # tiles in flight
    warps: int

    def shared(self, job: Job) -> int:
        """Bytes of the two tensors that are read tile by tile, in flight, and of the owned ones that tensor cores read."""
        owned = 1 if job.way == "forward" else 2
        return power_of_two(max(16, job.shape[0])) * job.bytes * (2 * self.stages * self.other + owned * self.own)

    def smaller(self) -> "WalkPlan | None":
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        if self.other > 16:
            return self._replace(other=self.other // 2)
        return self._replace(own=self.own // 2) if self.own > 16 else None

    @staticmethod
    def candidates(job: Job) -> "Iterator[WalkPlan]":
        for own, other, stages, warps in product((64, 128), (32, 64, 128), (2, 3, 4), (4, 8)):
            if own * other <= 8192 * warps // 4:  # a tile of scores is at most 64 registers a thread
                yield WalkPlan(own, other, stages, warps)


class ProductPlan(NamedTuple):
    """Plan of a GEMM on tensor cores that loops over the summed dimension."""

    rows: int  # of a tile of the result
    columns: int
    depth: int  # of the sum, a tile at a time
    warps: int
    stages: int  # tiles in flight
    parts: int = 1  # in which a tile of the result is stored: staged in shared memory, a whole one would take stages away
    splits: int = 1  # programs that share a sum

    def shared(self, job: Job) -> int:
        """Tiles in flight, an fp32 adapter's under 16-bit rows, and the part of the result that waits to be stored."""
        second = 4 if job.way in ("down", "up") else job.bytes
        stored = self.rows * self.columns * job.bytes // self.parts if job.way == "described" else 0
        return self.stages * self.depth * (self.rows * job.bytes + self.columns * second) + stored

    def smaller(self) -> "ProductPlan | None":
        if self.stages > 2:
            return self._replace(stages=self.stages - 1)
        if self.stages > 1 and self.depth > 32:
            return self._replace(depth=self.depth // 2)
        if self.columns > 64 and self.parts > 1:
            return self._replace(columns=self.columns // 2, parts=1)
        return self._replace(rows=self.rows // 2) if self.rows > 16 else None

    @staticmethod
    def candidates(job: Job) -> "Iterator[ProductPlan]":
        rank = job.shape[2]
        if job.way in ("described", "pointers"):
            for plan in product((64, 128), (64, 128, 256), (64, 128), (4, 8), (3, 4), (1, 2)):
                yield ProductPlan(*plan)
        elif job.way == "up":
            for rows, columns, warps in product((32, 64, 128), (64, 128, 256), (4, 8)):
                yield ProductPlan(rows, columns, rank, warps, 1)
        else:  # the rank is the width of the result
            shared = (1, 2, 4, 8) if job.way == "gradients" else (1,)
            for rows, depth, warps, stages, splits in product((16, 32, 64, 128), (64, 128, 256), (4, 8), (2, 3, 4), shared):
                yield ProductPlan(rows, rank, depth, warps, stages, 1, splits)
