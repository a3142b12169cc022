"""Exponential moving average of the weights, for validation and export."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..models.registry import put_back
from .checkpoint import joined
from .step import TrainStep


class Ema:
    """An exponential moving average of the weights, by parameter name, taken at each `update()` without a host sync.

    It reads the fp32 masters of 16-bit weights, and other weights themselves, from the step's flat buffers. A step that moved
    no weight (not finite, or without items) leaves the average unchanged: the device compares its count of updates t with
    the last one. The decay rises as (1 + t) / (10 + t), or the first random weights would stay in a short run's average.
    """

    def __init__(self, step: TrainStep, decay: float):
        self.decay, self._step = decay, step
        self._updates = step.updates  # a scalar on the device that each step writes
        self._included = self._updates.clone()
        self._weights = [weight for weight, _ in step.weights.values()]
        self._flat = [torch.zeros_like(flat, dtype=torch.float32) for flat in step.flat_weights.flat]
        step.flat_weights.add_to(self._flat, torch.ones_like(self._updates, dtype=torch.float32))
        groups = zip(step.flat_weights.layout.groups, self._flat)
        self.average = {
            slot.name: slot.view(flat, group.start)
            for group, flat in groups
            for slot in step.flat_weights.layout.slots_of(group)
        }

    @torch.no_grad()
    def update(self) -> None:
        decay = ((1 + self._updates) / (10 + self._updates)).clamp(max=self.decay)
        weight = torch.where(self._updates > self._included, 1 - decay, 0.0).float()
        self._step.flat_weights.add_to(self._flat, weight)
        self._included.copy_(self._updates)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the weights to the average while inside."""
        with put_back(self._weights):
            self.settle()
            yield

    def settle(self) -> None:
        """Set the weights to the average permanently."""
        torch._foreach_copy_(self._weights, list(self.average.values()))

    def state(self) -> dict[str, Tensor]:
        """Return the live average as a checkpoint stores it."""
        state = self._step.global_state(joined(average=self.average))
        return {name: state[f"average.{name}"] for name in self.average}

    def load(self, average: dict[str, Tensor]) -> None:
        """Continue from a state that `state()` gave, after the step's own state has been loaded."""
        self._included.copy_(self._updates)
        for name, tensor in self.state().items():
            tensor.copy_(average[name])
