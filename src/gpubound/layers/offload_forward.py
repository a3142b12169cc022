"""Modules whose weights lie in the host's memory, computed on a device: the weights of one come for its call, and are forgotten
behind it.

So the own forward of a model that no device has room for takes the time in which its weights are copied.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .block import brought, sent


@contextmanager
def visiting(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside, modules on another kind of device are computed on this one. Their outputs return to their device."""
    away = [module for module in modules if next(module.parameters()).device.type != device.type]
    handles = [handle for module in away for handle in _Visit(module, device).hooks()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Visit:
    def __init__(self, module: nn.Module, device: torch.device):
        self.module, self.device, self.home = module, device, next(module.parameters()).device
        self.left: list[tuple[dict, dict]] = []  # stores of tensors by name, and what was in them

    def hooks(self) -> Sequence[Any]:
        begin = self.module.register_forward_pre_hook(self.begin, with_kwargs=True)
        return begin, self.module.register_forward_hook(self.end, always_call=True)

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        for part in module.modules():
            stores: tuple[dict[str, Any], ...] = part._parameters, part._buffers
            for store in stores:
                self.left.append((store, dict(store)))
                store.update({name: None if t is None else t.to(self.device) for name, t in store.items()})
        return brought(module, args), brought(module, kwargs)

    def end(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Also where the call has failed, and has no output."""
        while self.left:
            store, own = self.left.pop()
            store.update(own)
        return sent(output, self.home)
