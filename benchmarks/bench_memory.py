"""The recipes of examples/small_gpus within their GPU's memory, and one small step by option: the peak of each phase beside the
predicted one.

A recipe runs in a process that may use no more of this GPU than it says (gpubound.limit), at the real shape with random
weights. What is reserved counts: a card of that size must have it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError
from gpubound.measure.memory_phases import Peak

from . import results
from .harness import Bench
from .memory_rows import keep_phases, peaks_in
from .serving import Job
from .workers import Worker

RECIPES = Path(__file__).parents[1] / "examples" / "small_gpus"
WORKER = "benchmarks.memory_worker"
OPTIONS = "options"
LORA = {"rank": 16, "alpha": 32}
SPLIT, EIGHT_BITS = {"precision": "bf16-split"}, {"optimizer": "adamw8bit"}
IN_BACKWARD = SPLIT | EIGHT_BITS | {"update_in_backward": True, "clip": None}
BY_OPTION: dict[str, dict[str, Any]] = {  # keys of a recipe: each row of the table in docs/running.md, and recomputation
    "the defaults": {},
    "bf16-split": SPLIT,
    "adamw8bit": EIGHT_BITS,
    "both": SPLIT | EIGHT_BITS,
    "both, update_in_backward": IN_BACKWARD,
    "these, offload_optimizer": IN_BACKWARD | {"offload_optimizer": True},
    "recompute none": {"recompute": "none"},
    "recompute 12": {"recompute": "12"},
    "recompute blocks": {"recompute": "blocks"},
    "lora": {"lora": LORA},
    "lora, base nf4": {"lora": LORA | {"base": "nf4"}},
}


@dataclass(frozen=True)
class Memory:
    """Measure the peak memory of the recipes for small GPUs, and of a step of 350m by option, phase by phase.

    Example: gpubound bench memory --only qlora_8b_12gb,full_3b_24gb
    """

    only: str = ""
    """Recipes of examples/small_gpus, and options, by comma; empty: all."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Tiny models on the CPU: shows that the script works, keeps nothing."""


@dataclass(frozen=True)
class MemoryJob(Job):
    """A recipe's file, or a recipe's keys by option; dry: a tiny model. Shape and batch are the recipe's."""

    recipe: str = ""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    dry: bool = False


def main(argv: Sequence[str]) -> int:
    options = arguments(Memory, argv, "bench memory")
    known = {file.stem: file for file in sorted([*RECIPES.glob("*.yaml"), *RECIPES.glob("*.sh")])}
    names = options.only.split(",") if options.only else [*known, OPTIONS]
    if wrong := [name for name in names if name not in (*known, OPTIONS)]:
        raise ValueError(f"--only: got {wrong[0]!r}, wanted some of {', '.join(known)}, {OPTIONS}.")
    device = resolve("cpu" if options.dry else "require")
    bench = Bench.of(options, "memory", device, argv)
    for name in names:
        measure(bench, name, known.get(name))
    return bench.finish()


def measure(bench: Bench, name: str, recipe: Path | None) -> None:
    """Keep a line for each phase's peak, of a recipe beside its limit, which is the gate, or of one step with each option."""
    job = MemoryJob(
        name,
        "350m",
        1024,
        4,
        1,
        bench.device.type,
        recipe=str(recipe or ""),
        options={} if recipe else BY_OPTION,
        dry=bench.dry,
    )
    try:
        with Worker(job, WORKER) as worker:
            found = worker.facts
    except MeasureError as error:
        bench.wrong.append(f"{name}: {error}")
        return
    for case, facts in found.items():
        peaks = peaks_in(facts["peaks"])
        if not peaks:  # a CPU has no such peaks: what the step holds besides activations is known there, too
            held = sum(facts["state"].values())
            peaks = {"make step": Peak(held, held)}
        limits = dict.fromkeys(peaks, ("the limit", facts["room"], 1.0)) if "room" in facts else {}
        keep_phases(bench, case, peaks, limits, predicted=facts["predicted"])


if __name__ == "__main__":
    sys.exit(guarded("bench memory", main, sys.argv[1:]))
