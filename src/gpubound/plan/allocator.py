"""What torch's caching allocator holds beyond what is in use, by its own rules.

A tensor above a mebibyte takes the smallest free extent that holds it. What is left of the extent is free for others, and a
segment goes back to the GPU only when nothing of it is in use. A captured step has memory of its own and uses none of that.
"""

import bisect
from dataclasses import dataclass, field

MIB = 1 << 20
SMALL, MIDDLE, SEGMENT, STEP = MIB, 10 * MIB, 20 * MIB, 2 * MIB
"""Bytes. Up to SMALL a tensor lies in segments of STEP, below MIDDLE in those of SEGMENT, else in one of its own."""


@dataclass(eq=False)
class Extent:
    """A part of a segment. Neighbours that are free are one extent."""

    segment: int
    start: int
    size: int
    small: bool
    free: bool = True
    before: "Extent | None" = None
    behind: "Extent | None" = None

    @property
    def order(self) -> tuple[int, int, int]:
        return self.size, self.segment, self.start


@dataclass
class Heap:
    """Segments and their free extents, smallest first."""

    segments: dict[int, int] = field(default_factory=dict)
    free: dict[bool, list[Extent]] = field(default_factory=lambda: {True: [], False: []})
    in_use: int = 0
    made: int = 0

    @property
    def reserved(self) -> int:
        return sum(self.segments.values())

    def take(self, size: int) -> Extent:
        size = max(512, -(-size // 512) * 512)
        small = size <= SMALL
        extent = self._smallest(size, small) or self._segment(size, small)
        if extent.size - size >= (512 if small else SMALL + 1):
            rest = Extent(extent.segment, extent.start + size, extent.size - size, small, before=extent, behind=extent.behind)
            if rest.behind is not None:
                rest.behind.before = rest
            extent.size, extent.behind = size, rest
            bisect.insort(self.free[small], rest, key=lambda b: b.order)
        extent.free = False
        self.in_use += extent.size
        return extent

    def give(self, extent: Extent) -> None:
        self.in_use -= extent.size
        extent.free = True
        if (before := extent.before) is not None and before.free:
            self.free[extent.small].remove(before)
            self._join(before, extent)
            extent = before
        if (behind := extent.behind) is not None and behind.free:
            self.free[extent.small].remove(behind)
            self._join(extent, behind)
        bisect.insort(self.free[extent.small], extent, key=lambda b: b.order)

    def empty(self) -> None:
        """Segments of which nothing is in use go back to the GPU."""
        for small, extents in self.free.items():
            whole = [extent for extent in extents if extent.size == self.segments[extent.segment]]
            for extent in whole:
                del self.segments[extent.segment]
            self.free[small] = [extent for extent in extents if extent not in whole]

    def _smallest(self, size: int, small: bool) -> Extent | None:
        extents = self.free[small]
        at = bisect.bisect_left(extents, (size, -1, -1), key=lambda b: b.order)
        return extents.pop(at) if at < len(extents) else None

    def _segment(self, size: int, small: bool) -> Extent:
        size = STEP if small else SEGMENT if size < MIDDLE else -(-size // STEP) * STEP
        self.made += 1
        self.segments[self.made] = size
        return Extent(self.made, 0, size, small)

    @staticmethod
    def _join(extent: Extent, behind: Extent) -> None:
        extent.size += behind.size
        extent.behind = behind.behind
        if extent.behind is not None:
            extent.behind.before = extent
