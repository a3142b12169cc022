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
