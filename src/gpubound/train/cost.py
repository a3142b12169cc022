"""Cost of a training step: its arithmetic per token, and what low-rank adapters add to the frozen model's step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import lora, measure
from ..errors import MeasureError
from ..layers.linear_product import size_of
from ..models.registry import Sizes, put_back
from .adapters import trained_state
from .recompute import blocks_of
from .step import TrainStep

GAIN = "input_layernorm.weight"  # of the first layer
TIMED_S = 3.0  # of either step, 3 runs at least and 20 at most


@dataclass(frozen=True)
class TokenFlops:
    """Operations of a training step per token.

    The first number of each term is the operations per parameter: 2 forward, 2 for the gradient of the input, 2 for that of the
    weight. Attention costs as many a layer, over half the square (measure.train_flops_per_token), or all of it if not causal.
    """

    weights: list[tuple[int, int, str]]  # (passes, parameters, description)
    layers: list[tuple[int, int]]  # (passes, layers)
    width: int  # of a layer's attention

    def flops_per_token(self, seq: float) -> float:
        attention = sum(passes * layers for passes, layers in self.layers) * self.width * seq
        return sum(passes * parameters for passes, parameters, _ in self.weights) + attention


def flops_of(model: nn.Module, sizes: Sizes) -> TokenFlops:
    """Return the operations of training all of a model, or only its adapters: below the first of them there is no backward."""
    halves = 2 if getattr(getattr(model, "config", None), "causal", True) is False else 1  # of the square that attention fills
    if all(p.requires_grad for p in model.parameters()):
        return TokenFlops([(6, sizes.product_parameters, "parameters in products")], [(6 * halves, sizes.layers)], sizes.width)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    blocks = blocks_of(model)
    first = next((i for i, block in enumerate(blocks) if any(p.requires_grad for p in block.parameters())), len(blocks))
    below = sum(size_of(p) for block in blocks[:first] for p in block.parameters() if p.dim() > 1)
    weights = [
        (6, trained, "parameters of adapters"),
        (4, sizes.product_parameters - below, "frozen parameters in products"),
        (2, below, "below the first adapter"),
    ]
    layers = [(6 * halves, sizes.layers - first), (2 * halves, first)]
    return TokenFlops([w for w in weights if w[1]], [w for w in layers if w[1]], sizes.width)


@dataclass(frozen=True)
class Price:
    """Times of a step with adapters, and of the frozen model's forward and dX, which such a step cannot avoid."""

    step: measure.Timing
    frozen: measure.Timing

    @property
    def ratio(self) -> float:
        return self.step.median_s / self.frozen.median_s

    def __str__(self) -> str:
        step, frozen = measure.in_words(self.step.median_s), measure.in_words(self.frozen.median_s)
        return f"LoRA step = {self.ratio:.2f} x (frozen forward + dX): {step} beside {frozen}, {self.step.clock}"


def price_of(step: TrainStep, make_step: Callable[[], TrainStep], batches: Sequence[Any]) -> Price:
    """Time `step`, close it, and time the frozen model under a new step. Both are captured where the run's step was.

    Afterwards the model's weights are unchanged, and so is which of them train.
    """
    model = step.model
    with put_back(trained_state(model).values()):
        ours = _timed(step, batches)
    step.close()
    with frozen_alone(model):
        frozen = make_step()
        try:
            return Price(ours, _timed(frozen, batches))
        finally:
            frozen.close()


@contextmanager
def frozen_alone(model: nn.Module) -> Iterator[None]:
    """Disable the adapters and train only the gain of the first layer's norm: its gradient needs dX through the whole model."""
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
    return measure.time(run, warmup=0, runs=max(3, min(20, int(TIMED_S / once))), device=step.device)
