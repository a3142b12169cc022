"""Simulation of a tape: the cost of each call and what it waits for, the works that each work comes after.

    a call begins      when the call before it has ended, and the pause between them is over
    a call ends        after its cost, and not before the works that it waits for are done
    a work begins      after its launch and a latency, and not before the works that it comes after, and a gap
    a work lasts       as long as it did

Only sums and maxima are taken, so to leave something out makes nothing later.

`fit_simulator` finds all of this on a tape. Costs, pauses and delays are those of the tape. But a delay of more than LIMIT is
none: something else must have held the work up. If another work had just ended, that one is the reason; if not, the delay is
truncated, and `Simulator.error` shows it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from ..record.tape import Call, Tape, Work
from .idle import HostDependencies, Stalls

PAIR = 20.0  # µs between a copy and the wait that makes it blocking: torch calls both in one C++ function
NEVER = float("-inf")


class Played(NamedTuple):
    """Times from the beginning of the simulation, in µs; the lists have the last time that each call was played."""

    length: float
    ends: list[float]
    begun: list[float]  # of the calls' works


@dataclass(frozen=True)
class Simulator:
    """Lists with one entry per call; calls refer to each other by their positions.

    The calls are played repeatedly. So a position may refer to a later call: it means this call in the play before. `low` and
    `high` are the times on the tape between which one play runs.
    """

    low: float
    high: float
    indices: list[int]  # of the calls on the tape
    calls: list[Call]
    before: list[int]  # see HostDependencies
    previous: list[int]
    pause: list[float]
    cost: list[float]
    waits_for: list[tuple[int, ...]]  # calls whose works this call waits for
    room: list[int]  # the call whose work must have begun, because the queue was full. -1: none
    tail: list[float]  # time from then to the call's end
    after: list[tuple[int, ...]]  # calls whose works this call's work comes after; none: it has no work
    latency: list[float]
    gap: list[float]
    run: list[float]
    queue: list[tuple[int, int] | None]  # device and stream of the call's work
    began: list[float]  # when this work began on the tape
    launch: float  # cost of a launch on the host
    idle_latency: float  # latency of a launch to an idle device
    pinned: float  # bytes per µs of a copy from pinned memory

    def play(self, times: int) -> Played:
        """Play the calls `times` times in a row. An entry holds the time of the play before until it is written again."""
        rows = list(zip(self.before, self.previous, self.pause, self.cost, self.after, self.waits_for, self.room))
        latency, gap, run, tail = self.latency, self.gap, self.run, self.tail
        ends = [call.end - self.high for call in self.calls]
        begun, done = [NEVER] * len(rows), [NEVER] * len(rows)
        plays = chain.from_iterable(enumerate(rows) for _ in range(times))
        for at, (before, previous, rest, own, after, waits_for, room) in plays:
            start = ends[before] + rest
            if ends[previous] > start:
                start = ends[previous]
            if after:
                begin = start + latency[at]
                for other in after:
                    free = done[other] + gap[at]
                    if free > begin:
                        begin = free
                begun[at] = begin
                done[at] = begin + run[at]
            end = start + own
            for other in waits_for:
                until = done[other] + tail[at]
                if until > end:
                    end = until
            if room >= 0 and begun[room] + tail[at] > end:
                end = begun[room] + tail[at]
            ends[at] = end
        return Played(max(*ends, *done, 0.0, 0.0), ends, begun)

    def without(self, gone: frozenset[int], work: bool = False) -> Simulator:
        """Return the simulator in which these calls cost nothing and wait for nothing; with `work` they launch nothing, too."""
        cost, waits_for, room = list(self.cost), list(self.waits_for), list(self.room)
        latency, gap, run = list(self.latency), list(self.gap), list(self.run)
        for at in self._with_partners(gone):
            cost[at] = min(cost[at], self.launch) if self.calls[at].kind == "copy" and not work else 0.0
            waits_for[at], room[at] = (), -1
            if self.calls[at].blocks and self.calls[at].bytes:  # from pinned memory nothing is staged
                latency[at] = min(latency[at], self.idle_latency)
                run[at] = min(run[at], self.calls[at].bytes / self.pinned)
            if work:  # it begins and ends when the works before it end
                latency[at], gap[at], run[at] = NEVER, 0.0, 0.0
        return replace(self, cost=cost, waits_for=waits_for, room=room, latency=latency, gap=gap, run=run)

    def paced(self, share: float, awake: Simulator) -> Simulator:
        """Return the simulator whose host takes this share of its time. Stalls, which `awake` leaves out, keep theirs: a
        recording does not slow a loader.

        A pageable copy takes at least the time of the link; the rest is the host's, which copies to a buffer.
        """
        least = [call.bytes / self.pinned if call.blocks and call.bytes else run for call, run in zip(self.calls, self.run)]
        return replace(
            self,
            pause=[was - own + share * own for was, own in zip(self.pause, awake.pause)],
            cost=[share * cost for cost in self.cost],
            tail=[share * tail for tail in self.tail],
            latency=[share * late if call.blocks else late for call, late in zip(self.calls, self.latency)],
            run=[min(run, max(share * run, link)) for run, link in zip(self.run, least)],
        )

    def hostless(self) -> Simulator:
        """Return the simulator whose host takes no time."""
        size, zero = len(self.calls), [0.0] * len(self.calls)
        calls = [replace(call, end=self.high) for call in self.calls]
        return replace(self, calls=calls, pause=zero, cost=zero, waits_for=[()] * size, room=[-1] * size)

    def error(self) -> float:
        """Return the largest difference of a played time from the recorded one, as a fraction of the tape's length."""
        played = self.play(1)
        missed = [abs(end - (call.end - self.low)) for end, call in zip(played.ends, self.calls)]
        missed += [abs(got - (was - self.low)) for got, was in zip(played.begun, self.began) if was > NEVER]
        length = max(self.high - self.low, *(b + r - self.low for b, r in zip(self.began, self.run)), 0.0)
        return max(missed, default=0.0) / length if length > 0 else 0.0

    def within(self, low: float, high: float) -> Simulator:
        """Return the simulator of the calls of this time alone. References to earlier calls mean them in the play before."""
        calls = [at for at, call in enumerate(self.calls) if low <= call.start < high]
        new = {at: position for position, at in enumerate(calls)}
        last_call = {self.calls[at].thread: position for position, at in enumerate(calls)}
        last_work = {self.queue[at]: position for position, at in enumerate(calls) if self.after[at]}

        def works(named: tuple[int, ...]) -> tuple[int, ...]:
            new_works = (new.get(at, last_work.get(self.queue[at], -1)) for at in named)
            return tuple(dict.fromkeys(at for at in new_works if at >= 0))

        own = [last_call[self.calls[at].thread] for at in calls]
        pause = [self.pause[at] for at in calls]
        for position, at in enumerate(calls):
            if self.before[at] not in new or self.before[at] >= at:
                last = self.calls[calls[own[position]]]
                pause[position] = self.calls[at].start - low + max(high - last.end, 0.0)
        lists = ("indices", "calls", "cost", "tail", "latency", "gap", "run", "queue", "began")
        same: dict[str, Any] = {name: [getattr(self, name)[at] for at in calls] for name in lists}
        return replace(
            self,
            low=low,
            high=high,
            before=[new.get(self.before[at], mine) if self.before[at] < at else mine for at, mine in zip(calls, own)],
            previous=[new.get(self.previous[at], mine) for at, mine in zip(calls, own)],
            pause=pause,
            waits_for=[works(self.waits_for[at]) for at in calls],
            room=[new.get(self.room[at], -1) for at in calls],
            after=[works(self.after[at]) for at in calls],
            **same,
        )

    def _with_partners(self, gone: frozenset[int]) -> set[int]:
        """Return the positions of these calls, and of the other half of each blocking copy."""
        following = {previous: at for at, previous in enumerate(self.previous) if previous < at}
        partners = {at for at, index in enumerate(self.indices) if index in gone}
        for at in list(partners):
            after = following.get(at)
            if after is not None and self._is_pair(at, after):
                partners.add(after)
            if self.previous[at] < at and self._is_pair(self.previous[at], at):
                partners.add(self.previous[at])
        return partners

    def _is_pair(self, copy: int, wait: int) -> bool:
        first, second = self.calls[copy], self.calls[wait]
        named = first.kind == "copy" and second.kind == "sync" and "StreamSync" in second.name
        one_stream = None in (first.stream, second.stream) or first.stream == second.stream
        return named and one_stream and second.start - first.end <= PAIR

    def awake(self, away: Stalls) -> Simulator:
        """Return the simulator whose pauses do not have these stalls."""
        pauses = []
        for at, (before, call, pause) in enumerate(zip(self.before, self.calls, self.pause)):
            ended, threads = self.calls[before].end, {call.thread, self.calls[before].thread}
            parts = [(ended, call.start)] if before < at else [(ended, self.high), (self.low, call.start)]
            stalled = sum(away.lasting(a, b, threads) for a, b in parts if b > a)
            pauses.append(max(pause - stalled, 0.0))
        return replace(self, pause=pauses)

    def loaded(self, loading: float, without_data: Simulator) -> Simulator:
        """Return the simulator whose waits for data, which `without_data` leaves out, last `loading` times as long."""
        pauses = (own + loading * (was - own) for was, own in zip(self.pause, without_data.pause))
        return replace(self, pause=list(pauses))


