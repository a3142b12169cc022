"""Sharding of a model during training: replicated, or shards that FSDP gathers for each block (distributed/fsdp.py).

Replicated: every rank has all weights, and gradients are summed after backward. FullySharded: each rank has its rows of every
parameter, in fp32: they are the masters, and are rounded as they are gathered. Flat buffers hold these rows, so that moments
and the update are the same code; gradients are reduced as backward computes them, the norm is that of all ranks' rows, and a
tensor of a state is a DTensor. FrozenBaseSharded: each rank has all that trains (low-rank adapters), which is summed and
updated as weights of replicas are, and its rows of the frozen base, which has no gradient.

Replicas begin with the first rank's weights. A step's sums have the same bits on every rank, and the update depends on nothing
else, so the weights stay equal without being sent again; `check_replicas_equal` verifies it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..device import total_bytes
from ..distributed import Ranks
from ..distributed.all_reduce import Reduction, symmetric_sums
from ..distributed.local_shard import any_sharded, is_sharded
from ..errors import GraphError, RankError
from ..formatting import readable
from ..kernels.accumulate import Side
from ..layers.linear_product import format_of
from ..lora.layers import of_peft
from ..trace import fallback, notice
from .accumulate import Accumulators, FlatLayout
from .adamw import AdamW, Muon, Weights
from .offload import StateMemory
from .precision import Precision
from .torch_optimizer import TorchOptimizer

FULL = 0.9  # of a GPU's memory: the rest is for the driver, NCCL and fragmentation
Loss = tuple[Tensor, Tensor | int]
Result = TypeVar("Result")


class Replicated:
    """Every rank has the whole model."""

    def __init__(self, model: nn.Module, ranks: Ranks):
        self.model, self.ranks = model, ranks

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        """Return the parameters that the flat layout holds."""
        return self.model.named_parameters()

    def storage_precision(self, precision: Precision) -> Precision:
        """Return the precision that the flat buffers are stored in."""
        return precision

    def check_optimizer(self, config: AdamW | Muon | TorchOptimizer) -> None:
        """Raise ValueError where the optimizer needs tensors that this rank does not have."""

    def graph(self, mode: str) -> str:
        return mode

    def accumulators(self, layout: FlatLayout, overlap: bool) -> Accumulators:
        side = Side(layout.device) if overlap and layout.device.type == "cuda" else None
        return Accumulators(layout, side, symmetric_sums(self.ranks, layout.size))

    def weights(self, layout: FlatLayout, masters: torch.dtype | None, memory: StateMemory | None = None) -> Weights:
        return Weights(layout, masters, memory)

    def broadcast_start(self) -> None:
        broadcast_start([*self.named_parameters(), *self.model.named_buffers()], self.ranks)

    def global_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a state with their global shapes: shards as DTensors."""
        return state

    def replicated_tensors(self, named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return those of these tensors that must be the same on every rank."""
        return named

    def release(self) -> None:
        """Remove what was changed about the model."""


class Sharded(Replicated):
    """FSDP gathers a block's weights just before they are used, so ranks wait for each other in each forward, too."""

    def __init__(self, model: nn.Module, trains_whole: bool):
        from ..distributed.fsdp import ShardedModel  # a second's import, for those who shard

        self.sharded = ShardedModel(model, trains_whole)
        self.pieces = self.sharded.pieces
        super().__init__(model, self.sharded.ranks)

    def graph(self, mode: str) -> str:
        return uncaptured(mode, "the model is sharded, and its gathering of weights is not captured", self.ranks)

    def take(self, overlap: bool) -> None:
        """Take the gradients over from FSDP."""
        if overlap:
            raise ValueError(
                "TrainStep: overlap=True is for models too small to fill a GPU, and this one is sharded; leave it out."
            )
        self.sharded.take()

    def rest(self) -> None:
        """Free gathered weights, before the model's parameters are read."""
        self.sharded.rest()

    def loss(self, loss_fn: Callable[[], Loss]) -> Loss:
        """Return loss_fn(), which runs the model's forward: (sum of the losses, number of items)."""

        def cloned_loss() -> Loss:
            total, items = loss_fn()
            return total.clone(), items  # FSDP registers a hook on it, which a view may lose

        return self.sharded.within(cloned_loss)

    def before_backward(self, last: bool) -> None:
        """Prepare a backward; `last`: it is the last of its step."""

    def of_norm(self, gradient: Tensor) -> Tensor:
        """Return a tensor with the norm of the whole gradient, of which `gradient` is what this rank updates."""
        return gradient

    def stepped(self, micro_batches: int) -> None:
        """Follow a step of this many micro-batches that has been launched."""

    def with_weights(self, work: Callable[[], Result]) -> Result:
        """Return work(), which runs the model or reads its weights outside of a step."""
        try:
            return self.sharded.within(work)
        finally:
            self.rest()

    def release(self) -> None:
        self.sharded.release()


class FullySharded(Sharded):
    """Each rank has its rows of every parameter."""

    def __init__(self, model: nn.Module):
        super().__init__(model, trains_whole=False)
        self._waits: bool | None = None  # whether sums wait for a step's last micro-batch; None: not decided yet

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        return [(piece.name, piece.rows) for piece in self.pieces]

    def storage_precision(self, precision: Precision) -> Precision:
        if precision.fp8 or precision.at_random or precision.split:
            name = "fp8" if precision.fp8 else "bf16-pure" if precision.at_random else "bf16-split"
            raise ValueError(
                f"TrainStep: precision={name!r} needs whole weights on each rank, and this model is sharded; take "
                f"precision='bf16', or train replicas."
            )
        if any(map(of_peft, self.model.modules())):
            raise ValueError(
                "TrainStep: the model's low-rank adapters are sharded like its other parameters; leave them out, as "
                "gpubound.distributed.fsdp.shard does, or by fully_shard(ignored_params=set(gb.lora.parameters(model)))."
            )
        for piece in self.pieces:
            if not piece.rows.requires_grad:
                continue
            got = f"computes in {piece.dtype}, sums gradients in {piece.reduced} and keeps {piece.rows.dtype}"
            wanted = f"computes in {precision.dtype}, sums gradients in torch.float32 and keeps torch.float32"
            if got != wanted:
                raise ValueError(
                    f"parameters: fully_shard of {piece.name} {got}; this precision {wanted}: shard an fp32 model with "
                    f"MixedPrecisionPolicy(param_dtype={precision.dtype}, reduce_dtype=torch.float32)."
                )
        return replace(precision, dtype=torch.float32, masters=None)

    def check_optimizer(self, config: AdamW | Muon | TorchOptimizer) -> None:
        if config.whole:
            raise ValueError(
                f"TrainStep: {config.whole}, and this model is sharded: a rank has some rows; take AdamW, or train replicas."
            )
        if isinstance(config, TorchOptimizer):
            notice("train: the optimizer is given this rank's rows: right for one that updates each element by itself.")

    def accumulators(self, layout: FlatLayout, overlap: bool) -> Accumulators:
        self.take(overlap)
        return ShardedGradients(layout, self)

    def weights(self, layout: FlatLayout, masters: torch.dtype | None, memory: StateMemory | None = None) -> Weights:
        return ShardedWeights(layout, self)

    def broadcast_start(self) -> None:
        broadcast_start(self.model.named_buffers(), self.ranks)

    def before_backward(self, last: bool) -> None:
        self.sharded.sum_with_backward(last or not self._waits)

    def of_norm(self, gradient: Tensor) -> Tensor:
        squares = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        self.ranks.sum(squares)
        return squares.sqrt().float().reshape(1)

    def stepped(self, micro_batches: int) -> None:
        if self._waits is None and micro_batches > 1:
            self._waits = self._room_to_wait(micro_batches)

    def _room_to_wait(self, micro_batches: int) -> bool:
        """Return whether full fp32 gradients fit next to the peak of a step, which has summed them with each micro-batch."""
        needed, memory = self.sharded.whole_gradients, memory_used(self.pieces[0].rows.device)
        waits = self.ranks.all(memory is None or memory[0] + needed <= FULL * memory[1])
        besides = "" if memory is None else f" beside {readable(memory[0])}, of its {readable(memory[1])}"
        each, more = f"with each of {micro_batches} micro-batches", f"{readable(needed)} of them{besides}"
        notice(
            f"train: from here on gradients are summed over the ranks once a step, not {each}: until then a rank holds {more}."
            if waits
            else f"train: gradients are summed over the ranks {each}: to wait for the last one, a rank would hold {more}."
        )
        return waits

    def global_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        state = {key: self.sharded.end_to_end(t) if key.startswith("scale.") else t for key, t in state.items()}
        by_name = {piece.name: piece for piece in self.pieces}
        return {
            key: piece.whole(tensor) if (piece := by_name.get(key.partition(".")[2])) is not None else tensor
            for key, tensor in state.items()
        }

    def replicated_tensors(self, named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in named if name == "state"]


class ShardedGradients(Accumulators):
    """The sums of each rank's rows: FSDP reduces each micro-batch's gradients over the ranks as backward computes them."""

    def __init__(self, layout: FlatLayout, rows: FullySharded):
        self.layout, self.side, self.opened = layout, None, False
        self.gradient = torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
        pieces = {id(piece.rows): piece for piece in rows.pieces}
        self._views = [(pieces[id(slot.parameter)], slot.view(self.gradient)) for slot in layout.slots]

    def zero(self) -> None:
        self.gradient.zero_()
        for piece, view in self._views:
            piece.forget()
            piece.add_gradients_to(view)

    begin = zero

    def finish(self) -> None:
        """Do nothing: backward has added everything."""

    def reduction(self, ranks: Ranks, sums: Sequence[Tensor], largest: Sequence[Tensor]) -> Reduction:
        """Return a reduction of `sums` and `largest` alone: `gradient` is reduced already."""
        return Reduction(ranks, self.gradient[:0], [], [], (), self.settle, lambda work: work(), sums, largest)

    def release(self) -> None:
        for piece, _ in self._views:
            piece.parameter.grad = None


class ShardedWeights(Weights):
    """The rows of this rank, moved into flat buffers."""

    def __init__(self, layout: FlatLayout, rows: FullySharded):
        super().__init__(layout, masters=None)
        pieces = {id(piece.rows): piece for piece in rows.pieces}
        self.part = rows.ranks.rank
        self._pieces = [pieces[id(slot.parameter)] for slot in layout.slots]
        for piece in self._pieces:
            piece.settle()

    def check(self) -> None:
        for piece in self._pieces:
            if not piece.settled():
                raise ValueError(
                    f"parameters: {piece.name} is no longer in the flat buffer it was moved to (a .to() or "
                    f"load_state_dict(assign=True) since?); copy new values into it in place, or make a new TrainStep."
                )


def memory_used(device: torch.device) -> tuple[int, int] | None:
    """Return (peak bytes that this process allocated on a GPU, bytes of its memory); None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device), total_bytes(device)


class FrozenBaseSharded(Sharded):
    """Each rank has all that trains, and its rows of the frozen base."""

    def __init__(self, model: nn.Module):
        super().__init__(model, trains_whole=True)

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if not is_sharded(p)]

    def storage_precision(self, precision: Precision) -> Precision:
        if precision.fp8:
            raise ValueError(
                "TrainStep: precision='fp8' rounds weights that train, and here these are low-rank adapters, or little more; "
                "take precision='bf16', and gb.lora.quantize_base(model, 'fp8') before the model is sharded."
            )
        for piece in self.pieces:
            if piece.dtype != precision.dtype and not format_of(piece.parameter).coded:
                raise ValueError(
                    f"parameters: fully_shard of {piece.name} computes in {piece.dtype}, and this precision in "
                    f"{precision.dtype}; shard the model with param_dtype={precision.dtype}."
                )
        return precision

    def accumulators(self, layout: FlatLayout, overlap: bool) -> Accumulators:
        self.take(overlap)
        return GradientsSummedAfterBackward(layout)


class GradientsSummedAfterBackward(Accumulators):
    """Accumulators whose sums are reduced over the ranks after backward.

    Within it, autograd may begin reductions in one thread while it gathers weights in another, in another order on each
    rank: a deadlock. What trains is small: 168 MB of gradients, for rank 16 on all layers of 8b.
    """

    def reduction(self, ranks: Ranks, sums: Sequence[Tensor], largest: Sequence[Tensor]) -> Reduction:
        everything = [self.gradient, *sums]
        return Reduction(ranks, self.gradient[:0], [], [], (), self.settle, lambda work: work(), everything, largest)


def make_sharding(model: Any, ranks: Ranks) -> Replicated:
    """Return how this process holds `model`."""
    if not any_sharded(model.parameters()):
        return Replicated(model, ranks)
    trained = [p for p in model.parameters() if p.requires_grad]
    return FullySharded(model) if any_sharded(trained) or not trained else FrozenBaseSharded(model)


def uncaptured(mode: str, why: str, ranks: Ranks) -> str:
    """Return the mode of a step that cannot be captured: "off", as a fallback on a GPU, or GraphError where it must be."""
    if mode == "require":
        raise GraphError(f"TrainStep: {why}; take graph='auto', which runs it call by call.")
    if mode == "auto" and ranks.device.type == "cuda":
        fallback("train step as one graph", why)
    return "off"


def check_replicas(layout: FlatLayout, ranks: Ranks) -> None:
    """Raise ValueError on every rank where one has other parameters than the first."""
    mine = [f"{slot.name} {tuple(slot.parameter.shape)} {slot.parameter.dtype}" for slot in layout.slots]
    first = ranks.of_first(mine)
    odd = next((f"{a} where rank 0 has {b}" for a, b in zip([*mine, "nothing"], [*first, "nothing"]) if a != b), None)
    for rank, difference in enumerate(ranks.gather(odd)):
        if difference is not None:
            raise ValueError(
                f"parameters: rank {rank} has {difference}; make the same model, and freeze the same of it, on every rank."
            )


def settings(name: str, chosen: Any) -> dict[str, Any]:
    """Return the settings of an optimizer or a schedule that must be equal on all ranks. Functions cannot be compared."""
    values = {name: type(chosen).__name__}
    if is_dataclass(chosen):
        for key, value in vars(chosen).items():
            values |= settings(f"{name}.{key}", value) if is_dataclass(value) else {f"{name}.{key}": value}
    else:  # a torch optimizer, which has been made
        groups = chosen.optimizer.param_groups
        values |= {f"{name} (group {i}).{key}": value for i, group in enumerate(groups) for key, value in group.items()}
    return {key: value for key, value in values.items() if isinstance(value, int | float | str | tuple | None)}


@torch.no_grad()
def broadcast_start(named: Iterable[tuple[str, Tensor]], ranks: Ranks) -> None:
    """Broadcast the first rank's values of these tensors, and seed every rank differently.

    Two ranks with one seed would drop out the same elements and draw the same noise. A captured step reads the generator's
    state at each replay, so a seed or a state that is set later applies there, too.
    """
    for _, tensor in named:
        ranks.broadcast(tensor)
    seed = ranks.of_first(torch.initial_seed())
    if not ranks.first:
        torch.manual_seed((seed + ranks.rank) % (1 << 63))


@torch.no_grad()
def check_replicas_equal(named: Iterable[tuple[str, Tensor]], ranks: Ranks) -> None:
    """Raise RankError on every rank with the first tensor whose bits differ from the first rank's. Waits for the device."""
    named = list(named)
    mine = _read([_bits(tensor) for _, tensor in named])
    first = ranks.of_first(mine)
    odd = next((name for (name, _), a, b in zip(named, mine, first) if a != b), None)
    for rank, name in enumerate(ranks.gather(odd)):
        if name is not None:
            raise RankError(
                f"rank {rank} has other values in {name} than rank 0, and every rank should have the same; go on from a "
                f"checkpoint before this step, and look for what writes weights on one rank alone."
            )


def _read(scalars: list[Tensor]) -> list[int]:
    """Return their values, with one wait for each device: a part of a state is on the host."""
    values = [0] * len(scalars)
    for device in {scalar.device for scalar in scalars}:
        indices = [index for index, scalar in enumerate(scalars) if scalar.device == device]
        for index, value in zip(indices, torch.stack([scalars[index] for index in indices]).tolist()):
            values[index] = value
    return values


def _bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, which changes with any value, also a NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(integers[tensor.itemsize]).sum(dtype=torch.int64)
