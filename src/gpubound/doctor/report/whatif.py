"""The replay as data for the page: its script plays the same lists in the same order, so its prices are the doctor's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...watch.site import Place
from ..finding import Finding
from ..mechanism import Mechanism
from ..order import Stalls
from ..preparing import preparing
from ..replay import Replay
from ..tape import Span, Tape

SPANS = {"data", "gc", "compile", "checkpoint"}  # kinds of findings that are a stall of the host without a call
COPIES = {"h2d", "d2h", "pageable"}
LISTS = ("before", "previous", "pause", "cost", "held", "room", "tail", "after", "latency", "gap", "run")


@dataclass(frozen=True)
class Pick:
    """What one check box leaves out: places of the tape's calls and spans."""

    calls: frozenset[int] = frozenset()
    spans: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.calls or self.spans)


def picks(tape: Tape, findings: Iterable[Finding], located: Mapping[int, Place]) -> list[Pick]:
    """For each finding the calls of its line and what prepares them; for a stall without calls the spans of its kind."""
    at: dict[tuple[str, int], set[int]] = {}
    for call, place in located.items():
        if site := place.site or place.built:
            at.setdefault((site.file, site.line), set()).add(call)
    found = []
    for finding in findings:
        if finding.certainty != "replayed":  # its price is no replay's, so its box would say another one
            found.append(Pick())
            continue
        site = finding.line
        calls = at.get((site.file, site.line), set()) if site else set()
        spans = {n for n, span in enumerate(tape.spans) if finding.kind in SPANS and span.kind == finding.kind}
        spans |= preparing(tape, calls) if finding.kind in COPIES else set()
        found.append(Pick(frozenset(c for c in calls if tape.calls[c].waits), frozenset(spans)))
    return found


def program(replay: Replay, chosen: Sequence[Pick]) -> dict[str, Any]:
    """The lists of the replay's mechanism, and what each pick changes in them. Pick 0 is everything that stalls the host."""
    played, every = replay.mechanism, (Pick(replay.waits, replay.stalls), *chosen)
    return {
        **{name: getattr(played, name) for name in LISTS},
        "ends": [call.end - played.high for call in played.calls],
        "times": replay.times,
        "steps": replay.steps,
        "picks": [_changed(played, played.without(pick.calls)) if pick.calls else [] for pick in every],
        "stalls": list(_stalls(replay, every)),
    }


def _changed(played: Mechanism, left: Mechanism) -> list[tuple[int, float, float, float]]:
    """(call, its cost, its work's latency and length) of the calls that wait no more."""
    was, now = (zip(each.cost, each.latency, each.run, each.held, each.room) for each in (played, left))
    return [(at, *after[:3]) for at, (before, after) in enumerate(zip(was, now)) if before != after]


def _stalls(replay: Replay, chosen: Sequence[Pick]) -> Iterator[tuple[int, float, list[int]]]:
    """(call, µs of the pause before it, the picks that leave these out). Spans may overlap, so time is cut at their ends."""
    pieces: dict[tuple[int, ...], list[Span]] = {}
    for thread in {span.thread for span in replay.tape.spans}:
        mine = {n: s for pick in chosen for n in pick.spans if (s := replay.tape.spans[n]).thread == thread}
        cuts = sorted({time for span in mine.values() for time in (span.start, span.end)})
        for start, end in pairwise(cuts):
            over = {n for n, span in mine.items() if span.start <= start and end <= span.end}
            if over:
                covering = tuple(number for number, pick in enumerate(chosen) if pick.spans & over)
                pieces.setdefault(covering, []).append(Span("", "data", thread, start, end))
    for covering, some in pieces.items():
        awake = replay.mechanism.awake(Stalls(Tape(spans=tuple(some))))
        for at, (was, left) in enumerate(zip(replay.mechanism.pause, awake.pause)):
            if left < was:
                yield at, was - left, list(covering)
