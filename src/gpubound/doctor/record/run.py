"""Run a script or a function through the phases, and collect what they measured; or read it from a trace or a run log."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from ...device import label
from ...errors import MeasureError
from ...version import __version__
from ...watch import pretend
from ...watch.events import Place
from ...watch.ledger import LedgerRow
from ...watch.pretend_cuda import cuda_is_pretended
from ..finding import Verdict
from ..price.prices import Line, Measurements, line_of
from ..rules.compute import idle
from ..rules.diagnose import diagnose
from .kineto import read_trace
from .located import LocatedPhase, SampledPhase, SurveyPhase, WatchedPhase
from .phases import Period, Phase, Phases, RecordedPhase, TimedPhase
from .script import Script, Steps, StopScript
from .tape import lines_by_mark, match_lines

PYTHON, COMMAND = "pass dry_run=True", "put --dry-run before the script"
DRY = "a dry run counts and names lines; prices need a GPU"
SAMPLED = 4  # steps in which the launching thread's stack is sampled, at least
UNUSED = "nothing ran on the device, so nothing could wait for it"


@dataclass(frozen=True)
class RunPlan:
    """Number of steps of each phase, and how the end of a step is recognised."""

    warmup: int = 10
    timed: int = 20
    taped: int = 10
    located: int = 2
    marker: str = ""
    keep_going: bool = False
    dry: bool = False

    def __post_init__(self) -> None:
        for name in ("warmup", "timed", "taped", "located"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 1 step.")

    def phases(self) -> list[Phase]:
        """Return the phases. All after the survey are whole periods of the loop."""
        period = Period()
        if self.dry:
            return [Phase(1), SurveyPhase(self.located, period, "located")]
        recorded = RecordedPhase(self.taped, period)
        located = LocatedPhase(self.located, period, lambda: recorded.copied)
        plain, timed, sampled = (
            TimedPhase(self.timed, name="plain"),
            TimedPhase(self.timed, period),
            SampledPhase(SAMPLED, period),
        )
        return [Phase(self.warmup), plain, SurveyPhase(1, period), timed, sampled, recorded, located]


def measure_script(script: Script, plan: RunPlan, report: Callable[[str], None] | None = None) -> Measurements:
    """Run a script until its phases are over, or it ends. `report` receives lines of progress."""

    steps: list[Steps] = []

    def program(phases: Phases) -> None:
        steps.append(Steps(phases.ended, plan.marker))
        with cuda_is_pretended() if plan.dry else nullcontext(), steps[0]:
            script.run()

    evidence = _measure(script.name, program, plan, COMMAND, report)
    return replace(evidence, step=steps[0].name)


def measure_trace(path: Path, marker: str = "") -> Measurements:
    """Read measurements from a trace: it shows where the time went, but no lines."""
    tape = read_trace(path, marker)
    device = ", ".join(dict.fromkeys(tape.about.get("devices", ()))) or "device not named"
    absent = {"lines": "a trace has none", "timed": "a trace has recorded steps alone"}
    return Measurements(path.name, device, tape=tape, about={"source": "a trace of torch.profiler"}, absent=absent)


def doctor(step: Callable[[], object], *, steps: int = 20, warmup: int = 10, dry_run: bool = False) -> Verdict:
    """Call `step` repeatedly, and report what made the GPU wait for the host.

    steps    steps that are timed; the steps of the other phases are run in addition
    warmup   steps before
    dry_run  count on the pretend device (gpubound.watch.pretend.simgpu), without prices

    >>> print(gb.doctor(train_step).findings)  # doctest: +SKIP
    """
    if not callable(step):
        raise ValueError(f"doctor: step: got {type(step).__name__}, wanted a function of no arguments that makes one step.")
    if steps < 1:
        raise ValueError(f"doctor: steps: got {steps}, wanted at least 1.")
    plan = RunPlan(warmup=warmup, timed=steps, dry=dry_run)

    def program(phases: Phases) -> None:
        with suppress(StopScript):
            while True:
                step()
                phases.ended()

    return diagnose(_measure(getattr(step, "__name__", "step"), program, plan, PYTHON))


def _measure(
    name: str,
    program: Callable[[Phases], object],
    plan: RunPlan,
    dry_run_advice: str,
    report: Callable[[str], None] | None = None,
) -> Measurements:
    if plan.dry:
        pretend.simgpu()
    elif not torch.cuda.is_available():
        raise MeasureError(
            f"no CUDA GPU works here, and prices need one; {dry_run_advice} to count stalls and name their lines without a GPU."
        )
    steps = plan.phases()
    if report is not None:
        report(f"running {name}: " + ", ".join(f"{phase.name} {phase.steps}" for phase in steps) + " steps")
    with Phases(steps, plan.keep_going, report) as phases:
        program(phases)
    located, wanted = steps[-1], sum(phase.steps for phase in steps)  # those that have begun know how many they take
    assert isinstance(located, WatchedPhase)
    if phases.total == 0:
        raise MeasureError(
            f"{name} ended without a step: neither Optimizer.step nor a gb.TrainStep was called; "
            f"name what ends a step with --step-marker."
            if not plan.marker
            else f"{name} ended without a step: {plan.marker!r} was never reached; give another --step-marker."
        )
    if located.done == 0:
        raise MeasureError(
            f"{name} ended after {phases.total} steps, wanted {wanted}; let it run longer, "
            f"or ask for fewer (--warmup, --timed, --taped)."
        )
    optional = ("kernels", "simgpu")  # sensors that a run with a GPU does not need
    absent = {what: why for phase in steps for what, why in phase.absent.items()}
    absent |= {name: why for name, why in located.ledger.absent.items() if not plan.dry and name not in optional}
    if located.done < located.least:
        absent["steps"] = f"the script ended after {phases.total} steps, wanted {wanted}"
    if plan.dry:
        absent["prices"] = DRY
    about: dict[str, Any] = {"torch": torch.__version__, "gpubound": __version__}
    if any(isinstance(phase, RecordedPhase) and phase.other_profiler for phase in steps):
        about["profiler"] = True
    period = _period(steps)
    device = pretend.NAME if plan.dry else label(torch.device("cuda", torch.cuda.current_device()))
    evidence = Measurements(
        script=name,
        device=f"{device}, the pretend device" if plan.dry else device,
        rows=[*located.ledger.rows, *located.unchanged],
        steps=located.ledger.steps,
        counted=located.ledger.counted,
        about=about,
        period=period,
        parts={line: len(steps) / located.ledger.steps for line, steps in _steps_by_line(located)},
        once=lines_once(located) if period == 1 else frozenset(),
        phases={phase.name: phase.as_dict() for phase in steps},
        **_timed_and_taped(steps, located),
        absent=absent,
    )
    return _without_idle_counts(evidence, plan.dry)


def lines_once(located: WatchedPhase) -> frozenset[Line]:
    """Return the lines that blocked in a single step of several, such as an evaluation's."""
    return frozenset(line for line, steps in _steps_by_line(located) if len(steps) == 1 < located.ledger.steps)


