"""A model of which each rank holds a part of every parameter, by PyTorch's FSDP2 (fully_shard).

A parameter's rows are dealt to the ranks. What a block computes with is gathered just before it is used, in the precision that
it computes in, and freed behind it; its gradient is added up over the ranks as it is dealt to them again, in fp32. So a rank
keeps, updates and saves its own rows alone. Where the ranks do not divide the rows, the last of them hold rows of zeros behind
their own, as FSDP gathers them: every rank's memory is laid out alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from ..kernels.record import record_of
from .drawn import Drawing, key_of
from .pieces import Piece, piece_of
from .ranks import Ranks, ranks_of

Result = TypeVar("Result")
Model = TypeVar("Model", bound=nn.Module)
GATHERED = "gathered"  # of a unit: runs a function with its parameters there


def shard(
    model: nn.Module, blocks: Sequence[nn.Module], ranks: Ranks, dtype: torch.dtype = torch.bfloat16, keep: bool = False
) -> None:
    """Deal every parameter's rows to the ranks, in place. One of `blocks` at a time is gathered.

    dtype  what the model computes in; the rows themselves are fp32
    keep   whether a gathered block stays until backward has used it: less traffic, and more memory

    The rows are those of the first rank's weights.
    """
    for name, parameter in model.named_parameters():
        record = record_of(parameter)
        if record is not None and (record.adapters or record.format is not None):
            raise ValueError(
                f"shard: {name} has a low-rank adapter or is in codes, which belong to the parameter that sharding replaces; "
                f"train it on replicas (parallel: ddp)."
            )
    model.to(torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            ranks.spread(tensor)
    _deal(model, blocks, ranks, dtype, keep)


def shard_made(
    make: Callable[[torch.device], Model],
    blocks: Callable[[Model], Sequence[nn.Module]],
    ranks: Ranks,
    dtype: torch.dtype = torch.bfloat16,
    keep: bool = False,
    fill: Callable[[Mapping[str, Piece]], object] | None = None,
) -> Model:
    """make(device) in shards, for a model that fits no rank: a block, or a parameter while it is drawn, is whole at a time.

    make    is called with the meta device
    blocks  of the model that it made, which are gathered one at a time; the rest of `shard` holds
    fill    is given each rank's pieces of parameters and buffers, by name, and fills them, from a file, say. None: the weights
            are those of make(device) in one process, to the last bit; all ranks draw them, with the first one's generator
    """
    drawing = Drawing()
    with drawing:
        model = make(torch.device("meta"))
    homes = {}
    for name, tensor in _tensors(model):
        if fill is None:
            drawing.check(name, tensor)
        homes[key_of(tensor)] = name
    _deal(model, blocks(model), ranks, dtype, keep)
    pieces = {name: piece_of(tensor) for name, tensor in _tensors(model)}
    if fill is not None:
        fill(pieces)
    else:
        _draw(drawing, homes, pieces, ranks)
    return model


def _draw(drawing: Drawing, homes: dict[int, str], pieces: Mapping[str, Piece], ranks: Ranks) -> None:
    """Each rank's part of what is drawn. `homes`: the name of what has that key."""
    random = torch.cuda if ranks.device.type == "cuda" else torch
    state = torch.tensor(ranks.of_first(random.get_rng_state().tolist()), dtype=torch.uint8)
    random.set_rng_state(state)
    for key, values in drawing.values(ranks.device):
        if key in homes:
            piece = pieces[homes[key]]
            piece.local.copy_(values[piece.slices])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _deal(model: nn.Module, blocks: Sequence[nn.Module], ranks: Ranks, dtype: torch.dtype, keep: bool) -> None:
    """What is on the meta device gets room, part by part, before its rows are dealt."""
    mesh = DeviceMesh.from_group(ranks.group, ranks.device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        _give_room(block, ranks.device)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    _give_room(model, ranks.device)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # the head is used as soon as it is there


def _give_room(part: nn.Module, device: torch.device) -> None:
    """Tensors on `device` in place of those on the meta device: parameters in fp32, a tied one once."""
    made: dict[int, Any] = {}
    for module in part.modules():
        for key, p in module._parameters.items():
            if p is not None and p.is_meta:
                new = made.get(id(p))
                if new is None:
                    new = made[id(p)] = Parameter(torch.zeros(p.shape, device=device), requires_grad=p.requires_grad)
                module._parameters[key] = new
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)


def units(model: nn.Module) -> list[Any]:
    """The modules that are gathered one at a time."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _fsdp_parameters(unit: Any) -> Iterator[Any]:
    """What FSDP knows of each parameter. Private to torch: one group a module in 2.11, a list of them since."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        yield from group.fsdp_params if group is not None else ()


