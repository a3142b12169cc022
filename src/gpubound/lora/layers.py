"""PEFT's adapted layers, read as they are at each call: active adapters, merged, disabled, scales, dropout, routing.

Nothing is converted, and PEFT's objects own all state. A layer that is more than plain LoRA of an nn.Linear (DoRA and other
variants, convolutions, embeddings, a bias) runs PEFT's own forward: a fallback, with its reason.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.fused_weights import FORWARDS, READERS, LinearSite, describe, hooked, plain
from ..layers.linear_product import linear
from ..trace import fallback
from .adapter import LowRank, PerRow
from .routing import Routing

NAMES = "adapter_names"  # PEFT's argument for a mixed batch: "__base__" is no adapter of any layer


class Unmerged:
    """A layer's weight from before `gb.lora.merge`. In slots: graphs do not check what they contain."""

    __slots__ = ("of", "version", "weight")

    def __init__(self, weight: Tensor):
        self.weight = weight.detach().to("cpu", copy=True)
        self.note(weight)

    def note(self, weight: Tensor) -> None:
        """Remember the version of the merged weight."""
        self.of, self.version = id(weight), weight._version

    def changed(self, weight: Tensor) -> bool:
        """Return whether the merged weight was written since. A copy of a layer has another weight."""
        return self.of == id(weight) and self.version != weight._version


def of_peft(module: nn.Module) -> bool:
    """Return whether PEFT has put it around another layer."""
    return type(module).__module__.startswith("peft.tuners.") and hasattr(module, "base_layer")


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, layer) of all layers of PEFT's in the model."""
    return [(name, module) for name, module in model.named_modules() if of_peft(module)]


def wrappers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, wrapper) of the modules that PEFT trains copies of: `modules_to_save` and `trainable_token_indices`."""
    return [(name, m) for name, m in model.named_modules() if type(m).__module__ == "peft.utils.other" and _wraps(m)]


def _wraps(module: Any) -> bool:
    return hasattr(module, "original_module") and hasattr(module, "active_adapters")


def names_in(layer: Any) -> list[str]:
    """Return the names of the layer's adapters."""
    if hasattr(layer, "adapter_layer_names"):
        return list(dict.fromkeys(name for part in layer.adapter_layer_names for name in getattr(layer, part)))
    return list(layer.modules_to_save) if hasattr(layer, "modules_to_save") else names_in(layer.token_adapter)


def parameters_of(layer: Any, name: str) -> list[nn.Parameter]:
    """Return the parameters of the layer's adapter `name`."""
    if not hasattr(layer, "adapter_layer_names"):
        if not hasattr(layer, "modules_to_save"):
            return parameters_of(layer.token_adapter, name)
        return list(layer.modules_to_save[name].parameters()) if name in layer.modules_to_save else []
    parts = [getattr(layer, part) for part in layer.adapter_layer_names]
    found = [part[name] for part in parts if name in part]
    return [p for one in found for p in ([one] if isinstance(one, nn.Parameter) else one.parameters())]


def active_in(layer: Any) -> list[str]:
    """Return the names of the layer's adapters that are on."""
    names = names_in(layer)
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in names]


def read(layer: Any) -> LinearSite:
    """Return the site of a `peft.tuners.lora.Linear`."""
    base, of_rows = layer.base_layer, _names_of_rows(layer)
    if of_rows is None and hooked(layer):
        return LinearSite(why="a projection carries hooks")
    if not plain(base):
        return LinearSite(why=describe(base))
    merged = layer.merged_adapters
    if merged and "unmerged" not in vars(layer):
        if layer.disable_adapters:  # PEFT's forward takes them out of the weight
            return LinearSite(why="its adapters of PEFT's are disabled, and still merged")
        if of_rows is not None:  # PEFT's forward says that it cannot
            return LinearSite(why="its adapters of PEFT's are merged, and the rows have their own")
        return LinearSite(base._parameters["weight"], base._parameters["bias"])
    lows: dict[str, LowRank] = {}
    if not layer.disable_adapters:
        for name in layer.active_adapters if of_rows is None else dict.fromkeys(of_rows):
            if name in layer.lora_A and name not in merged:
                if why := _unusual(layer, name):
                    return LinearSite(why=f"PEFT's adapter {name!r} {why}")
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                lows[name] = LowRank(a, b, layer.scaling[name], layer.lora_dropout[name])
    weight = base._parameters["weight"]
    routing = vars(layer).get("routing") if of_rows is None else _routing(tuple(of_rows), weight.device)
    extra = list(lows.values()) if routing is None else list(_routed(lows, routing))
    return LinearSite(weight, base._parameters["bias"], extra)


