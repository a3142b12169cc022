"""Adapters merged into the weights of a model, unmerged bit for bit, and state_dicts without adapters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..device import without_autocast
from ..layers.linear_product import format_of, is_sharded
from ..layers.quantized_base import Base
from .layers import TOKENS, active_in, adapted_layers, tokens_of, wrappers
from .model import check_not_routed, check_values, layers_with, take_out


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


@torch.inference_mode(False)
@torch.no_grad()
def merge(model: nn.Module, name: str | None = None, for_good: bool = False) -> float:
    """Add scale · b a of the adapters that are on, or those of them called `name`, to the weights. They then cost nothing.

    for_good  remove the merged adapters, and keep no copy of the former weights. Copies of whole modules (`modules_to_save`)
              and rows of tokens that trained with them replace the model's own

    Return the largest rounding error of a layer, relative to the sum that was added. In bf16 it is large where an adapter is
    small: one hundredth of a weight keeps one or two bits.
    """
    layers = layers_with(model, name, "lora.merge", some=True)
    check_not_routed(layers, "lora.merge")
    active: list[tuple[str, Any, list[str]]] = []
    for key, layer, names in layers:
        on = [word for word in active_in(layer) if word in names and word not in getattr(layer, "merged_adapters", ())]
        if on and hasattr(layer, "base_layer"):
            active.append((key, layer, on))
    check_values({key: _weight(layer) for key, layer, _ in active}, "lora.merge")
    for key, layer, on in active:
        _check_mergeable(key, layer, on)
    trained = [(key, layer, on) for key, layer, names in layers if (on := _replacing(layer, names))] if for_good else []
    _check_own_weights(model, trained)
    with without_autocast(next(model.parameters()).device):  # it would round the products of b and a to 16 bits
        errors = [_merge_layer(layer, on, keep=not for_good) for _, layer, on in active]
    if for_good:
        merged = {word for _, layer in adapted_layers(model) for word in layer.merged_adapters}
        for _, layer in adapted_layers(model):
            vars(layer).pop("unmerged", None)
            layer.merged_adapters.clear()
        for _, wrapper, on in trained:
            _replace(wrapper, on)
        take_out(model, sorted(merged))
    return max((error.item() for error in errors), default=0.0)


def _replacing(layer: Any, names: Sequence[str]) -> list[str]:
    """Return which of these adapters replace a module or rows of it now."""
    return [] if hasattr(layer, "base_layer") else [word for word in active_in(layer) if word in names]


def _check_own_weights(model: nn.Module, wrapped: Sequence[tuple[str, Any, list[str]]]) -> None:
    """Refuse a copy of a module whose weight another module has, too: that one would change as well."""
    paths: dict[int, list[str]] = {}
    for path, p in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(p), []).append(path)
    for key, wrapper, _ in wrapped:
        if tokens_of(wrapper) is None:  # PEFT lets the rows of tied modules follow each other
            for p in wrapper.original_module.parameters():
                if other := [path for path in paths[id(p)] if not path.startswith(f"{key}.")]:
                    raise ValueError(
                        f"lora.merge: the adapter has a copy of {key}, whose weight is {other[0]}, too; untie them, or merge "
                        f"without for_good."
                    )


def _replace(wrapper: Any, names: Sequence[str]) -> None:
    """Write what the wrapper's forward reads into the module that it wraps."""
    if tokens := tokens_of(wrapper):
        tokens.base_layer.weight.copy_(tokens.get_merged_weights(names))
    else:
        wrapper.original_module.load_state_dict(wrapper.modules_to_save[names[0]].state_dict())


def _weight(layer: Any) -> Any:
    base = layer.get_base_layer()
    return getattr(base, layer.parameter_name) if hasattr(layer, "parameter_name") else base.weight


