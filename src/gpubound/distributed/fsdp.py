"""Shard a model's parameters over the ranks with PyTorch's FSDP2 (fully_shard).

Each rank has some rows of every parameter. The parameters of a block are gathered just before their use, in the dtype of the
computation, and freed after it; gradients are reduce-scattered in fp32. So a rank keeps, updates and saves only its rows. Where
the number of ranks does not divide the rows, the last ranks have rows of zeros at the end, so that all have equal sizes.

Low-rank adapters stay whole on every rank; only the frozen model under them is sharded.

A model that fits no rank next to its optimizer state is made on the meta device. The first rank alone makes it whole, too, on
its device or in host memory, and broadcasts it tensor by tensor.

A training step uses the local shard of each parameter, and its gathering (ShardedModel). All uses of FSDP's
private attributes are in this file.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from ..device import grow_segments, label, usable_bytes
from ..formatting import readable
from ..kernels.accumulate import record_of, share_record
from ..layers.linear_product import any_sharded as any_sharded, format_of, is_sharded
from ..layers.quantized_base import Base
from ..lora.layers import of_peft
from ..models.storing import allocate
from ..trace import notice
from .local_shard import LocalShard, local_shard_of
from .ranks import Ranks, check_ranks, ranks_of

Result = TypeVar("Result")
GATHERED = "gathered"  # attribute of a unit: runs a function with its gathered parameters
GATHERS = "gathers"  # attribute of a unit: the hooks that gather when it is called as a module


def fsdp_units(model: nn.Module) -> list[Any]:
    """Return the modules that are gathered one at a time."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def fsdp_parameters(unit: Any) -> Iterator[Any]:
    """Yield FSDP's state of each parameter. It is private to torch: one group per module in 2.11, a list of groups since."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            yield from group.fsdp_params


def has_attached_state(model: nn.Module) -> bool:
    """Return whether a weight has attached state, such as low-rank adapters or quantised weights."""
    return any(isinstance(module, Base) for module in model.modules())


def share_tensor_state(model: nn.Module) -> None:
    """Share the state of each sharded weight with the gathered weight, which FSDP creates at its first gather.

    Each unit is gathered once, unless that was done before. All ranks call it.
    """
    for unit in fsdp_units(model):
        records = [(param, record_of(param.sharded_param)) for param in fsdp_parameters(unit)]
        unshared = [param for param, record in records if record is None or record.gathered is None]
        if not unshared:
            continue
        unit.unshard()
        for param in unshared:
            share_record(param.sharded_param, param._unsharded_param)
        for module in unit.modules():
            if isinstance(module, Base) and not is_sharded(module.layer.weight):
                module.reattach()
        unit.reshard()


class ShardedParameter:
    """A parameter's rows on this rank. `rows` is a plain Parameter over their memory, with the padding at the end."""

    def __init__(self, name: str, param: Any):
        self.name, self._param = name, param
        self.parameter: DTensor = param.sharded_param
        data = param._sharded_param_data.view(param.padded_sharded_param_size)
        self.rows = Parameter(data, requires_grad=self.parameter.requires_grad)

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype in which the parameter is gathered."""
        return self._param.mp_policy.param_dtype or self.parameter.dtype

    @property
    def reduced(self) -> torch.dtype | None:
        """Return the dtype in which the gradient is reduced."""
        return self._param.mp_policy.reduce_dtype or self.dtype

    def settle(self) -> None:
        """Point the parameter to the memory of `rows`, which has moved."""
        self._param._sharded_param_data = self.rows.data.view(-1)
        self.parameter._local_tensor = self._unpadded(self.rows.data)

    def settled(self) -> bool:
        """Return whether the parameter still uses the memory of `rows`."""
        local, data = self.parameter._local_tensor, self._param._sharded_param_data
        return data.data_ptr() == self.rows.data_ptr() and (not local.numel() or local.data_ptr() == self.rows.data_ptr())

    def add_gradients_to(self, rows: Tensor) -> None:
        """Let backward add to `rows`: FSDP adds to an existing gradient."""
        gradient: Any = self.parameter.grad
        if gradient is None or gradient.to_local().data_ptr() != rows.data_ptr():
            self.parameter.grad = self.whole(rows)

    def forget(self) -> None:
        """Drop the full gradient of a backward that failed."""
        self._param.unsharded_accumulated_grad = None
        if (gathered := getattr(self._param, "_unsharded_param", None)) is not None:
            gathered.grad = None

    def whole(self, rows: Tensor) -> DTensor:
        """Return all ranks' rows as one DTensor with this rank's as its shard."""
        p = self.parameter
        return DTensor.from_local(
            self._unpadded(rows), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    def _unpadded(self, rows: Tensor) -> Tensor:
        return rows.narrow(0, 0, self.parameter._local_tensor.shape[0] if self.parameter._local_tensor.numel() else 0)


class ShardedModel:
    """The sharded parameters of a model on this rank.

    trains_whole  trained parameters are whole on every rank, and the frozen ones are sharded
    """

    def __init__(self, model: nn.Module, trains_whole: bool = False):
        self.units = fsdp_units(model)
        self.rest()
        if has_attached_state(model):
            share_tensor_state(model)
        params = {id(param.sharded_param): param for unit in self.units for param in fsdp_parameters(unit)}
        self.pieces = []
        for name, parameter in model.named_parameters():
            if id(parameter) in params:
                self.pieces.append(ShardedParameter(name, params[id(parameter)]))
            elif parameter.requires_grad and (isinstance(parameter, DTensor) or not trains_whole):
                kind = "another DTensor" if isinstance(parameter, DTensor) else "whole on every rank"
                raise ValueError(
                    f"parameters: {name} is {kind}, others are sharded by fully_shard; call fully_shard on the whole model, "
                    f"too, or freeze the parameters that are not sharded."
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
        self._taken, self._attached = False, list[Any]()

    def take(self) -> None:
        """Let FSDP sum gradients over the ranks instead of averaging them, and enable `within`."""
        self._taken = True
        self._attached = [unit for unit in self.units if attach_gathered(unit)]
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor

    def rest(self) -> None:
        """Free gathered parameters, as after an evaluation: the model's parameters are shards again."""
        for unit in self.units:
            unit.reshard()

    def sum_with_backward(self, now: bool) -> None:
        """Set whether the next backward reduces gradients over the ranks. Until one does, each rank accumulates unsharded
        gradients."""
        for unit in self.units:
            unit.set_requires_gradient_sync(now, recurse=False)

    @property
    def whole_gradients(self) -> int:
        """Return the bytes of unsharded gradients."""
        return 4 * sum(p.parameter.numel() for p in self.pieces if p.parameter.requires_grad)

    def within(self, work: Callable[[], Result]) -> Result:
        """Return work(), run as the model's forward with its outermost parameters gathered: a loss may use the head."""
        return self._model.gathered(work)

    def end_to_end(self, tensor: Tensor) -> DTensor:
        """Return the ranks' equally sized tensors, which belong to no parameter, as one DTensor."""
        p = self.pieces[0].parameter
        return DTensor.from_local(tensor, p.device_mesh, p.placements, run_check=False)

    def release(self) -> None:
        """Restore FSDP's mean over the ranks."""
        if not self._taken:
            return
        for unit in self._attached:
            del vars(unit)[GATHERED], vars(unit)[GATHERS]
        for unit in self.units:
            unit.set_gradient_divide_factor(float(self.ranks.world))
        self.sum_with_backward(True)
        for piece in self.pieces:
            piece.forget()
            piece.parameter.grad = None


