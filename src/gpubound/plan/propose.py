"""All variants of a recipe's step, the fastest that fits, and the text of a plan.

Every variant has the recipe's rows, micro_batch x accumulate, so the losses do not depend on the variant.
"""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from ..formatting import in_words, quantity, readable
from ..measure import mfu
from ..train.adamw import Muon
from ..train.recipe import Recipe
from ..train.recipe_checks import MOST_ACCUMULATE
from ..train.sharding import FULL
from .costs import EAGER, FRAGMENTS, Collective, bound_by, collectives, in_host_memory, memory, seconds, total
from .step import GIB, HOP_US, LINK, NVLINK, GpuRates, StepConfig, step_of

SIMILAR = 0.02  # of the speed: predictions are off by more
FREE = 0.05  # of the memory stays free for peaks that are not predicted and other processes


@dataclass(frozen=True)
class Proposal:
    """A step with its predicted memory and time."""

    step: StepConfig
    gpu: GpuRates
    limit: int
    """Bytes of a GPU that may be used."""

    @cached_property
    def memory(self) -> dict[str, int]:
        return memory(self.step)

    @cached_property
    def seconds(self) -> dict[str, float]:
        return seconds(self.step, self.gpu)

    @cached_property
    def collectives(self) -> list[Collective]:
        return collectives(self.step)

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def sent(self) -> int:
        """Bytes that a GPU sends in a step."""
        return round(sum(call.sent(self.step.world) for call in self.collectives))

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all GPUs together."""
        return self.step.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        return mfu(self.tokens_per_s / self.step.world, self.step.flops_per_token, self.gpu.flops["bf16"])

    @property
    def parallel(self) -> str | None:
        """A recipe's `parallel`; None on one GPU."""
        return None if self.step.world == 1 else "fsdp" if self.step.sharded else "ddp"

    @property
    def options(self) -> list[str]:
        """Options of gpubound train."""
        step = self.step
        words = ["--micro-batch", str(step.rows), "--accumulate", str(step.accumulate * step.world)]
        words += ["--recompute", step.recompute]
        return words if self.parallel is None else [*words, "--parallel", self.parallel, "--gpus", str(step.world)]

    def as_dict(self) -> dict[str, Any]:
        step = self.step
        return {
            "options": self.options, "fits": self.fits, "parallel": self.parallel, "micro_batch": step.rows,
            "accumulate": step.accumulate * step.world, "recompute": step.recompute, "bytes_per_gpu": self.bytes,
            "memory": self.memory, "host_bytes": in_host_memory(step), "sent_bytes_per_gpu": self.sent,
            "step_s": self.step_s, "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s, "mfu": self.mfu, "bottleneck": bound_by(self.seconds),
        }  # fmt: skip

    def row(self) -> str:
        """Return the line of the table."""
        step = self.step
        sent = readable(self.sent) if self.collectives else "-"
        variant = f"{self.parallel or 'one GPU':9}{step.rows:>6}{step.accumulate * step.world:>6} {step.recompute:10}"
        speed = f"{in_words(self.step_s):>10}{quantity(self.tokens_per_s):>9}{self.mfu:>6.0%}"
        return f"{variant}{self.bytes / GIB:>7.1f}{'yes' if self.fits else 'no':>6}{sent:>10}{speed}  {bound_by(self.seconds)}"

    def details(self) -> str:
        """Return memory, collectives and time by part."""
        lines = [f"memory of a GPU, {self.bytes / GIB:.1f} GiB:"]
        lines += [f"  {name:36}{size / GIB:>8.2f} GiB" for name, size in self.memory.items()]
        if host := in_host_memory(self.step):
            lines.append(f"in host memory, moments and masters: {host / GIB:.1f} GiB")
        lines += ["sent by a GPU in a step:"] if self.collectives else []
        for call in self.collectives:
            sent = readable(call.sent(self.step.world))
            lines.append(f"  {f'{call.what}, {call.kind}':56}{call.times:>6} x {readable(call.bytes):>9}{sent:>11}")
        lines.append(f"a step, {in_words(self.step_s)}:")
        lines += [f"  {name:36}{1e3 * s:>9.2f} ms {s / self.step_s:>5.0%}" for name, s in self.seconds.items()]
        return "\n".join(lines)


