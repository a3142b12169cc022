"""The frozen weights of a model in fewer bits, in place: QLoRA's NF4, int8, and fp8 with products in 8 bits."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from ..layers.frozen import CHILD, Base, Frozen, InInt8, InNf4
from ..layers.frozen_fp8 import InFp8
from ..layers.site_parts import format_of
from ..layers.stacked import Stacked, multiply_by_records
from ..layers.vocabulary import head_of
from ..trace import fallback, notice
from ..words import readable
from .pairs import adapted_layers
from .targets import layers_of, unfit

FORMATS: dict[str, type[Frozen]] = {kind.name: kind for kind in (InNf4, InInt8, InFp8)}


def quantize_base(model: nn.Module, format: str) -> list[str]:
    """Put the weights of all nn.Linear but the head into `format`: "nf4", "int8" or "fp8". Returns the layers' names.

    They are frozen by it. A layer at a time: no second copy of the model is ever there. What cannot be in the format stays as
    it is, a fallback with its reason; so does a weight that trains, where others are frozen already.
    """
    kind = kind_of(format, "lora.quantize_base")
    _check(model, kind)
    chosen = dict(_wanted(model, kind))
    before = sum(layer.weight.nbytes for layer in chosen.values())
    _forget_stacks(model)
    for layer in chosen.values():
        Base(layer, kind)
    multiply_by_records(model, everywhere=True)
    after = sum(t.nbytes for layer in chosen.values() for t in (layer.weight, *getattr(layer, CHILD).buffers()))
    if chosen:
        rest = "" if head_of(model) is None else "; the head stays as it is"
        notice(f"lora: {len(chosen)} weights in {format}: {readable(after)} instead of {readable(before)}{rest}.")
    return list(chosen)


def dequantize_base(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """The weights that `quantize_base` put into codes as numbers again, in `dtype` or the model's. Rounding stays."""
    _check_closed(model, "lora.dequantize_base")
    undo = multiply_by_records(model, everywhere=True)
    _forget_stacks(model)
    for base in [module for module in model.modules() if isinstance(module, Base)]:
        base.dissolve(dtype)
    undo()


def kind_of(format: str, who: str) -> type[Frozen]:
    if format not in FORMATS:
        raise ValueError(f"{who}: format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}.")
    return FORMATS[format]


def _wanted(model: nn.Module, kind: type[Frozen]) -> Iterator[tuple[str, nn.Linear]]:
    """The layers below the head; what is left as it is, is said."""
    head, uses = head_of(model), Counter(id(p) for module in model.modules() for p in module._parameters.values())
    adapters = {id(child) for module in model.modules() for child in _adapters_of_peft(module)}
    layers = {
        key: layer for key, layer in layers_of(model, (nn.Linear,)).items() if layer is not head and id(layer) not in adapters
    }
    some_frozen = any(not layer.weight.requires_grad for layer in layers.values())
    for key, layer in layers.items():
        if format_of(layer.weight).coded:
            continue
        why = unfit(model, layer) or _unsuited(layer, uses[id(layer.weight)], some_frozen) or kind.refusal(layer.weight)
        if why is not None:
            fallback("lora.quantize_base", f"{key} {why}, so it stays as it is")
        else:
            yield key, layer


def _unsuited(layer: nn.Linear, uses: int, some_frozen: bool) -> str | None:
    if uses > 1:
        return "shares its weight with another module"
    return "trains, as other layers do not" if some_frozen and layer.weight.requires_grad else None


def _adapters_of_peft(module: nn.Module) -> list[nn.Module]:
    if not (type(module).__module__.startswith("peft.tuners.") and hasattr(module, "base_layer")):
        return []
    return [child for child in module.modules() if child is not module.base_layer]


def _check(model: nn.Module, kind: type[Frozen]) -> None:
    _check_closed(model, "lora.quantize_base")
    for key, adapters in adapted_layers(model):
        if adapters.original is not None:
            raise ValueError(
                f"lora.quantize_base: an adapter is merged into the weight of {key}, which could not be unmerged; call "
                f"gb.lora.unmerge first."
            )
    for key, module in model.named_modules():
        if isinstance(module, Base) and module.kind is not kind:
            raise ValueError(
                f"lora.quantize_base: {key.rpartition('.')[0]} is in {module.kind.name} already; call gb.lora.dequantize_base "
                f"first."
            )


def _check_closed(model: nn.Module, who: str) -> None:
    if any(hasattr(p, "main_grad") for p in model.parameters()):
        raise ValueError(f"{who}: the model is in a TrainStep, whose graphs hold its weights; close that first.")


def _forget_stacks(model: nn.Module) -> None:
    """Joined weights are held by what multiplies by them; it would keep all of them as they were until it is next called."""
    for module in model.modules():
        if isinstance(stacked := vars(module).get("stacked"), Stacked):
            stacked.forget()
