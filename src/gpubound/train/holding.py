"""What of a model this process holds, and what a step does otherwise where that is not all of it.

HoldsAll: every rank has all weights, and gradients are summed behind backward. HoldsRows: each has its rows of every parameter
(parallel/sharded.py). Flat buffers are then made of these rows, so that masters, moments and the update know nothing of other
ranks. Three things do: gradients are summed as backward goes, the norm is that of all ranks' rows, and a tensor of a state is a
DTensor. The rows are fp32, and are rounded as they are gathered: they are the masters.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..errors import GraphError
from ..kernels.aside import Side
from ..layers.vocabulary import head_of
from ..lora.pairs import Adapters
from ..parallel import Ranks
from ..parallel.peers import peer_sums
from ..parallel.pieces import any_sharded
from ..parallel.reduction import Reduction
from ..trace import fallback, notice
from .accumulate import Accumulators
from .flat_buffers import FlatLayout, Weights
from .foreign import Foreign
from .optimizer import AdamW, Muon
from .precision import Precision
from .replicas import begin_alike

Loss = tuple[Tensor, Tensor | int]
Result = TypeVar("Result")


class HoldsAll:
    """All of it."""

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
        begin_alike(self.model, self.ranks)

    def rest(self) -> None:
        """Before the model's parameters are looked at."""

    def loss(self, lossy: Callable[[], Loss]) -> Loss:
        """lossy(), which asks the model for a loss: (sum, number)."""
        return lossy()

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


class HoldsRows(HoldsAll):
    """This rank's rows of every parameter."""

    def __init__(self, model: nn.Module):
        from ..parallel.sharded import DealtModel  # a second's import, for those who shard

        self.sharded = DealtModel(model)
        self.pieces = self.sharded.pieces
        super().__init__(model, self.sharded.ranks)

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        return [(piece.name, piece.rows) for piece in self.pieces]

    def kept(self, numbers: Precision) -> Precision:
        if numbers.fp8 or numbers.at_random:
            name = "fp8" if numbers.fp8 else "bf16-pure"
            raise ValueError(
                f"TrainStep: precision={name!r} needs whole weights on each rank, and this model is sharded; take "
                f"precision='bf16', or train replicas."
            )
        if any(isinstance(module, Adapters) for module in self.model.modules()):
            raise ValueError(
                "TrainStep: the model has low-rank adapters, which add to products of the parameters that sharding replaced; "
                "train it on replicas, or merge them before fully_shard."
            )
        for piece in self.pieces:
            if not piece.rows.requires_grad:
                continue
            got = f"computes in {piece.dtype}, sums gradients in {piece.reduced} and keeps {piece.rows.dtype}"
            wanted = f"computes in {numbers.dtype}, sums gradients in torch.float32 and keeps torch.float32"
            if got != wanted:
                raise ValueError(
                    f"parameters: fully_shard of {piece.name} {got}; this precision {wanted}: shard an fp32 model with "
                    f"MixedPrecisionPolicy(param_dtype={numbers.dtype}, reduce_dtype=torch.float32)."
                )
        return replace(numbers, dtype=torch.float32, masters=False)

    def check_optimizer(self, config: AdamW | Muon | Foreign) -> None:
        if config.whole:
            raise ValueError(
                f"TrainStep: {config.whole}, and this model is sharded: a rank has some rows; take AdamW, or train replicas."
            )
        if isinstance(config, Foreign):
            notice("train: the optimizer is given this rank's rows: right for one that updates each element by itself.")

    def graph(self, mode: str) -> str:
        why = "the model is sharded, and its gathering of weights is not captured"
        if mode == "require":
            raise GraphError(f"TrainStep: {why}; take graph='auto', which runs it call by call.")
        if mode == "auto" and self.pieces[0].rows.device.type == "cuda":
            fallback("train step as one graph", why)
        return "off"

    def accumulators(self, layout: FlatLayout, overlap: bool) -> Accumulators:
        if overlap:
            raise ValueError(
                "TrainStep: overlap=True delivers weight gradients past autograd, which deals those of a sharded model to the "
                "ranks; leave it out."
            )
        self.sharded.take()
        return SumsOfRows(layout, self)

    def weights(self, layout: FlatLayout, masters: bool) -> Weights:
        return RowWeights(layout, self)

    @torch.no_grad()
    def begin_alike(self) -> None:
        for _, tensor in self.named_buffers():
            self.ranks.spread(tensor)

    def rest(self) -> None:
        self.sharded.rest()

    def loss(self, lossy: Callable[[], Loss]) -> Loss:
        def apart() -> Loss:
            total, items = lossy()
            return total.clone(), items  # FSDP hangs a hook on it, which a view may lose

        return self.sharded.within(apart)

    def within(self, work: Callable[[], Result]) -> Result:
        try:
            return self.sharded.within(work)
        finally:
            self.rest()

    def said(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        state = {key: self.sharded.end_to_end(t) if key.startswith("scale.") else t for key, t in state.items()}
        by_name = {piece.name: piece for piece in self.pieces}
        return {
            key: piece.whole(tensor) if (piece := by_name.get(key.partition(".")[2])) is not None else tensor
            for key, tensor in state.items()
        }

    def common(self, named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in named if name == "state"]

    def release(self) -> None:
        self.sharded.release()


def holding(model: Any, ranks: Ranks) -> HoldsAll:
    """What of `model` this process holds."""
    dealt = any_sharded(model.parameters())
    return HoldsRows(model) if dealt else HoldsAll(model, ranks)


class SumsOfRows(Accumulators):
    """The same sums where FSDP adds: each micro-batch's gradients are added up over the ranks as backward makes them."""

    def __init__(self, layout: FlatLayout, rows: HoldsRows):
        self.layout, self.side, self.opened = layout, None, False
        self.gradient = torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
        pieces = {id(piece.rows): piece for piece in rows.pieces}
        self._homes = [(pieces[id(slot.parameter)], slot.view(self.gradient)) for slot in layout.slots]

    def zero(self) -> None:
        self.gradient.zero_()
        for piece, home in self._homes:
            piece.add_gradients_to(home)

    begin = zero

    def finish(self) -> None:
        """Everything has been added."""

    def reduction(self, ranks: Ranks, sums: Sequence[Tensor], largest: Sequence[Tensor]) -> Reduction:
        """`gradient` is the ranks' sum already."""
        return Reduction(ranks, self.gradient[:0], [], [], (), self.settle, lambda work: work(), sums, largest)

    def release(self) -> None:
        for piece, _ in self._homes:
            piece.parameter.grad = None


class RowWeights(Weights):
    """This rank's rows moved into flat buffers."""

    def __init__(self, layout: FlatLayout, rows: HoldsRows):
        super().__init__(layout, masters=False)
        pieces = {id(piece.rows): piece for piece in rows.pieces}
        self._ranks, self._pieces = rows.ranks, [pieces[id(slot.parameter)] for slot in layout.slots]
        for piece in self._pieces:
            piece.settle()

    def check(self) -> None:
        for piece in self._pieces:
            if not piece.settled():
                raise ValueError(
                    f"parameters: {piece.name} no longer lies in the flat buffer it was moved to (a .to() or "
                    f"load_state_dict(assign=True) since?); copy new values into it in place, or make a new TrainStep."
                )

    def of_norm(self, gradient: Tensor) -> Tensor:
        """One number: the norm of all ranks' rows."""
        squares = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        self._ranks.sum(squares)
        return squares.sqrt().float().reshape(1)
