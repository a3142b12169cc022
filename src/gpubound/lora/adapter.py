"""A low-rank adapter of a linear product: y += scale · drop(x) aᵀ bᵀ, as a part of its site (layers/linear_product.py).

Several of them, on one weight or on weights that are multiplied as one, are computed together: x is read once for all of their
aᵀ, and once more for all of their gradients. For backward they keep x and the narrow product h.

Legend: N tokens, K inputs, O outputs, R ranks; x (N, K), a (R, K), b (O, R), h (N, R), g (N, O) the output's gradient.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.accumulate import join, join_rows, one_matrix
from ..kernels.adapter_routing import Owners, OwnRanks, own_columns
from ..kernels.hash_dropout import Drop, drawn
from ..kernels.lora import lora_down, lora_up
from ..kernels.lora_grads import adapter_gradients, blocks_of
from ..layers.fused_weights import Projecting, foreign, site_of
from ..layers.linear_formats import Adapter, Factors, Spanning, adapters_of, is_sharded, rows_of, shape_of
from ..trace import fallback


class LowRank(Adapter):
    """What one adapter is. `dropout` is an nn.Dropout, which drops while it is in training mode, or another module: none."""

    routing: Any = None  # which rows of a batch have which columns of h (rows.py); None: all have all

    def __init__(self, a: Tensor, b: Tensor, scale: float = 1.0, dropout: nn.Module | None = None):
        self.parameters = self.a, self.b = a, b
        self.all_a, self.all_b = [a], [b]
        self.scale, self.dropout = scale, dropout

    @property
    def identity(self) -> tuple:
        return (*super().identity, self.scale)

    @property
    def rate(self) -> float:
        """The share of x that is dropped now."""
        dropout = self.dropout
        return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0

    @classmethod
    def join(cls, members: Sequence[Spanning]) -> Sequence[Spanning]:
        """One `Together` for all that scale and drop alike."""
        alike: dict[tuple, list[Spanning]] = {}
        for member in members:
            low: LowRank = member.adapter  # type: ignore[assignment]
            alike.setdefault((low.scale, low.rate, low.routing), []).append(member)
        return [Spanning(Together(group), group[0].start, group[-1].stop) for group in alike.values()]

    def plain(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.rate) if self.rate else x
        return F.linear(F.linear(x, self.a.to(x.dtype)) * self.scale, self.b.to(x.dtype))

    def gradients(self, x: Tensor, gh: Tensor, g: Tensor, h: Tensor, drop: Drop | None) -> list[Tensor | None]:
        """Those of `parameters`."""
        return adapter_gradients([self.a], [self.b], x, gh, g, h, drop, [p.requires_grad for p in self.parameters])


class Together(Adapter):
    """Adapters over parts of one product, in the order of these parts, of one scale and one mask of dropout.

    Where the parts are all of the product they are one adapter, whose b is block-diagonal (kernels/lora.py).
    """

    seen: Any  # of the rows' adapters, by what their routing knows them again in backward

    def __init__(self, members: Sequence[Spanning]):
        start = members[0].start
        self.lows: list[LowRank] = [member.adapter for member in members]  # type: ignore[misc]
        self.spans = [member._replace(start=member.start - start, stop=member.stop - start) for member in members]
        self.ranks = [low.a.shape[0] for low in self.lows]
        self.parameters = [p for low in self.lows for p in low.parameters]
        self.scale, self.rate, self.routing = self.lows[0].scale, self.lows[0].rate, self.lows[0].routing
        b, follows = [low.b for low in self.lows], [0, *(span.stop for span in self.spans)]
        self.blocks = blocks_of(b) if all(span.start == stop for span, stop in zip(self.spans, follows)) else None
        self.one = self.blocks is not None or len(self.lows) == 1

    def forward(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        h, kept = self._down(x)
        y = y.view(-1, y.shape[-1])
        if self.one:
            lora_up(y, h, self._b(), blocks=self.blocks)
        else:
            for _, span, part, b in self._each(h):
                lora_up(span.of(y), part, b)
        return kept

    def factors(self, x: Tensor) -> tuple[Factors, Sequence[Tensor]] | None:
        if not self.one:
            return None
        h, kept = self._down(x)
        return Factors(h, self._b(), None, self.blocks, None if self.routing is None else self._own_ranks(kept[1])), kept

    def _down(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        drop = drawn(self.rate, x.device)
        ids = None if self.routing is None else self.routing.begin(self, x)
        h = lora_down(rows_of(x), self._a(), self.scale, drop, None, self._owners(ids, self.lows))
        return h, (h, *(t for t in (ids, None if drop is None else drop.seed) if t is not None))

    def share(self, g: Tensor, kept: Sequence[Tensor]) -> Factors:
        h, *rest = kept
        ids = None if self.routing is None else self.routing.again(self, rest.pop(0))
        gh = h.new_empty(h.shape)
        if self.one:
            lora_down(g, self._b().t(), self.scale, None, gh, self._owners(ids, self.lows), self.blocks)
        else:
            for low, span, out, b in self._each(gh):
                lora_down(span.of(g), b.t(), self.scale, None, out, self._owners(ids, [low]))
        return Factors(gh, self._a().t(), Drop(self.rate, rest[0]) if rest else None, None, self._own_ranks(ids))

    def _owners(self, ids: Tensor | None, lows: Sequence[LowRank]) -> Owners | None:
        return None if ids is None else self.routing.owners(ids, lows)

    def _own_ranks(self, ids: Tensor | None) -> OwnRanks | None:
        if ids is None or (alike := self.routing.alike(self.lows)) is None:
            return None
        return OwnRanks(ids, *alike)

    def backward(
        self, g: Tensor, x: Tensor, kept: Sequence[Tensor], dx: Tensor | None, share: Factors | None = None
    ) -> Sequence[Tensor | None]:
        if share is None:
            share = self.share(g, kept)
            if dx is not None:
                lora_up(dx, share.h, share.b, share.drop)
        if self.blocks and self.routing is None:
            a, b, wanted = (
                [low.a for low in self.lows],
                [low.b for low in self.lows],
                [p.requires_grad for p in self.parameters],
            )
            return adapter_gradients(a, b, x, share.h, g, kept[0], share.drop, wanted)
        made: list[Tensor | None] = []
        for (low, span, h, _), gh in zip(self._each(kept[0]), share.h.split(self.ranks, 1)):
            made += low.gradients(x, gh, span.of(g), h, share.drop)
        return made

    def _each(self, h: Tensor) -> Iterator[tuple[LowRank, Spanning, Tensor, Tensor]]:
        return zip(self.lows, self.spans, h.split(self.ranks, 1), (low.b.detach() for low in self.lows))

    def pack(self) -> None:
        """Store a and b as one matrix each, wherever they are now."""
        if self._packable or self.routing is not None:
            pack([a for low in self.lows for a in low.all_a], force=True)
        if self._packable and self.blocks:
            pack([low.b for low in self.lows], force=True)
        for low in self.lows:
            pack(low.all_b, COLUMNS, force=True)

    @property
    def _packable(self) -> bool:
        """Whether each adapter has a weight of its own among those that are multiplied as one."""
        follows = [0, *(span.stop for span in self.spans)]
        return self.routing is None and all(span.start >= stop for span, stop in zip(self.spans, follows))

    def _a(self) -> Tensor:
        """All a, one below the other."""
        return self._matrix([low.a for low in self.lows])

    def _b(self) -> Tensor:
        return self._matrix([low.b for low in self.lows])

    def _matrix(self, parameters: Sequence[Tensor]) -> Tensor:
        joined = join_rows([p.detach() for p in parameters])
        if joined is None and self._packable:
            if (why := pack(parameters)) is not None:
                fallback("lora: the adapters of layers that are multiplied as one, as one matrix", f"{why}: they are copied")
            joined = join_rows([p.detach() for p in parameters])
        return torch.cat([p.detach() for p in parameters]) if joined is None else joined


class PerRow(LowRank):
    """`places`: which adapter of the routing (rows.py) each member is."""

    def __init__(self, members: Sequence[LowRank], places: Sequence[int], routing: Any):
        self.members, self.routing, self.dropout, self.scale = members, routing, members[0].dropout, 1.0
        self.all_a, self.all_b = [low.a for low in members], [low.b for low in members]
        self.parameters = [p for low in members for p in low.parameters]
        self.columns = tuple((place, low.a.shape[0], low.scale) for place, low in zip(places, members))

    @property
    def identity(self) -> tuple:
        return (*super().identity, self.columns, id(self.routing))

    @property
    def a(self) -> Tensor:  # type: ignore[override]
        return one_matrix(self.all_a)

    @property
    def b(self) -> Tensor:  # type: ignore[override]
        return one_matrix(self.all_b, beside=True)

    def plain(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.rate) if self.rate else x
        h = F.linear(x, torch.cat(self.all_a).to(x.dtype))
        own = self.routing.owners(self.routing.ids_of(x), [self])
        return F.linear(own_columns(h.flatten(0, -2), own).view(h.shape), torch.cat(self.all_b, COLUMNS).to(x.dtype))

    def gradients(self, x: Tensor, gh: Tensor, g: Tensor, h: Tensor, drop: Drop | None) -> list[Tensor | None]:
        wanted = [p.requires_grad for p in self.parameters]
        return adapter_gradients(self.all_a, self.all_b, x, gh, g, h, drop, wanted, beside=True)


ROWS, COLUMNS = 0, 1


def pack(parameters: Sequence[Tensor], dim: int = ROWS, force: bool = False) -> str | None:
    """Make the parameters slices of one matrix, along `dim`. Return None if they are, else the reason against moving them.

    force: move slices of a larger buffer, too, as before a TrainStep, which moves every parameter
    """
    if len(parameters) == 1 or join([p.detach() for p in parameters], beside=dim == COLUMNS) is not None:
        return None
    if (why := _immovable(parameters, force)) is not None:
        return why
    with torch.inference_mode(False), torch.no_grad():
        turned = [p.detach().t() if dim == COLUMNS else p.detach() for p in parameters]
        for p, rows in zip(parameters, torch.cat(turned).split([t.shape[0] for t in turned])):
            p.data = rows.t() if dim == COLUMNS else rows
    return None


def _immovable(parameters: Sequence[Tensor], force: bool) -> str | None:
    if any(type(p) is not nn.Parameter or p.is_inference() for p in parameters):
        return "some of them are no plain parameters"
    if len({(p.dtype, p.device) for p in parameters}) > 1:
        return "they differ in dtype or device"
    if len({id(p) for p in parameters}) < len(parameters):
        return "two of them share one parameter"
    if any(hasattr(p, "main_grad") for p in parameters):
        return "a TrainStep holds them in its buffers; make a new TrainStep"
    if any(hasattr(p, "ds_id") or hasattr(p, "_fsdp_flattened") for p in parameters):
        return "DeepSpeed or FSDP manages their memory"
    if any(p.device.type == "cpu" and p.is_shared() for p in parameters):
        return "they are in memory shared between processes"
    if any(p.is_cuda for p in parameters) and torch.cuda.is_current_stream_capturing():
        return "their memory was moved, and a graph is being captured; run the model once before the capture"
    if not force and any(p.untyped_storage().nbytes() != p.nbytes for p in parameters):
        return "they are slices of a larger buffer"
    return None


def pack_adapters(model: nn.Module) -> None:
    """Store the adapters of all layers that are multiplied as one as one matrix, and those that rows of a batch choose from.

    A TrainStep calls it before it lays out its flat buffers, which keep neighbours next to each other.
    """
    for layers in _multiplied_together(model):
        sites = [site_of(layer) for layer in layers]
        if any(site.why is not None or is_sharded(site.weight) for site in sites):
            continue
        members, stop = list[Spanning](), 0
        for site in sites:
            start, stop = stop, stop + shape_of(site.weight)[0]
            found = (*adapters_of(site.weight), *site.extra)
            members += [Spanning(low, start, stop) for low in found if isinstance(low, LowRank)]
        for spanning in LowRank.join(members):
            spanning.adapter.pack()  # type: ignore[attr-defined]


def _multiplied_together(model: nn.Module) -> Iterator[list[Any]]:
    groups = [module.projections() for module in model.modules() if isinstance(module, Projecting)]
    yield from groups
    grouped = {id(layer) for layers in groups for layer in layers}
    for module in model.modules():
        if id(module) not in grouped and (isinstance(module, nn.Linear) or foreign(module)):
            yield [module]
