"""Prices in milliseconds of a timed step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cached_property
from statistics import median

from ...errors import MeasureError
from ..record.tape import Span
from .idle import Bar
from .measurements import Measurements
from .replay import Replay


class Prices:
    """Prices by replay where the tape can be replayed, by the gaps that are blamed on a thing where it cannot.

    The replay goes at the pace of a timed step, as far as it can. What then is left between the two is in `scale`, by which
    every price is multiplied. `host` is the same for what the host alone takes.
    """

    def __init__(self, evidence: Measurements):
        self.evidence = evidence
        self.bar: Bar | None = None
        self.replay: Replay | None = None
        self.refused = ""
        if evidence.recording is None:
            self.refused = "no tape was recorded"
        else:
            try:
                self.bar = evidence.recording.bar
                self.replay = evidence.recording.replay
            except MeasureError as error:
                self.refused = str(error)
        # A host that is ahead ends its recorded steps too soon; the replay plays until it runs at the device's pace.
        played = self.replay.step_ms if self.replay else self.bar.step_ms if self.bar else None
        self.step_ms = played if evidence.ms is None else evidence.ms
        self.scale = self.step_ms / played if self.step_ms and played else 1.0
        self.host = self.scale * (self.replay.share if self.replay else 1.0)
        self.distortion = self.replay.recorded_ms / evidence.ms if self.replay and evidence.ms else None

    def saved(self, calls: Iterable[int] = (), spans: Iterable[int] = (), work: bool = False) -> tuple[float | None, str]:
        """(what a step would save without these, how sure that is). `work`: what the calls launched is gone, too."""
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
        """An estimate: this share of what a step would save if these calls, what they launched and these spans were gone."""
        ms, _ = self.saved(calls, spans, work=True)
        return None if ms is None or self.step_ms is None else min(share * ms, self.step_ms)

    def share(self, ms: float | None) -> float | None:
        """Return `ms` as a fraction of a step."""
        return None if ms is None or not self.step_ms else ms / self.step_ms

    @cached_property
    def ceiling(self) -> float | None:
        """A step whose host never stalls."""
        return None if self.replay is None else self.scale * self.replay.ceiling()

    @cached_property
    def launch_free(self) -> float | None:
        """A step whose host costs nothing. The device is not slower while it is recorded, so this is not scaled."""
        return None if self.replay is None else self.replay.launch_free()

    def inside(self, wanted: Callable[[Span], bool]) -> frozenset[int]:
        """The calls that a thread made within its spans of this sort."""
        tape = self.evidence.tape
        if tape is None:
            return frozenset()
        times: dict[int, list[tuple[float, float]]] = {}
        for span in tape.spans:
            if wanted(span):
                times.setdefault(span.thread, []).append((span.start, span.end))
        calls = set()
        for place, call in enumerate(tape.calls):
            mine = times.get(call.thread, [])
            before = bisect_right(mine, (call.start, float("inf"))) - 1
            if before >= 0 and call.start < mine[before][1]:
                calls.add(place)
        return frozenset(calls)

    @cached_property
    def pace(self) -> float | None:
        """Milliseconds from one launch of a thread to its next one, where nothing waits between: the median."""
        tape, intervals = self.evidence.tape, []
        last: dict[int, float | None] = {}
        for call in tape.calls if tape else ():
            if call.kind == "launch" and (before := last.get(call.thread)) is not None:
                intervals.append(call.start - before)
            last[call.thread] = call.start if call.kind == "launch" else None
        return self.host * median(intervals) / 1e3 if intervals else None

    def of_launches(self, count: float) -> float | None:
        """An estimate: what a step would save without so many launches, where launches are what holds it up."""
        if self.bar is None or self.pace is None:
            return None
        most = self.host * self.bar.ms("dispatch")
        if self.launch_free is not None and self.step_ms is not None:  # the tape begins with an empty queue, the play does not
            most = min(most, max(self.step_ms - self.launch_free, 0.0))
        return min(count * self.pace, most)

    def idle_in(self, wanted: Callable[[Span], bool]) -> float | None:
        """An estimate: for how long a step's device has nothing to do while the host is in spans of this sort."""
        if self.bar is None or self.evidence.tape is None:
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
    """Spans of this name."""
    return lambda span: span.name == name
