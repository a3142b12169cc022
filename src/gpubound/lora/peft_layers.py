"""PEFT's own adapted layers, read as they are at each call: active adapters, merged, disabled, scales, dropout.

Nothing is converted, and PEFT's objects stay the only owners of their state. What is not plain LoRA of an nn.Linear is called
as PEFT wrote it: a fallback, with its reason.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from ..layers.fused_weights import READERS, LinearSite, describe, hooked, plain
from .adapter import LowRank
from .per_row import PerRow
from .rows import Routing

NAMES = "adapter_names"  # what a mixed batch is called in PEFT: "__base__" is no adapter of any layer


def read(layer: Any) -> LinearSite:
    """The site of a `peft.tuners.lora.Linear`."""
    base, of_rows = layer.base_layer, _names_of_rows(layer)
    if of_rows is None and hooked(layer):
        return LinearSite(why="a projection carries hooks")
    if not plain(base):
        return LinearSite(why=describe(base))
    lows: dict[str, LowRank] = {}
    if layer.merged:
        if layer.disable_adapters:  # PEFT's forward takes them out of the weight
            return LinearSite(why="its adapters of PEFT's are disabled, and still merged")
        if of_rows is not None:  # PEFT's forward says that it cannot
            return LinearSite(why="its adapters of PEFT's are merged, and the rows have their own")
    elif not layer.disable_adapters:
        for name in layer.active_adapters if of_rows is None else dict.fromkeys(of_rows):
            if name in layer.lora_A:
                if why := _unusual(layer, name):
                    return LinearSite(why=f"PEFT's adapter {name!r} {why}")
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                lows[name] = LowRank(a, b, layer.scaling[name], layer.lora_dropout[name])
    weight = base._parameters["weight"]
    extra = list(lows.values()) if of_rows is None or not lows else [_per_row(lows, of_rows, weight.device)]
    return LinearSite(weight, base._parameters["bias"], extra)


def _names_of_rows(layer: Any) -> Sequence[str] | None:
    """A call with `adapter_names`, one a row: PEFT gives them to its layers by a hook, and takes them in eval mode alone."""
    if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks or len(layer._forward_pre_hooks) != 1:
        return None
    (hook,) = layer._forward_pre_hooks.values()
    ours = isinstance(hook, partial) and hook.func.__module__ == "peft.tuners.lora.model" and set(hook.keywords) == {NAMES}
    return hook.keywords[NAMES] if ours else None


def _per_row(lows: dict[str, LowRank], of_rows: Sequence[str], device: torch.device) -> LowRank:
    routing = _routing(tuple(of_rows), device)
    return PerRow(list(lows.values()), [routing.names.index(name) for name in lows], routing)


@lru_cache(maxsize=16)
def _routing(of_rows: tuple[str, ...], device: torch.device) -> Routing:
    """One for all layers of a call, and of the calls after it: their names go to the device once."""
    names = list(dict.fromkeys(of_rows))
    return Routing(names, torch.tensor([names.index(name) for name in of_rows], device=device), NAMES)


def of_peft(module: nn.Module) -> bool:
    """Whether PEFT has put it around another layer."""
    return type(module).__module__.startswith("peft.tuners.") and hasattr(module, "base_layer")


def adding(layer: Any) -> tuple:
    """What a layer of PEFT's adds now, by which a call that was captured knows itself again."""
    if layer.merged or layer.disable_adapters:
        return ()
    scales = getattr(layer, "scaling", {})
    return tuple((name, scales.get(name)) for name in layer.active_adapters)


def trains(layer: Any) -> bool:
    """Whether an adapter of it does."""
    return any(p.requires_grad for name, p in layer.named_parameters() if not name.startswith("base_layer."))


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
