"""What adapters cost: a step of theirs beside what no such step can leave out, the frozen model's forward and dX.

Both are whole steps of TrainStep on one micro-batch, captured where the run's were. The frozen one trains the gain of the first
norm alone: its gradient needs dX through the whole model, and costs next to nothing itself.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import lora, measure
from ..errors import MeasureError
from ..models.placing import put_back
from .adapters import kept_state
from .step import TrainStep

GAIN = "input_layernorm.weight"  # of the first layer
ENOUGH_S = 3.0  # of either step, 3 runs at least and 20 at most


@dataclass(frozen=True)
class Price:
    step: measure.Timing
    frozen: measure.Timing

    @property
    def ratio(self) -> float:
        return self.step.median_s / self.frozen.median_s

    def __str__(self) -> str:
        step, frozen = measure.in_words(self.step.median_s), measure.in_words(self.frozen.median_s)
        return f"LoRA step = {self.ratio:.2f} x (frozen forward + dX): {step} beside {frozen}, {self.step.clock}"


def price_of(step: TrainStep, again: Callable[[], TrainStep], batches: Sequence[Any]) -> Price:
    """Times `step`, closes it, and times the frozen model under `again()`, a step made as `step` was.

    The model's weights, and which of them train, are as before then.
    """
    model = step.model
    with put_back(kept_state(model).values()):
        ours = _timed(step, batches)
    step.close()
    with frozen_alone(model):
        alone = again()
        try:
            return Price(ours, _timed(alone, batches))
        finally:
            alone.close()


@contextmanager
def frozen_alone(model: nn.Module) -> Iterator[None]:
    """Inside, adapters are off, and the gain of the first layer's norm is all that trains."""
    named = dict(model.named_parameters())
    gain = next((p for name, p in named.items() if name.endswith(GAIN)), None)
    if gain is None:
        raise MeasureError(f"the frozen step trains the gain of the first layer's norm, and no parameter ends in {GAIN}.")
    trained = [p for p in named.values() if p.requires_grad]
    with put_back([gain]), lora.disable(model):
        model.requires_grad_(False)
        gain.requires_grad_(True)
        try:
            yield
        finally:
            gain.requires_grad_(False)
            for parameter in trained:
                parameter.requires_grad_(True)


def _timed(step: TrainStep, batches: Sequence[Any]) -> measure.Timing:
    def run() -> None:
        step(list(batches))

    once = measure.time(run, warmup=2, runs=1, device=step.device).median_s
    return measure.time(run, warmup=0, runs=max(3, min(20, int(ENOUGH_S / once))), device=step.device)
