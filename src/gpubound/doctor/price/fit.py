"""Finds the mechanism of a tape: what each call waited for, what each work came after, and how much later it began.

Costs, pauses and delays are those on the tape. But a delay of more than LIMIT is none: something else must have held the work
up. If another work had just ended, that is taken for the reason; if not, the delay is cut, and `Simulator.error` shows it.
"""

from __future__ import annotations

from bisect import bisect_right
from statistics import median

from ..record.tape import Call, Tape, Work
from .dependencies import HostDependencies
from .simulator import NEVER, Simulator

LIMIT = 50.0  # µs; a launch takes 5 to reach an idle device, and 20 when the driver is busy
WAKE = 200.0  # µs; a host that sleeps in a wait takes up to so long to run again: longer, and it waited for something else
NEAR = 20.0  # µs; a work that begins so shortly after another one ended may have waited for it
LATELY = 64  # launches; further back none is looked for
TAIL = 2.0  # µs from a work's end to the end of what waited for it, where it was not seen
APART = 20.0  # µs; by so much a device's clock and the host's may differ, where it is known what a wait waited for
LARGE = 1 << 20  # bytes; a smaller copy is latency for the most part
PINNED = (
    25_000.0  # bytes a µs; PCIe 4 with 16 lanes. Only where neither the link was measured nor the tape has a large pinned copy
)
FAR = 4096  # calls; a host is no further ahead of its device
FULL = 256  # works in the queue from which on a slow launch is taken for one that waited for room; drivers take about 1024
SLOW = 20.0  # µs; a launch takes 2 to 8

Queue = tuple[int, int]  # device, stream


def fit_simulator(tape: Tape, order: HostDependencies) -> Simulator:
    return _Fit(tape, order).mechanism()


