"""Plan a training run before it runs: memory, bytes between GPUs, time, and the best way to cut a step. Needs no GPU.

gpubound plan config.yaml --gpus 8
gpubound plan --model 8b --seq 4096 --gpus 1024 --network 45
gpubound plan --check                                        the predictions beside committed measurements
"""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..train.recipe import Recipe
from . import arguments
from .options import RECIPE
from .train import from_file

LARGEST = 1e15  # GPUs, GiB, GB/s: far above any, and no product of them is infinite


@dataclass(frozen=True)
class Planned(Recipe):
    """Predict what a training run will take, and propose how to cut its steps.

    Takes the config and the options of gpubound train. Nothing is trained, no data is read, no GPU is needed. Every rate and
    every assumption that the figures stand on is printed. Exit code 1: nothing fits.

    Examples: gpubound plan config.yaml --gpus 8
              gpubound plan --model 8b --seq 4096 --micro-batch 4 --accumulate 256 --gpus 1024
    """

    lora: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    phases: Annotated[tuple[dict[str, Any], ...], tyro.conf.Suppress] = ()
    objective_options: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    gpus: int = 1
    """How many GPUs share the run."""
    gpu: str = "h200"
    """Which kind: h200, h100, or here, which measures this machine's."""
    memory: float | None = None
    """GiB of each, where it is not what the kind has."""
    node: int = 8
    """GPUs in a node."""
    nvlink: float = 370.0
    """GB/s that a GPU sends to others of its node."""
    network: float = 45.0
    """GB/s that a GPU sends to other nodes."""
    most: int = 8
    """Rows of the table."""
    check: bool = False
    """Compare the predictions with committed measurements instead; exit code 1 where one is too far off."""
    results: str | None = None
    """With --check: the folder of the measurements; by default the checkout's."""
    json: bool = False
    """Print everything as JSON."""

    def __post_init__(self) -> None:
        """Nothing is checked here: the Recipe made from it checks, and its errors are one line instead of the parser's box."""

    def recipe(self) -> Recipe:
        return Recipe(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe)})


def main(argv: Sequence[str]) -> int:
    argv = list(argv)
    file, argv = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    known = Planned()
    options = arguments(Planned, argv, "plan", known)
    if file is not None:  # a mistyped option is refused before torch is imported to check the file
        given = from_file(file)
        known = Planned(**vars(given.recipe()), gpus=given.gpus or 1)
        options = arguments(Planned, argv, "plan", known)
    from ..plan.cards import GIB, GIGA, Network, card_named  # torch takes two seconds: options are read first
    from ..plan.propose import proposals
    from ..plan.report import ABOUT, as_json, gib, headline, parts, row, table

    if options.check:
        return checked(options)
    for name in ("gpus", "node", "most", "nvlink", "network", "memory"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= LARGEST:
            raise ValueError(f"plan: {name} must be {f'at most {LARGEST:g}' if value > 0 else 'above 0'}, got {value}.")
    if options.gpus > options.node and options.gpus % options.node:
        raise ValueError(
            f"plan: gpus: got {options.gpus:,} in nodes of {options.node}, wanted whole nodes; give --gpus "
            f"{options.gpus // options.node * options.node}, or another --node."
        )
    card, network = card_named(options.gpu), Network(options.nvlink * GIGA, options.network * GIGA, options.node)
    total = card.memory if options.memory is None else int(options.memory * GIB)
    as_it_is, found = proposals(options.recipe(), options.gpus, card, network, total)
    best = found[0] if found[0].fits else None
    assumed = [card.about(), *network.about(options.gpus), *as_it_is.setting.assumed, *ABOUT]
    if options.json:
        print(json.dumps(as_json(options.model, options.gpus, options.gpu, total, assumed, as_it_is, best, found), indent=1))
        return 0 if best else 1
    print(headline(options.recipe(), as_it_is.setting, f"{options.gpus:,} x {card.name}, {gib(total)} GiB"))
    print(*assumed, "", sep="\n")
    print(table(found[: options.most], best))
    print(f"{'as it is':9}{row(as_it_is)}\n")
    shown = best or found[0]
    print(parts(shown))
    if best is None:
        least = f"at least {shown.bytes / GIB:.1f} GiB of {gib(total)} a GPU"
        print(f"\nnothing fits: {least}; take more GPUs, shorter rows or a smaller model.")
        return 1
    print(f"\nbest: {shlex.join(best.command(train_options(file, known, options)))}")
    return 0


CUT = {"micro_batch", "accumulate", "recompute", "parallel"}  # what a proposal chooses


def train_options(file: str | None, known: Planned, options: Planned) -> list[str]:
    """What gpubound train takes for this recipe, but for what a proposal says: the file, and what overrides it."""
    words = [] if file is None else [file]
    for name in (name for name in RECIPE if name not in CUT):
        if (value := getattr(options, name)) != getattr(known, name):
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


def checked(options: Planned) -> int:
    from ..plan import check as committed

    rows = committed.check(committed.RESULTS if options.results is None else Path(options.results))
    print(json.dumps([r.as_dict() for r in rows], indent=1) if options.json else committed.table(rows))
    return 0 if all(r.holds for r in rows) else 1
