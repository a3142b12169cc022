"""Kernel calls of adapters in a training step, named before it runs, so that the kernels are compiled in parallel."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..kernels.dispatch import Call
from ..kernels.lora import blocks_of, product_size
from ..kernels.norms import norm_shape
from ..layers.block import RMSNorm
from ..layers.fused_weights import Projecting, has_reader, site_of
from ..layers.linear_product import DENSE, Format, format_of
from .adapter import LowRank

UNKNOWN_TOKENS = 1 << 20  # for a batch that does not show how many it has


def calls(model: nn.Module) -> Iterator[Call]:
    """Yield the calls of any batch: of layers with one adapter each, or routed ones, and of the norms between them."""
    for lows, format, _ in _sites(model):
        yield from _of_every_batch(lows, format)
    for norm in model.modules():
        if isinstance(norm, RMSNorm) and not norm.weight.requires_grad:
            yield from ((op, norm_shape(len(norm.weight), norm.weight)) for op in norm.OPS)


def products(model: nn.Module, batch: Any) -> Iterator[Call]:
    """Yield the products with adapters of this batch."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    tokens = ids.numel() if isinstance(ids, Tensor) and ids.dim() else UNKNOWN_TOKENS
    for lows, format, biased in _sites(model):
        if format is DENSE:
            yield from _products(lows, biased, tokens)


def _sites(model: nn.Module) -> Iterator[tuple[list[LowRank], Format, bool]]:
    """Yield the adapters that are computed together, the format of their weights, and whether a bias is added."""
    sites = {id(layer): site for layer in model.modules() if has_reader(layer) and len((site := site_of(layer)).adapters) == 1}
    for part in model.modules():
        if isinstance(part, Projecting):
            together = [sites.get(id(layer)) for layer in part.projections()]
            lows: list[Any] = [site.adapters[0] for site in together if site is not None]
            same = len(lows) == len(together) and len({(low.scale, low.routing) for low in lows}) == 1
            if same and blocks_of([low.b for low in lows]):
                yield lows, format_of(together[0].weight), any(site.bias is not None for site in together)  # type: ignore[union-attr]
                for layer in part.projections():
                    sites.pop(id(layer), None)
    for site in sites.values():
        yield [site.adapters[0]], format_of(site.weight), site.bias is not None  # type: ignore[list-item]


def _of_every_batch(lows: Sequence[LowRank], format: Format) -> Iterator[Call]:
    rank, inputs, outputs, count = lows[0].a.shape[0], lows[0].a.shape[1], _outputs(lows), len(lows)
    ranks, dropping, routed = rank * count, lows[0].rate > 0, lows[0].routing is not None
    yield "lora_down", (ranks, dropping, routed, 1, True)
    yield "lora_down", (rank, False, routed, count, False)
    if format is not DENSE:
        yield "lora_up", (rank, False, count)
        yield "lora_up", (ranks, dropping, 1)
    if routed:  # the gradients of a layer's b are adjacent columns
        yield from (("lora_gradients", (inputs, low.b.shape[0], rank, dropping, 1, True, False)) for low in lows)
    else:
        yield "lora_gradients", (inputs, outputs, rank, dropping, count, False, False)


def _products(lows: Sequence[LowRank], biased: bool, tokens: int) -> Iterator[Call]:
    """Yield the product of forward, then the one of the gradient of x."""
    rank, inputs, count, dropping, routing = *lows[0].a.shape, len(lows), lows[0].rate > 0, lows[0].routing
    own = (None if routing is None else routing.equal_layout(lows)) or (0, 0)
    yield "lora_product", (product_size(tokens, _outputs(lows)), rank, False, True, count, biased, *own)
    yield "lora_product", (product_size(tokens, inputs), rank * count, dropping, False, 1, False, *own)


def _outputs(lows: Sequence[LowRank]) -> int:
    return sum(low.b.shape[0] for low in lows)
