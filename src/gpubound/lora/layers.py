"""PEFT's adapted layers, read at each call: active adapters, merged, disabled, scales, dropout, routing.

Nothing is converted, and PEFT's objects own all state. A layer that is more than plain LoRA of an nn.Linear (DoRA and other
variants, convolutions, embeddings, a bias) runs PEFT's own forward: a fallback, with its reason.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.fused_weights import READERS, LinearSite, class_key, describe, hooked, plain
from ..layers.linear_product import FORWARDS, linear
from ..trace import fallback
from .adapter import LowRank, RoutedLowRank, Routing

TOKENS = ".token_adapter"  # the end of the names of layers that PEFT's wrappers for `trainable_token_indices` hold
NAMES = "adapter_names"  # PEFT's argument for a mixed batch: "__base__" is no adapter of any layer


def of_peft(module: nn.Module) -> bool:
    """Return whether PEFT has put the module around another layer."""
    return type(module).__module__.startswith("peft.tuners.") and hasattr(module, "base_layer")


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, layer) of all layers of PEFT's in the model, but for those inside a wrapper."""
    return [(name, module) for name, module in model.named_modules() if of_peft(module) and not name.endswith(TOKENS)]


def wrappers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, wrapper) of the modules that PEFT trains copies of: `modules_to_save` and `trainable_token_indices`."""
    return [(name, module) for name, module in model.named_modules() if is_wrapper(module)]


def is_wrapper(module: Any) -> bool:
    """Return whether PEFT has put the module around one of which it trains a copy or rows."""
    return (
        type(module).__module__ == "peft.utils.other"
        and hasattr(module, "original_module")
        and hasattr(module, "active_adapters")
    )


def tokens_of(layer: Any) -> Any:
    """Return the layer in a wrapper for `trainable_token_indices`, which holds the rows that train, or None."""
    return layer._modules.get("token_adapter")


def names_in(layer: Any) -> list[str]:
    layer = tokens_of(layer) or layer
    return list(dict.fromkeys(name for part in layer.adapter_layer_names for name in getattr(layer, part)))


def parameters_of(layer: Any, name: str) -> list[nn.Parameter]:
    layer = tokens_of(layer) or layer
    parts = [getattr(layer, part) for part in layer.adapter_layer_names]
    halves = [part[name] for part in parts if name in part]
    return [p for half in halves for p in ([half] if isinstance(half, nn.Parameter) else half.parameters())]


def active_in(layer: Any) -> list[str]:
    """Return the names of the layer's adapters that are on."""
    names = names_in(layer)
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in names]


def read(layer: Any) -> LinearSite:
    """Return the site of a `peft.tuners.lora.Linear`."""
    base, names_of_rows = layer.base_layer, _names_of_rows(layer) if layer._forward_pre_hooks else None
    if names_of_rows is None and hooked(layer):
        return LinearSite(why="a projection carries hooks")
    if not plain(base):
        return LinearSite(why=describe(base))
    weight, bias = base._parameters["weight"], base._parameters["bias"]
    merged = layer.merged_adapters
    if merged and "unmerged" not in vars(layer):
        if layer.disable_adapters:  # PEFT's forward takes them out of the weight
            return LinearSite(why="its adapters of PEFT's are disabled, and still merged")
        if names_of_rows is not None:  # PEFT's forward raises for it
            return LinearSite(why="its adapters of PEFT's are merged, and each row has an adapter")
        return LinearSite(weight, bias)
    adapters: dict[str, LowRank] = {}
    if not layer.disable_adapters:
        for name in layer.active_adapters if names_of_rows is None else dict.fromkeys(names_of_rows):
            if name in layer.lora_A and name not in merged:
                if why := unusual(layer, name):
                    return LinearSite(why=f"PEFT's adapter {name!r} {why}")
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                adapters[name] = LowRank(a, b, layer.scaling[name], layer.lora_dropout[name])
    routing = vars(layer).get("routing")
    if names_of_rows is not None:
        routing = _routing(tuple(names_of_rows), weight.device)
    return LinearSite(weight, bias, list(adapters.values()) if routing is None else list(_routed(adapters, routing)))