def _check_mergeable(key: str, layer: Any, names: Sequence[str]) -> None:
    _check_unchanged("merge", key, layer)
    if is_sharded(_weight(layer)):
        raise ValueError(
            f"lora.merge: the weight of {key} is sharded; save the adapters, and load and merge them into a model that is "
            f"not sharded."
        )
    if format_of(_weight(layer)).coded:
        raise ValueError(
            f"lora.merge: the weight of {key} is quantised, in steps larger than an adapter's sums; call "
            f"gb.lora.dequantize_base first."
        )
    if biased := [word for word in names if getattr(layer, "lora_bias", {}).get(word)]:
        raise ValueError(
            f"lora.merge: the adapter {biased[0]!r} of {key} adds a bias, too, which the weight cannot hold; keep the adapter."
        )
    left = [word for word in active_in(layer) if word not in names and word not in layer.merged_adapters]
    if left and (set(layer.lora_variant) or type(layer.get_base_layer()) is not nn.Linear):
        raise ValueError(
            f"lora.merge: {key} has the adapter {left[0]!r}, too, which PEFT's forward leaves out while another is merged; "
            f"merge or disable that one first."
        )


def _merge_layer(layer: Any, names: Sequence[str], keep: bool) -> Tensor:
    weight = _weight(layer)
    if keep and "unmerged" not in vars(layer):
        layer.unmerged = Unmerged(weight)
    before = weight.detach().double()
    if layer.lora_variant or not isinstance(layer.get_base_layer(), nn.Linear):
        layer.merge(adapter_names=list(names))
        added = weight.double() - before
    else:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        deltas = []
        for name in names:
            deltas.append(layer.scaling[name] * (layer.lora_B[name].weight.to(dtype) @ layer.lora_A[name].weight.to(dtype)))
        delta = torch.stack(deltas).sum(0)
        weight.copy_(weight.to(dtype) + delta)
        layer.merged_adapters.extend(names)
        added = delta.double()
    torch.autograd.graph.increment_version(weight)
    if "unmerged" in vars(layer):
        layer.unmerged.note(weight)
    return (weight.double() - before - added).norm() / added.norm().clamp_min(torch.finfo(torch.float64).tiny)


@torch.inference_mode(False)
@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Restore every weight that adapters were merged into, bit for bit. The adapters add to its products again."""
    layers = [(key, layer) for key, layer in adapted_layers(model) if "unmerged" in vars(layer)]
    for key, layer in layers:
        _check_unchanged("unmerge", key, layer)
    for _, layer in layers:
        _weight(layer).copy_(vars(layer).pop("unmerged").weight)
        layer.merged_adapters.clear()


def _check_unchanged(what: str, key: str, layer: Any) -> None:
    if "unmerged" in vars(layer) and layer.unmerged.changed(_weight(layer)):
        raise ValueError(
            f"lora.{what}: the weight of {key} was changed after an adapter was merged into it, and unmerging would undo that; "
            f"call gb.lora.unmerge before weights are trained or loaded."
        )


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of `model` without adapters, under the names that it has without them.

    Raise ValueError where an adapter is on and not merged, because it would be lost, and where weights are quantised.
    """
    for key, module in model.named_modules():
        if isinstance(module, Base):
            raise ValueError(
                f"lora: the weight of {key.rpartition('.')[0].removesuffix('.base_layer')} is in {module.kind.name}, which a "
                f"model's own files cannot store; call gb.lora.dequantize_base first."
            )
    state = model.state_dict()
    for key, layer in [*adapted_layers(model), *wrappers(model)]:
        for name in active_in(layer):
            if name not in getattr(layer, "merged_adapters", ()):
                raise ValueError(
                    f"lora: {key} carries the adapter {name!r}, which a model's own files cannot store; call gb.lora.merge "
                    f"first, or gb.lora.disable to leave it out."
                )
        own = "" if hasattr(layer, "base_layer") else TOKENS if tokens_of(layer) else None
        inner = f"{key}.original_module." if own is None else f"{key}{own}.base_layer."
        state = {
            f"{key}.{word.removeprefix(inner)}" if word.startswith(inner) else word: tensor
            for word, tensor in state.items()
            if word.startswith(inner) or not word.startswith(f"{key}.")
        }
    return state
