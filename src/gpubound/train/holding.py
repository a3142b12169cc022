"""What of a model this process holds, and what a step does otherwise where that is not all of it.

HoldsAll: every rank has all weights, and gradients are summed behind backward. HoldsRows: each has its rows of every parameter
(rows.py). HoldsFrozenRows: each has all that trains, and its rows of what is frozen (frozen_rows.py).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import Parameter

from ..kernels.side_stream import Side
from ..layers.embedding_and_head import head_of
from ..parallel import Ranks
from ..parallel.peers import peer_sums
from .accumulate import Accumulators
from .flat_buffers import FlatLayout, Weights
from .foreign import Foreign
from .muon import Muon
from .optimizer import AdamW
from .precision import Precision
from .replicas import begin_alike

Loss = tuple[Tensor, Tensor | int]
Result = TypeVar("Result")


class HoldsAll:
    """All of it."""

    gathers = False
    """Whether ranks wait for each other in each forward, too."""

    def __init__(self, model: nn.Module, ranks: Ranks):
        self.model, self.ranks = model, ranks

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        """What is laid out."""
        return self.model.named_parameters()

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        return self.model.named_buffers()

    def get_output_embeddings(self) -> Any:
        """The model's head, where it says which that is: Muon leaves it to AdamW."""
        return head_of(self.model)

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()

    waits_at_the_end = True
    """Whether a step waits for other ranks at its end alone, where the device notes it."""

    def kept(self, numbers: Precision) -> Precision:
        """What the flat buffers are kept in."""
        return numbers

    def check_optimizer(self, config: AdamW | Muon | Foreign) -> None:
        """ValueError where it needs more than this."""

    def graph(self, mode: str) -> str:
        return mode

    def accumulators(self, layout: FlatLayout, overlap: bool) -> Accumulators:
        side = Side(layout.device) if overlap and layout.device.type == "cuda" else None
        return Accumulators(layout, side, peer_sums(self.ranks, layout.size))

    def weights(self, layout: FlatLayout, masters: bool) -> Weights:
        return Weights(layout, masters)

    def begin_alike(self) -> None:
        begin_alike([*self.named_parameters(), *self.named_buffers()], self.ranks)

    def rest(self) -> None:
        """Before the model's parameters are looked at."""

    def loss(self, lossy: Callable[[], Loss]) -> Loss:
        """lossy(), which asks the model for a loss: (sum, number)."""
        return lossy()

    def before_backward(self, last: bool) -> None:
        """A micro-batch's backward is next, `last` of its step."""

    def stepped(self, micro_batches: int) -> None:
        """A step of so many has been launched."""

    def within(self, work: Callable[[], Result]) -> Result:
        """work(), which asks the model for anything else, outside of a step."""
        return work()

    def said(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a state as others see them."""
        return state

    def common(self, named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Of these tensors, those that should be the same on every rank."""
        return named

    def release(self) -> None:
        """Leave the model as it was."""
