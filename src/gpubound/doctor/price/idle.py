"""Idle times of a device by cause, and the dependencies between launches, works and host calls that name the causes.

A gap is a time in which a device runs nothing. The work that ends the gap shows its cause. If the launch of this work was over
before the gap began, the work was queued: something on the device held it up. Otherwise the host was late, and its activity
meanwhile is split into pieces, each with one leaf. docs/doctor-how.md has the full rules.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import NamedTuple

import numpy as np

from ...errors import MeasureError
from ..record.tape import Span, Tape

TOUCH = 0.2  # µs; calls of two threads that overlap by less do not run at once
TOGETHER = 0.02  # threads whose calls overlap more often than this run at once


class HostDependencies:
    """Dependencies between the calls and works of a tape.

    `launch[w]` is the call that launched work w, or -1. `works[c]` are the works of call c. `previous[c]` is the last call of
    the same thread, or -1. `before[c]` is the call that the host made before call c, or -1: the last one of the same thread, or
    of a thread that handed over to it. Backward runs on autograd's thread while the main thread waits, so the two form one
    chain: threads that are never busy at once count as such a pair.
    """

    def __init__(self, tape: Tape):
        self.tape = tape
        by_number = {call.correlation: index for index, call in enumerate(tape.calls) if call.correlation}
        self.launch = [by_number.get(work.correlation, -1) for work in tape.work]
        self.works: dict[int, list[int]] = {}
        for work, launch in enumerate(self.launch):
            if launch >= 0:
                self.works.setdefault(launch, []).append(work)
        self.threads: dict[int, list[int]] = {}
        for index, call in enumerate(tape.calls):
            self.threads.setdefault(call.thread, []).append(index)
        self.previous, self.before = self._chain(self._pairs())

    def _pairs(self) -> dict[int, list[int]]:
        """Return for each thread the threads that hand over to it and wait for it."""
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
        for index, call in enumerate(self.tape.calls):
            own = came = last.get(call.thread, -1)
            for other in pairs[call.thread]:
                earlier = last.get(other, -1)
                if earlier >= 0 and ends[earlier] <= call.start + TOUCH and (came < 0 or ends[earlier] > ends[came]):
                    came = earlier
            previous.append(own)
            before.append(came)
            last[call.thread] = index
        return previous, before

    @property
    def lost(self) -> list[int]:
        """Works whose launch is not on the tape, except those that a queue held when the tape began."""
        known = {(self.tape.work[works[0]].device, self.tape.work[works[0]].stream) for works in self.works.values()}
        begun: set[tuple[int, int]] = set()
        launches = []
        for index, (work, launch) in enumerate(zip(self.tape.work, self.launch)):
            queue = (work.device, work.stream)
            if launch >= 0:
                begun.add(queue)
            elif queue in begun or queue not in known:
                launches.append(index)
        return launches

    def measurable(self) -> None:
        """Raise MeasureError for a tape that does not show what its device did."""
        tape = self.tape
        if not tape.work:
            raise MeasureError("the tape has no work of a device, wanted kernels; is the model on the GPU?")
        hidden = [call for index, call in enumerate(tape.calls) if call.kind == "graph" and index not in self.works]
        if hidden:
            replays = sum(call.kind == "graph" for call in tape.calls)
            raise MeasureError(
                f"{len(hidden)} of {replays} graph replays show no work of theirs, so that a busy device would look idle; "
                "record the tape with the nodes of graphs (a newer driver and CUPTI), or without replays."
            )


class Stalls:
    """Spans in which a thread made no progress, or `only` these, split so that none overlap: the later kind of KINDS wins.

    Waits for data took `loading` times as long in the timed steps.
    """

    KINDS = ("data", "checkpoint", "compile", "gc")  # a later one hides those before it

    def __init__(self, tape: Tape, only: frozenset[int] | None = None, loading: float = 1.0):
        self._data = frozenset(n for n, span in enumerate(tape.spans) if span.kind == "data")
        self._loading = loading
        mine: dict[int, list[int]] = {}
        for index, span in enumerate(tape.spans):
            wanted = span.kind in self.KINDS if only is None else index in only
            if wanted and span.end > span.start:
                mine.setdefault(span.thread, []).append(index)
        self._pieces = {thread: self._flat(tape, spans) for thread, spans in mine.items()}
        self._starts = {thread: [piece[0] for piece in pieces] for thread, pieces in self._pieces.items()}

    def _flat(self, tape: Tape, spans: list[int]) -> list[tuple[float, float, int]]:
        cuts = sorted({time for index in spans for time in (tape.spans[index].start, tape.spans[index].end)})
        pieces: list[tuple[float, float, int]] = []
        active: list[int] = []
        waiting = iter(spans)  # sorted by start
        upcoming = next(waiting, None)
        for start, end in pairwise(cuts):
            while upcoming is not None and tape.spans[upcoming].start <= start:
                active.append(upcoming)
                upcoming = next(waiting, None)
            active = [index for index in active if tape.spans[index].end > start]
            if active:
                pieces.append((start, end, max(active, key=lambda index: (self._rank(tape.spans[index]), index))))
        return pieces

    def _rank(self, span: Span) -> int:
        return self.KINDS.index(span.kind) if span.kind in self.KINDS else -1

    def within(self, start: float, end: float, threads: set[int]) -> list[tuple[float, float, int]]:
        """Return (start, end, index of the span) of each stall of these threads in this time."""
        stalls = []
        for thread in threads & self._pieces.keys():
            pieces = self._pieces[thread]
            for a, b, span in pieces[max(bisect_right(self._starts[thread], start) - 1, 0) :]:
                if a >= end:
                    break
                if b > start:
                    stalls.append((max(a, start), min(b, end), span))
        return sorted(stalls)

    def lasting(self, start: float, end: float, threads: set[int]) -> float:
        """Return µs of stalls of these threads in this time, the waits for data as long as in the timed steps."""
        return sum((b - a) * (self._loading if n in self._data else 1.0) for a, b, n in self.within(start, end, threads))


SHARES = ("busy", "host_late", "device_side", "comm", "unlocated")
LEAVES = ("sync", "copy", "data", "gc", "compile", "checkpoint", "alloc", "dispatch")
DRAINED = 20.0  # µs; a wait that ended at most so long before the device ran dry is the cause: an item() takes 10

_LEAF = {"sync": "sync", "copy": "copy", "alloc": "alloc", "free": "alloc", "pin": "alloc"}


class Gap(NamedTuple):
    """A time in which `device` ran nothing, for one cause. Times are those of the tape."""

    device: int
    start: float
    end: float
    cause: str  # one of SHARES, but never busy or comm
    leaf: str = ""  # one of LEAVES, if the host was late
    call: int | None = None  # index on the tape of the causing call: the wait, or the late launch
    span: int | None = None  # index of the causing span

    @property
    def us(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Bar:
    """Division of a step's time in percent. `shares` add up to 100, and `late` to the share of host_late. Several devices:
    their mean."""

    step_ms: float
    steps: int
    shares: dict[str, float]
    late: dict[str, float]
    devices: dict[int, dict[str, float]]  # the shares of each
    gaps: tuple[Gap, ...]

    def ms(self, share: str) -> float:
        """Return milliseconds a step of one of SHARES or LEAVES."""
        return self.step_ms * (self.shares | self.late)[share] / 100


def idle_times(tape: Tape, order: HostDependencies | None = None) -> Bar:
    """Divide the steps of a tape into what their devices did and the causes of their idle times."""
    order = order or HostDependencies(tape)
    order.measurable()
    start, end = tape.window
    if end <= start:
        raise MeasureError("the tape's steps take no time; record some steps of a loop.")
    blame = _Blame(tape, order)
    gaps: list[Gap] = []
    devices, leaves = {}, []
    for device in sorted({work.device for work in tape.work}):
        mine = [index for index, work in enumerate(tape.work) if work.device == device]
        busy, comm, idle = _cover(tape, mine, start, end)
        own_gaps = blame.pieces(device, mine, idle)
        gaps += own_gaps
        parts: dict[str, list[float]] = {"busy": [busy], "comm": [comm]}
        for gap in own_gaps:
            parts.setdefault(gap.leaf or gap.cause, []).append(gap.us)
        times = {name: fsum(each) for name, each in parts.items()}
        times["host_late"] = fsum(times.get(leaf, 0.0) for leaf in LEAVES)
        total = fsum(times.get(share, 0.0) for share in SHARES)
        devices[device] = {share: 100 * times.get(share, 0.0) / total for share in SHARES}
        leaves.append({leaf: 100 * times.get(leaf, 0.0) / total for leaf in LEAVES})
    shares = {share: fsum(each[share] for each in devices.values()) / len(devices) for share in SHARES}
    late = {leaf: fsum(each[leaf] for each in leaves) / len(leaves) for leaf in LEAVES}
    steps = max(len(tape.steps), 1)
    return Bar((end - start) / steps / 1e3, steps, shares, late, devices, tuple(gaps))


def _cover(tape: Tape, mine: list[int], start: float, end: float) -> tuple[float, float, list[tuple[float, float, int | None]]]:
    """Return the time with other work than communication, the time with communication alone, and the idle times, each with the
    work that ends it."""
    starts = np.array([tape.work[index].start for index in mine])
    ends = np.array([tape.work[index].end for index in mine])
    other = np.array([tape.work[index].kind != "comm" for index in mine])
    idle, any_work = _holes(starts, ends, start, end)
    _, computing = _holes(starts[other], ends[other], start, end)
    return computing, any_work - computing, [(a, b, mine[n] if n < len(mine) else None) for a, b, n in idle]


def _holes(starts: np.ndarray, ends: np.ndarray, start: float, end: float) -> tuple[list[tuple[float, float, int]], float]:
    """Return the times between `start` and `end` that no interval covers, each with the interval after it, and the covered
    time."""
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(ends)]) if len(ends) else np.array([-np.inf])
    upto = np.concatenate([starts, [np.inf]])
    low, high = np.maximum(reached, start), np.minimum(upto, end)
    (where,) = np.nonzero(high > low)
    holes = [(float(low[n]), float(high[n]), int(n)) for n in where]
    return holes, (end - start) - fsum(b - a for a, b, _ in holes)


class _Blame:
    def __init__(self, tape: Tape, order: HostDependencies):
        self.tape, self.order, self.stalls = tape, order, Stalls(tape)
        self._starts = [call.start for call in tape.calls]
        self._ends = [call.end for call in tape.calls]
        self._may_wait = [call.waits for call in tape.calls]
        self._waits = [index for index, waits in enumerate(self._may_wait) if waits]

    def pieces(self, device: int, mine: list[int], idle: list[tuple[float, float, int | None]]) -> list[Gap]:
        """Return the idle times of one device, divided by cause."""
        gaps: list[Gap] = []
        queued = self._queued(mine)
        root: tuple[int, float] | None = None  # the wait that drained the queue, and until when it causes gaps
        for start, end, work in idle:
            # The launch that ends the gap; at the end of the tape, where there is none, the last call before.
            late = bisect_right(self._starts, end) - 1 if work is None else self.order.launch[work]
            if late < 0:
                gaps.append(Gap(device, start, end, "unlocated"))
            elif work is not None and self._ends[late] <= start:
                gaps.append(Gap(device, start, end, "device_side", call=late))
            else:
                drain = self._drain(late, start)
                if drain is not None:
                    root = (drain, self._recovery(drain, end, queued))
                elif root is not None and start > root[1]:
                    root = None
                gaps += self._host_late(device, start, end, work, late, root[0] if root else None)
        return gaps

    def _queued(self, mine: list[int]) -> list[float]:
        """Return the times when the device came to works that were queued already: there the host was ahead."""
        calls, work, launch = self.tape.calls, self.tape.work, self.order.launch
        reached, queued = float("-inf"), []
        for index in mine:
            if launch[index] >= 0 and calls[launch[index]].end <= reached:
                queued.append(work[index].start)
            reached = max(reached, work[index].end)
        return queued

    def _drain(self, late: int, start: float) -> int | None:
        """Return the wait in which the host was when the device ran dry, or that had just ended."""
        ends, waits, before = self._ends, self._may_wait, self.order.before
        index = late
        while index >= 0 and ends[index] > start - DRAINED:
            if waits[index] and self._starts[index] < start:
                return index
            index = before[index]
        return None

    def _recovery(self, drain: int, end: float, queued: list[float]) -> float:
        """Return the time until which the host, set back by this wait, runs after its device: never, if the next wait comes
        first."""
        ahead = bisect_right(queued, end)
        following = bisect_right(self._waits, drain)
        next_wait = self.tape.calls[self._waits[following]].start if following < len(self._waits) else float("inf")
        return queued[ahead] if ahead < len(queued) and queued[ahead] < next_wait else end

    def _host_late(self, device: int, start: float, end: float, work: int | None, late: int, root: int | None) -> list[Gap]:
        """Divide a gap: waits and stalls take the time that they overlap; the rest is the root wait's, or else dispatch."""
        calls, before = self.tape.calls, self.order.before
        covered: list[tuple[float, float, str, int | None, int | None]] = []
        threads = {calls[late].thread}
        index = late
        while index >= 0 and self._ends[index] > start:
            call = calls[index]
            threads.add(call.thread)
            if self._may_wait[index] and call.start < end:
                covered.append((max(call.start, start), min(call.end, end), _LEAF[call.kind], index, None))
            index = before[index]
        for a, b, span in self.stalls.within(start, end, threads):
            covered.append((a, b, self.tape.spans[span].kind, None, span))
        rest = (_LEAF[calls[root].kind], root) if root is not None else ("dispatch", late if work is not None else None)
        gaps, at = [], start
        for a, b, leaf, call_place, span_place in sorted(covered, key=lambda piece: piece[:2]):
            if b <= at:
                continue
            if a > at:
                gaps.append(Gap(device, at, a, "host_late", *rest))
            gaps.append(Gap(device, max(a, at), b, "host_late", leaf, call_place, span_place))
            at = b
        if at < end:
            gaps.append(Gap(device, at, end, "host_late", *rest))
        return gaps
