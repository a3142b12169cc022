"""Prices of stalls in milliseconds of a timed step, by replay of the recorded steps without some of their stalls.

The sum of the times spent in waits is no price. A wait of 30 ms costs nothing while the device has work, and one of 0.2 ms
costs 20 ms when it lets a queue run dry. So the simulator plays the host with its pauses, the streams as queues, and the waits.
Then some of the waits are left out, and the times are compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean, median
from typing import Any

from ...errors import MeasureError
from ...watch.events import LIBRARY, Place, owner
from ...watch.ledger import LedgerRow
from ..record.located import Samples
from ..record.tape import Span, Tape, chosen
from .idle import Bar, HostDependencies, Stalls, idle_times
from .simulator import Simulator, fit_simulator

WRONG = 0.02  # of the tape's length: a simulation that misses a recorded time by more gives no prices
LOST = 0.005  # of all works: with more launches missing, the host's activity is not known
STEPS = 40  # steps in a play: the first one begins with an empty queue, so its price is wrong, but only a 40th of the result
SLOWED = 0.5  # of the recorded host's time; the least that was measured without a recording is 0.55
HALVINGS = 8  # bisections between SLOWED and 1: accurate to 0.2 %
BUDGET = 200_000  # calls in a play, about 0.2 s: the steps of a large tape are played fewer times, but once in any case


class Replay:
    """Prices in milliseconds a step: the steps of the tape are simulated repeatedly, with some of their stalls and without.

    `error` is the largest difference of a simulated time of the whole tape from the recorded one, as a fraction of its length.
    `simulator` is played `times` times, which makes `steps` steps. Its host takes `share` of the recorded time (see `paced`);
    `recorded_ms` is a step at the full recorded time.
    """

    share = 1.0
    loading = 1.0  # how many times as long the waits for data are in the timed steps,
    longer_ms = 0.0  # and by how much a step

    def __init__(self, tape: Tape, order: HostDependencies | None = None):
        order = order or HostDependencies(tape)
        order.measurable()
        if (lost := len(order.lost)) > LOST * len(tape.work):
            raise MeasureError(
                f"{lost} of {len(tape.work)} works have no launch on the tape, wanted at most {LOST:.1%}, so no stall can be "
                "priced; record the tape with a profiler that runs before the first step and sees all threads."
            )
        simulator = fit_simulator(tape, order)
        self.error = simulator.error()
        if self.error > WRONG:
            raise MeasureError(
                f"the replay misses recorded times by up to {self.error:.1%} of the tape, wanted at most {WRONG:.0%}: "
                "something that is not on the tape held up the host or the device, so no stall can be priced; record it again."
            )
        self.tape = tape
        self.simulator = simulator.within(*tape.window) if tape.steps else simulator
        steps = max(len(tape.steps), 1)
        most = max(BUDGET // max(len(self.simulator.calls), 1), 1)
        self.times = min(max(STEPS // steps, 1), most) if tape.steps else 1
        self.steps = self.times * steps
        self._base = self.simulator.play(self.times).length
        self.recorded_ms = self.step_ms
        self.waits = frozenset(index for index, call in enumerate(tape.calls) if call.waits)
        self.stalls = frozenset(index for index, span in enumerate(tape.spans) if span.kind in Stalls.KINDS)

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step with all its stalls, by replay."""
        return self._ms(self._base)

    def paced(self, step_ms: float) -> Replay:
        """Return the replay with a faster host, so that a step takes `step_ms`, as far as a recording can have slowed the host.

        A profiler slows the host alone. If the device holds up a step, a recorded step takes little longer than a timed one,
        but the host's work while the device waits took up to twice its time.
        """
        low, high = SLOWED, 1.0
        if step_ms >= self.step_ms:
            return self
        awake = self.simulator.awake(Stalls(self.tape, loading=self.loading))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._with(middle, awake).step_ms < step_ms else (low, middle)
        return self._with(high, awake)

    def loaded(self, loading_ms: float) -> Replay:
        """Return the replay whose waits for data take this long a step, as they did without a recording.

        A recorded host is slow, so that a loader may keep up with it; or the recording slows a loader without workers.
        """
        data = frozenset(n for n, span in enumerate(self.tape.spans) if span.kind == "data")
        without = self.simulator.awake(Stalls(self.tape, data))
        recorded = (sum(self.simulator.pause) - sum(without.pause)) / max(len(self.tape.steps), 1) / 1e3
        if recorded <= 0 or loading_ms <= 0:
            return self
        loaded = copy(self)
        loaded.loading, loaded.longer_ms = loading_ms / recorded, loading_ms - recorded
        loaded.simulator = self.simulator.loaded(loaded.loading, without)
        loaded._base = loaded.simulator.play(loaded.times).length
        return loaded

    def _with(self, share: float, awake: Simulator) -> Replay:
        paced = copy(self)
        paced.share, paced.simulator = share, self.simulator.paced(share, awake)
        paced._base = paced.simulator.play(self.times).length
        return paced

    def saved(self, calls: Iterable[int] = (), spans: Iterable[int] = (), work: bool = False) -> float:
        """Return the saving of a step if these calls cost their host nothing, never waited, and these spans were gone.

        `calls` are indices of tape.calls. The works that they launch still run, unless `work` is true. A blocking copy is a
        copy and a wait: either means both. `spans` are indices of tape.spans: the host's pauses in them are left out, not the
        calls.
        """
        return self._ms(self._base - self._without(calls, spans, work))

    def ceiling(self) -> float:
        """Return milliseconds of a step whose host never waits, also not for data, collections, compilations, checkpoints."""
        return self._ms(self._without(self.waits, self.stalls))

    def launch_free(self) -> float:
        """Return milliseconds of a step whose host costs nothing, as in a graph: the time of the devices alone."""
        return self._ms(self.simulator.hostless().play(self.times).length)

    def _without(self, calls: Iterable[int], spans: Iterable[int], work: bool = False) -> float:
        gone = chosen(calls, len(self.tape.calls), "calls")
        away = chosen(spans, len(self.tape.spans), "spans")
        simulator = self.simulator.without(gone, work) if gone else self.simulator
        simulator = simulator.awake(Stalls(self.tape, away, self.loading)) if away else simulator
        return simulator.play(self.times).length

    def _ms(self, us: float) -> float:
        return us / self.steps / 1e3


