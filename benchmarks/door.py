"""One op as a benchmark case: its inputs, what computes it, and the runs that are timed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gpubound.measure import Prepared


@dataclass
class Drawer:
    """Random tensors of one case: unit normal, the same in every run."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    seq: int
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        self.seed += 1
        generator = torch.Generator(self.device).manual_seed(self.seed)
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return drawn.mul_(scale).requires_grad_()

    def labels(self, vocab: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        labels = torch.randint(vocab, (self.tokens,), generator=generator, device=self.device)
        labels[::7] = -100  # as padding and prompts are masked
        return labels


@dataclass
class Door:
    """One op on one set of inputs. `ours`, `eager`, `liger` and `others` take the inputs in order and return the same outputs.

    Liger writes results over its inputs and over upstream gradients in several ops, so every run starts from fresh copies, made
    off the clock.
    """

    inputs: list[Tensor]
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    liger: Callable[..., Any] | None = None
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Of libraries beside Liger, by the peer's name."""
    saved_bytes: int = 0
    """What the backward cannot do without from the forward, besides the upstream gradients."""
    gradient_bytes: int | None = None
    """Distinct gradients written; None: one of each leaf's size."""
    whole: bool = False
    """Forward and backward are measured as one."""
    without_liger: str = ""
    """Why Liger's op of that name is no peer."""
    pristine: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.pristine = [t.detach().clone() for t in self.inputs]
        self.leaves = [t for t in self.inputs if t.requires_grad]

    @property
    def output_bytes(self) -> int:
        return sum(t.nbytes for t in self.upstream)

    @cached_property
    def upstream(self) -> list[Tensor]:
        generator = torch.Generator(self.inputs[0].device).manual_seed(1)
        with torch.no_grad():
            return [
                torch.randn(t.shape, generator=generator, device=t.device, dtype=t.dtype)
                for t in _tuple(self.eager(*self.fresh()))
            ]

    @property
    def forward_bytes(self) -> int:
        return sum(t.nbytes for t in self.inputs) + self.output_bytes

    @property
    def backward_bytes(self) -> int:
        written = sum(t.nbytes for t in self.leaves) if self.gradient_bytes is None else self.gradient_bytes
        return self.output_bytes + self.saved_bytes + written

    @property
    def both_bytes(self) -> int:
        """Every input read once, every gradient written once: the forward's own result is a scalar."""
        return sum(t.nbytes for t in self.inputs) + sum(t.nbytes for t in self.leaves)

    def fresh(self) -> list[Tensor]:
        with torch.no_grad():
            for tensor, original in zip(self.inputs, self.pristine):
                tensor.copy_(original)
        return self.inputs

    def forward(self, function: Callable[..., Any]) -> Prepared:
        """With autograd on, as in training: what a forward saves for its backward belongs to its cost."""
        return Prepared(self.fresh, lambda inputs: function(*inputs))

    def backward(self, function: Callable[..., Any]) -> Prepared:
        """The gradient call alone, on a graph built off the clock."""

        def prepare() -> tuple:
            upstream = [t.clone() for t in self.upstream]  # before the graph is built: drawing it writes the inputs afresh
            return _tuple(function(*self.fresh())), upstream

        return Prepared(prepare, lambda state: torch.autograd.grad(state[0], self.leaves, state[1]))

    def both(self, function: Callable[..., Any]) -> Prepared:
        def run(inputs: list[Tensor]) -> tuple[Tensor, ...]:
            loss = function(*inputs)
            return loss, *torch.autograd.grad(loss, self.leaves)

        return Prepared(self.fresh, run)


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
