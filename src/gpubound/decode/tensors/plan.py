"""Which slice of each weight goes to which device. A pure function of sizes, so that it can be tried for devices not here.

Heads of attention and columns of the MLP are dealt out evenly, so that each device finishes its part of a sum when the others
do. The vocabulary is dealt out in the stretches of which a step finds the greatest logit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...device import label
from ...formatting import readable
from ...models.decoding import DenseWeights, LayerWeights, Shape
from ...trace import say
from ..stages.plan import lanes


@dataclass(frozen=True)
class SlicePlan:
    """What one device has of every layer, and of the head."""

    device: torch.device
    number: int
    count: int  # of slices
    words: range

    def of(self, size: int) -> slice:
        """Its stretch of so many heads, or columns."""
        each = size // self.count
        return slice(self.number * each, (self.number + 1) * each)


def plan_slices(shape: Shape, layers: Sequence[LayerWeights], devices: Sequence[torch.device], stretch: int) -> list[SlicePlan]:
    """A slice for each device; a ValueError where the model does not divide. stretch: words that stay together."""
    return dealt(shape.vocab, devices, stretch, indivisible(shape, layers, len(devices)))


def dealt(vocab: int, devices: Sequence[torch.device], stretch: int, why: str | None) -> list[SlicePlan]:
    """why: what of the model does not divide."""
    count = len(devices)
    if why is None and vocab <= stretch * (count - 1):
        why = f"its {vocab} words are fewer than {stretch} a device"
    if why is not None:
        raise ValueError(
            f"decoder: split: got 'tensors' over {count} devices, and {why}; name another number of devices, or pass "
            "split='layers'."
        )
    stretches = lanes(-(-vocab // stretch), count)
    words = [range(part.start * stretch, min(part.stop * stretch, vocab)) for part in stretches]
    return [SlicePlan(device, number, count, words[number]) for number, device in enumerate(devices)]


def fit_slice(plan: SlicePlan, needed: int, free: int, held: str, told: str) -> None:
    """Say what a slice has, if its device has room for what it takes. held: what that is of; told: the slice in words."""
    if needed > free:
        raise ValueError(
            f"decoder: devices: slice {plan.number} does not fit: its {held} take {readable(needed)}, but {readable(free)} are "
            f"free on {plan.device}; free memory there, name more devices, or ask for fewer or shorter sequences."
        )
    say(f"decoder: slice {plan.number} on {label(plan.device)}: {told}")


def indivisible(shape: Shape, layers: Sequence[LayerWeights], count: int) -> str | None:
    """Why so many devices cannot share the model; None if they can."""
    if shape.kv_heads % count:
        return f"its {shape.kv_heads} key and value heads do not divide by {count}"
    for number, (attention, mlp) in enumerate(layers):
        if type(mlp) is not DenseWeights:
            return f"layer {number} is a mixture of experts, of which none is sliced"
        if any(norm is not None and len(norm.weight) != shape.head_dim for norm in (attention.q_norm, attention.k_norm)):
            return f"layer {number} norms all heads of a row together, which lie on different devices"
        if len(mlp.gate.weight) % count:
            return f"layer {number} has {len(mlp.gate.weight)} columns in its MLP, which do not divide by {count}"
    return None