Line = tuple[str, int, str]  # file and line number, and the file of a library that was called there


def line_of(place: Place) -> Line | None:
    """Return the user's line; in backward, where there may be none, the line that built the node.

    A trainer's whole loop is one line of the user. Its stalls are told apart by the library's file.
    """
    site, via = place.site or place.built, place.via
    library = via.file if via is not None and owner(via.file) is LIBRARY else ""
    return (site.file, site.line, library) if site else None


@dataclass(frozen=True)
class Measurements:
    """Measurements of a script. A missing one is None or empty, and `absent` has the reason."""

    script: str  # as the user called it, without folders of this machine
    device: str  # in words, such as "NVIDIA H200 (cuda:0)"
    rows: Sequence[LedgerRow] = ()  # of `steps` steps under the sensors
    steps: int = 0
    counted: frozenset[str] = frozenset()  # the ledger's totals that a running sensor counted
    tape: Tape = field(default_factory=Tape)  # recorded without sensors
    step_ms: Sequence[float] = ()  # of each step timed without hooks, before the survey and after it
    located: Mapping[int, Place] = field(default_factory=dict)  # index of a call on the tape -> its line
    named_lines: Mapping[str, Place] = field(default_factory=dict)  # a span's name -> its line: a loader, a checkpoint
    loading_ms: float | None = None  # of a timed step, in the script's DataLoader
    starting_ms: float = 0.0  # of it, while its workers start and make the first batch
    workers: int = 0  # that it has
    samples: Samples = field(default_factory=Samples)  # of the launching thread's stack, in steps that were not recorded
    memory: Mapping[str, float] = field(default_factory=dict)  # per timed step: alloc, free, retry, pin
    about: Mapping[str, Any] = field(default_factory=dict)  # versions and settings
    phases: Mapping[str, Any] = field(default_factory=dict)  # steps and seconds of each phase
    step: str = ""  # what a step is, in words, if no optimizer makes one
    period: int = 1  # steps after which the loop repeats itself
    plain_ms: float | None = None  # median of the steps that were timed before any sensor was attached, if they hold a period
    timed_ms: float | None = None  # median of those timed after the survey
    spread: float | None = None  # run.spread of step_ms
    rare: Mapping[str, float] = field(default_factory=dict)  # run.rare_steps of the timed steps
    parts: Mapping[Line, float] = field(default_factory=dict)  # of the steps under the sensors, those in which a line blocked
    once: frozenset[Line] = frozenset()  # lines that blocked in a single one of several steps under the sensors
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def ms(self) -> float | None:
        """Mean of the timed steps. An event in every fifth step, such as a checkpoint, counts with its share, as in a price."""
        return mean(self.step_ms) if self.step_ms else None

    def sampled_ms(self, count: int) -> float:
        """Return milliseconds a step for a number of samples."""
        return count * (self.ms or 0.0) / max(self.samples.total, 1)

    def sampled_at(self, place: Place) -> float:
        """Return milliseconds a step in which the device is idle while the host is in this line of the user."""
        line = line_of(Place(place.site))
        late = self.samples.late.items()
        return self.sampled_ms(sum(count for stack, count in late if line_of(Place(stack.user)) == line))

    def by_line(self, *kinds: str) -> list[list[LedgerRow]]:
        """Return the rows of these kinds, grouped by line, the most frequent first."""
        lines: dict[Line | None, list[LedgerRow]] = {}
        for row in sorted(self.rows, key=lambda row: -row.count):
            if row.kind in kinds:
                lines.setdefault(line_of(row.place), []).append(row)
        return list(lines.values())

    def count_per_step(self, rows: Iterable[LedgerRow]) -> float:
        return sum(row.count for row in rows) / max(self.steps, 1)

    def bytes_per_step(self, rows: Iterable[LedgerRow]) -> float:
        return sum(row.bytes for row in rows) / max(self.steps, 1)

    def calls_at(self, place: Place) -> frozenset[int]:
        """Return the calls of the tape that this line made, as far as they are located."""
        line = line_of(place)
        return frozenset(n for n, location in self.located.items() if line is not None and line_of(location) == line)

    @property
    def taped_steps(self) -> int:
        return max(len(self.tape.steps), 1)

    @cached_property
    def order(self) -> HostDependencies:
        return HostDependencies(self.tape)

    @cached_property
    def bar(self) -> Bar:
        """The shares of a recorded step. MeasureError if the tape does not show them."""
        return idle_times(self.order.tape, self.order)

    @cached_property
    def replay(self) -> Replay:
        """The replay of the tape, at the pace of the timed steps. MeasureError if the tape cannot be replayed."""
        replay = Replay(self.order.tape, self.order)
        if self.ms is None:
            return replay
        return (replay if self.loading_ms is None else replay.loaded(self.loading_ms)).paced(self.ms)

    def cut(self, count: int) -> Measurements:
        """Return the measurements with the first `count` steps of the tape alone."""
        if count >= len(self.tape.steps):
            return self
        part = self.tape.cut(0, count)
        lines = {id(self.tape.calls[call]): place for call, place in self.located.items()}
        return replace(self, tape=part, located={n: lines[id(c)] for n, c in enumerate(part.calls) if id(c) in lines})