def proposals(recipe: Recipe, world: int, gpu: GpuRates, bytes_per_gpu: int) -> tuple[Proposal, list[Proposal]]:
    """Return (the recipe unchanged, the best variant of each sharding and recomputation), fitting and fast ones first."""
    base, limit = step_of(recipe, world), int(bytes_per_gpu * (1 - FREE))

    def propose(step: StepConfig) -> Proposal:
        return Proposal(summed_once(step, int(FULL * bytes_per_gpu)), gpu, limit)

    groups: dict[tuple, list[Proposal]] = {}
    for step in _variants(base, limit):
        key = step.sharded, "count" if step.recompute.isdecimal() else step.recompute
        groups.setdefault(key, []).append(propose(step))
    return propose(base), _ranked([_ranked(group)[0] for group in groups.values()])


def first_that_fits(recipe: Recipe, world: int, bytes_per_gpu: int) -> str | None:
    """Return the options of the first change with which the recipe's step fits, or None: fewer rows in a micro-batch (and more
    micro-batches, so that losses do not depend on it), then recomputed blocks, then moments in 8 bits, then offloaded state;
    of adapters, last, a base in NF4; of a step of one micro-batch without clipping, updates in backward."""
    rows, limit = recipe.micro_batch * recipe.accumulate, int(bytes_per_gpu * (1 - FREE))
    sizes = [n for n in range(recipe.micro_batch, 0, -1) if rows % n == 0 and rows // n % world == 0]
    unchanged = step_of(recipe, world)
    for base in _bases(recipe, world, unchanged.adapters is not None and unchanged.adapters.published):
        step, recomputed = step_of(dataclasses.replace(recipe, **base), world), recipe.recompute
        for recompute, size in product(dict.fromkeys((recomputed, "blocks")), [rows] if step.in_backward else sizes):
            changed = {"micro_batch": size, "accumulate": rows // size, "recompute": recompute} | base
            changed = {name: value for name, value in changed.items() if value != getattr(recipe, name)}
            fitting = replace(step, rows=size, accumulate=rows // size // world, recompute=recompute)
            if changed and total(fitting) <= limit:
                return " ".join(map(_option, changed.items()))
    return None


def _bases(recipe: Recipe, world: int, published: bool) -> Iterator[dict[str, Any]]:
    """Yield changes of a recipe besides its rows and recomputation, the least ones first. published: the base is quantised"""
    eight_bits: list[dict[str, Any]] = [{}] if recipe.optimizer == "muon" else [{}, {"optimizer": "adamw8bit"}]
    yield from eight_bits
    if recipe.adapters is not None:
        if recipe.adapters.base is None and not published:
            yield {"lora": recipe.lora | {"base": "nf4"}}
        return
    if world > 1 or recipe.optimizer == "muon" or recipe.ema:
        return
    yield from ({"offload_optimizer": True} | change for change in eight_bits)
    if (
        recipe.micro_batch * recipe.accumulate == 1
        and not recipe.overlap
        and recipe.precision in ("auto", "bf16", "bf16-split")
    ):
        small = {"optimizer": "adamw8bit", "precision": "bf16-split", "update_in_backward": True, "clip": None}
        yield from (small, small | {"offload_optimizer": True})


def _option(change: tuple[str, Any]) -> str:
    name, value = change
    if name == "lora":
        return f"lora: {{base: {value['base']}}}"
    return f"--{name.replace('_', '-')} {0 if value is None else value}"


def summed_once(step: StepConfig, limit: int) -> StepConfig:
    """Return the step of a run: fsdp sums gradients once a step if full ones fit into `limit` bytes."""
    once = replace(step, sum_once=True)
    return once if step.sharded and step.accumulate > 1 and total(once) <= limit else step


def _variants(base: StepConfig, limit: int) -> Iterator[StepConfig]:
    """Yield every micro-batch that divides a rank's rows, with every sharding and recomputation."""
    rows = base.rows * base.accumulate
    small = [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    whole = isinstance(base.optimizer, Muon) or (base.adapters is not None and base.adapters.published)
    shardings = [False, True] if base.world > 1 and not whole else [False]
    for micro in sorted({*small, *(rows // n for n in small)}):
        if rows // micro * base.world > MOST_ACCUMULATE:  # which train refuses
            continue
        for sharded in shardings:
            step = replace(base, rows=micro, accumulate=rows // micro, sharded=sharded)
            yield from (replace(step, recompute=recompute) for recompute in ("none", "cheap", "blocks"))
            # The fewest recomputed blocks that fit, or all of them.
            layers = step.config.layers
            fits = bisect_left(range(layers + 1), True, key=lambda count: total(replace(step, recompute=str(count))) <= limit)
            some = replace(step, recompute=str(min(fits, layers)))
            if 0 < some.recomputed < some.config.layers:
                yield some


def _ranked(proposals: list[Proposal]) -> list[Proposal]:
    """Sort by fit, then speed; those that do not fit, by memory.

    Among those as good as the fastest, ddp comes before fsdp, and less memory before more.
    """
    fastest = max((p.tokens_per_s for p in proposals if p.fits), default=0.0)

    def key(p: Proposal) -> tuple[int, float, float]:
        if not p.fits:
            return 2, p.bytes, 0.0
        if p.tokens_per_s >= (1 - SIMILAR) * fastest:
            return 0, float(p.step.sharded), p.bytes
        return 1, -p.tokens_per_s, 0.0

    return sorted(proposals, key=key)


def assumptions(unchanged: Proposal) -> list[str]:
    """Return the rates and assumptions that the figures are based on, a line each."""
    lines = [str(unchanged.gpu)]
    if unchanged.step.world > 1:
        lines += [
            f"assumed: a GPU sends {NVLINK / 1e9:.0f} GB/s to the others of its node, {HOP_US:.0f} us a hop; no rank is slower",
            f"assumed: fsdp's steps are not captured, and cost the host {EAGER} bare launches a kernel",
        ]
    if unchanged.step.offload:
        lines.append(f"assumed: {LINK / 1e9:.0f} GB/s each way between host memory and a GPU")
    if unchanged.step.adapters is not None:
        lines.append(f"assumed: {FRAGMENTS:.0%} of the frozen weights' memory is lost between them")
    checked = "checked: within 20 % of measurements on one, two and four GPUs (benchmarks/check_plan.py)"
    return [*lines, checked, f"fits: at most {1 - FREE:.0%} of the memory is used"]


def text(recipe: Recipe, unchanged: Proposal, proposals: list[Proposal], gpus: str, rows: int) -> str:
    """Return the plan without the command to run."""
    step, best = unchanged.step, proposals[0]
    model = f"{recipe.model}, vocabulary {step.config.vocabulary:,}: {step}, {recipe.optimizer}"
    head = f"{'':9}{'sharing':9}{'micro':>6}{'acc':>6} {'recompute':10}{'GiB':>7}{'fits':>6}{'sent':>10}{'step':>10}"
    return "\n".join(
        [
            f"{model}; a step has {quantity(step.tokens_per_step)} tokens, rows of {step.seq:,}; {gpus}",
            *assumptions(unchanged),
            "",
            f"{head}{'tok/s':>9}{'MFU':>6}  bound by",
            *(f"{'best' if p is best and best.fits else '':9}{p.row()}" for p in proposals[:rows]),
            f"{'recipe':9}{unchanged.row()}",
            "",
            best.details(),
        ]
    )