def attach_gathered(unit: Any) -> bool:
    """Let `unit.gathered(work, ...)` run work with the unit's gathered parameters. Return False if it does already."""
    if GATHERED in vars(unit):
        return False
    unit.gathered = _run
    register_fsdp_forward_method(unit, GATHERED)
    state, hooks = unit._get_fsdp_state(), [*unit._forward_pre_hooks.values(), *unit._forward_hooks.values()]
    unit.gathers = [hook for hook in hooks if getattr(hook, "__self__", None) is state]
    return True


def _run(work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run `work` as FSDP's forward. FSDP must see the tensors: it reshards the weights after computing their gradients."""
    return work(*args, **kwargs)


Model = TypeVar("Model", bound=nn.Module)


def shard(model: nn.Module, blocks: Sequence[nn.Module], ranks: Ranks, dtype: torch.dtype = torch.bfloat16) -> None:
    """Shard every parameter in place, with the values of the first rank. One of `blocks` at a time is gathered.

    If the model has low-rank adapters, the library's or PEFT's, what trains stays whole on every rank, and the frozen
    parameters alone are sharded, in `dtype`.

    dtype  dtype of the computation; the shards are fp32
    """
    check_ranks(ranks, "shard")
    whole = has_attached_state(model) or any(map(of_peft, model.modules()))
    trained = {p for p in model.parameters() if p.requires_grad} if whole else set[Parameter]()
    if whole:
        for p in model.parameters():
            if p not in trained and not format_of(p).coded:
                p.data = p.data.to(dtype)
    else:
        model.to(torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            ranks.broadcast(tensor)
    _shard(model, blocks, ranks, dtype, dtype if whole else torch.float32, whole=trained)
    if whole:
        share_tensor_state(model)


def shard_deferred(
    make: Callable[[torch.device], Model],
    blocks: Callable[[Model], Sequence[nn.Module]],
    ranks: Ranks,
    dtype: torch.dtype = torch.bfloat16,
    fill: Callable[[Mapping[str, LocalShard]], object] | None = None,
    frozen: bool = False,
    encode: Callable[[nn.Module], object] | None = None,
) -> Model:
    """Return make(device) in shards, for a model whose training fits no rank: one block at a time is whole.

    make    is called with the meta device, and without `fill` on the first rank with a real one
    blocks  returns the blocks of the model that are gathered one at a time; otherwise as in `shard`
    fill    is called with each rank's shards of parameters and buffers, by name, and fills them, from a file for example. None:
            the weights are those of make(device) on the first rank, bit for bit
    frozen  none of it will train, except for adapters that are added later: the shards are in `dtype`
    encode  is called with each whole block of a frozen model that `fill` fills, before it is sharded, to quantise it
    """
    check_ranks(ranks, "shard_deferred")
    if encode is not None and (fill is None or not frozen):
        raise ValueError("shard_deferred: encode takes weights of a frozen model that fill has read; add fill, frozen=True.")
    model = make(torch.device("meta"))
    initial = {} if fill is not None else _initial_tensors(make, model, ranks)
    if frozen:
        model.requires_grad_(False)
    parts = blocks(model)

    def shards_of(tensors: Iterable[Tensor]) -> dict[str, LocalShard]:
        ids = {id(tensor) for tensor in tensors}
        return {name: local_shard_of(tensor) for name, tensor in _tensors(model) if id(tensor) in ids}

    def fill_and_encode(block: nn.Module) -> None:
        if fill is not None and encode is not None:
            fill(shards_of(t for _, t in _tensors(block)))
            encode(block)

    _shard(model, parts, ranks, dtype, dtype if frozen else torch.float32, fill_and_encode)
    if fill is None:
        _scatter(initial, shards_of(t for _, t in _tensors(model)), ranks)
    else:
        done = {id(t) for part in parts for _, t in _tensors(part)} if encode else set[int]()
        fill(shards_of(t for _, t in _tensors(model) if id(t) not in done))
    if frozen:
        share_tensor_state(model)
    return model


def _initial_tensors(make: Callable[[torch.device], Model], outline: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return the tensors of the model that the first rank makes, by name; {} on the others, with the generator after it."""

    def first() -> dict[str, Tensor]:
        if not ranks.first:
            return {}
        device, need = ranks.device, 2 * sum(tensor.nbytes for _, tensor in _tensors(outline))  # twice: shards begin as zeros
        if device.type == "cuda" and need > usable_bytes(device):
            notice(f"shard_deferred: {readable(need)} are not free on {label(device)}: the model is made in host memory.")
            device = torch.device("cpu")
        return dict(_tensors(make(device)))

    tensors, random = ranks.together(first), torch.cuda if ranks.device.type == "cuda" else torch
    state = ranks.of_first(random.get_rng_state().tolist())
    random.set_rng_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))
    return tensors


@torch.no_grad()
def _scatter(initial: dict[str, Tensor], shards: Mapping[str, LocalShard], ranks: Ranks) -> None:
    """Fill the shards with the first rank's tensors, which it releases individually. All pass through one buffer: the thread of
    a broadcast keeps its tensor for some time."""
    sizes = {name: math.prod(piece.shape) * piece.local.itemsize for name, piece in shards.items()}
    buffer = torch.empty(max(sizes.values(), default=0), dtype=torch.uint8, device=ranks.device)
    for name, piece in shards.items():
        values = buffer[: sizes[name]].view(piece.local.dtype).view(piece.shape)
        if ranks.first:
            tensor = initial.pop(name)
            values.copy_(tensor)
            tensor.data = tensor.new_empty(0)
        ranks.broadcast(values)
        piece.local.copy_(values[piece.slices])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    ranks: Ranks,
    dtype: torch.dtype,
    stored: torch.dtype,
    ready: Callable[[nn.Module], object] = lambda block: None,
    whole: Set[Parameter] = frozenset(),
) -> None:
    """Shard the model; tensors on the meta device are allocated unit by unit first.

    dtype   dtype in which parameters are gathered
    stored  dtype of the shards
    ready   is called with each block before it is sharded
    whole   parameters that are not sharded
    """
    grow_segments(ranks.device)
    mesh = DeviceMesh.from_group(ranks.group, ranks.device.type)
    cast = None if stored == dtype else dtype  # no cast of equal dtypes: it would take quantised weights for numbers
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32, cast_forward_inputs=False)
    apply = partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=set(whole))
    for block in blocks:
        allocate(block, ranks.device, stored)
        ready(block)
        _view_as_fp32(block)
        apply(block, reshard_after_forward=True)
    allocate(model, ranks.device, stored)
    _view_as_fp32(model)
    apply(model, reshard_after_forward=False)  # the head is used at once
    for unit in fsdp_units(model):
        attach_gathered(unit)  # the library's stacks do not call their blocks as modules
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # the segments of whole parameters


def _view_as_fp32(part: nn.Module) -> None:
    """View quantised weights as fp32: fully_shard takes no integers in torch 2.11, and gloo no 8-bit floats. After gathering
    they are viewed as quantised weights again (layers/quantized_base.py)."""
    for module in part.modules():
        if isinstance(module, Base) and not is_sharded(weight := module.layer.weight):
            weight.data = weight.data.view(torch.float32)
