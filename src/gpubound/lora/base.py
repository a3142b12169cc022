"""Quantisation of a model's frozen weights, in place: QLoRA's NF4, int8, and fp8 with products in 8 bits."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..formatting import readable
from ..kernels.accumulate import Taker
from ..kernels.tensor_state import record_of
from ..layers.fused_weights import release_stacks
from ..layers.linear_product import format_of, is_sharded, multiply_by_records
from ..layers.quantized_base import Base, Frozen, InFp8, InInt8, InNf4
from ..trace import fallback, notice
from .layers import adapted_layers
from .targets import in_encoder_layers, layers_of, output_layer, unfit

FORMATS: dict[str, type[Frozen]] = {kind.name: kind for kind in (InNf4, InInt8, InFp8)}


@torch.inference_mode(False)
def quantize_base(model: nn.Module, format: str) -> list[str]:
    """Quantise and freeze the weights of all nn.Linear but the head: "nf4", "int8" or "fp8". Return the layers' names.

    Layers are quantised individually, without a second copy of the model. A weight that the format cannot store is left out, a
    fallback with its reason; so is a weight that trains, where others are frozen already.
    """
    kind = kind_of(format, "lora.quantize_base: format")
    check(model, kind)
    release_stacks(model)
    codes = encode(model, kind)
    multiply_by_records(model, everywhere=True)
    experts = sum(stack.nbytes for stack in layers_of(model).values() if isinstance(stack, torch.Tensor))
    report_quantised([codes], format, output_layer(model) is not None, experts)
    return codes.names


class InCodes(NamedTuple):
    """Names of layers that were quantised, and the bytes of their weights before and after."""

    names: list[str]
    before: int
    after: int


def encode(part: nn.Module, kind: type[Frozen], name: str = "") -> InCodes:
    """Quantise the weights of a model, or of its part of that name."""
    names, before, after = [], 0, 0
    for key, layer, why in _candidates(part, kind):
        key = f"{name}.{key}" if name else key
        if why is not None:
            fallback("lora.quantize_base", f"{key} {why}, so it is not quantised")
            continue
        before += layer.weight.nbytes
        base = Base(layer, kind)
        after += sum(t.nbytes for t in (layer.weight, *base.buffers()))
        names.append(key)
    return InCodes(names, before, after)


def report_quantised(parts: Sequence[InCodes], format: str, has_head: bool, experts: int = 0) -> None:
    """Print the number of weights and bytes. experts: the bytes of experts that are parameters, which are not quantised"""
    count = sum(len(part.names) for part in parts)
    before, after = sum(part.before for part in parts), sum(part.after for part in parts)
    if count:
        rest = "; the head is not quantised" * has_head
        if experts:
            rest = f"; {'the head and ' * has_head}the experts, {readable(experts)}, are not quantised"
        notice(f"lora: {count} weights in {format}: {readable(after)} instead of {readable(before)}{rest}.")


def suited(model: nn.Module, kind: type[Frozen]) -> list[str]:
    """Return the names of the layers that `encode` would quantise."""
    return [key for key, _, why in _candidates(model, kind) if why is None]


@torch.inference_mode(False)
def dequantize_base(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Undo `quantize_base`, in `dtype` or the model's. The weights keep its rounding errors."""
    _check_closed(model, "lora.dequantize_base")
    undo = multiply_by_records(model, everywhere=True)
    release_stacks(model)
    for base in [module for module in model.modules() if isinstance(module, Base)]:
        base.dissolve(dtype)
    undo()


def kind_of(format: str, who: str) -> type[Frozen]:
    """Return the format of this name. who: the caller and its argument, for the error"""
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"{who} must be one of {', '.join(map(repr, FORMATS))}, got {format!r}.")
    return FORMATS[format]


def _candidates(model: nn.Module, kind: type[Frozen]) -> Iterator[tuple[str, nn.Linear, str | None]]:
    """Yield the layers below the head that are not quantised yet, and why one of them cannot be."""
    head, uses = output_layer(model), Counter(id(p) for module in model.modules() for p in module._parameters.values())
    layers = {key: layer for key, layer in layers_of(model, (nn.Linear,)).items() if layer is not head}
    variants = {id(layer.get_base_layer()) for _, layer in adapted_layers(model) if getattr(layer, "lora_variant", None)}
    never_called = in_encoder_layers(model)
    some_frozen = any(not layer.weight.requires_grad for layer in layers.values())
    for key, layer in layers.items():
        if not format_of(layer.weight).coded:
            why: str | None
            if id(layer) in variants:
                why = "carries an adapter that reads its weight, such as DoRA"
            elif (why := unfit(layer, never_called)) is None and uses[id(layer.weight)] > 1:
                why = "shares its weight with another module"
            elif why is None and some_frozen and layer.weight.requires_grad:
                why = "trains, as other layers do not"
            yield key, layer, why or kind.refusal(layer.weight)


def check(model: nn.Module, kind: type[Frozen]) -> None:
    """Raise ValueError where the model cannot be quantised now."""
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
    """Raise ValueError for a model in a TrainStep or another trainer, which would ignore a change of its parameters."""
    for name, p in model.named_parameters():
        record_of(p)  # of a parameter that was pickled in a step, it removes the main_grad
        if not hasattr(p, "main_grad"):
            continue
        if any(isinstance(hook, Taker) for hook in (p._post_accumulate_grad_hooks or {}).values()):  # type: ignore[attr-defined]
            raise ValueError(f"{who}: the model is in a TrainStep, whose graphs hold its weights; close that first.")
        raise ValueError(
            f"{who}: {name} has a main_grad, in which another library sums its gradients; call {who} before it takes the model."
        )
