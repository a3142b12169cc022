"""Memory of weights: different tensors over the same bytes, and state_dicts of weights that are slices of one buffer.

To the user two tensors over the same memory are one weight, and moving one of them silently ends that: code that moves weights,
into a stacked or a flat buffer, checks here first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack, to_dlpack


def overlapping(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of different tensors that share bytes. A tied tensor, listed twice, is one tensor.

    Tensors with gaps are left out, for two may be stored in each other's gaps, and so are subclasses.
    """
    tensors = {id(t): (name, t) for name, t in reversed(list(named))}.values()  # reversed: the first name of each stays
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors if _is_dense(t))
    end, owner = 0, ""
    for begin, stop, name in ranges:
        if begin < end:
            yield owner, name
        if stop > end:
            end, owner = stop, name


def shares_memory(parts: Sequence[Tensor], others: Iterable[Tensor]) -> bool:
    """Return whether a tensor of `others` that is none of `parts` shares bytes with one of them."""
    own = set(map(id, parts))
    ranges = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in parts if _is_dense(p)]
    rest = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in others if id(t) not in own and _is_dense(t)]
    return any(begin < end and start < stop for begin, stop in ranges for start, end in rest)


def _is_dense(t: Tensor) -> bool:
    if type(t) not in (Tensor, Parameter) or t.layout != torch.strided or not t.numel():
        return False
    return sum((size - 1) * step for size, step in zip(t.shape, t.stride())) + 1 == t.numel()


class MovingModules:
    """The modules of this process that move their own weights: a weight that one of them moves may be another one's, too."""

    def __init__(self) -> None:
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._lock = Lock()

    def add(self, module: nn.Module) -> None:
        with self._lock:
            self._modules.add(module)

    def weights(self) -> list[Tensor]:
        with self._lock:
            modules = list(self._modules)
        return [parameter for module in modules for parameter in module.parameters()]


moving_modules = MovingModules()


@torch.inference_mode(False)  # or tensors that are made inside could not be written outside
def own_storages(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Give each tensor of a state_dict its own storage, over the same memory: a post hook of `module.state_dict()`.

    Writers of files recognise tied weights by their storage: to accelerate all weights in one buffer were copies of the first,
    and it left them out of the file; safetensors' save_model refused them. The tensors stay live: writes are visible in the
    module. Tied ones get one storage.
    """
    aliases: dict[int, Tensor] = {}
    at = prefix.removesuffix(".")
    live = module.named_parameters(at, remove_duplicate=False), module.named_buffers(at, remove_duplicate=False)
    for name, source in chain(*live):
        tensor = state.get(name)
        if tensor is source or type(tensor) is not Tensor or tensor.device.type not in ("cpu", "cuda"):
            continue  # unchanged with keep_vars=True
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            if id(source) not in aliases:
                aliases[id(source)] = _alias(tensor.detach())
            tensor.data = aliases[id(source)]  # detached from the module's tensor, whose version it keeps


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory, with a storage that is no larger. Not every torch's DLPack supports fp8."""
    if tensor.dtype.is_floating_point and tensor.itemsize == 1:
        return from_dlpack(to_dlpack(tensor.view(torch.uint8))).view(tensor.dtype)
    return from_dlpack(to_dlpack(tensor))


def give_own_storages(model: nn.Module) -> None:
    """Register `own_storages` permanently: the weights stay adjacent after the module that moved them was deleted."""
    for module in (model, getattr(model, "_orig_mod", model)):  # torch.compile's wrapper, and the module inside
        if own_storages not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(own_storages)
