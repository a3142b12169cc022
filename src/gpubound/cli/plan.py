"""Plan a training run before it runs: memory, bytes between GPUs, time, and the fastest way to run a step. Needs no GPU.

gpubound plan config.yaml --gpus 8
gpubound plan --model 8b --seq 4096 --gpu h100 --gpus 4
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from ..train.aliases import RECIPE, convert
from . import arguments, split_config
from .train_options import RecipeOptions, checked, from_file, override_length, split_aliases, translated, with_aliases


@dataclass(frozen=True)
class PlanOptions(RecipeOptions):
    """Predict the memory and the time of a training step, and propose how to run it.

    Takes the config and the options of gpubound train. Nothing is trained, no data is read, no GPU is needed. Every rate and
    every assumption that the figures are based on is printed. Exit code 1: nothing fits.

    Examples: gpubound plan config.yaml --gpus 8
              gpubound plan --model 8b --micro-batch 4 --accumulate 256 --gpus 8
    """

    gpus: int = 1
    """How many GPUs of one node share the run."""
    gpu: str = "h200"
    """Which kind: h200, h100, or here, which measures this machine's."""
    memory: str | None = None
    """Memory of each, where it is not what the kind has: 24 GB, 22.5 GiB, or a number of GiB."""
    rows: int = 8
    """Rows of the table."""
    json: bool = False
    """Print everything as JSON."""
    from_: Annotated[str | None, tyro.conf.arg(name="from", metavar="FILE")] = None
    """A config of another trainer, as gpubound train --from takes it."""


OPTIONS = {field.name: field for field in dataclasses.fields(PlanOptions) if field.name != "from_"}


def main(argv: Sequence[str]) -> int:
    file, argv = split_config(argv)
    argv, theirs = split_aliases(argv, OPTIONS, "plan")
    known = PlanOptions()
    options = arguments(PlanOptions, argv, "plan", known)
    if file is not None and options.from_ is not None:
        raise ValueError(f"from: got {options.from_} and the config {file}; give one of them.")
    if (path := file or options.from_) is not None:  # a mistyped option is refused before torch is imported to check the file
        config, lines = (from_file(path, complete=False), "") if file is not None else translated(path)
        print(lines, end="\n" if lines else "", file=sys.stderr)
        recipe_of = {field.name: getattr(config, field.name) for field in dataclasses.fields(RecipeOptions)}
        known = PlanOptions(**recipe_of, gpus=config.gpus or 1, memory=config.memory)
    if path is not None or theirs:
        options = arguments(PlanOptions, argv, "plan", with_aliases(known, theirs, argv, OPTIONS))
        options = override_length(options, known)
    from ..device import memory_size
    from ..plan.propose import assumptions, proposals, text
    from ..plan.step import GIB, MOST_GPUS, gpu_named  # torch takes two seconds: options are read first

    for name, most in (("gpus", MOST_GPUS), ("rows", 1000)):
        if not 0 < (value := getattr(options, name)) <= most:
            raise ValueError(f"{name}: got {value}, wanted more than 0 and at most {most:,.0f}.")
    gpu = gpu_named(options.gpu)
    size = gpu.memory if options.memory is None else memory_size(options.memory)
    recipe = checked(options, known, path)
    current, plans = proposals(recipe, options.gpus, gpu, size)
    best = plans[0] if plans[0].fits else None
    if options.json:
        step = current.step
        facts = {
            "model": recipe.model, "gpus": options.gpus, "gpu": options.gpu, "memory_bytes": size,
            "assumed": assumptions(current), "parameters": step.parameters, "trained": step.trained,
            "tokens_per_step": step.tokens_per_step, "precision": step.precision, "as_it_is": current.as_dict(),
            "best": best.as_dict() if best else None, "plans": [p.as_dict() for p in plans],
        }  # fmt: skip
        print(json.dumps(facts, indent=1))
        return 0 if best else 1
    gib = f"{size / GIB:.0f}" if size >= 10 * GIB else f"{size / GIB:.1f}"
    print(text(recipe, current, plans, f"{options.gpus} x {gpu.name}, {gib} GiB", options.rows))
    if best is None:
        least = f"at least {plans[0].bytes / GIB:.1f} GiB of {gib} a GPU"
        print(f"\nnothing fits: {least}; take more GPUs, shorter rows or a smaller model.")
        return 1
    source = [] if path is None else [path] if file is not None else ["--from", path]
    print(f"\nbest: {shlex.join(['gpubound', 'train', *source, *train_options(known, options, theirs), *best.options])}")
    return 0


PROPOSED = {"micro_batch", "accumulate", "recompute", "parallel"}


def train_options(known: PlanOptions, options: PlanOptions, theirs: Mapping[str, Any]) -> list[str]:
    """Return the arguments of gpubound train that override its config, without those that a proposal has."""
    words = list[str]()
    for name in (name for name in RECIPE if name not in PROPOSED):
        if (value := getattr(options, name)) == getattr(known, name):
            continue
        if name == "lora":  # no option of ours, but of others
            own = {key: value for key, value in theirs.items() if {"lora"} == convert({key: value}, OPTIONS).keys()}
            words += [word for key, value in own.items() for word in (f"--{key.replace('_', '-')}", *_words(value))]
        else:
            words += [f"--{name.replace('_', '-')}", *_words(value)]
    return words


def _words(value: Any) -> list[str]:
    return [*map(str, value if isinstance(value, tuple | list) else [value])]
