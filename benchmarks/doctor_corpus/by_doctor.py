"""What `gpubound doctor` finds in a script: its phases, behind one in which nothing looks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from gpubound.doctor.finding import Verdict
from gpubound.doctor.record.phases import Phase
from gpubound.doctor.record.run import RunPlan, measure_script
from gpubound.doctor.record.script import Script
from gpubound.doctor.rules.diagnose import diagnose

from .running import FIRST, Alone, forgetting, timed
from .score import Found, Sight


@dataclass(frozen=True)
class Timed(RunPlan):
    """The doctor's phases; `before` are steps that it has no part in."""

    before: Sequence[Phase] = field(default_factory=list)

    def phases(self) -> list[Phase]:
        return [*self.before, *super().phases()]


def look(script: Path, arguments: Sequence[str], alone: AbstractContextManager, dry: bool, clean: Path | None = None) -> Sight:
    """With a price on a GPU. Without one its dry run: counts and lines. What a tape says is thought about outside the turn.

    `clean` is timed in the same process, and both of them before anything is recorded: a host that has had a profiler takes
    longer for each launch from then on, 9.5 ms for a launch-bound step of 7.
    """
    steps = Alone()
    before = [] if dry else [Phase(FIRST), steps]
    with alone, forgetting(script.parent):
        clean_ms = None if dry or clean is None else timed(clean, arguments)
        began = perf_counter()
        evidence = measure_script(Script(str(script), tuple(arguments)), Timed(dry=dry, warmup=2, before=before))
    verdict = diagnose(evidence)
    seconds = perf_counter() - began - (0.0 if dry else steps.seconds)
    return read(verdict, None if dry else steps.ms, clean_ms, seconds)


def read(verdict: Verdict, alone_ms: float | None, clean_ms: float | None, seconds: float) -> Sight:
    """The findings of a verdict, the harmless ones marked. One without a line has none here either."""
    found = [
        Found(each.kind, each.line.file if each.line else "", each.line.line if each.line else 0, each.ms, harmless)
        for some, harmless in ((verdict.findings, False), (verdict.harmless, True))
        for each in some
    ]
    return Sight(found, verdict.step_ms, seconds, alone_ms, clean_ms)