class Prices:
    """Prices by replay if the tape can be replayed, else by the gaps that a stall caused.

    The replay runs at the pace of a timed step, as far as possible. The remaining ratio of the two is `scale`, by which every
    price is multiplied. `host` is the ratio for the time of the host alone.
    """

    def __init__(self, evidence: Measurements):
        self.evidence = evidence
        self.bar: Bar | None = None
        self.replay: Replay | None = None
        self.refused = ""
        if not evidence.tape:
            self.refused = "no tape was recorded"
        else:
            try:
                self.bar = evidence.bar
                self.replay = evidence.replay
            except MeasureError as error:
                self.refused = str(error)
        # A host that is ahead ends its recorded steps too soon; the replay plays until it runs at the device's pace.
        played = self.replay.step_ms if self.replay else self.bar.step_ms if self.bar else None
        self.step_ms = played if evidence.ms is None else evidence.ms
        self.scale = self.step_ms / played if self.step_ms and played else 1.0
        self.host = self.scale * (self.replay.share if self.replay else 1.0)
        self.distortion = self.replay.recorded_ms / evidence.ms if self.replay and evidence.ms else None

    @cached_property
    def shares(self) -> dict[str, dict[str, float]]:
        """Return "shares" and "late" of a timed step, in percent; {} without a bar.

        A recording slows the host, not the device: where a timed step is shorter than a recorded one, the device's parts last
        as long as they did, and the host is late for what is left. The part of it for data is as long as in the timed steps. If
        a timed step is longer even so, all of it is.
        """
        bar, step = self.bar, self.step_ms
        if bar is None:
            return {}
        loading, longer = (self.replay.loading, self.replay.longer_ms) if self.replay else (1.0, 0.0)
        if step is None or (longer <= 0 and step >= bar.step_ms):
            return {"shares": bar.shares, "late": bar.late}
        slower = max(step / (bar.step_ms + max(longer, 0.0)), 1.0)
        times = {share: slower * bar.ms(share) for share in bar.shares if share != "host_late"}
        rest = max(step - sum(times.values()), 0.0)
        total = sum(times.values()) + rest
        shares = {share: 100 * times.get(share, rest) / total for share in bar.shares}
        host = shares["host_late"]
        others = bar.shares["host_late"] - bar.late["data"]
        waits = slower * (bar.ms("data") * min(loading, 1.0) + max(longer, 0.0))
        data = min(100 * waits / total, host) if others > 0 else host
        part = (host - data) / others if others > 0 else 0.0
        late = {leaf: data if leaf == "data" else part * percent for leaf, percent in bar.late.items()}
        return {"shares": shares, "late": late}

    def saved(self, calls: Iterable[int] = (), spans: Iterable[int] = (), work: bool = False) -> tuple[float | None, str]:
        """Return the saving of a step without these, and its certainty. `work`: the works that the calls launched are gone,
        too."""
        calls, spans = frozenset(calls), frozenset(spans)
        if not calls and not spans:
            return None, "counted"
        if self.replay is not None:
            return max(self.scale * self.replay.saved(calls, spans, work), 0.0), "replayed"
        if self.bar is None or work:
            return None, "counted"
        late = sum(gap.us for gap in self.bar.gaps if gap.call in calls or gap.span in spans)
        return self.host * late / self.bar.steps / len(self.bar.devices) / 1e3, "estimate"

    def without_work(self, calls: Iterable[int], share: float, spans: Iterable[int] = ()) -> float | None:
        """Estimate a saving: this share of a step's saving if these calls, the works that they launched and these spans were
        gone."""
        ms, _ = self.saved(calls, spans, work=True)
        return None if ms is None or self.step_ms is None else min(share * ms, self.step_ms)

    def share(self, ms: float | None) -> float | None:
        """Return `ms` as a fraction of a step."""
        return None if ms is None or not self.step_ms else ms / self.step_ms

    @cached_property
    def ceiling(self) -> float | None:
        """Milliseconds of a step whose host never stalls."""
        return None if self.replay is None else self.scale * self.replay.ceiling()

    @cached_property
    def launch_free(self) -> float | None:
        """Milliseconds of a step whose host costs nothing. A recording does not slow the device, so this is not scaled."""
        return None if self.replay is None else self.replay.launch_free()

    def inside(self, wanted: Callable[[Span], bool]) -> frozenset[int]:
        """Return the calls that a thread made within its spans of this kind."""
        tape = self.evidence.tape
        return frozenset(tape.spans_around(range(len(tape.calls)), wanted))

    @cached_property
    def pace(self) -> float | None:
        """Median of the milliseconds from one launch of a thread to its next one without a wait between."""
        intervals: list[float] = []
        last: dict[int, float | None] = {}
        for call in self.evidence.tape.calls:
            if call.kind == "launch" and (before := last.get(call.thread)) is not None:
                intervals.append(call.start - before)
            last[call.thread] = call.start if call.kind == "launch" else None
        return self.host * median(intervals) / 1e3 if intervals else None

    def of_launches(self, count: float) -> float | None:
        """Estimate the saving of a step without `count` launches, if launches hold it up."""
        if self.bar is None or self.pace is None:
            return None
        most = self.host * self.bar.ms("dispatch")
        if self.launch_free is not None and self.step_ms is not None:  # the tape begins with an empty queue
            most = min(most, max(self.step_ms - self.launch_free, 0.0))
        return min(count * self.pace, most)

    def idle_in(self, wanted: Callable[[Span], bool]) -> float | None:
        """Estimate how long a step's device is idle while the host is in spans of this kind."""
        if self.bar is None:
            return None
        gaps = sorted((gap.start, gap.end) for gap in self.bar.gaps if gap.cause == "host_late")
        starts = [start for start, _ in gaps]
        total, reached = 0.0, float("-inf")
        for span in self.evidence.tape.spans:
            if not wanted(span):
                continue
            low = max(span.start, reached)
            for start, end in gaps[max(bisect_right(starts, low) - 1, 0) : bisect_right(starts, span.end)]:
                total += max(min(end, span.end) - max(start, low), 0.0)
            reached = max(reached, span.end)
        return self.host * total / self.bar.steps / len(self.bar.devices) / 1e3


def named(name: str) -> Callable[[Span], bool]:
    """Return a predicate for spans of this name."""
    return lambda span: span.name == name
