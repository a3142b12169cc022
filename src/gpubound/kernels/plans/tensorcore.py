"""The plan of a product that holds slices of its weights while it waits for x (triton/tiled_product.py)."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from .types import Job, power_of_two


class HeldPlan(NamedTuple):
    rows: int  # of weights, a program's
    columns: int  # of a slice, divided evenly among the warps
    warps: int
    held: int  # slices of weights that a program asks for before it waits
    ahead: int  # slices of x on their way

    def shared(self, job: Job) -> int:
        """Tensor cores read from there: the slices that are held, and twice one of x, as it comes and turned."""
        _, _, tall = job.shape
        return job.bytes * self.columns * (self.held * self.rows + 2 * tall)

    def smaller(self) -> "HeldPlan | None":
        if self.held > 1:
            return self._replace(held=self.held - 1)
        if self.columns > 16 * self.warps:
            return self._replace(columns=self.columns // 2)
        return self._replace(rows=self.rows // 2) if self.rows > 16 else None

    @staticmethod
    def candidates(job: Job) -> "Iterator[HeldPlan]":
        width = job.shape[1]
        for rows, columns, warps, ahead in product((16, 32, 64), (512, 1024), (4, 8), (1, 2)):
            slices = -(-width // columns)
            if columns > max(64, power_of_two(width)) or (ahead > slices and ahead > 1):
                continue
            most = {min(slices, max(1, size // (rows * columns * job.bytes))) for size in (1 << 15, 1 << 16, 1 << 17)}
            yield from (HeldPlan(rows, columns, warps, held, ahead) for held in sorted(most))


SLICE_BYTES = 1 << 16  # of weights, that a program asks for before it waits: two programs share a multiprocessor
LONG_BYTES = 1 << 17  # where fewer programs than multiprocessors have all of them


def tiled_product(job: Job) -> HeldPlan:
    """shape: rows of all weights, their width, and rows of x, up to a power of two; "normed" where there is a gain.

    H200, a whole step of 350m with 8 and with 16 rows, us: 527 and 790, the latter in slices of 512 columns throughout. With
    one thing changed: q k v by 16 rows a program 544 and 831; gate and up in slices of 512 540 and 791, of 1,024 527 and
    754; down by 8 warps in slices of 1,024 527 and 750. So slices have 1,024 columns, and down, which is long, has 8 warps.
    """
    outputs, width, tall = job.shape
    columns = max(128, min(1024 if tall <= 16 else 512, power_of_two(width)) * 2 // max(2, job.bytes))
    rows = 32 if outputs >= 1536 and width <= 2048 else 16
    held = (SLICE_BYTES if -(-outputs // rows) > job.chip.sms else LONG_BYTES) // (rows * columns * job.bytes)
    slices = -(-width // columns)
    ahead = 1 if job.way == "normed" else 2  # with a gain and squares a second slice of x spills
    return HeldPlan(rows, columns, 8 if slices > 2 else 4, max(1, min(slices, held)), min(slices, ahead))
