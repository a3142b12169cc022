"""A tape, whose lines its calls and spans are, and what it comes to: gone through once, for the judge and for every report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..watch.site import Place
from .gaps import Bar, analyse
from .order import HostOrder
from .replay import Replay
from .tape import Tape


@dataclass(frozen=True)
class Recorded:
    """`bar` and `replay` raise MeasureError where the tape does not show what it would take.

    `step_ms` is a step that was not recorded, if one was timed. The replay runs at its pace.
    """

    tape: Tape
    located: Mapping[int, Place] = field(default_factory=dict)  # a call's place on the tape -> its line
    places: Mapping[str, Place] = field(default_factory=dict)  # a span's name -> its line
    step_ms: float | None = None

    @cached_property
    def order(self) -> HostOrder:
        return HostOrder(self.tape)

    @cached_property
    def bar(self) -> Bar:
        return analyse(self.tape, self.order)

    @cached_property
    def replay(self) -> Replay:
        replay = Replay(self.tape, self.order)
        return replay if self.step_ms is None else replay.paced(self.step_ms)

    def cut(self, count: int) -> Recorded:
        """The first `count` steps, and `located` by the calls' places among those."""
        if count >= len(self.tape.steps):
            return self
        part = self.tape.cut(0, count)
        lines = {id(self.tape.calls[call]): place for call, place in self.located.items()}
        located = {n: lines[id(call)] for n, call in enumerate(part.calls) if id(call) in lines}
        return Recorded(part, located, self.places, self.step_ms)
