"""The frozen weights of a model in fewer bits, in place: QLoRA's NF4, int8, and fp8 with products in 8 bits."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..formatting import readable
from ..layers.fused_weights import Stacked, multiply_by_records
from ..layers.linear_product import format_of, is_sharded
from ..layers.quantized_base import Base, Frozen, InFp8, InInt8, InNf4
from ..trace import fallback, notice
from .layers import adapted_layers
from .targets import layers_of, output_layer, unfit

FORMATS: dict[str, type[Frozen]] = {kind.name: kind for kind in (InNf4, InInt8, InFp8)}


@torch.inference_mode(False)
def quantize_base(model: nn.Module, format: str) -> list[str]:
    """Put the weights of all nn.Linear but the head into `format`: "nf4", "int8" or "fp8". Returns the layers' names.

    They are frozen by it. A layer at a time: no second copy of the model is ever there. What cannot be in the format stays as
    it is, a fallback with its reason; so does a weight that trains, where others are frozen already.
    """
    kind = kind_of(format, "lora.quantize_base: format")
    check(model, kind)
    _forget_stacks(model)
    made = encode(model, kind)
    multiply_by_records(model, everywhere=True)
    experts = sum(stack.nbytes for stack in layers_of(model).values() if isinstance(stack, torch.Tensor))
    tell([made], format, output_layer(model) is not None, experts)
    return made.names


class InCodes(NamedTuple):
    """Layers whose weights went into codes, and the bytes that these took and take."""

    names: list[str]
    before: int
    after: int


def encode(part: nn.Module, kind: type[Frozen], name: str = "") -> InCodes:
    """Put the weights of a model, or of its part of that name, into codes, one after the other."""
    names, before, after = [], 0, 0
    for key, layer, why in _judged(part, kind):
        key = f"{name}.{key}" if name else key
        if why is not None:
            fallback("lora.quantize_base", f"{key} {why}, so it stays as it is")
            continue
        before += layer.weight.nbytes
        base = Base(layer, kind)
        after += sum(t.nbytes for t in (layer.weight, *base.buffers()))
        names.append(key)
    return InCodes(names, before, after)


def tell(made: Sequence[InCodes], format: str, headed: bool, experts: int = 0) -> None:
    """`experts`: the bytes of those that lie in parameters, which no layer of codes stands for."""
    count, before, after = sum(len(one.names) for one in made), sum(one.before for one in made), sum(one.after for one in made)
    if count:
        rest = "; the head stays as it is" * headed
        if experts:
            rest = f"; {'the head and ' * headed}the experts, {readable(experts)}, stay as they are"
        notice(f"lora: {count} weights in {format}: {readable(after)} instead of {readable(before)}{rest}.")


def suited(model: nn.Module, kind: type[Frozen]) -> list[str]:
    """The layers whose weights `encode` would put into codes."""
    return [key for key, _, why in _judged(model, kind) if why is None]


@torch.inference_mode(False)
def dequantize_base(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """The weights that `quantize_base` put into codes as numbers again, in `dtype` or the model's. Rounding stays."""
    _check_closed(model, "lora.dequantize_base")
    undo = multiply_by_records(model, everywhere=True)
    _forget_stacks(model)
    for base in [module for module in model.modules() if isinstance(module, Base)]:
        base.dissolve(dtype)
    undo()


def kind_of(format: str, who: str) -> type[Frozen]:
    """`who`: the call, and what it calls its argument."""
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"{who} must be one of {', '.join(map(repr, FORMATS))}, got {format!r}.")
    return FORMATS[format]


def _judged(model: nn.Module, kind: type[Frozen]) -> Iterator[tuple[str, nn.Linear, str | None]]:
    """The layers below the head that hold numbers, and why one of them cannot be in codes."""
    head, uses = output_layer(model), Counter(id(p) for module in model.modules() for p in module._parameters.values())
    layers = {key: layer for key, layer in layers_of(model, (nn.Linear,)).items() if layer is not head}
    variants = {id(layer.get_base_layer()) for _, layer in adapted_layers(model) if getattr(layer, "lora_variant", None)}
    some_frozen = any(not layer.weight.requires_grad for layer in layers.values())
    for key, layer in layers.items():
        if not format_of(layer.weight).coded:
            read = "carries an adapter that reads its weight, such as DoRA" if id(layer) in variants else None
            unsuited = _unsuited(layer, uses[id(layer.weight)], some_frozen)
            why = read or unfit(model, layer) or unsuited or kind.refusal(layer.weight)
            yield key, layer, why


def _unsuited(layer: nn.Linear, uses: int, some_frozen: bool) -> str | None:
    if uses > 1:
        return "shares its weight with another module"
    return "trains, as other layers do not" if some_frozen and layer.weight.requires_grad else None


def check(model: nn.Module, kind: type[Frozen]) -> None:
    """ValueError where nothing can be put into codes now."""
    _check_closed(model, "lora.quantize_base")
    for key, layer in adapted_layers(model):
        if layer.merged_adapters:
            raise ValueError(
                f"lora.quantize_base: an adapter is merged into the weight of {key}, which could not be unmerged; call "
                f"gb.lora.unmerge first."
            )
    for key, module in model.named_modules():
        if isinstance(module, Base) and module.kind is not kind:
            layer = key.rpartition(".")[0].removesuffix(".base_layer")
            raise ValueError(
                f"lora.quantize_base: {layer} is in {module.kind.name} already; call gb.lora.dequantize_base first."
            )


def _check_closed(model: nn.Module, who: str) -> None:
    if sharded := next((key for key, layer in layers_of(model, (nn.Linear,)).items() if is_sharded(layer.weight)), None):
        raise ValueError(f"{who}: the weight of {sharded} is sharded; call it before the model is sharded.")
    check_no_step(model, who)


def check_no_step(model: nn.Module, who: str) -> None:
    """What is added to a model, or taken out, while a step has it would not train, or train on."""
    if any(hasattr(p, "main_grad") for p in model.parameters()):
        raise ValueError(f"{who}: the model is in a TrainStep, whose graphs hold its weights; close that first.")


def _forget_stacks(model: nn.Module) -> None:
    """Joined weights are held by what multiplies by them; it would keep all of them as they were until it is next called."""
    for module in model.modules():
        if isinstance(stacked := vars(module).get("stacked"), Stacked):
            stacked.forget()
