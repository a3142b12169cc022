"""What the phases of a run bring back, and all that the rules read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean
from typing import Any

from ..watch.rows import LedgerRow
from ..watch.site import Place
from .recorded import Recorded
from .tape import Tape


@dataclass(frozen=True)
class Evidence:
    """What was seen of a script. What could not be seen is None or empty, and `absent` says why."""

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
    def recording(self) -> Recorded | None:
        return None if self.tape is None else Recorded(self.tape, self.located, self.places, self.ms)

    @property
    def ms(self) -> float | None:
        """A timed step's mean. What happens in every fifth step, such as a checkpoint, has a share of it, as of a price."""
        return mean(self.step_ms) if self.step_ms else None
