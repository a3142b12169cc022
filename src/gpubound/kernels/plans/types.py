"""Launch plans: how one launch is divided into programs. Pure data and pure functions.

A plan changes the speed of a kernel, and the order of its sums, but not what it computes. Each kind has the shared memory that
the compiler will ask for, and the next smaller plan.
"""

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
    """Return the job of a launch on tensors like `x`."""
    return Job(op, way, shape, x.element_size(), chip(x.device))


class Plan(Protocol):
    @property
    def warps(self) -> int: ...

    def shared(self, job: Job) -> int:
        """Return the shared memory of a program in bytes. Reductions and conversions need up to SPARE more."""
        ...

    def smaller(self) -> Self | None:
        """Return the next plan that needs less; None if this is the smallest."""
        ...


SPARE = 4096


def cdiv(n: int, size: int) -> int:
    """Return n / size, rounded up. On the host Triton's own takes 2.0 us, and an adapted linear layer asked it 15 times."""
    return -(-n // size)


def power_of_two(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


class RowPlan(NamedTuple):
    """Plan of a norm. Forward, a program computes one tile of rows, or strides over several; backward, a fixed number of
    programs stride over the rows, and each sums its part of the weight gradient: the same bits in every run, unlike atomics.

    A program that strides alternates between waiting for memory and computing. With `stages` above 1 the compiler prefetches
    that many tiles, less one, into shared memory, so that both overlap.
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


class TilePlan(NamedTuple):
    """Plan of a kernel whose program takes a number of elements of any shape."""

    elements: int
    warps: int
    hint: str = ""

    def shared(self, job: Job) -> int:
        return 0

    def smaller(self) -> "TilePlan | None":
        return self._replace(elements=self.elements // 2) if self.elements > 32 * self.warps else None


class MatrixPlan(NamedTuple):
    """Plan of a kernel whose program takes rows and columns of a matrix, or rows that it reads tile by tile."""

    rows: int
    columns: int  # of a packed weight, words
    warps: int

    def along(self, rows: int) -> int:
        """Programs that share that many rows."""
        return -(-rows // self.rows)

    def divides(self, rows: int, columns: int) -> bool:
        """True when no tile reaches beyond a matrix of that size."""
        return rows % self.rows == 0 and columns % self.columns == 0

    def shared(self, job: Job) -> int:
        return 0

    def smaller(self) -> "MatrixPlan | None":
        return self._replace(columns=self.columns // 2) if self.columns > 32 else None


class RopePlan(NamedTuple):
    heads: int  # of a tile, at most
    tokens: int  # of a tile
    warps: int

    def shared(self, job: Job) -> int:
        return 0

    def smaller(self) -> "RopePlan | None":
        return self._replace(heads=self.heads // 2) if self.heads > 1 else None


class AttentionPlan(NamedTuple):
    """Plan of attention over a KV cache."""

    keys: int  # of a tile
    stages: int  # tiles in flight, this one counted
    warps: int

    def shared(self, job: Job) -> int:
        """Return the bytes of prefetched tiles of keys and values, by halves, and of q and the weights for tensor cores.

        8-bit values that are multiplied in fp32 (`wide` is 4) are dequantised in shared memory.
        """
        *sizes, _, wide = job.shape
        group, half = (max(16, power_of_two(n)) for n in sizes)
        ahead, codes = self.stages - 1, job.bytes == 1
        tiles = 4 * self.keys * half
        if codes:
            cache_bytes = ahead * (tiles + 2 * self.keys * 4) + (4 * tiles if wide == 4 else 0)
        else:
            cache_bytes = max(ahead, 1) * tiles * wide
        return cache_bytes + group * (2 * half + self.keys) * wide

    def smaller(self) -> "AttentionPlan | None":
        if self.stages > 1:  # the same bits, which fewer keys would not give
            return self._replace(stages=self.stages - 1)
        return self._replace(keys=self.keys // 2) if self.keys > 16 else None


class LatentPlan(NamedTuple):
    """Plan of attention over latents that all heads share."""

    heads: int  # of a program
    keys: int  # of a tile
    stages: int  # tiles in flight, this one counted
    warps: int

    def shared(self, job: Job) -> int:
        """Return the bytes of the tiles in flight, and of q and the weights for tensor cores; fp32 takes fewer."""
        _, *widths = job.shape
        width = sum(max(16, power_of_two(n)) for n in widths)
        tiles = max(1, self.stages - 1) * self.keys
        return (tiles * width + self.heads * (width + self.keys)) * job.bytes

    def smaller(self) -> "LatentPlan | None":
        if self.stages > 1:  # the same bits, which fewer keys would not give
            return self._replace(stages=self.stages - 1)
        if self.keys > 16:
            return self._replace(keys=self.keys // 2)
        return self._replace(heads=self.heads // 2) if self.heads > 16 else None


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


class ResidentPlan(NamedTuple):
    rows: int  # of weights, a program's
    warps: int
    resident: int  # slices of weights, 32 columns for each warp, that a program asks for before it waits
    ahead: int  # slices of x on their way

    def shared(self, job: Job) -> int:
        """Return the bytes of the warps' sums, which meet there. What is multiplied stays in registers."""
        return 4 * self.warps * self.rows * job.shape[2]

    def smaller(self) -> "ResidentPlan | None":
        return self._replace(rows=self.rows // 2) if self.rows > 16 else None


class SplitPlan(NamedTuple):
    """Plan of a GEMM whose programs have some rows of the weights and one of the ranges of their columns."""

    rows: int  # of weights, a program's
    columns: int  # of a slice
    warps: int
    parts: int  # ranges of columns
    stages: int  # slices in flight; 0: all weights are asked for before a program waits

    def shared(self, job: Job) -> int:
        """Slices of weights and of x in flight."""
        _, width, tall = job.shape
        return job.bytes * self.columns * (self.rows + tall) * (self.stages or cdiv(width // self.parts, self.columns))

    def smaller(self) -> "SplitPlan | None":
        if self.stages == 0:
            return self._replace(stages=2)
        if self.stages > 2:
            return self._replace(stages=self.stages - 1)
        return self._replace(columns=self.columns // 2) if self.columns > 16 else None
