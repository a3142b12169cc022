"""A training run with its progress output: shared by `gpubound train` and `gpubound demo`."""

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import measure, trace
from ..device import label, total_bytes
from ..distributed import ALONE, Ranks
from ..distributed.failures import SMALLER
from ..doctor.finding import Verdict
from ..doctor.record.run import of_run
from ..doctor.report.words import brief
from ..errors import DeviceError, MeasureError
from ..files import explain_disk_full, locked
from ..formatting import counted, quantity
from ..layers.quantized_base import numbers_of
from ..models.registry import family_of, is_named
from ..monitor import LiveLine, RunTape, changed, write_report
from ..monitor.figures import skipped as skipped_steps, warnings
from ..monitor.live import Gauges, open_log
from ..plan import first_that_fits, phases, step_of
from ..trace import fallbacks, notice
from ..train.loop import HOPELESS, Run, Stop
from ..train.precision import precision
from ..train.recipe import Recipe
from ..train.records import Record, flops_of
from ..version import __version__

GIB = 1 << 30
MATRIX_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SEARCH = 16  # steps that fp16 may skip while it finds its loss scale
MAX_SKIPPED = 0.1  # fraction of all steps; with more the training is not sound, even if the last loss is finite


@contextmanager
def log_level(quiet: bool, ranks: Ranks = ALONE) -> Iterator[None]:
    """Log only warnings, fallbacks and failures inside the block if `quiet`. Ranks other than the first log only errors: it
    reports their fallbacks."""
    before = trace.logger.level
    if not ranks.first:
        trace.logger.setLevel(logging.ERROR)
    elif quiet:
        trace.logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        trace.logger.setLevel(before)


def is_quiet() -> bool:
    return trace.logger.level > logging.INFO


def say(text: str, needed: bool = False) -> None:
    """Print a line to stderr; in a quiet session only if it is `needed`."""
    if needed or not is_quiet():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def run_folder(out: str, ranks: Ranks = ALONE) -> Iterator[None]:
    """Lock the folder `out` for this run inside the block; its first rank writes there. Explain a full disk."""
    if Path(out).exists() and not Path(out).is_dir():
        raise ValueError(f"out: {out} is a file; give a folder with --out.")
    advice = "what was saved there before is intact. Free space, then go on with --resume, or give another --out."
    with explain_disk_full(out, advice), locked(out) if ranks.first else nullcontext():
        yield


def predict(recipe: Recipe, device: torch.device, world: int) -> dict[str, int]:
    """Print and return the peaks of the phases of a run on a GPU, of torch's allocator; nothing where they are not known."""
    if device.type != "cuda":
        return {}
    try:
        step = step_of(recipe, world)
    except ValueError as error:
        notice(f"memory: not predicted: {error}")
        return {}
    predicted = phases(step, 4 if is_named(recipe.model) and recipe.adapters is None else step.itemsize)
    if predicted:
        peaks = ", ".join(f"{phase} {size / GIB:.1f}" for phase, size in predicted.items())
        notice(f"memory: {peaks} GiB predicted, of {total_bytes(device) / GIB:.1f}.")
    return predicted


@contextmanager
def explained(recipe: Recipe, device: torch.device, world: int) -> Iterator[None]:
    """Add to an error of MemoryPhases, raised inside, the first options that would fit."""
    try:
        yield
    except DeviceError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        try:
            options = first_that_fits(recipe, world, total_bytes(device))
        except ValueError:  # the model's activations are not counted
            advice = SMALLER
        else:
            other = " or a smaller model" if recipe.lora else ", a smaller model, or lora"
            advice = f"{options} would fit" if options else f"no other step fits: take shorter rows{other}"
        raise DeviceError(f"{str(error).rstrip('.')}; {advice}.") from error.__cause__


@dataclass(frozen=True)
class Outcome:
    """Result of a run. `failed`: the model is of no use, and the command's exit code is 1."""

    tape: RunTape
    verdict: str
    failed: bool

    @property
    def doctor(self) -> Verdict:
        """Return what made the device wait, as far as the run's tape records it."""
        about = self.tape.about
        return of_run(about["name"], about["machine"]["device"], self.tape.steps())


