"""A tape as a mechanism that can be played: what each call costs and waits for, what each work comes after.

    a call begins      when the call before it has ended, and the pause between them is over
    a call ends        after its own cost, and not before what it waits for is done
    a work begins      after its launch and a latency, and not before what it comes after, and a gap
    a work lasts       as long as it did

All this only adds and takes the larger, so to leave something out can make nothing later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..record.tape import Call
from .dependencies import Stalls

PAIR = 20.0  # µs between a copy and the wait that makes it a blocking one: torch makes both in one C++ function
NEVER = float("-inf")


class Played(NamedTuple):
    """Times from the beginning of the play, in µs; the lists have the last time that each call was played."""

    length: float
    ends: list[float]
    begun: list[float]  # of the calls' works


@dataclass(frozen=True)
class Simulator:
    """Lists with one entry a call; calls name each other by their positions in them.

    The calls are played again and again. So a position may name one that is not before it: then it means this call in the play
    before. `low` and `high` are the times on the tape from which and to which one play goes.
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
    room: list[int]  # the call whose work must have begun: there the queue was full. -1: none
    tail: list[float]  # from there to the call's end
    after: list[tuple[int, ...]]  # calls whose works this call's work comes after; none: it has no work
    latency: list[float]
    gap: list[float]
    run: list[float]
    queue: list[tuple[int, int] | None]  # device and stream of the call's work
    began: list[float]  # when this work began on the tape
    launch: float  # what a launch costs the host
    idle_latency: float  # and how long it takes to an idle device
    pinned: float  # bytes that a copy from pinned memory moves in a µs

    def play(self, times: int) -> Played:
        """Play the calls `times` times in a row. An entry holds the time of the play before until it is written again."""
        rows = list(zip(self.before, self.previous, self.pause, self.cost, self.after, self.waits_for, self.room))
        ends = [call.end - self.high for call in self.calls]
        begun, done = [NEVER] * len(rows), [NEVER] * len(rows)
        for _ in range(times):
            self._once(rows, ends, begun, done)
        return Played(max(*ends, *done, 0.0, 0.0), ends, begun)

    def without(self, gone: frozenset[int], work: bool = False) -> Simulator:
        """The mechanism in which these calls cost nothing and wait for nothing; with `work`, nor launch anything."""
        cost, waits_for, room = list(self.cost), list(self.waits_for), list(self.room)
        latency, gap, run = list(self.latency), list(self.gap), list(self.run)
        for at in self._with_partners(gone):
            cost[at] = min(cost[at], self.launch) if self.calls[at].kind == "copy" and not work else 0.0
            waits_for[at], room[at] = (), -1
            if self.calls[at].blocks and self.calls[at].bytes:  # from pinned memory nothing is staged
                latency[at] = min(latency[at], self.idle_latency)
                run[at] = min(run[at], self.calls[at].bytes / self.pinned)
            if work:  # it begins and ends as what it comes after ends
                latency[at], gap[at], run[at] = NEVER, 0.0, 0.0
        return replace(self, cost=cost, waits_for=waits_for, room=room, latency=latency, gap=gap, run=run)

    def paced(self, share: float, awake: Simulator) -> Simulator:
        """The mechanism whose host takes this share of its time, but all of the stalls that `awake` is without: a recording
        slows no loader.

        A pageable copy takes the link's own time at least; the rest is the host, which copies to a buffer.
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
        """The mechanism whose host takes no time."""
        size, zero = len(self.calls), [0.0] * len(self.calls)
        calls = [replace(call, end=self.high) for call in self.calls]
        return replace(self, calls=calls, pause=zero, cost=zero, waits_for=[()] * size, room=[-1] * size)

    def _once(self, rows: list, ends: list[float], begun: list[float], done: list[float]) -> None:
        latency, gap, run, tail = self.latency, self.gap, self.run, self.tail
        for at, (before, previous, rest, own, after, waits_for, room) in enumerate(rows):
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

    def error(self) -> float:
        """By how much one play misses a recorded time at most, as a share of the tape's length."""
        played = self.play(1)
        missed = [abs(end - (call.end - self.low)) for end, call in zip(played.ends, self.calls)]
        missed += [abs(got - (was - self.low)) for got, was in zip(played.begun, self.began) if was > NEVER]
        length = max(self.high - self.low, *(b + r - self.low for b, r in zip(self.began, self.run)), 0.0)
        return max(missed, default=0.0) / length if length > 0 else 0.0

    def within(self, low: float, high: float) -> Simulator:
        """The calls of this time alone. What they name before it, is named in the play before."""
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
        """The positions of these calls, and of the other half of each blocking copy."""
        following = {previous: at for at, previous in enumerate(self.previous) if previous < at}
        partners = {at for at, place in enumerate(self.indices) if place in gone}
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
        """The mechanism whose pauses do not have these stalls."""
        pauses = []
        for at, (before, call, pause) in enumerate(zip(self.before, self.calls, self.pause)):
            ended, threads = self.calls[before].end, {call.thread, self.calls[before].thread}
            parts = [(ended, call.start)] if before < at else [(ended, self.high), (self.low, call.start)]
            stalled = (end - start for a, b in parts for start, end, _ in away.within(a, b, threads) if b > a)
            pauses.append(max(pause - sum(stalled), 0.0))
        return replace(self, pause=pauses)