def _steps_by_line(located: WatchedPhase) -> list[tuple[Line, Collection[int]]]:
    lines = ((line_of(Place(site)), steps) for site, steps in located.ledger.lines.items())
    return [(line, steps) for line, steps in lines if line]


def _without_idle_counts(evidence: Measurements, dry: bool) -> Measurements:
    """Return evidence without counts if the device did nothing: the 0 waits of a script on the CPU would pass every budget.

    A dry run that never used the pretend device has nothing to report, so it raises. On a GPU only a tape shows that nothing
    ran, because the sensors see no launch in the replay of a graph.
    """
    if dry and idle(evidence):
        raise MeasureError(
            f"nothing of {evidence.script} reached the device in {evidence.steps} steps, so this dry run shows nothing. In a "
            f'dry run of a script the device is "cuda", in one of a function {pretend.NAME}:0; check which one it chooses.'
        )
    if evidence.tape and idle(evidence):
        return replace(evidence, counted=frozenset(), absent={"counts": UNUSED} | dict(evidence.absent))
    return evidence


def _period(steps: Sequence[Phase]) -> int:
    return next(phase.period.steps for phase in steps if isinstance(phase, SurveyPhase))


def _timed_and_taped(steps: Sequence[Phase], located: WatchedPhase) -> dict[str, Any]:
    """Return the measurements of the timed and the recorded phase. Of the timed steps, whole periods count."""
    measured: dict[str, Any] = {}
    period = _period(steps)
    windows = [(phase.name, phase.measured(period)) for phase in steps if isinstance(phase, TimedPhase)]
    if windows := [(name, timed) for name, timed in windows if timed]:
        times = [ms for _, timed in windows for ms in timed["step_ms"]]
        parts = [len(timed["step_ms"]) / len(times) for _, timed in windows]
        measured |= windows[-1][1] | {f"{name}_ms": median(timed["step_ms"]) for name, timed in windows}
        for each in ("loading_ms", "starting_ms"):
            measured[each] = sum(part * timed[each] for part, (_, timed) in zip(parts, windows))
        measured |= {"step_ms": times, "rare": rare_steps(times)}
        measured["spread"] = spread([timed["step_ms"] for _, timed in windows], period)
    for phase in steps:
        if isinstance(phase, SampledPhase):
            measured["samples"] = phase.samples
        if isinstance(phase, RecordedPhase) and (tape := phase.tape) is not None:
            if any(call.blocks for call in tape.calls) and (rate := pinned_rate()) is not None:
                tape = replace(tape, about={**tape.about, "pinned": rate})  # the rate that its blocking copies could have
            measured |= {"tape": tape, "named_lines": located.named_lines | phase.named_lines}
            if isinstance(located, LocatedPhase) and located.tape is not None:
                lines = lines_by_mark(located.tape, located.ledger.locations)
                measured["located"] = match_lines(tape, located.tape, lines)
    return measured


