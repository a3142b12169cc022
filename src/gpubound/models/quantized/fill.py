"""Fill a model from a quantised folder. One layer at a time is in memory in more bits than the folder has."""

from collections import Counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...errors import DataError
from ...formatting import readable
from ...layers.embedding_and_head import head_of
from ...layers.linear_product import multiply_by_records
from ...layers.quantized_base import Base, dequantised
from ...trace import fallback, notice
from ..folder import CURE
from ..storing import allocate, stored_state
from .scheme import Coded, Scheme, Weight

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def fill(model: Model, scheme: Scheme, device: torch.device, dtype: torch.dtype) -> Model:
    """Read the folder's weights into a model whose linear layers are on the meta device. Quantised embeddings and heads are
    dequantised to `dtype`."""
    layers = _quantised_layers(model, scheme)
    allocate(model, device, dtype, leave={*layers.values()})

    def take(name: str) -> Tensor:
        return scheme.raw(name).to(device)

    coded = {f"{name}.weight" for name in layers}
    plain, read, missing, widened = scheme.plain_names(), set[int](), [], 0
    for name, tensor in stored_state(model).items():
        if name in coded:
            continue
        stem = name.removesuffix(".weight")
        if name in plain:
            values = scheme.dense(name, take)
            _check_shape(scheme, name, tuple(tensor.shape), tuple(values.shape))
            tensor.copy_(values)
        elif stem in scheme.layers:
            values = numbers(scheme.read(stem, take), scheme.layers[stem], dtype)
            _check_shape(scheme, name, tuple(tensor.shape), tuple(values.shape))
            tensor.copy_(values)
            widened += 1
        else:
            missing.append((name, tensor.data_ptr()))
            continue
        read.add(tensor.data_ptr())
    if absent := [name for name, address in missing if address not in read]:  # a tied one was read under another name
        raise DataError(f"{scheme.folder} lacks {absent[:3]} ({len(absent)} tensors in all); {CURE}.")
    formats, reasons = Counter[str](), dict[str, list[str]]()
    nbytes = of_modules = scheme.read_modules(model, take)
    for name, layer in layers.items():
        kind, why = _fill_layer(name, layer, scheme, take, device, dtype)
        formats[kind] += 1
        nbytes += sum(t.nbytes for t in (layer.weight, *layer.buffers()))
        if why:
            reasons.setdefault(why, []).append(name)
    multiply_by_records(model, everywhere=True)
    precision = str(dtype).removeprefix("torch.")
    for why, names in reasons.items():
        rest = f" and {len(names) - 1} others" if len(names) > 1 else ""
        fallback(f"{scheme.folder.name}: {len(names)} quantised weights", f"{names[0]}{rest} are read in {precision}: {why}")
    summary = ", ".join(f"{count} weights in {kind}" for kind, count in formats.items() if kind)
    dequantised_note = f"; embedding or head in {precision}" * bool(widened)
    if of_modules:
        summary = ", ".join(filter(None, (summary, "experts")))
    if summary:
        notice(f"{scheme.folder.name}: {scheme.name}: {summary} as published, {readable(nbytes)}{dequantised_note}.")
    return model


def _quantised_layers(model: nn.Module, scheme: Scheme) -> dict[str, Any]:
    """Return the linear layers that stay quantised, by name: all but the head."""
    modules, head = dict(model.named_modules()), head_of(model)
    layers = {name: layer for name in scheme.layers if type(layer := modules.get(name)) is nn.Linear and layer is not head}
    for name, layer in layers.items():
        _check_shape(scheme, f"{name}.weight", tuple(layer.weight.shape), scheme.layers[name])
    return layers


class Held(NamedTuple):
    """Bytes of a weight in memory, of its codes or its numbers and of the scales."""

    codes: int
    scales: int


@torch.no_grad()
def stored_weights(model: nn.Module, scheme: Scheme, dtype: torch.dtype) -> dict[str, Held]:
    """Return the bytes that `fill` makes of each quantised layer's weight. Of the layers that are stored alike one is read."""
    known, held = dict[Any, Held](), dict[str, Held]()
    for layer, module in _quantised_layers(model, scheme).items():
        stored = [scheme.stored[name] for name in scheme.tensors(layer)]
        form = tuple(module.weight.shape), *((each.dtype, tuple(each.shape)) for each in stored)
        if form not in known:
            weight = scheme.read(layer, scheme.raw)
            known[form] = Held(dtype.itemsize * module.weight.numel(), 0)
            if isinstance(weight, Coded):
                known[form] = Held(weight.codes.nbytes, sum(t.nbytes for t in weight.scales.values()))
        held[layer] = known[form]
    return held


def _fill_layer(name: str, layer: Any, scheme: Scheme, take: Any, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Read a quantised layer. Return the name of its format, or '' and why it is dequantised."""
    weight = scheme.read(name, take)
    if layer.bias is not None:
        bias = torch.empty(layer.bias.shape, dtype=dtype, device=device)
        layer.bias = nn.Parameter(bias.copy_(scheme.dense(f"{name}.bias", take)))
    if isinstance(weight, Coded):
        base = Base(layer, weight.kind, (weight.codes, weight.scales), dtype)
        base.rounds_inputs = False
        return weight.kind.name, ""
    layer.weight = nn.Parameter(weight.values.to(dtype))
    return "", weight.why


def numbers(weight: Weight, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the dequantised numbers of a weight."""
    if not isinstance(weight, Coded):
        return weight.values.to(dtype)
    layer = nn.Linear(shape[1], shape[0], bias=False, device="meta")
    Base(layer, weight.kind, (weight.codes, weight.scales), dtype)
    return dequantised([layer.weight], dtype)


def _check_shape(scheme: Scheme, name: str, wanted: tuple[int, ...], got: tuple[int, ...]) -> None:
    if wanted != got:
        raise DataError(f"{scheme.folder}: {name}: got {got}, wanted {wanted}, by config.json; {CURE}.")
