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

from ..plan import check as committed
from ..plan.cards import GIB, GIGA, Network, card_named
from ..plan.pace import EAGER, LAST_BUCKET
from ..plan.propose import FREE, Proposal, proposals
from ..plan.setting import Setting
from ..train.recipe import Recipe
from ..words import in_words, quantity, readable
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
    results: str = str(committed.RESULTS)
    """With --check: the folder of the measurements."""
    json: bool = False
    """Print everything as JSON."""

    def __post_init__(self) -> None:
        """Nothing is checked here: the Recipe made from it checks, and its errors are one line instead of the parser's box."""

    def recipe(self) -> Recipe:
        return Recipe(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe)})


def main(argv: Sequence[str]) -> int:
    argv = list(argv)
    file, argv = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    given = from_file(file) if file is not None else None
    known = Recipe() if given is None else given.recipe()
    options = arguments(Planned, argv, "plan", Planned(**vars(known), gpus=getattr(given, "gpus", None) or 1))
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
        print(json.dumps(as_json(options, total, assumed, as_it_is, best, found), indent=1))
        return 0 if best else 1
    print(headline(options, as_it_is.setting, f"{card.name}, {gib(total)} GiB"))
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
ABOUT = [
    f"assumed: replicas sum their gradient beside the last backward, but for its last {readable(LAST_BUCKET)}; sharded ranks "
    f"gather and sum beside the blocks",
    f"assumed: a step of replicas is captured; a sharded one is not, and costs the host {EAGER} bare launches for each kernel",
    "assumed: the data keeps up, and takes no memory; what passes over links slows no kernel beside it",
    "checked: on one GPU, on two and on four, by gpubound plan --check; no prediction for more has met a run yet",
    f"fits: at most {1 - FREE:.0%} of the memory is used",
]


def train_options(file: str | None, known: Recipe, options: Planned) -> list[str]:
    """What gpubound train takes for this recipe, but for what a proposal says: the file, and what overrides it."""
    words = [] if file is None else [file]
    for name in (name for name in RECIPE if name not in CUT):
        if (value := getattr(options, name)) != getattr(known, name):
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


def headline(options: Planned, setting: Setting, card: str) -> str:
    vocabulary, tokens = f"vocabulary {setting.config.vocabulary:,}", quantity(setting.tokens_per_step)
    model = f"{options.model}, {vocabulary}: {setting}, {options.optimizer}"
    return f"{model}; a step has {tokens} tokens, rows of {setting.seq:,}; {options.gpus:,} x {card}"


def gib(total: int) -> str:
    """The memory of a GPU. --memory may say less than 1 GiB."""
    return f"{total / GIB:.0f}" if total >= 10 * GIB else f"{total / GIB:.1f}"


def table(found: list[Proposal], best: Proposal | None) -> str:
    head = f"{'':9}{'sharing':9}{'micro':>6}{'acc':>6} {'recompute':10}{'GiB':>7}{'fits':>6}{'sent':>10}{'step':>10}"
    head += f"{'tok/s':>9}{'MFU':>6}  bound by"
    return "\n".join([head, *(f"{'best' if p is best else '':9}{row(p)}" for p in found)])


def row(p: Proposal) -> str:
    s = p.setting
    sharing = p.sharing or "one GPU"
    sent = readable(sum(call.sent(s.world) for call in p.wire)) if p.wire else "-"
    cut = f"{sharing:9}{s.rows:>6}{s.accumulate * s.world:>6} {s.recompute:10}"
    size = f"{p.bytes / GIB:>7.1f}{'yes' if p.fits else 'no':>6}"
    pace = f"{in_words(p.step_s):>10}{quantity(p.tokens_per_s):>9}{p.mfu:>6.0%}"
    return f"{cut}{size}{sent:>10}{pace}  {p.bottleneck}"


def parts(p: Proposal) -> str:
    lines = [f"memory of a GPU, {p.bytes / GIB:.1f} GiB:"]
    lines += [f"  {name:36}{size / GIB:>8.2f} GiB" for name, size in p.memory.items()]
    if p.wire:
        lines.append("sent by a GPU in a step:")
        for call in p.wire:
            whole, sent = readable(call.bytes), readable(call.sent(p.setting.world))
            lines.append(f"  {f'{call.what}, {call.kind}':56}{call.times:>6} x {whole:>9}{sent:>11}")
    lines.append(f"a step, {in_words(p.step_s)}:")
    lines += [f"  {name:36}{1e3 * s:>9.2f} ms {s / p.step_s:>5.0%}" for name, s in p.seconds.items()]
    return "\n".join(lines)


def as_json(
    options: Planned, total: int, assumed: list[str], as_it_is: Proposal, best: Proposal | None, found: list[Proposal]
) -> dict[str, Any]:
    return {
        "model": options.model, "gpus": options.gpus, "gpu": options.gpu, "memory_bytes": total, "assumed": assumed,
        "parameters": as_it_is.setting.outline.parameters, "trained": as_it_is.setting.trained,
        "tokens_per_step": as_it_is.setting.tokens_per_step, "precision": as_it_is.setting.precision,
        "as_it_is": as_it_is.as_dict(), "best": best.as_dict() if best else None,
        "plans": [p.as_dict() for p in found],
    }  # fmt: skip


def checked(options: Planned) -> int:
    rows = committed.check(Path(options.results))
    print(json.dumps([r.as_dict() for r in rows], indent=1) if options.json else committed.table(rows))
    return 0 if all(r.holds for r in rows) else 1
