"""The weights of any model, as the general body reads them: where they lie, how much a step reads, which first goes bad."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .watched import Place


def places(model: nn.Module) -> Iterator[Place]:
    """Every parameter and buffer."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for holder in (module._parameters, module._buffers):
            yield from ((f"{prefix}.{key}".lstrip("."), holder, key) for key, tensor in holder.items() if tensor is not None)


def bytes_read(model: nn.Module, config: Any) -> int:
    """Of weights in one step, at the least: each once, of an embedding single rows, of the experts what one token chooses."""
    read: dict[int, int] = {}
    chosen: Any = getattr(config, "num_experts_per_tok", None)
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            routed: Any = module if chosen and hasattr(module, "is_concatenated") else None  # Hugging Face's expert modules
            for weight in module._parameters.values():
                if weight is not None:
                    read[weight.data_ptr()] = weight.nbytes * chosen // routed.num_experts if routed else weight.nbytes
    return sum(read.values())


def first_not_finite(model: nn.Module, ids: Tensor) -> str:
    """The module that first gives a NaN or infinity for the sequence ids (T,). Reads every module's output back."""
    found: list[str] = []

    def look(name: str):
        def hook(module, inputs, output) -> None:
            tensors = output if isinstance(output, tuple | list) else [output]
            bad = any(isinstance(t, Tensor) and t.is_floating_point() and not t.isfinite().all() for t in tensors)
            if bad and not found:
                found.append(name)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            model(input_ids=ids[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "none of its modules in a pass without a cache"
