"""PEFT's own adapted layers, read as they are at each call: active adapters, merged, disabled, scales, dropout.

Nothing is converted, and PEFT's objects stay the only owners of their state. What is not plain LoRA of an nn.Linear is called
as PEFT wrote it: a fallback, with its reason.
"""

from typing import Any

from torch import nn

from ..layers.stacked import READERS, LinearSite, describe, hooked, plain
from .adapter import LowRank


def read(layer: Any) -> LinearSite:
    """The site of a `peft.tuners.lora.Linear`."""
    base = layer.base_layer
    if hooked(layer):
        return LinearSite(why="a projection carries hooks")
    if not plain(base):
        return LinearSite(why=describe(base))
    lows: list[LowRank] = []
    if layer.merged:
        if layer.disable_adapters:  # PEFT's forward takes them out of the weight
            return LinearSite(why="its adapters of PEFT's are disabled, and still merged")
    elif not layer.disable_adapters:
        for name in layer.active_adapters:
            if name in layer.lora_A:
                if why := _unusual(layer, name):
                    return LinearSite(why=f"PEFT's adapter {name!r} {why}")
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                lows.append(LowRank(a, b, layer.scaling[name], layer.lora_dropout[name]))
    return LinearSite(base._parameters["weight"], base._parameters["bias"], lows)


def base_of(model: nn.Module) -> nn.Module:
    """The model that PEFT's wrapper of low-rank adapters hands its calls to: all that PEFT added is in its layers."""
    tuner = getattr(model, "base_model", None)
    if (type(tuner).__module__, type(tuner).__name__) == ("peft.tuners.lora.model", "LoraModel"):
        return tuner.model  # type: ignore[union-attr, return-value]
    return model


def _unusual(layer: Any, name: str) -> str | None:
    """What an adapter does beside adding scale · dropout(x) aᵀ bᵀ."""
    if name in layer.lora_variant:
        return f"is a {type(layer.lora_variant[name]).__name__}, not plain LoRA"
    if not (plain(layer.lora_A[name]) and plain(layer.lora_B[name])):
        return "has halves that are no plain nn.Linear"
    if layer.lora_B[name].bias is not None:
        return "adds a bias"
    if type(layer.lora_dropout[name]) not in (nn.Dropout, nn.Identity):
        return f"drops by a {type(layer.lora_dropout[name]).__name__}"
    return None


READERS["peft.tuners.lora.layer", "Linear"] = read
