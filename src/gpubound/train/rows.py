"""A step of a model of which each rank has its rows of every parameter (parallel/sharded.py).

Flat buffers are made of these rows, so that masters, moments and the update know nothing of other ranks. Three things do:
gradients are summed as backward goes, the norm is that of all ranks' rows, and a tensor of a state is a DTensor. The rows are
fp32, and are rounded as they are gathered: they are the masters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..lora.pairs import Adapters
from ..parallel import Ranks
from ..parallel.reduction import Reduction
from ..trace import notice
from ..words import readable
from .accumulate import Accumulators
from .flat_buffers import FlatLayout, Weights
from .foreign import Foreign
from .muon import Muon
from .optimizer import AdamW
from .precision import Precision
from .replicas import begin_alike
from .shards import HoldsShards

FULL = 0.9  # of a GPU's memory: the rest is the driver's, NCCL's, and what lies between allocations


class HoldsRows(HoldsShards):
    """This rank's rows of every parameter."""

    def __init__(self, model: nn.Module):
        super().__init__(model, trains_whole=False)
        self._waits: bool | None = None  # whether sums wait for a step's last micro-batch; None: not decided yet

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
                "TrainStep: the model's low-rank adapters are sharded like its other parameters; leave them out, as "
                "gpubound.parallel.sharded.shard does, or by fully_shard(ignored_params=set(gb.lora.parameters(model)))."
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

    def accumulators(self, layout: FlatLayout, overlap: bool) -> Accumulators:
        self.take(overlap)
        return SumsOfRows(layout, self)

    def weights(self, layout: FlatLayout, masters: bool) -> Weights:
        return RowWeights(layout, self)

    def begin_alike(self) -> None:
        begin_alike(self.named_buffers(), self.ranks)

    def before_backward(self, last: bool) -> None:
        self.sharded.sum_with_backward(last or not self._waits)

    def stepped(self, micro_batches: int) -> None:
        if self._waits is None and micro_batches > 1:
            self._waits = self._room_to_wait(micro_batches)

    def _room_to_wait(self, micro_batches: int) -> bool:
        """Whether whole fp32 gradients fit beside the most that a step has held, which has summed with each micro-batch."""
        whole, taken = self.sharded.whole_gradients, memory_taken(self.pieces[0].rows.device)
        waits = self.ranks.all(taken is None or taken[0] + whole <= FULL * taken[1])
        beside = "" if taken is None else f" beside {readable(taken[0])}, of its {readable(taken[1])}"
        each, more = f"with each of {micro_batches} micro-batches", f"{readable(whole)} of them{beside}"
        notice(
            f"train: from here on gradients are summed over the ranks once a step, not {each}: until then a rank holds {more}."
            if waits
            else f"train: gradients are summed over the ranks {each}: to wait for the last one, a rank would hold {more}."
        )
        return waits

    def said(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        state = {key: self.sharded.end_to_end(t) if key.startswith("scale.") else t for key, t in state.items()}
        by_name = {piece.name: piece for piece in self.pieces}
        return {
            key: piece.whole(tensor) if (piece := by_name.get(key.partition(".")[2])) is not None else tensor
            for key, tensor in state.items()
        }

    def common(self, named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in named if name == "state"]


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
            piece.forget()
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
        self.part, self._ranks = rows.ranks.rank, rows.ranks
        self._pieces = [pieces[id(slot.parameter)] for slot in layout.slots]
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


def memory_taken(device: torch.device) -> tuple[int, int] | None:
    """The most bytes of a GPU that this process has held, and those that it has."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
