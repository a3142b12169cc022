"""Which linear layers of a model are to be adapted: by "all-linear", by the ends of their names, or by a regular expression."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..layers.stacked import as_torch_has_it
from ..layers.vocabulary import head_of
from ..trace import fallback

ALL_LINEAR = "all-linear"


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {key: module for key, module in model.named_modules() if isinstance(module, nn.Linear)}


def chosen(model: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Linear]:
    _check_no_peft(model)
    layers = linear_layers(model)
    if targets == ALL_LINEAR:
        return _all_linear(model, layers)
    wanted = [targets] if isinstance(targets, str) else list(targets)
    found: dict[str, Any] = {}
    for target in wanted:
        matches = [key for key, _ in model.named_modules() if key and _matches(key, target, regex=isinstance(targets, str))]
        if not matches:
            ends = sorted({key.rpartition(".")[2] for key in layers})
            raise ValueError(
                f"lora.add: no layer of {type(model).__name__} is named {target!r}; its linear layers end in {', '.join(ends)}."
            )
        found.update((key, model.get_submodule(key)) for key in matches)
    for key, module in found.items():
        if why := unfit(model, module):
            raise ValueError(f"lora.add: {key} {why}; name other layers.")
    return found


def _matches(key: str, target: str, regex: bool) -> bool:
    return key == target or key.endswith(f".{target}") or (regex and re.fullmatch(target, key) is not None)


def _all_linear(model: nn.Module, layers: dict[str, nn.Linear]) -> dict[str, nn.Linear]:
    head = head_of(model)
    fit = {key: layer for key, layer in layers.items() if layer is not head and not unfit(model, layer)}
    if not fit:
        raise ValueError(f"lora.add: {type(model).__name__} has no nn.Linear below its head; name its layers as targets.")
    for key, layer in layers.items():
        if layer is not head and key not in fit:
            fallback("lora.add: all-linear", f"{key} {unfit(model, layer)}, so it gets no adapter")
    return fit


def unfit(model: nn.Module, module: nn.Module) -> str | None:
    """Why no adapter can be a part of what `module` computes."""
    if type(module) is not nn.Linear:
        return f"is a {type(module).__module__.split('.')[0]}.{type(module).__name__}, not an nn.Linear"
    if type(module._parameters.get("weight")) is not nn.Parameter or not module.weight.is_floating_point():
        return "has a weight that is not a plain parameter of floating-point numbers"
    if not as_torch_has_it(module):
        return "has a forward of its own"
    encoders = [layer for layer in model.modules() if isinstance(layer, nn.TransformerEncoderLayer)]
    if any(module is layer.linear1 or module is layer.linear2 for layer in encoders):
        return "lies in an nn.TransformerEncoderLayer, which in eval mode reads its weight without calling it"
    return None


def _check_no_peft(model: nn.Module) -> None:
    for key, module in model.named_modules():
        if type(module).__module__.startswith("peft.tuners."):
            raise ValueError(f"lora.add: {key} carries an adapter of PEFT's; train that one, or call merge_and_unload() first.")