LIMIT = 50.0  # µs; a launch takes 5 to reach an idle device, and 20 when the driver is busy
WAKE = 200.0  # µs that a host asleep in a wait takes at most to run again; after longer it waited for something else
NEAR = 20.0  # µs; a work that begins at most so long after another one ended may have waited for it
LATELY = 64  # launches searched backwards
TAIL = 2.0  # µs from a work's end to the end of the wait for it, if not measured
APART = 20.0  # µs by which the clocks of device and host may differ, if the awaited work is known
LARGE = 1 << 20  # bytes; a smaller copy is latency for the most part
PINNED = 25_000.0  # bytes per µs of PCIe 4 with 16 lanes, if neither the link was measured nor the tape has a large pinned copy
FAR = 4096  # calls that a host is at most ahead of its device
FULL = 256  # queued works from which on a slow launch counts as waiting for room; drivers queue about 1024
SLOW = 20.0  # µs; a launch takes 2 to 8

Queue = tuple[int, int]  # device, stream


def fit_simulator(tape: Tape, order: HostDependencies) -> Simulator:
    return _Fit(tape, order).simulator()


class _Fit:
    def __init__(self, tape: Tape, order: HostDependencies):
        self.calls, self.order = tape.calls, order
        self.link = tape.about.get("pinned")
        self.groups = [[tape.work[w] for w in order.works.get(index, ())] for index in range(len(tape.calls))]
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

    def simulator(self) -> Simulator:
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
        """Set the host's cost of a launch, the latency to an idle device, and a queue's gap before its next work."""
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
        copies = (work for group in self.groups for work in group if work.kind in ("h2d", "d2h") and not work.pageable)
        rates = [copy.bytes / (copy.end - copy.start) for copy in copies if copy.bytes >= LARGE and copy.end > copy.start]
        return self.link or max(rates, default=PINNED)

    def _works(self) -> None:
        """Go through the calls with the state of the queues at each."""
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
                if call.end > group[0].start:  # else the copy was staged, and the host continued
                    self._hold(at, (at,), self.launch_us)
            elif call.waits and call.kind == "sync" and "Event" in call.name:
                known = records.get(call.record)
                self._wait(at, [known] if known is not None else self._ended_with(at))
            elif call.waits:  # without an event it means the queues of its device and stream
                meant = (q for q in final if call.device in (None, q[0]) and call.stream in (None, q[1]))
                self._wait(at, [queues.get(queue, final[queue]) for queue in meant])

    def _delays(self, at: int, work: Work, after: list[int]) -> None:
        """Set the latency after the launch and the gap after other works: one of the two determined when the work began."""
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
        """Add a call that waits for these works, as far as the tape agrees: it did not wait for works that ended later."""
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
        """Return the work that ended last before a wait for an unknown event did."""
        call = self.calls[at]
        past = [c for c in range(max(at - FAR, 0), at) if call.start < self.done[c] <= call.end + TAIL]
        return [max(past, key=self.done.__getitem__)] if past else []

    def _hold(self, at: int, works: tuple[int, ...], least: float) -> None:
        """Add a wait that held its host. It took `tail` after the works were done, and costs that much without works."""
        call = self.calls[at]
        tail = call.end - max(self.done[c] for c in works if c <= at)
        if call.kind == "sync":
            tail = min(tail, WAKE)
        self.waits_for[at], self.tail[at] = works, tail
        self.cost[at] = min(call.end - call.start, max(least, tail))

    def _full_queues(self) -> None:
        """Find launches that waited for room in a full queue: they took long, and ended as an earlier work began."""
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
