"""A state_dict whose tensors have a storage each, over slices of one buffer.

Who writes files tells tied weights by their storage: to accelerate all weights in one buffer were copies of the first, and it
left them out of the file; safetensors' save_model refused them.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack


@torch.inference_mode(False)  # or what is made inside could not be written by others
def own_storages(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """A post hook of `module.state_dict()`. The tensors stay live: writes are seen as before. Tied ones get one storage."""
    own: dict[int, Tensor] = {}
    at = prefix.removesuffix(".")
    here = module.named_parameters(at, remove_duplicate=False), module.named_buffers(at, remove_duplicate=False)
    for name, kept in chain(*here):
        tensor = state.get(name)
        if tensor is kept or type(tensor) is not Tensor or tensor.device.type not in ("cpu", "cuda"):
            continue  # unchanged with keep_vars=True
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            if id(kept) not in own:
                own[id(kept)] = _alias(tensor.detach())
            tensor.data = own[id(kept)]  # detached from what the module keeps, whose version it keeps


def _alias(tensor: Tensor) -> Tensor:
    """Over the same memory, which it goes on holding, with a storage that is no larger. Not every torch's DLPack knows fp8."""
    if tensor.dtype.is_floating_point and tensor.itemsize == 1:
        return from_dlpack(to_dlpack(tensor.view(torch.uint8))).view(tensor.dtype)
    return from_dlpack(to_dlpack(tensor))


def give_own_storages(model: nn.Module) -> None:
    """Permanently: the weights stay adjacent after the module that moved them is gone."""
    for module in (model, getattr(model, "_orig_mod", model)):  # torch.compile's wrapper, and what is inside
        if own_storages not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(own_storages)
