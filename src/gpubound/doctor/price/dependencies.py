"""Dependencies between launches, works and host calls, for the idle times and for the replay."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import numpy as np

from ...errors import MeasureError
from ..record.tape import Span, Tape

TOUCH = 0.2  # µs; calls of two threads that overlap by less only touch
TOGETHER = 0.02  # threads whose calls overlap more often than this run beside each other


class HostDependencies:
    """`launch[w]` is the call that launched work w, or -1. `works[c]` are the works of call c.

    `before[c]` is the call that the host came from when it made call c, or -1: the last one of its own thread, or of a thread
    that had handed over to it. Backward runs on autograd's thread while the main thread waits, so the two make one chain:
    threads that are never busy at once are taken for such a pair. `previous[c]` is the last call of the same thread, or -1.
    """

    def __init__(self, tape: Tape):
        self.tape = tape
        by_number = {call.correlation: place for place, call in enumerate(tape.calls) if call.correlation}
        self.launch = [by_number.get(work.correlation, -1) for work in tape.work]
        self.works: dict[int, list[int]] = {}
        for work, launch in enumerate(self.launch):
            if launch >= 0:
                self.works.setdefault(launch, []).append(work)
        self.threads: dict[int, list[int]] = {}
        for place, call in enumerate(tape.calls):
            self.threads.setdefault(call.thread, []).append(place)
        self.previous, self.before = self._chain(self._pairs())

    def _pairs(self) -> dict[int, list[int]]:
        """For each thread those that hand over to it and wait for it."""
        calls = self.tape.calls
        times = {
            thread: (np.array([calls[c].start for c in mine]), np.array([calls[c].end for c in mine]))
            for thread, mine in self.threads.items()
        }
        pairs: dict[int, list[int]] = {thread: [] for thread in times}
        names = sorted(times, key=lambda thread: len(times[thread][0]))
        for index, thread in enumerate(names):
            for other in names[index + 1 :]:
                (start, end), (other_start, other_end) = times[thread], times[other]
                after = np.searchsorted(other_end, start + TOUCH, side="right")
                met = (after < len(other_start)) & (other_start[np.minimum(after, len(other_start) - 1)] < end - TOUCH)
                if met.sum() <= TOGETHER * len(start):
                    pairs[thread].append(other)
                    pairs[other].append(thread)
        return pairs

    def _chain(self, pairs: dict[int, list[int]]) -> tuple[list[int], list[int]]:
        last: dict[int, int] = {}
        previous, before = [], []
        ends = [call.end for call in self.tape.calls]
        for place, call in enumerate(self.tape.calls):
            own = came = last.get(call.thread, -1)
            for other in pairs[call.thread]:
                earlier = last.get(other, -1)
                if earlier >= 0 and ends[earlier] <= call.start + TOUCH and (came < 0 or ends[earlier] > ends[came]):
                    came = earlier
            previous.append(own)
            before.append(came)
            last[call.thread] = place
        return previous, before

    @property
    def lost(self) -> list[int]:
        """Works whose launch is not on the tape, but for those that a queue held when it began."""
        known = {(self.tape.work[works[0]].device, self.tape.work[works[0]].stream) for works in self.works.values()}
        begun: set[tuple[int, int]] = set()
        launches = []
        for place, (work, launch) in enumerate(zip(self.tape.work, self.launch)):
            queue = (work.device, work.stream)
            if launch >= 0:
                begun.add(queue)
            elif queue in begun or queue not in known:
                launches.append(place)
        return launches

    def measurable(self) -> None:
        """Refuse a tape that does not show what its device did."""
        tape = self.tape
        if not tape.work:
            raise MeasureError("the tape has no work of a device, wanted kernels; is the model on the GPU?")
        hidden = [call for place, call in enumerate(tape.calls) if call.kind == "graph" and place not in self.works]
        if hidden:
            replays = sum(call.kind == "graph" for call in tape.calls)
            raise MeasureError(
                f"{len(hidden)} of {replays} graph replays show no work of theirs, so that a busy device would look idle; "
                "record the tape with the nodes of graphs (a newer driver and CUPTI), or without replays."
            )


class Stalls:
    """The spans in which a thread made no progress, or `only` these, cut so that none overlap: the more telling kind hides."""

    KINDS = ("data", "checkpoint", "compile", "gc")  # the last one hides those before it

    def __init__(self, tape: Tape, only: frozenset[int] | None = None):
        mine: dict[int, list[int]] = {}
        for place, span in enumerate(tape.spans):
            wanted = span.kind in self.KINDS if only is None else place in only
            if wanted and span.end > span.start:
                mine.setdefault(span.thread, []).append(place)
        self._pieces = {thread: self._flat(tape, spans) for thread, spans in mine.items()}
        self._starts = {thread: [piece[0] for piece in pieces] for thread, pieces in self._pieces.items()}

    def _flat(self, tape: Tape, spans: list[int]) -> list[tuple[float, float, int]]:
        cuts = sorted({time for place in spans for time in (tape.spans[place].start, tape.spans[place].end)})
        pieces: list[tuple[float, float, int]] = []
        active: list[int] = []
        waiting = iter(spans)  # sorted by start
        upcoming = next(waiting, None)
        for start, end in pairwise(cuts):
            while upcoming is not None and tape.spans[upcoming].start <= start:
                active.append(upcoming)
                upcoming = next(waiting, None)
            active = [place for place in active if tape.spans[place].end > start]
            if active:
                pieces.append((start, end, max(active, key=lambda place: (self._rank(tape.spans[place]), place))))
        return pieces

    def _rank(self, span: Span) -> int:
        return self.KINDS.index(span.kind) if span.kind in self.KINDS else -1

    def within(self, start: float, end: float, threads: set[int]) -> list[tuple[float, float, int]]:
        """(start, end, place of the span) of each stall of these threads in this time."""
        stalls = []
        for thread in threads & self._pieces.keys():
            pieces = self._pieces[thread]
            for a, b, span in pieces[max(bisect_right(self._starts[thread], start) - 1, 0) :]:
                if a >= end:
                    break
                if b > start:
                    stalls.append((max(a, start), min(b, end), span))
        return sorted(stalls)
