"""An average of the weights, for validation and for export."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..models.placing import put_back
from .checkpoint import joined
from .step import TrainStep


class Average:
    """An exponential moving average of the weights, by parameter name, taken at each `update()`: a launch or two, no host sync.

    It reads the finest weights that there are, the fp32 masters of 16-bit ones, where they lie: captured steps write there,
    too. The decay rises as (1 + t) / (10 + t), or the first random weights would stay in a short run's average.
    """

    def __init__(self, step: TrainStep, decay: float):
        self.decay, self.updates, self._step = decay, 0, step
        named = step.weights
        self._weights, self._finest = map(list, zip(*named.values()))
        self.average = {name: finest.float().clone() for name, (_, finest) in named.items()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        now = [w if w.dtype == torch.float32 else w.float() for w in self._finest]
        torch._foreach_lerp_(list(self.average.values()), now, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the average is the weights."""
        with put_back(self._weights):
            self.settle()
            yield

    def settle(self) -> None:
        """Make the average the weights, for good."""
        torch._foreach_copy_(self._weights, list(self.average.values()))

    def state(self) -> dict[str, Tensor]:
        """The average as a checkpoint has it, where it lies."""
        said = self._step.said(joined(average=self.average))
        return {name: said[f"average.{name}"] for name in self.average}

    def load(self, average: dict[str, Tensor], updates: int) -> None:
        self.updates = updates
        for name, tensor in self.state().items():
            tensor.copy_(average[name])
