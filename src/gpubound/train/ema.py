"""An exponential moving average of the weights: one or two launches a step, behind it on the device, no host sync.

It reads the finest weights that there are, the fp32 masters of 16-bit ones, where they lie; so it works behind a captured step
as it does behind an eager one. The decay rises as (1 + t) / (10 + t) towards its full value, or the first random weights would
stay in a short run's average.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .step import TrainStep


class Average:
    """The average, by parameter name. `update()` after each step; inside `applied()` the model has it as its weights."""

    def __init__(self, model: nn.Module, step: TrainStep, decay: float):
        if not 0 < decay < 1:
            raise ValueError(f"Average: decay must lie between 0 and 1, got {decay}; 0.999 averages about 1,000 steps.")
        state = step.state_dict()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.decay, self.updates = decay, 0
        self._weights = [p.detach() for p in named.values()]
        self._finest = [state.get(f"master.{name}", p.detach()) for name, p in named.items()]
        self.average = {name: w.float().clone() for name, w in zip(named, self._finest)}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        now = [w if w.dtype == torch.float32 else w.float() for w in self._finest]
        torch._foreach_lerp_(list(self.average.values()), now, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        kept = [w.clone() for w in self._weights]
        self.settle()
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, kept)

    def settle(self) -> None:
        """Make the average the weights, for good."""
        torch._foreach_copy_(self._weights, list(self.average.values()))

    def load(self, average: dict[str, Tensor], updates: int) -> None:
        self.updates = updates
        for name, tensor in self.average.items():
            tensor.copy_(average[name])