class DealtParameter:
    """One parameter's rows on this rank. `rows` is a plain Parameter over their memory, with the zeros behind the last."""

    def __init__(self, name: str, known: Any):
        self.name, self._known = name, known
        self.parameter: DTensor = known.sharded_param
        data = known._sharded_param_data.view(known.padded_sharded_param_size)
        self.rows = Parameter(data, requires_grad=self.parameter.requires_grad)

    @property
    def dtype(self) -> torch.dtype | None:
        """What it is gathered in."""
        return self._known.mp_policy.param_dtype or self.parameter.dtype

    @property
    def reduced(self) -> torch.dtype | None:
        """What its gradient is added up in."""
        return self._known.mp_policy.reduce_dtype or self.dtype

    def settle(self) -> None:
        """`rows` has moved to other memory, and the parameter with it."""
        self._known._sharded_param_data = self.rows.data.view(-1)
        self.parameter._local_tensor = self._own(self.rows.data)

    def settled(self) -> bool:
        own, data = self.parameter._local_tensor, self._known._sharded_param_data
        return data.data_ptr() == self.rows.data_ptr() and (not own.numel() or own.data_ptr() == self.rows.data_ptr())

    def add_gradients_to(self, rows: Tensor) -> None:
        """Backward adds up the gradient here: FSDP adds to a gradient that is there."""
        there: Any = self.parameter.grad
        if there is None or there.to_local().data_ptr() != rows.data_ptr():
            self.parameter.grad = self.whole(rows)

    def forget(self) -> None:
        """Drop what a backward that broke off has left of a whole gradient."""
        self._known.unsharded_accumulated_grad = None
        if (gathered := getattr(self._known, "_unsharded_param", None)) is not None:
            gathered.grad = None

    def whole(self, rows: Tensor) -> DTensor:
        """All ranks' rows as one tensor, of which this rank holds its own."""
        p = self.parameter
        return DTensor.from_local(
            self._own(rows), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    def _own(self, rows: Tensor) -> Tensor:
        return rows.narrow(0, 0, self.parameter._local_tensor.shape[0] if self.parameter._local_tensor.numel() else 0)


class DealtModel:
    """The parameters of a sharded model on this rank, by name, and what holds for all of them."""

    def __init__(self, model: nn.Module):
        self.units = units(model)
        self.rest()
        known = {id(k.sharded_param): k for unit in self.units for k in _fsdp_parameters(unit)}
        self.pieces, self.buffers = [], list(model.named_buffers())
        for name, parameter in model.named_parameters():
            if id(parameter) in known:
                self.pieces.append(DealtParameter(name, known[id(parameter)]))
            elif parameter.requires_grad:
                held = "a DTensor of its own" if isinstance(parameter, DTensor) else "whole on every rank"
                raise ValueError(
                    f"parameters: {name} is {held}, others are sharded by fully_shard; call fully_shard on the whole model, "
                    f"too, or freeze what is not to be sharded."
                )
        odd = next((p for p in self.pieces if tuple(p.parameter.placements) != (Shard(0),)), None)
        if odd is not None:
            raise ValueError(
                f"parameters: {odd.name} is laid out as {odd.parameter.placements}, wanted its rows on the ranks of one group, "
                f"(Shard(dim=0),); shard the model on a mesh of one dimension."
            )
        mesh = self.pieces[0].parameter.device_mesh
        self.ranks = ranks_of(mesh.get_group(), mesh.device_type)
        self._model: Any = model
        self._taken = False

    def take(self) -> None:
        """Gradients are sums over the ranks from here on, and `within` works."""
        self._taken = True
        for unit in self.units:
            unit.gathered = _run
            register_fsdp_forward_method(unit, GATHERED)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor

    def rest(self) -> None:
        """Give back what is gathered, as after an evaluation: the model's parameters are the ranks' rows again."""
        for unit in self.units:
            unit.reshard()

    def sum_with_backward(self, now: bool) -> None:
        """Whether the next backward adds its gradients up over the ranks. Until one does, each rank keeps its own, whole."""
        for unit in self.units:
            unit.set_requires_gradient_sync(now, recurse=False)

    @property
    def whole_gradients(self) -> int:
        """The bytes of those."""
        return 4 * sum(p.parameter.numel() for p in self.pieces if p.parameter.requires_grad)

    def within(self, work: Callable[[], Result]) -> Result:
        """work() with the outermost parameters there, as in the model's own forward: a loss may use its head, say."""
        return self._model.gathered(work)

    def end_to_end(self, tensor: Tensor) -> DTensor:
        """What has as many numbers on every rank, and is of no parameter, as one tensor."""
        p = self.pieces[0].parameter
        return DTensor.from_local(tensor, p.device_mesh, p.placements, run_check=False)

    def release(self) -> None:
        """FSDP's own mean over the ranks again."""
        if not self._taken:
            return
        for unit in self.units:
            vars(unit).pop(GATHERED, None)
            unit.set_gradient_divide_factor(float(self.ranks.world))
        self.sum_with_backward(True)
        for piece in self.pieces:
            piece.forget()
            piece.parameter.grad = None


def _run(work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """What FSDP takes for a forward. It must see the tensors: behind their gradients it gives the weights back."""
    return work(*args, **kwargs)
