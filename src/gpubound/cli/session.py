"""A training run with a screen around it: what `gpubound train` and `gpubound demo` share."""

import dataclasses
import sys
from typing import Any

import torch

from .. import measure
from ..device import label
from ..monitor import Live, Tape, write_report
from ..monitor.live import quantity
from ..trace import fallbacks
from ..train.loop import Record, Stop
from ..train.run import Run
from ..version import __version__


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def train(run: Run, title: str, sample: Any = None) -> tuple[Tape, bool]:
    """Train `run` with a live line, a tape and a report. Returns the tape and whether it ran to its end.

    `sample(run)` gives a text that the model writes, for the report.
    """
    tape = Tape.create(run.folder, name=title, config=dataclasses.asdict(run.recipe), machine=machine(run.device))
    tape.tell(placement=run.placement.as_dict()["rows"], verdict=None)
    say(f"{title}: {size_of(run)} on {label(run.device)}, {quantity(run.tokens_per_step)} tokens a step")
    scale = Scale.of(run)
    with Stop() as stop, Live(run.recipe.steps, title) as live:

        def on_record(record: Record) -> None:
            record = scale.fill(record)
            tape.append(record)
            live.show(record)

        first = run.done
        done = run.go(on_record, stop)
    whole = done >= run.recipe.steps
    tape.tell(
        sample=sample(run) if sample and whole else None,
        fallbacks=[{"what": what, "why": why, "times": times} for (what, why), times in fallbacks.items()],
        verdict=verdict(run, tape, first, stop),
    )
    say(f"{title}: {tape.about['verdict']}")
    return tape, whole


@dataclasses.dataclass(frozen=True)
class Scale:
    """What turns a step's pace into a share of this machine's measured matrix rate."""

    flops_per_token: float
    flops_per_s: float

    @classmethod
    def of(cls, run: Run) -> "Scale":
        config = run.model.config
        width = config.heads * config.head_dim
        flops = measure.train_flops_per_token(config.product_parameters, config.layers, width, run.recipe.seq)
        dtype = str(next(run.model.parameters()).dtype)
        kind = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(dtype, "fp32")
        found = measure.ceilings(run.device).as_dict()
        return cls(flops, found[f"{kind}_flops_per_s"])

    def fill(self, record: Record) -> Record:
        if "tokens_per_s" in record:
            record["mfu"] = measure.mfu(record["tokens_per_s"], self.flops_per_token, self.flops_per_s)
        return record


def machine(device: torch.device) -> dict[str, str]:
    return {"device": label(device), "gpubound": __version__, "torch": torch.__version__, "python": sys.version.split()[0]}


def size_of(run: Run) -> str:
    return f"{quantity(sum(p.numel() for p in run.model.parameters()))} parameters"


def verdict(run: Run, tape: Tape, first: int, stop: Stop) -> str:
    """What happened, from the tape."""
    steps = tape.steps()
    losses = [float(r["loss"]) for r in steps]
    paces = sorted(r["tokens_per_s"] for r in steps if "tokens_per_s" in r)
    parts = [f"{run.done} steps on {label(run.device)}", f"loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "no step"]
    if run.done in run.evaluations:
        parts.append(f"held out {run.evaluations[run.done]:.3f}")
    if paces:
        parts.append(f"{quantity(paces[len(paces) // 2])} tokens/s")
    if stop.asked:
        parts.append(f"stopped by {stop.asked}, checkpoint in {run.checkpoints.folder}")
    total = sum(fallbacks.values())
    parts.append("no fallback" if not total else f"{total} fallbacks")
    return ", ".join(parts) + "."


def finish(tape: Tape) -> None:
    say(f"report: {write_report([tape])}")