def _names_of_rows(layer: Any) -> Sequence[str] | None:
    """Return the adapter of each row: PEFT passes `adapter_names` by a hook on its layers, in eval mode alone."""
    if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks or len(layer._forward_pre_hooks) > 1:
        return None
    hook = next(iter(layer._forward_pre_hooks.values()))
    from_peft = isinstance(hook, partial) and hook.func.__module__ == "peft.tuners.lora.model" and set(hook.keywords) == {NAMES}
    return hook.keywords[NAMES] if from_peft else None


def _routed(adapters: dict[str, LowRank], routing: Routing) -> Iterator[LowRank]:
    """Yield the adapters that rows choose from as one for each dropout rate, and each other adapter."""
    by_rate: dict[float, dict[int, LowRank]] = {}
    for name, low in adapters.items():
        if name in routing.names:
            by_rate.setdefault(getattr(low.dropout, "p", 0.0), {})[routing.names.index(name)] = low
        else:
            yield low
    for indexed in by_rate.values():
        indices = sorted(indexed)
        yield RoutedLowRank([indexed[index] for index in indices], indices, routing)


@lru_cache(maxsize=16)
def _routing(names_of_rows: tuple[str, ...], device: torch.device) -> Routing:
    """Return one routing for all layers of a call, and of later calls: its ids are copied to the device once."""
    names = list(dict.fromkeys(names_of_rows))
    return Routing(names, torch.tensor([names.index(name) for name in names_of_rows], device=device), NAMES)


def unusual(layer: Any, name: str) -> str | None:
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
    if class_key(layer) in READERS and "forward" not in vars(layer):
        layer.forward = partial(_forward, layer)


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a layer of PEFT's. The compiler traces its own forward, which knows no routing and no partly merged adapters."""
    ours = "routing" in vars(layer) or "unmerged" in vars(layer)
    if not args and kwargs.keys() <= {NAMES} and (ours or not torch.compiler.is_compiling()):
        site = read(layer)
        if site.why is None:
            return linear(x, site.weight, site.bias, site.adapters)
        if "routing" in vars(layer):
            raise RuntimeError(f"lora.rows: {site.why}, so rows cannot choose from the layer's adapters; adapt other layers.")
        fallback("layers: a product", f"{site.why}, so it is called")
    return type(layer).forward(layer, x, *args, **kwargs)


def adding(layer: Any) -> tuple:
    """Return a key of the adapters that the layer adds now, by which a captured step recognises it."""
    if not hasattr(layer, "merged_adapters"):
        return tuple(active_in(layer))
    if layer.merged_adapters and "unmerged" not in vars(layer):  # by PEFT, whose forward then adds none of them
        return ()
    scales = getattr(layer, "scaling", {})
    names = [name for name in active_in(layer) if name not in layer.merged_adapters]
    return vars(layer).get("routing"), *((name, scales.get(name)) for name in names)


def trains(layer: Any) -> bool:
    """Return whether an adapter of the layer trains."""
    return any(p.requires_grad for name, p in layer.named_parameters() if not name.startswith("base_layer."))


def merged_and_trained(layer: Any) -> bool:
    """Return whether one of the merged adapters trains."""
    return any(p.requires_grad for name in layer.merged_adapters for p in parameters_of(layer, name))


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrapper of low-rank adapters, which adds nothing that is not in its layers."""
    tuner = getattr(model, "base_model", None)
    if class_key(tuner) == ("peft.tuners.lora.model", "LoraModel"):
        return tuner.model  # type: ignore[union-attr, return-value]
    return model


READERS["peft.tuners.lora.layer", "Linear"] = read
FORWARDS.add(_forward)
