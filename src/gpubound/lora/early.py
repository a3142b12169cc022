"""What a training step will ask of adapters, named before it runs, so that the kernels are compiled side by side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..kernels.dispatch import Call
from ..kernels.lora import product_size
from ..kernels.lora_grads import blocks_of
from ..layers.fused_weights import Projecting, foreign, plain, site_of
from ..layers.linear_formats import AS_IT_IS, Format, adapters_of, format_of
from ..layers.norm import RMSNorm
from .adapter import LowRank

MANY = 1 << 20  # tokens of a batch that does not say how many it has


def calls(model: nn.Module) -> Iterator[Call]:
    """Those of layers with one adapter each, or one for each row, and of norms between them, whatever the batch. `products`
    names the others."""
    for lows, stored, _ in _sites(model):
        yield from _of_every_batch(lows, stored)
    for norm in model.modules():
        if isinstance(norm, RMSNorm) and not norm.weight.requires_grad:
            yield from ((op, (norm.weight.shape[0], True)) for op in norm.OPS)


def products(model: nn.Module, batch: Any) -> Iterator[Call]:
    """The products with adapters that this batch will take, and those of its first row, which an objective tries, forward."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    tokens, row = (ids.numel(), ids[:1].numel()) if isinstance(ids, Tensor) and ids.dim() else (MANY, MANY)
    for lows, stored, biased in _sites(model):
        if stored is AS_IT_IS:
            yield from _products(lows, biased, tokens)
            yield next(_products(lows, biased, row))


def _sites(model: nn.Module) -> Iterator[tuple[list[LowRank], Format, bool]]:
    """Yield the adapters that are computed together, the format of their weights, and whether a bias is added."""
    layers = {id(m): m for m in model.modules() if foreign(m) or plain(m)}
    for part in model.modules():
        if isinstance(part, Projecting):
            together = [(layer, _only(layer)) for layer in part.projections()]
            lows = [found[0] for _, found in together if found is not None]
            if len(lows) == len(together) and blocks_of([low.b for low in lows]) and len({_joins(low) for low in lows}) == 1:
                yield lows, together[0][1][1], any(found[2] for _, found in together if found)  # type: ignore[index]
                for layer, _ in together:
                    layers.pop(id(layer), None)
    for layer in layers.values():
        if (found := _only(layer)) is not None:
            yield [found[0]], found[1], found[2]


def _only(layer: Any) -> tuple[LowRank, Format, bool] | None:
    """Return the only adapter of a layer, the format of its weight, and whether a bias is added."""
    site = site_of(layer) if foreign(layer) or plain(layer) else None
    if site is None or site.why is not None:
        return None
    adapters = (*adapters_of(site.weight), *site.extra)
    if len(adapters) != 1 or not isinstance(adapters[0], LowRank):
        return None
    return adapters[0], format_of(site.weight), site.bias is not None


def _joins(low: LowRank) -> tuple:
    return low.scale, low.routing


def _of_every_batch(lows: Sequence[LowRank], stored: Format) -> Iterator[Call]:
    rank, inputs, outputs, count = lows[0].a.shape[0], lows[0].a.shape[1], _outputs(lows), len(lows)
    ranks, dropping, routed = rank * count, lows[0].rate > 0, lows[0].routing is not None
    yield "lora_down", (ranks, dropping, routed, 1, True)
    yield "lora_down", (rank, False, routed, count, False)
    if stored is not AS_IT_IS:
        yield "lora_up", (rank, False, count)
        yield "lora_up", (ranks, dropping, 1)
    if routed:  # the gradients of a layer's b lie side by side
        yield from (("lora_gradients", (inputs, low.b.shape[0], rank, dropping, 1, True, False)) for low in lows)
    else:
        yield "lora_gradients", (inputs, outputs, rank, dropping, count, False, False)


def _products(lows: Sequence[LowRank], biased: bool, tokens: int) -> Iterator[Call]:
    """The one of forward, then the one that makes the gradient of x."""
    rank, inputs, count, dropping, routing = *lows[0].a.shape, len(lows), lows[0].rate > 0, lows[0].routing
    own = (None if routing is None else routing.alike(lows)) or (0, 0)
    yield "lora_product", (product_size(tokens, _outputs(lows)), rank, False, True, count, biased, *own)
    yield "lora_product", (product_size(tokens, inputs), rank * count, dropping, False, 1, False, *own)


def _outputs(lows: Sequence[LowRank]) -> int:
    return sum(low.b.shape[0] for low in lows)
