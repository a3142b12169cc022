"""The measurements of a run's phases: all that the rules read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean
from typing import Any

from ...watch.rows import LedgerRow
from ...watch.source_line import Place
from ..record.tape import Tape
from .dependencies import HostDependencies
from .idle import Bar, idle_times
from .replay import Replay


@dataclass(frozen=True)
class Measurements:
    """The measurements of a script. A missing one is None or empty, and `absent` has the reason."""

    script: str  # as the user called it, without folders of this machine
    device: str  # in words, such as "NVIDIA H200 (cuda:0)"
    rows: Sequence[LedgerRow] = ()  # of `steps` steps under the sensors
    steps: int = 0
    counted: frozenset[str] = frozenset()  # the ledger's totals that a running sensor counted
    tape: Tape | None = None  # recorded without sensors
    step_ms: Sequence[float] = ()  # of each step timed without hooks
    located: Mapping[int, Place] = field(default_factory=dict)  # a call's place on the tape -> its line
    places: Mapping[str, Place] = field(default_factory=dict)  # a span's name -> its line: a loader, a checkpoint
    memory: Mapping[str, float] = field(default_factory=dict)  # per timed step: alloc, free, retry, pin
    about: Mapping[str, Any] = field(default_factory=dict)  # versions and settings
    phases: Mapping[str, Any] = field(default_factory=dict)  # steps and seconds of each phase
    absent: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def recording(self) -> Profile | None:
        return None if self.tape is None else Profile(self.tape, self.located, self.places, self.ms)

    @property
    def ms(self) -> float | None:
        """A timed step's mean. What happens in every fifth step, such as a checkpoint, has a share of it, as of a price."""
        return mean(self.step_ms) if self.step_ms else None


@dataclass(frozen=True)
class Profile:
    """`bar` and `replay` raise MeasureError where the tape does not show what it would take.

    `step_ms` is a step that was not recorded, if one was timed. The replay runs at its pace.
    """

    tape: Tape
    located: Mapping[int, Place] = field(default_factory=dict)  # a call's place on the tape -> its line
    places: Mapping[str, Place] = field(default_factory=dict)  # a span's name -> its line
    step_ms: float | None = None

    @cached_property
    def order(self) -> HostDependencies:
        return HostDependencies(self.tape)

    @cached_property
    def bar(self) -> Bar:
        return idle_times(self.tape, self.order)

    @cached_property
    def replay(self) -> Replay:
        replay = Replay(self.tape, self.order)
        return replay if self.step_ms is None else replay.paced(self.step_ms)

    def cut(self, count: int) -> Profile:
        """The first `count` steps, and `located` by the calls' places among those."""
        if count >= len(self.tape.steps):
            return self
        part = self.tape.cut(0, count)
        lines = {id(self.tape.calls[call]): place for call, place in self.located.items()}
        located = {n: lines[id(call)] for n, call in enumerate(part.calls) if id(call) in lines}
        return Profile(part, located, self.places, self.step_ms)


Line = tuple[str, int]  # a file and a line of it


def line_of(place: Place) -> Line | None:
    """The user's line; in backward, where there may be none, the line that built the node."""
    site = place.site or place.built
    return (site.file, site.line) if site else None


def by_line(evidence: Measurements, *kinds: str) -> list[list[LedgerRow]]:
    """The rows of these kinds, those of one line together, the most frequent first."""
    lines: dict[Line | None, list[LedgerRow]] = {}
    for row in sorted(evidence.rows, key=lambda row: -row.count):
        if row.kind in kinds:
            lines.setdefault(line_of(row.place), []).append(row)
    return list(lines.values())


def times(evidence: Measurements, rows: list[LedgerRow]) -> float:
    """Occurrences per step."""
    return sum(row.count for row in rows) / max(evidence.steps, 1)


def size(evidence: Measurements, rows: list[LedgerRow]) -> float:
    """Bytes a step."""
    return sum(row.bytes for row in rows) / max(evidence.steps, 1)


def calls_at(evidence: Measurements, place: Place) -> frozenset[int]:
    """The calls of the tape that this line made, as far as they are located."""
    line = line_of(place)
    return frozenset(n for n, location in evidence.located.items() if line is not None and line_of(location) == line)


def taped(evidence: Measurements) -> int:
    """The number of steps on the tape."""
    return max(len(evidence.tape.steps), 1) if evidence.tape else 1
