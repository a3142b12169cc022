"""Allocate a model that was created on meta, over several devices."""

from collections.abc import Sequence
from typing import Any

import torch


def deal(model: Any, devices: Sequence[torch.device]) -> None:
    """Allocate equal shares of the layers on each device, and all other modules on the first.

    Buffers that are not in the state dict (rotary angles) are computed; all other memory is uninitialised.
    """
    blocks, held = model.model.layers, set(model.state_dict())
    inside = {id(module) for block in blocks for module in block.modules()}
    for number, block in enumerate(blocks):
        block.to_empty(device=devices[number * len(devices) // len(blocks)])
    for module in model.modules():
        if id(module) not in inside:
            module.to_empty(device=devices[0], recurse=False)
    for name, module in model.named_modules():
        if any(f"{name}.{key}" not in held for key, buffer in module._buffers.items() if buffer is not None):
            model._init_weights(module)
