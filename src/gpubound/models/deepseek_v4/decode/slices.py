"""Tensor-parallel shards of a layer: some attention heads, and some columns of every expert, per device.

The inputs that all heads share (a token's low-rank query, its keys and the entries) are replicated, and so is the routing.
A device's heads and columns compute one term of the layer's output, and the devices sum the terms.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ....decode.tensors.plan import SlicePlan
from ....kernels.packed_weights import GROUP, Packed
from ..family import CompressedWeights, LatentWeights, LinearWeights, MixtureWeights, StreamedLayerWeights
from ..kernels.products import Fp8Blocks
from .ends import Ends


def indivisible(layers: list[StreamedLayerWeights], count: int) -> str | None:
    """Return why the model cannot be sharded over `count` devices; None if it can."""
    return next(
        (f"layer {number} has {why}" for number, layer in enumerate(layers) if (why := _indivisible(layer, count))), None
    )


def _indivisible(layer: StreamedLayerWeights, count: int) -> str | None:
    latent, mixture = layer.attention, layer.mixture
    width = _width(mixture)
    if latent.groups % count:
        return f"{latent.groups} groups of heads, which do not divide by {count}"
    if width % count:
        return f"experts of {width} columns, which do not divide by {count}"
    if mixture.gate.rows % count:
        return f"a shared expert of {mixture.gate.rows} columns, which do not divide by {count}"
    if isinstance(mixture.down, Packed) and width // count % GROUP:
        return f"experts in codes, {width // count} columns for each device, which are no multiple of {GROUP}"
    parts = {0: (latent.q_b, latent.o_a, mixture.gate, mixture.up), 1: (latent.o_b, mixture.shared_down)}
    for axis, weight in ((axis, layer.weight) for axis, some in parts.items() for layer in some):
        if isinstance(weight, Fp8Blocks) and weight.shape[axis] // count % weight.block[axis]:
            return f"a weight {tuple(weight.shape)} in fp8, whose blocks {weight.block} do not divide by {count}"
    return None


def _width(mixture: MixtureWeights) -> int:
    """Return the width of an expert."""
    return mixture.down.columns if isinstance(mixture.down, Packed) else mixture.down.shape[2]


def slice_of(layer: StreamedLayerWeights, plan: SlicePlan) -> StreamedLayerWeights:
    """Return a layer's shard on the plan's device. Tensors, and row slices, that are already there are not copied."""
    return there(layer._replace(attention=_latent(layer.attention, plan), mixture=_mixture(layer.mixture, plan)), plan.device)


def ends_slice(ends: Ends, plan: SlicePlan) -> Ends:
    return there(ends._replace(head=ends.head[plan.words.start : plan.words.stop]), plan.device)


def _latent(w: LatentWeights, plan: SlicePlan) -> LatentWeights:
    return replace(
        w,
        q_b=rows(w.q_b, plan),
        o_a=rows(w.o_a, plan),
        o_b=columns(w.o_b, plan),
        sinks=w.sinks[plan.of(w.heads)],
        heads=w.heads // plan.count,
        groups=w.groups // plan.count,
    )


def _mixture(w: MixtureWeights, plan: SlicePlan) -> MixtureWeights:
    width = _width(w)
    return replace(
        w,
        gate_up=_of_stack(w.gate_up, lambda t: _halves(t, width, plan.of(width))),
        down=_of_stack(w.down, lambda t: t[..., plan.of(t.shape[-1])]),
        gate=rows(w.gate, plan),
        up=rows(w.up, plan),
        shared_down=columns(w.shared_down, plan),
    )


def _of_stack(stack: Tensor | Packed, of: Callable[[Tensor], Tensor]) -> Tensor | Packed:
    if isinstance(stack, Packed):
        words, scale = of(stack.words), of(stack.scale)
        return stack._replace(words=words, scale=scale, columns=stack.columns * words.shape[1] // stack.words.shape[1])
    return of(stack)


def _halves(stack: Tensor, width: int, mine: slice) -> Tensor:
    """Return the rows `mine` of each gate and each up, which alternate in `stack` with `width` rows each."""
    found = stack.flatten(0, -2).unflatten(0, (-1, width))[:, mine]
    return found.flatten(0, 1) if stack.dim() == 2 else found.unflatten(0, (len(stack), 2)).flatten(1, 2)


def rows(layer: LinearWeights, plan: SlicePlan) -> LinearWeights:
    return _part(layer, 0, plan)._replace(bias=None if layer.bias is None else layer.bias[plan.of(len(layer.bias))])


def columns(layer: LinearWeights, plan: SlicePlan) -> LinearWeights:
    """Return a column shard of a layer. Only the first device has the bias, since the devices' products are summed."""
    return _part(layer, 1, plan)._replace(bias=None if plan.number else layer.bias)


def _part(layer: LinearWeights, axis: int, plan: SlicePlan) -> LinearWeights:
    def of(t: Tensor) -> Tensor:
        mine = plan.of(t.shape[axis])
        return t[mine] if axis == 0 else t[:, mine]

    weight = layer.weight
    if isinstance(weight, Fp8Blocks):
        return layer._replace(weight=weight._replace(codes=of(weight.codes), scale=of(weight.scale)))
    return layer._replace(weight=of(weight))


def there(value: Any, device: torch.device) -> Any:
    """Return a copy of a nested record with all tensors contiguous on the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device).contiguous()
    if isinstance(value, CompressedWeights):
        found = {one.name: there(getattr(value, one.name), device) for one in fields(value)}  # type: ignore[arg-type]
        return replace(value, **found)  # type: ignore[type-var]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(there(one, device) for one in value))
    return value
