"""All ways to cut a step, what each takes, and which of those that fit is fastest.

A step keeps its rows, so that the losses do not depend on the way it is cut: micro_batch x accumulate is the recipe's.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..measure import mfu
from ..train.muon import Muon
from ..train.recipe import Recipe
from ..train.rows import FULL
from .cards import Card, Network
from .memory import memory
from .pace import GROUPS, pace
from .reading import setting_of
from .setting import Setting
from .wire import Collective, collectives

ALIKE = 0.02  # of the speed: smaller differences say nothing, for predictions are off by more
FREE = 0.05  # of the memory is left alone: a peak that was not seen, another process


@dataclass(frozen=True)
class Proposal:
    """A setting with what it would take on these GPUs."""

    setting: Setting
    card: Card
    network: Network
    limit: int
    """Bytes of a GPU that may be used."""

    @cached_property
    def memory(self) -> dict[str, int]:
        return memory(self.setting)

    @cached_property
    def seconds(self) -> dict[str, float]:
        return pace(self.setting, self.card, self.network)

    @property
    def wire(self) -> list[Collective]:
        return collectives(self.setting)

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together."""
        return self.setting.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        return mfu(self.tokens_per_s / self.setting.world, self.setting.flops_per_token, self.card.flops["bf16"])

    @property
    def bottleneck(self) -> str:
        shares: dict[str, float] = {}
        for part, seconds in self.seconds.items():
            shares[GROUPS[part]] = shares.get(GROUPS[part], 0.0) + seconds
        return max(shares, key=lambda group: shares[group])

    @property
    def sharing(self) -> str:
        """In which way ranks share the model, as a recipe's `parallel` says it; nothing on one GPU."""
        return "" if self.setting.world == 1 else "fsdp" if self.setting.sharded else "ddp"

    @property
    def options(self) -> list[str]:
        """To paste behind `gpubound train CONFIG`."""
        setting = self.setting
        cut = ["--micro-batch", str(setting.rows), "--accumulate", str(setting.accumulate * setting.world)]
        cut += ["--recompute", setting.recompute]
        return cut if setting.world == 1 else [*cut, "--parallel", self.sharing]

    def command(self, train: list[str]) -> list[str]:
        """The whole command line, of what stands behind `gpubound train`. On several nodes, torchrun's on each of them."""
        world, node = self.setting.world, self.network.node
        if world <= node:
            return ["gpubound", "train", *train, *self.options, *(["--gpus", str(world)] if world > 1 else [])]
        nodes = ["--nnodes", str(-(-world // node)), "--nproc-per-node", str(node)]
        return ["torchrun", *nodes, "-m", "gpubound", "train", *train, *self.options]

    def as_dict(self) -> dict:
        setting = self.setting
        return {
            "options": self.options, "fits": self.fits, "parallel": self.sharing or None,
            "micro_batch": setting.rows, "accumulate": setting.accumulate * setting.world, "recompute": setting.recompute,
            "bytes_per_gpu": self.bytes, "memory": self.memory,
            "sent_bytes_per_gpu": round(sum(call.sent(setting.world) for call in self.wire)),
            "step_s": self.step_s, "seconds": self.seconds, "tokens_per_s": self.tokens_per_s, "mfu": self.mfu,
            "bottleneck": self.bottleneck,
        }  # fmt: skip


def proposals(recipe: Recipe, world: int, card: Card, network: Network, total: int) -> tuple[Proposal, list[Proposal]]:
    """(the recipe as it stands, the best cut of each kind: those that fit first, fastest first). `total`: bytes of a GPU."""
    base, limit = setting_of(recipe, world), int(total * (1 - FREE))

    def propose(setting: Setting) -> Proposal:
        return Proposal(summing(setting, int(FULL * total)), card, network, limit)

    kinds: dict[tuple, list[Proposal]] = {}
    for setting in every_way(base, limit):
        kind = setting.sharded, setting.recompute if not setting.recompute.isdecimal() else "count"
        kinds.setdefault(kind, []).append(propose(setting))
    return propose(base), ranked([ranked(kind)[0] for kind in kinds.values()])


def summing(setting: Setting, limit: int) -> Setting:
    """The setting as a run goes on with it: shards sum gradients once a step where whole ones fit within `limit` bytes."""
    once = replace(setting, once=True)
    several = setting.sharded and setting.accumulate > 1
    return once if several and sum(memory(once).values()) <= limit else setting


def ranked(found: list[Proposal]) -> list[Proposal]:
    """Those that fit first, fastest first; then the others, by how little they take.

    Among those as good as the fastest, replicas come before shards, and less memory before more.
    """
    fastest = max((p.tokens_per_s for p in found if p.fits), default=0.0)

    def standing(p: Proposal) -> tuple[int, float, float]:
        if not p.fits:
            return 2, p.bytes, 0.0
        if p.tokens_per_s >= (1 - ALIKE) * fastest:
            return 0, float(p.setting.sharded), p.bytes
        return 1, -p.tokens_per_s, 0.0

    return sorted(found, key=standing)


def every_way(base: Setting, limit: int) -> Iterator[Setting]:
    """Each micro-batch that divides a rank's rows, each way to share, each way to recompute."""
    rows = base.rows * base.accumulate
    for micro in divisors(rows):
        for shared in sharings(replace(base, rows=micro, accumulate=rows // micro)):
            for recompute in ("none", "cheap", "blocks"):
                yield replace(shared, recompute=recompute)
            some = fewest(shared, limit)
            if 0 < some.recomputed < some.config.layers:
                yield some


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def sharings(setting: Setting) -> Iterable[Setting]:
    yield replace(setting, sharded=False)
    if setting.world > 1 and not isinstance(setting.optimizer, Muon):  # which wants whole matrices
        yield replace(setting, sharded=True)


def fewest(setting: Setting, limit: int) -> Setting:
    """With as few recomputed blocks as keep it within `limit` bytes; with all of them where none do."""

    def fits(count: int) -> bool:
        return sum(memory(replace(setting, recompute=str(count))).values()) <= limit

    layers = setting.config.layers
    return replace(setting, recompute=str(min(bisect_left(range(layers + 1), True, key=fits), layers)))