def _names_of_rows(layer: Any) -> Sequence[str] | None:
    """Return the adapter of each row: PEFT passes `adapter_names` by a hook on its layers, in eval mode alone."""
    if not layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return None
    hook = next(iter(layer._forward_pre_hooks.values()))
    ours = isinstance(hook, partial) and hook.func.__module__ == "peft.tuners.lora.model" and set(hook.keywords) == {NAMES}
    return hook.keywords[NAMES] if ours and len(layer._forward_pre_hooks) == 1 else None


def _routed(lows: dict[str, LowRank], routing: Routing) -> Iterator[LowRank]:
    """Yield the adapters that rows choose from as one for each rate of dropout, and each other adapter."""
    alike: dict[float, dict[int, LowRank]] = {}
    for name, low in lows.items():
        if name in routing.names:
            alike.setdefault(getattr(low.dropout, "p", 0.0), {})[routing.names.index(name)] = low
        else:
            yield low
    for members in alike.values():
        yield PerRow([members[place] for place in sorted(members)], sorted(members), routing)


@lru_cache(maxsize=16)
def _routing(of_rows: tuple[str, ...], device: torch.device) -> Routing:
    """One for all layers of a call, and of the calls after it: their names go to the device once."""
    names = list(dict.fromkeys(of_rows))
    return Routing(names, torch.tensor([names.index(name) for name in of_rows], device=device), NAMES)


def _unusual(layer: Any, name: str) -> str | None:
    """Return what an adapter does other than adding scale · dropout(x) aᵀ bᵀ."""
    if name in layer.lora_variant:
        return f"is a {type(layer.lora_variant[name]).__name__}, not plain LoRA"
    if not (plain(layer.lora_A[name]) and plain(layer.lora_B[name])):
        return "has halves that are no plain nn.Linear"
    if layer.lora_B[name].bias is not None:
        return "adds a bias"
    if type(layer.lora_dropout[name]) not in (nn.Dropout, nn.Identity):
        return f"drops by a {type(layer.lora_dropout[name]).__name__}"
    return None


def fuse(layer: Any) -> None:
    """Let calls of a layer of PEFT's run through `linear`, wherever it is in the model."""
    if type(layer) is not nn.Linear and _key(layer) in READERS and "forward" not in vars(layer):
        layer.forward = partial(_forward, layer)


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a layer of PEFT's. The compiler sees through its own forward, which knows no routing and no part that is merged."""
    ours = "routing" in vars(layer) or "unmerged" in vars(layer)
    if not args and kwargs.keys() <= {NAMES} and (ours or not torch.compiler.is_compiling()):
        site = read(layer)
        if site.why is None:
            return linear(x, site.weight, site.bias, site.extra)
        if "routing" in vars(layer):
            raise RuntimeError(f"lora.rows: {site.why}, so rows cannot choose from the layer's adapters; adapt other layers.")
        fallback("layers: a product", f"{site.why}, so it is called as it is")
    return type(layer).forward(layer, x, *args, **kwargs)


def _key(layer: Any) -> tuple[str, str]:
    return type(layer).__module__, type(layer).__name__


def adding(layer: Any) -> tuple:
    """Return what the layer adds now, by which a captured step recognises it."""
    if not hasattr(layer, "merged_adapters"):
        return tuple(active_in(layer))
    if layer.merged_adapters and "unmerged" not in vars(layer):  # by PEFT, whose forward adds none of them then
        return ()
    scales = getattr(layer, "scaling", {})
    names = [name for name in active_in(layer) if name not in layer.merged_adapters]
    return vars(layer).get("routing"), *((name, scales.get(name)) for name in names)


def trains(layer: Any) -> bool:
    """Return whether an adapter of it does."""
    return any(p.requires_grad for name, p in layer.named_parameters() if not name.startswith("base_layer."))


def merged_and_trained(layer: Any) -> bool:
    """Return whether one of the merged adapters trains."""
    return any(p.requires_grad for name in layer.merged_adapters for p in parameters_of(layer, name))


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrapper of low-rank adapters, which adds nothing that is not in its layers."""
    tuner = getattr(model, "base_model", None)
    if (type(tuner).__module__, type(tuner).__name__) == ("peft.tuners.lora.model", "LoraModel"):
        return tuner.model  # type: ignore[union-attr, return-value]
    return model


READERS["peft.tuners.lora.layer", "Linear"] = read
FORWARDS.add(_forward)