class _Fit:
    def __init__(self, tape: Tape, order: HostDependencies):
        self.calls, self.order = tape.calls, order
        self.link = tape.about.get("pinned")
        self.groups = [[tape.work[w] for w in order.works.get(place, ())] for place in range(len(tape.calls))]
        self.done = [max((work.end for work in group), default=NEVER) for group in self.groups]
        size = len(self.calls)
        self.cost = [call.end - call.start for call in self.calls]
        self.waits_for: list[tuple[int, ...]] = [()] * size
        self.room, self.tail = [-1] * size, [0.0] * size
        self.after: list[tuple[int, ...]] = [()] * size
        self.latency, self.gap = [0.0] * size, [0.0] * size
        self._typical()
        self._works()
        self._full_queues()

    def mechanism(self) -> Simulator:
        low = min((call.start for call in self.calls), default=0.0)
        high = max((call.end for call in self.calls), default=0.0)
        last = {call.thread: at for at, call in enumerate(self.calls)}
        own = [last[call.thread] for call in self.calls]
        before = [b if b >= 0 else mine for b, mine in zip(self.order.before, own)]
        pause = [
            max(call.start - self.calls[b].end, 0.0) if b < at else call.start - low + high - self.calls[b].end
            for at, (call, b) in enumerate(zip(self.calls, before))
        ]
        return Simulator(
            low=low, high=high, indices=list(range(len(self.calls))), calls=list(self.calls), before=before,
            previous=[p if p >= 0 else mine for p, mine in zip(self.order.previous, own)], pause=pause, cost=self.cost,
            waits_for=self.waits_for, room=self.room, tail=self.tail, after=self.after, latency=self.latency, gap=self.gap,
            run=[end - group[0].start if group else 0.0 for end, group in zip(self.done, self.groups)],
            queue=[(group[0].device, group[0].stream) if group else None for group in self.groups],
            began=[group[0].start if group else NEVER for group in self.groups], launch=self.launch_us,
            idle_latency=self.latency_us, pinned=self._pinned(),
        )  # fmt: skip

    def _typical(self) -> None:
        """The host's cost of a launch, the latency to an idle device, and a queue's gap before its next work."""
        latencies, gaps = [], []
        reached: dict[Queue, float] = {}
        for call, group in zip(self.calls, self.groups):
            for work in group:
                queue = (work.device, work.stream)
                free = reached.get(queue, NEVER)
                if work is group[0] and free < call.start:
                    latencies.append(work.start - call.start)
                elif work is group[0] and free > call.end + LIMIT:
                    gaps.append(work.start - free)
                reached[queue] = max(free, work.end)
        launches = [call.end - call.start for call in self.calls if call.kind == "launch" and call.end - call.start < SLOW]
        self.launch_us = median(launches) if launches else 4.0
        self.latency_us = min(max(median(latencies), 0.0), LIMIT) if latencies else 5.0
        self.gap_us = min(max(median(gaps), 0.0), LIMIT) if gaps else 1.0

    def _pinned(self) -> float:
        rates = [w.bytes / (w.end - w.start) for group in self.groups for w in group if _is_typical(w)]
        return self.link or max(rates, default=PINNED)

    def _works(self) -> None:
        """Go through the calls, with the queues as they stood."""
        final = {(w.device, w.stream): at for at, group in enumerate(self.groups) for w in group}
        queues: dict[Queue, int] = {}  # the last call with work in each
        event_waits: dict[Queue, list[int]] = {}  # works that a queue waits for by an event
        records: dict[int, int] = {}  # a record's correlation -> the call whose work it follows
        latest: dict[int, int] = {}  # the last call with work of each thread
        for at, (call, group) in enumerate(zip(self.calls, self.groups)):
            if call.kind == "event" and "Record" in call.name:
                follows = latest.get(call.thread) if call.stream is None else queues.get((call.device or 0, call.stream))
                if follows is not None:
                    records[call.correlation] = follows
            elif call.kind == "event" and call.record in records and call.stream is not None:
                event_waits.setdefault((call.device or 0, call.stream), []).append(records[call.record])
            if group:
                latest[call.thread] = at
                first = (group[0].device, group[0].stream)
                self._delays(at, group[0], [queues.get(first, final[first]), *event_waits.pop(first, ())])
                queues |= {(work.device, work.stream): at for work in group}
            if call.blocks and group:
                if call.end > group[0].start:  # else the copy was staged, and the host went on
                    self._hold(at, (at,), self.launch_us)
            elif call.waits and call.kind == "sync" and "Event" in call.name:
                known = records.get(call.record)
                self._wait(at, [known] if known is not None else self._ended_with(at))
            elif call.waits:
                self._wait(at, [queues.get(queue, last) for queue, last in final.items() if _meant(call, queue)])

    def _delays(self, at: int, work: Work, after: list[int]) -> None:
        """The latency after the launch and the gap after other works: one of the two made the work begin when it did."""
        call = self.calls[at]
        cap = float("inf") if call.blocks else LIMIT  # a pageable copy begins when its first part has been staged
        soon = cap + call.end - call.start  # a slow launch may reach the device as late as it ends
        latency = work.start - call.start
        gap = work.start - max((self.done[c] for c in after if c < at), default=NEVER)
        if latency > soon and gap > cap:
            near = [c for c in range(max(at - LATELY, 0), at) if work.start - NEAR <= self.done[c] <= work.start]
            if near:
                after.append(max(near, key=self.done.__getitem__))
                gap = work.start - self.done[after[-1]]
        self.after[at] = tuple(after)
        by_launch, by_queue = latency <= soon, gap <= cap
        if by_launch == by_queue:
            by_launch = latency - self.latency_us <= gap - self.gap_us
        if by_launch:
            self.latency[at], self.gap[at] = min(max(latency, 0.0), soon), min(self.gap_us, max(gap, 0.0))
        else:
            self.latency[at], self.gap[at] = min(self.latency_us, max(latency, 0.0)), min(max(gap, 0.0), cap)

    def _wait(self, at: int, works: list[int]) -> None:
        """A call that waits for these works, as far as the tape agrees: what ended later was not waited for."""
        call = self.calls[at]
        past = [c for c in works if c < at]
        clocks = APART if call.kind == "sync" and (call.record or call.stream is not None) else TAIL
        finished = [c for c in past if self.done[c] <= call.end + clocks]
        waited = any(self.done[c] > call.start for c in finished)
        if call.kind == "sync" or call.kind == "free":
            works = finished + [c for c in works if c >= at]
        elif waited and len(finished) == len(past):  # cudaMalloc waits, or does not
            works = finished
        else:
            return
        if waited:
            self._hold(at, tuple(works), TAIL if call.kind == "sync" else 0.0)
        elif works:
            self.waits_for[at], self.tail[at] = tuple(works), TAIL if call.kind == "sync" else self.cost[at]

    def _ended_with(self, at: int) -> list[int]:
        """The work that ended last before a wait for an unknown event did."""
        call = self.calls[at]
        past = [c for c in range(max(at - FAR, 0), at) if call.start < self.done[c] <= call.end + TAIL]
        return [max(past, key=self.done.__getitem__)] if past else []

    def _hold(self, at: int, works: tuple[int, ...], least: float) -> None:
        """A wait that held its host. It took `tail` after the works were done, and costs as much where none is to wait for."""
        call = self.calls[at]
        tail = call.end - max(self.done[c] for c in works if c <= at)
        if call.kind == "sync":
            tail = min(tail, WAKE)
        self.waits_for[at], self.tail[at] = works, tail
        self.cost[at] = min(call.end - call.start, max(least, tail))

    def _full_queues(self) -> None:
        """A launch that took long while the queue was full waited for room: it ended as an earlier work began."""
        starts: dict[int, list[float]] = {}
        owners: dict[int, list[int]] = {}
        for at, (call, group) in enumerate(zip(self.calls, self.groups)):
            if not group:
                continue
            begun, whose = starts.setdefault(group[0].device, []), owners.setdefault(group[0].device, [])
            if call.kind == "launch" and call.end - call.start > SLOW:
                last = bisect_right(begun, call.end) - 1
                if len(begun) - bisect_right(begun, call.start) >= FULL and last >= 0 and begun[last] > call.start:
                    self.room[at], self.tail[at], self.cost[at] = whose[last], call.end - begun[last], self.launch_us
            if not begun or group[0].start >= begun[-1]:
                begun.append(group[0].start)
                whose.append(at)


def _is_typical(work: Work) -> bool:
    """Return whether a copy shows the rate of pinned memory."""
    return work.kind in ("h2d", "d2h") and not work.pageable and work.bytes >= LARGE and work.end > work.start


def _meant(call: Call, queue: Queue) -> bool:
    """Return whether a wait without an event means this queue."""
    return call.device in (None, queue[0]) and call.stream in (None, queue[1])
