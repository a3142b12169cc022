"""What a training step will ask of adapters, named before it runs, so that the kernels are compiled side by side."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..kernels.adapters import blocks_of
from ..kernels.choose import Call
from ..layers.norm import RMSNorm
from ..layers.site_parts import AS_IT_IS, Format, adapters_of, format_of
from ..layers.stacked import Projecting
from .adapter import LowRank

SIZE = 2  # of a product, in what lora_product's door says of its shape: thousands of tokens have the largest


def calls(model: nn.Module) -> Iterator[Call]:
    """Those of layers with one adapter each, or one for each row, and of norms between them. A batch of few tokens takes other
    kernels, when it comes."""
    layers = {id(m): m for m in model.modules() if isinstance(m, nn.Linear)}
    for part in model.modules():
        if isinstance(part, Projecting):
            together = part.projections()
            lows = [low for layer in together if (low := _only(layer)) is not None]
            if len(lows) == len(together) and blocks_of([low.b for low in lows]) and len({_joins(low) for low in lows}) == 1:
                yield from _site(lows, format_of(together[0].weight), any(layer.bias is not None for layer in together))
                for layer in together:
                    layers.pop(id(layer), None)
    for layer in layers.values():
        if (low := _only(layer)) is not None:
            yield from _site([low], format_of(layer.weight), layer.bias is not None)
    for norm in model.modules():
        if isinstance(norm, RMSNorm) and not norm.weight.requires_grad:
            yield from ((op, (norm.weight.shape[0], True)) for op in norm.OPS)


def _only(layer: Any) -> LowRank | None:
    weight = getattr(layer, "weight", None)
    adapters = () if weight is None else adapters_of(weight)
    low = adapters[0] if len(adapters) == 1 else None
    return low if isinstance(low, LowRank) else None


def _joins(low: LowRank) -> tuple:
    return low.scale, low.routing


def _site(lows: Sequence[LowRank], stored: Format, biased: bool) -> Iterator[Call]:
    rank, inputs, outputs, count = lows[0].a.shape[0], lows[0].a.shape[1], sum(low.b.shape[0] for low in lows), len(lows)
    ranks, dropping, routed = rank * count, lows[0].rate > 0, lows[0].routing is not None
    yield "lora_down", (ranks, dropping, routed, 1, True, False)
    yield "lora_down", (rank, False, routed, count, False, False)
    if stored is AS_IT_IS:
        own = (lows[0].routing.alike(lows) if routed else None) or (0, 0)
        yield "lora_product", (SIZE, rank, False, True, count, biased, *own)
        yield "lora_product", (SIZE, ranks, dropping, False, 1, False, *own)
    else:
        yield "lora_up", (rank, False, count)
        yield "lora_up", (ranks, dropping, 1)
    if routed:  # the gradients of a layer's b lie side by side
        yield from (("lora_gradients", (inputs, low.b.shape[0], rank, dropping, 1, True, False)) for low in lows)
    else:
        yield "lora_gradients", (inputs, outputs, rank, dropping, count, False, False)