def train(
    run: Run, title: str, sample: Callable[[Run], str | None] | None = None, log: str | None = None, tape: RunTape | None = None
) -> Outcome:
    """Train `run` with a live line, a tape and perhaps a logger; `sample` generates a text with the best weights.

    Of several ranks the first one calls this; the others call `follow`.
    """
    config = dataclasses.asdict(run.recipe)
    tape = tape or RunTape.create(run.folder)
    tape.rewind(run.done)
    run.checkpoints.before_commit = tape.flush
    rate, gauges, first = MatrixRate(run), Gauges(run.device), run.done
    versions = {"gpubound": __version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    tape.tell(name=title, config=config, changed=changed(run.recipe), placement=str(run.placement))
    tape.tell(machine={"device": label(run.device)} | versions)
    tape.tell(mfu=rate.formula, verdict=None, doctor=None, finished=False, sample=None)
    say(run.placement.summary)
    size, left = numbers_of(run.model), max(run.steps - first, 0)
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    parameters = f"{quantity(size)} parameters" + (f", {quantity(trained)} of them trained" if trained < size else "")
    after = f" after step {first:,}" if first else ""
    say(f"{title}: {parameters}, {left:,} steps of {quantity(run.stage.recipe.tokens_per_step)} tokens{after}")
    if rate.formula:
        say(rate.formula)
    line = nullcontext() if is_quiet() else LiveLine(run.steps, title)
    with Stop(run.ranks) as stop, open_log(log, run.folder, title, config) as logged, gauges, line as live:

        def on_record(record: Record) -> None:
            record = rate.fill(record) | gauges.read()
            tape.append(record)
            if live is not None:
                live.show(record)
            logged(record)

        run.go(on_record, stop)
    outcome = outcome_of(run, tape, stop)
    run.ranks.of_first(outcome.failed)
    report_fallbacks(run.ranks)
    if sample and run.finished and not outcome.failed:
        with run.best_weights():
            tape.tell(sample=sample(run))
    doctor = brief(outcome.doctor)
    tape.tell(
        memory=run.memory.rows(),
        fallbacks=[{"what": what, "why": why, "times": times} for (what, why), times in fallbacks.items()],
        verdict=outcome.verdict,
        doctor="\n".join(doctor),
        finished=run.finished,
    )
    say(f"{title}: {outcome.verdict}", needed=outcome.failed)
    say("\n".join(f"doctor: {line}" for line in doctor))
    return outcome


def follow(run: Run) -> bool:
    """Train `run` on a rank other than the first; return whether the training failed."""
    with Stop(run.ranks) as stop:
        run.go(lambda record: None, stop)
    failed = run.ranks.of_first(None)
    report_fallbacks(run.ranks)
    return failed


def report_fallbacks(ranks: Ranks) -> None:
    """Log on the first rank the fallbacks that only other ranks have taken."""
    for rank, theirs in enumerate(ranks.gather(dict(fallbacks))):
        for (what, why), times in theirs.items():
            if ranks.first and (what, why) not in fallbacks:
                fallbacks[f"rank {rank}: {what}", why] += times
                notice(f"fallback: rank {rank}: {what}: {why}", logging.WARNING)


class MatrixRate:
    """The speed of a step as a fraction of this machine's measured matrix rate."""

    def __init__(self, run: Run):
        self.run, self.work = run, flops_of(run.model, family_of(run.recipe.model).sizes(run.model))
        computes = precision(run.recipe.precision_on(run.device))  # shards are fp32, whatever the model computes in
        dtype = "tf32" if run.recipe.precision == "tf32" else MATRIX_DTYPES[computes.dtype]
        self.figure = f"{dtype}_flops_per_s"
        self.attended = [stage.attended for stage in run.stages]
        self.tokens = [stage.tokens_per_step for stage in run.stages]  # learnt or not
        self.flops_per_s: float | None = None
        self.formula: str | None = None  # of `mfu`, with this run's numbers
        try:
            self.flops_per_s = measure.ceilings(run.device, quick=True).flops_per_s(dtype)
        except MeasureError as error:
            notice(f"the MFU is left out: {error}")
            return
        lengths = set(map(round, self.attended))
        seq = lengths.pop() if len(lengths) == 1 else "attended"
        weights = [f"{passes} · {quantity(number)} {what}" for passes, number, what in self.work.weights]
        layers = [f"{passes} · {number} layers · {self.work.width} wide · {seq} tokens" for passes, number in self.work.layers]
        self.formula = (
            f"MFU = tokens/s · ({' + '.join(weights + layers)}) / "
            f"{'' if run.ranks.alone else f'{run.ranks.world} · '}{quantity(self.flops_per_s, 'FLOP/s')} "
            f"({dtype}, measured on this machine)"
        )

    def fill(self, record: Record) -> Record:
        if self.flops_per_s and "tokens_per_s" in record:
            flops = self.work.flops_per_token(self.attended[self.run.phase])
            tokens_per_s = self.tokens[self.run.phase] / record["seconds"]
            share = measure.mfu(tokens_per_s / self.run.ranks.world, flops, self.flops_per_s)
            if share <= 1:
                record["mfu"] = share
            else:  # the measured rate is too low: measured again here, for the next run
                measure.share(share * self.flops_per_s, self.figure, self.run.device)
                notice("the MFU is left out from here on: this run passes the rate that was measured.")
                self.flops_per_s = None
        return record


def outcome_of(run: Run, tape: RunTape, stop: Stop) -> Outcome:
    """Return the outcome of a run, from its tape."""
    steps = tape.steps()
    losses = [float(r["loss"]) for r in steps if "loss" in r]
    speeds = sorted(r["tokens_per_s"] for r in steps if "tokens_per_s" in r)
    held_out, skipped = run.evaluations.get(run.done), sum(count for _, count in skipped_steps(steps))
    where = label(run.device) if run.ranks.alone else f"{run.ranks.world} ranks, the first on {label(run.device)}"
    parts = [f"{run.done:,} steps on {where}", f"loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "no step"]
    if held_out is not None:
        parts.append(f"held out {held_out:.3f}")
    if run.best not in (None, run.done) and run.evaluations[run.best] != held_out:
        parts.append(f"best held out {run.evaluations[run.best]:.3f} at step {run.best:,}")
    if speeds:
        parts.append(f"{quantity(speeds[len(speeds) // 2])} tokens/s")
    not_finite = any(value is not None and not math.isfinite(value) for value in (*losses[-1:], held_out))
    allowed = max(MAX_SKIPPED * len(steps), SEARCH if run.recipe.precision == "fp16" else 0)
    failed = run.diverged or not_finite or skipped > allowed
    if run.diverged:
        parts.append(f"stopped because the last {HOPELESS} were all skipped, not saved")
    elif stop.asked:
        parts.append(f"stopped by {stop.asked}, checkpoint of step {run.done} in {run.checkpoints.folder}")
    elif run.done < run.steps:
        parts.append("ended early, the held-out loss no longer fell; the weights are the best ones'")
    if not run.ranks.alone and len(steps) > 2 and not any("waited_ms" in record for record in steps):
        parts.append("how long ranks waited for each other was not measured")
    if run.device.type == "cuda" and run.step.captured:
        parts.append(f"captured as {counted(len(run.step.captured), 'graph')}")
    parts += [*run.changes, *warnings(steps)]
    total = sum(fallbacks.values())
    parts.append("no fallback" if not total else f"{total} fallbacks")
    text = ", ".join(parts) + "."
    return Outcome(tape, f"FAILED, the training is not sound (try a lower lr or clip): {text}" if failed else text, failed)


def finish(tape: RunTape) -> Any:
    report = write_report([tape])
    say(f"report: {report}")
    return report