MUCH = 1.5  # a step that takes this many times the median is a rare one


def rare_steps(step_ms: Sequence[float]) -> dict[str, float]:
    """Return the fraction of steps that take MUCH of the median or more, of the time that is theirs, and how many times the
    median they take; {} if there are none, or if they are not rare."""
    if not step_ms:
        return {}
    middle = median(step_ms)
    long = [ms for ms in step_ms if ms >= MUCH * middle]
    if not long or 3 * len(long) > len(step_ms):
        return {}
    share, time = len(long) / len(step_ms), sum(long) / sum(step_ms)
    return {"steps": share, "time": time, "times": sum(long) / len(long) / middle}


WINDOW = 5  # steps, at least: the windows by which the spread of a mean is told


def spread(phases: Sequence[Sequence[float]], period: int = 1) -> float | None:
    """Return how far the mean of the steps of these phases is known, as a fraction of it; None for fewer than 3 windows.

    It is twice the standard error by windows of whole periods, or half the difference of the phases if that is more: a thread
    that moves to another core may keep its new pace for a second (nanoGPT on an H200: 10.2 and 12.7 ms in one process).

    >>> round(spread([[1.0] * 5 + [2.0] * 5 + [3.0] * 5]), 2), spread([[1.0] * 9]), spread([[1.0] * 10, [3.0] * 10])
    (0.58, None, 0.5)
    """
    steps = -(-WINDOW // period) * period
    windows = [mean(ms[end - steps : end]) for ms in phases for end in range(len(ms), steps - 1, -steps)]
    if len(windows) < 3:
        return None
    means = [mean(ms) for ms in phases]
    return max(2 * stdev(windows) / len(windows) ** 0.5, (max(means) - min(means)) / 2) / mean(windows)


BYTES = 32 << 20


def pinned_rate() -> float | None:
    """Return bytes per µs of the fastest of three pinned copies; None if the script left no memory for one."""
    try:
        source = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
        target = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    marks[0].record()
    for mark in marks[1:]:
        target.copy_(source, non_blocking=True)
        mark.record()
    torch.cuda.synchronize()
    return BYTES / (1e3 * min(before.elapsed_time(after) for before, after in pairwise(marks)))


NO_DEVICE = "the CPU computes the steps itself, so no device waits for its host"
UNWATCHED = "no step was watched: a run's sixth is the first"
UNRECORDED = "the run was counted, not recorded"
EAGER = "the steps were not captured, and gaps between the launches of an eager step are not seen from outside"


def of_run(name: str, device: str, records: Iterable[Mapping[str, Any]]) -> Verdict:
    """Return the verdict of a training run. `records` are the lines of its log, `device` its description."""
    records = list(records)
    watched = [record for record in records if "syncs" in record]
    on_device = any("host_lead_ms" in record for record in records)
    busy, lead_times = (
        [record[name] for record in records if record.get(name) is not None] for name in ("gpu_busy", "host_lead_ms")
    )
    absent = {
        "counts": UNWATCHED if on_device and not watched else None,
        "the busy share": EAGER if on_device and not busy else None,
        "prices": UNRECORDED if on_device else NO_DEVICE,
    }
    evidence = Measurements(
        script=name,
        device=device,
        rows=[LedgerRow.of_record(stall) for record in watched for stall in record.get("stalls", ())],
        steps=len(watched),
        counted=frozenset({"syncs", "pageable_copies"}) if watched else frozenset(),
        step_ms=[1e3 * record["seconds"] for record in records if record.get("seconds") is not None],
        absent={what: why for what, why in absent.items() if why},
    )
    shares = {"shares": {"busy": 100 * median(busy)}} if busy else {}
    return replace(diagnose(evidence), bar=shares, lead_ms=median(lead_times) if lead_times else None)
