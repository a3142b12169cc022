"""Which layers go to which device. A pure function of sizes, so that it can be tried for devices that are not here.

Stages are layers in a row: a token changes device once a stage, where layers dealt out in turn would change it at every layer.
The first device also has the embedding, the norm and the head, so the stream comes back to it, tokens are chosen where they
are embedded, and a head that is the embedding's own weight stays one tensor.

While lanes go round, every stage works on one of them, and the slowest sets the pace. A step is bound by what it reads, so the
plan makes the most that a device reads as little as can be, among the plans that fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from ...formatting import readable


@dataclass(frozen=True)
class LayerStage:
    """Layers in a row on one device."""

    device: torch.device
    layers: range


class DeviceRoom(NamedTuple):
    """A device and what it has for its stage: memory that is free, or taken by this model."""

    device: torch.device
    free: int


@dataclass(frozen=True)
class StageBytes:
    """In bytes."""

    weights: Sequence[int]  # of each layer
    kept: Sequence[int]  # by each layer: keys and values of all rows
    ends: int  # of the embedding, the final norm and the head
    read: int  # of them, what a step reads: all but the embedding
    scratch: int = 0  # on each device, beside weights and what layers keep
    first: int = 0  # on the first device alone: logits

    def held(self, layers: range, first: bool) -> int:
        """What a stage takes of its device."""
        return sum(self.weights[n] + self.kept[n] for n in layers) + self.scratch + first * (self.ends + self.first)


def plan(sizes: StageBytes, rooms: Sequence[DeviceRoom]) -> list[LayerStage]:
    """A stage for each room, in their order; a ValueError where no plan fits."""
    count, stages = len(sizes.weights), len(rooms)
    if stages > count:
        raise ValueError(
            f"decoder: devices: got {stages} devices for {count} layers, and each needs one at least; name fewer devices."
        )
    before = [0, *accumulate(sizes.weights)]
    # best[end]: of plans for the layers up to `end` on the devices so far, the one whose busiest device reads least.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for number, room in enumerate(rooms):
        found: dict[int, tuple[int, list[int]]] = {}
        for end in range(number + 1, count - (stages - number - 1) + 1):
            for start, (most, ends) in best.items():
                if start >= end or sizes.held(range(start, end), number == 0) > room.free:
                    continue
                reads = before[end] - before[start] + (sizes.read if number == 0 else 0)
                if end not in found or max(most, reads) < found[end][0]:
                    found[end] = max(most, reads), [*ends, end]
        best = found
    if count not in best:
        raise ValueError(_misfit(sizes, rooms))
    ends = best[count][1]
    return [LayerStage(room.device, range(start, end)) for room, start, end in zip(rooms, [0, *ends], ends)]


def _misfit(sizes: StageBytes, rooms: Sequence[DeviceRoom]) -> str:
    """Which stage does not fit: the first whose device has no room even for one layer, or all of them together."""
    layer = min(range(len(sizes.weights)), key=lambda n: sizes.weights[n] + sizes.kept[n])
    for number, room in enumerate(rooms):
        least = sizes.held(range(layer, layer + 1), number == 0)
        if least > room.free:
            what = "the embedding, the head and one layer" if number == 0 else "one layer"
            return (
                f"decoder: devices: stage {number} does not fit: {what} take {readable(least)}, but {readable(room.free)} are "
                f"free on {room.device}; free memory there, name another device, or ask for fewer or shorter sequences."
            )
    needed = sizes.held(range(len(sizes.weights)), True) + (len(rooms) - 1) * sizes.scratch
    free = ", ".join(f"{readable(room.free)} on {room.device}" for room in rooms)
    return (
        f"decoder: devices: the model does not fit: its weights, keys, values and logits take {readable(needed)}, but there "
        f"are {free}, and a layer lies whole on one device; name more devices, or ask for fewer or shorter sequences."
    )


def described(layers: range, weights: int, kept: int) -> str:
    """A stage in words."""
    what = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
    return f"{what}: {readable(weights)} of weights, {readable(kept)} of keys and values"


def lanes(rows: int, count: int) -> list[range]:
    """`rows` rows in up to `count` lanes as equal as can be, the larger ones first.

    >>> lanes(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    count = min(rows, count)
    ends = list(accumulate(rows // count + (lane < rows % count) for lane in range(count)))
    return [range(start, end) for start, end in zip([0, *ends], ends)]
