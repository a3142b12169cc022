"""The recipes of examples/small_gpus within their GPU's memory: the peak of each phase beside the predicted one and the limit.

Each runs in a process that may use no more of this GPU than the recipe says (gpubound.limit), at the real shape with random
weights. What is reserved counts: a card of that size must have it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError

from . import results
from .harness import Bench
from .serving import Job
from .workers import Worker

RECIPES = Path(__file__).parents[1] / "examples" / "small_gpus"
WORKER = "benchmarks.memory_worker"
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Measure the peak memory of the recipes for small GPUs, phase by phase.

    Example: gpubound bench memory --only qlora_8b_12gb,full_3b_24gb
    """

    only: str = ""
    """Recipes of examples/small_gpus, by comma; empty: all."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Tiny models on the CPU: shows that the script works, keeps nothing."""


@dataclass(frozen=True)
class MemoryJob(Job):
    """A recipe's file; dry: a tiny model. Shape and batch are the recipe's."""

    recipe: str = ""
    dry: bool = False


def main(argv: Sequence[str]) -> int:
    options = arguments(Memory, argv, "bench memory")
    known = {file.stem: file for file in sorted([*RECIPES.glob("*.yaml"), *RECIPES.glob("*.sh")])}
    names = options.only.split(",") if options.only else list(known)
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"--only: got {wrong[0]!r}, wanted some of {', '.join(known)}.")
    device = resolve("cpu" if options.dry else "require")
    bench = Bench.of(options, "memory", device, argv)
    for name in names:
        measure(bench, name, known[name])
    return bench.finish()


def measure(bench: Bench, name: str, recipe: Path) -> None:
    """Keep a line for each phase's reserved peak, beside the predicted one and the recipe's limit, which is the gate."""
    job = MemoryJob(name, "", 0, 0, 0, bench.device.type, recipe=str(recipe), dry=bench.dry)
    try:
        with Worker(job, WORKER) as worker:
            facts = worker.facts
    except MeasureError as error:
        bench.wrong.append(f"{name}: {error}")
        return
    peaks = {phase: peak["reserved"] for phase, peak in facts["peaks"].items()}
    if not peaks:  # a CPU has no such peaks: what the step holds besides activations is known there, too
        peaks = {"make step": sum(facts["state"].values())}
    for phase, peak in peaks.items():
        predicted = {} if phase not in facts["predicted"] else {"predicted": facts["predicted"][phase] / GIB}
        beside = predicted | {"the limit": facts["room"] / GIB}
        bench.figure(f"{name}, {phase}", "GiB", peak / GIB, beside, {"the limit": 1.0})


if __name__ == "__main__":
    sys.exit(guarded("bench memory", main, sys.argv[1:]))
