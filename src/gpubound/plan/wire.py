"""What the ranks send each other in a step, and how long that takes.

A ring over w ranks sends (w - 1) / w of a tensor from each of them to gather or to scatter it, and twice that to sum it.
"""

import math
from dataclasses import dataclass
from functools import singledispatch

from .cards import Network
from .setting import Setting

FP32 = 4
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}


@dataclass(frozen=True)
class Collective:
    """One call that all ranks make together, `times` a step, on a tensor of `bytes` when it is whole."""

    what: str
    kind: str
    bytes: int
    times: int

    def sent(self, world: int) -> float:
        """Bytes that each rank sends in a step."""
        return PASSES[self.kind] * (world - 1) / world * self.bytes * self.times

    def seconds(self, world: int, network: Network) -> float:
        """Of a step. Sums go up and down trees where that is shorter; gathering has rings alone."""
        steps = world - 1 if self.kind != "all-reduce" else min(2 * (world - 1), 2 * math.ceil(math.log2(world)))
        return self.sent(world) / network.rate(world) + self.times * steps * network.step_us * 1e-6


@singledispatch
def collectives(setting: Setting) -> list[Collective]:
    """All of a step's that carry weights or gradients."""
    if setting.world == 1:
        return []
    outline, accumulate = setting.outline, setting.accumulate
    if not setting.sharded:
        return [Collective("gradient", "all-reduce", FP32 * setting.trained, 1)]
    s, layers, sums = setting.numbers.dtype.itemsize, setting.config.layers, 1 if setting.once else accumulate
    return [
        Collective("weights of a block, forward and backward", "all-gather", s * outline.in_block, 2 * layers * accumulate),
        Collective("other weights", "all-gather", s * outline.outside, accumulate),
        Collective("gradient of a block", "reduce-scatter", FP32 * outline.in_block, layers * sums),
        Collective("other gradients", "reduce-scatter", FP32 * outline.outside, sums),
    ]
