"""A training run with a screen around it: what `gpubound train` and `gpubound demo` share."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOSPC
from typing import Any

import torch
from safetensors import SafetensorError

from .. import measure
from ..device import label
from ..errors import DataError, MeasureError
from ..monitor import Live, Tape, write_report
from ..monitor.gauges import Gauges
from ..monitor.live import quantity
from ..monitor.logs import open_log
from ..trace import fallbacks, notice
from ..train.loop import Record, Stop
from ..train.run import Run
from ..version import __version__


@contextmanager
def disk_of(out: str) -> Iterator[None]:
    """Say it in a sentence when the disk under `out` is full, whoever found out."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) != ENOSPC and f"os error {ENOSPC}" not in str(error):
            raise
        raise DataError(
            f"{out}: no space is left on its disk; what was saved there before is intact. "
            f"Free space, then go on with --resume, or give another --out."
        ) from error


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def train(run: Run, title: str, sample: Callable[[Run], str] | None = None, log: str | None = None) -> Tape:
    """Train `run` with a live line, a tape, perhaps a logger, and a report at the end.

    `sample(run)` gives a text that the model writes once it is trained, for the report.
    """
    config = dataclasses.asdict(run.recipe)
    logger = open_log(log, run.folder, title, config)
    tape = Tape.create(run.folder, name=title, config=config, machine=machine(run.device))
    tape.rewind(run.done)
    scale, gauges, first = Scale(run), Gauges(run.device), run.done
    tape.tell(placement=str(run.placement), mfu=scale.formula, verdict=None, finished=False)
    say(run.placement.summary)
    after = f" after step {first:,}" if first else ""
    say(f"{title}: {size_of(run)}, {run.steps - first:,} steps of {quantity(run.tokens_per_step)} tokens{after}")
    if scale.formula:
        say(scale.formula)
    with Stop() as stop, logger, gauges, Live(run.steps, title) as live:

        def on_record(record: Record) -> None:
            record = scale.fill(record) | gauges.read()
            tape.append(record)
            live.show(record)
            logger.write(record)

        run.go(on_record, stop)
    tape.tell(
        sample=sample(run) if sample and run.finished else None,
        fallbacks=[{"what": what, "why": why, "times": times} for (what, why), times in fallbacks.items()],
        verdict=verdict(run, tape, stop),
        finished=run.finished,
    )
    say(f"{title}: {tape.about['verdict']}")
    return tape


class Scale:
    """Turns a step's pace into a share of this machine's measured matrix rate."""

    def __init__(self, run: Run):
        self.run = run
        dtype = str(next(run.model.parameters()).dtype).removeprefix("torch.")
        kind = "tf32" if run.recipe.precision == "tf32" else {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
        self.flops_per_s: float | None = None
        self.formula: str | None = None
        try:
            self.flops_per_s = measure.ceilings(run.device, quick=True).flops_per_s(kind)
            self.formula = self._formula(kind)
        except MeasureError as error:
            notice(f"the share of the matrix rate is left out: {error}")

    def _formula(self, kind: str) -> str:
        """How `mfu` comes about, with this run's numbers."""
        config, lengths = self.run.model.config, {stage.recipe.seq for stage in self.run.stages}
        seq = lengths.pop() if len(lengths) == 1 else "seq"
        width = config.heads * config.head_dim
        return (
            f"share of the matrix rate = tokens/s · (6 · {quantity(config.product_parameters)} parameters in products + "
            f"6 · {config.layers} layers · {width} wide · {seq} tokens) / {quantity(self.flops_per_s or 0, 'FLOP/s')} "
            f"({kind}, measured on this machine)"
        )

    def fill(self, record: Record) -> Record:
        if self.flops_per_s and "tokens_per_s" in record:
            config, seq = self.run.model.config, self.run.stage.recipe.seq
            flops = measure.train_flops_per_token(config.product_parameters, config.layers, config.heads * config.head_dim, seq)
            record["mfu"] = measure.mfu(record["tokens_per_s"], flops, self.flops_per_s)
        return record


def machine(device: torch.device) -> dict[str, str]:
    return {"device": label(device), "gpubound": __version__, "torch": torch.__version__, "python": sys.version.split()[0]}


def size_of(run: Run) -> str:
    return f"{quantity(sum(p.numel() for p in run.model.parameters()))} parameters"


def verdict(run: Run, tape: Tape, stop: Stop) -> str:
    """What happened, from the tape."""
    steps = tape.steps()
    losses = [float(r["loss"]) for r in steps]
    paces = sorted(r["tokens_per_s"] for r in steps if "tokens_per_s" in r)
    parts = [f"{run.done:,} steps on {label(run.device)}", f"loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "no step"]
    if run.done in run.evaluations:
        parts.append(f"held out {run.evaluations[run.done]:.3f}")
    if paces:
        parts.append(f"{quantity(paces[len(paces) // 2])} tokens/s")
    if stop.asked:
        parts.append(f"stopped by {stop.asked}, checkpoint of step {run.done} in {run.checkpoints.folder}")
    elif run.done < run.steps:
        parts.append("ended early, the held-out loss no longer fell; the weights are the best ones'")
    total = sum(fallbacks.values())
    parts.append("no fallback" if not total else f"{total} fallbacks")
    return ", ".join(parts) + "."


def finish(tape: Tape) -> Any:
    report = write_report([tape])
    say(f"report: {report}")
    return report
