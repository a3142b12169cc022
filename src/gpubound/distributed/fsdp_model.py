"""Shards of an FSDP model, as a training step uses them: the local shard of each parameter, and its gathering.

All uses of torch's private attributes are in this file.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from ..kernels.tensor_state import record_of, share_record
from ..layers.linear_product import is_sharded
from ..layers.quantized_base import Base
from .ranks import ranks_of

Result = TypeVar("Result")
GATHERED = "gathered"  # of a unit: runs a function with its parameters there
GATHERS = "gathers"  # of a unit: the hooks that do so where it is called as a module


def units(model: nn.Module) -> list[Any]:
    """The modules that are gathered one at a time."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def groups_of(unit: Any) -> list[Any]:
    """FSDP's groups of parameters. Private to torch: one a module in 2.11, a list of them since."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def fsdp_parameters(unit: Any) -> Iterator[Any]:
    """Yield FSDP's state of each parameter."""
    for group in groups_of(unit):
        yield from group.fsdp_params


def has_parts(model: nn.Module) -> bool:
    """Return whether a weight has attached state, such as low-rank adapters or quantised weights."""
    return any(isinstance(module, Base) for module in model.modules())


def join_records(model: nn.Module) -> None:
    """Let what hangs on a weight's record be found on the weight that products see, which FSDP makes at its first gather.

    Each unit is gathered once, and not again where that was done before. All ranks call it.
    """
    for unit in units(model):
        apart = [known for known in fsdp_parameters(unit) if not _joined(known)]
        if not apart:
            continue
        unit.unshard()
        for known in apart:
            share_record(known.sharded_param, known._unsharded_param)
        for module in unit.modules():
            if isinstance(module, Base) and not is_sharded(module.layer.weight):
                module.reattach()
        unit.reshard()


def _joined(known: Any) -> bool:
    record = record_of(known.sharded_param)
    return record is not None and record.gathered is not None


class ShardedParameter:
    """One parameter's rows on this rank. `rows` is a plain Parameter over their memory, with the zeros behind the last."""

    def __init__(self, name: str, known: Any):
        self.name, self._known = name, known
        self.parameter: DTensor = known.sharded_param
        data = known._sharded_param_data.view(known.padded_sharded_param_size)
        self.rows = Parameter(data, requires_grad=self.parameter.requires_grad)

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype in which the parameter is gathered."""
        return self._known.mp_policy.param_dtype or self.parameter.dtype

    @property
    def reduced(self) -> torch.dtype | None:
        """Return the dtype in which the gradient is reduced."""
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


class ShardedModel:
    """The parameters of a sharded model on this rank, by name, and what holds for all of them."""

    def __init__(self, model: nn.Module, trains_whole: bool = False):
        """`trains_whole`: what trains is whole on every rank, and what is frozen is dealt."""
        self.units = units(model)
        self.rest()
        if has_parts(model):
            join_records(model)
        known = {id(k.sharded_param): k for unit in self.units for k in fsdp_parameters(unit)}
        self.pieces = []
        for name, parameter in model.named_parameters():
            if id(parameter) in known:
                self.pieces.append(ShardedParameter(name, known[id(parameter)]))
            elif parameter.requires_grad and (isinstance(parameter, DTensor) or not trains_whole):
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
        self._taken, self._given = False, list[Any]()

    def take(self) -> None:
        """Gradients are sums over the ranks from here on, and `within` works."""
        self._taken = True
        self._given = [unit for unit in self.units if give_gathered(unit)]
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor

    def rest(self) -> None:
        """Give back what is gathered, as after an evaluation: the model's parameters are the ranks' rows again."""
        for unit in self.units:
            unit.reshard()

    def sum_with_backward(self, now: bool) -> None:
        """Set whether the next backward reduces gradients over the ranks. Until one does, each rank accumulates unsharded
        gradients."""
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
        """Return the ranks' equally sized tensors, which belong to no parameter, as one DTensor."""
        p = self.pieces[0].parameter
        return DTensor.from_local(tensor, p.device_mesh, p.placements, run_check=False)

    def release(self) -> None:
        """FSDP's own mean over the ranks again."""
        if not self._taken:
            return
        for unit in self._given:
            del vars(unit)[GATHERED], vars(unit)[GATHERS]
        for unit in self.units:
            unit.set_gradient_divide_factor(float(self.ranks.world))
        self.sum_with_backward(True)
        for piece in self.pieces:
            piece.forget()
            piece.parameter.grad = None


def give_gathered(unit: Any) -> bool:
    """Let `unit.gathered(work, ...)` run work with the unit's parameters there. False where it does already."""
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
