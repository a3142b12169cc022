"""The adapters of one weight as one whose rank is the sum of theirs, of which each row of a batch has its own columns.

a lie one below the other and b side by side, as one matrix each where memory has them so (`lay_together`). So do their
gradients then, which one read of x and g gives. Legend as in adapter.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.accumulate import join_rows, main_gradient, opens
from ..kernels.aside import aside
from ..kernels.lora import Drop, lora_gradients
from ..kernels.rows import own_columns
from .adapter import LowRank

BELOW, BESIDE = 0, 1


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
        return _matrix(self.all_a, BELOW)

    @property
    def b(self) -> Tensor:  # type: ignore[override]
        return _matrix(self.all_b, BESIDE)

    def plain(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.rate) if self.rate else x
        h = F.linear(x, torch.cat(self.all_a).to(x.dtype))
        own = self.routing.owners(self.routing.ids_of(x), [self])
        return F.linear(own_columns(h.flatten(0, -2), own).view(h.shape), torch.cat(self.all_b, BESIDE).to(x.dtype))

    def gradients(self, x: Tensor, gh: Tensor, g: Tensor, h: Tensor, drop: Drop | None, wants_a: bool) -> list[Tensor | None]:
        of_a, of_b = _target(self.all_a, wants_a, BELOW), _target(self.all_b, True, BESIDE)
        if of_a is None or of_b is None:
            ranks, made = [rank for _, rank, _ in self.columns], list[Tensor | None]()
            for low, narrow, own in zip(self.members, gh.split(ranks, 1), h.split(ranks, 1)):
                made += low.gradients(x, narrow, g, own, drop, wants_a)
            return made
        begins = (of_a.begins(), of_b.begins())

        def put() -> None:
            lora_gradients(x, gh, g, h, of_a.whole, of_b.whole, drop, begins)

        if any(t is not None for t in (*of_a.made, *of_b.made)):
            put()
        else:
            aside(self.all_a[0], put, x, gh, g, h)
        return [t for pair in zip(of_a.made, of_b.made) for t in pair]


class _Target(NamedTuple):
    """Where the gradients of several parameters go as one matrix: None where none is wanted."""

    whole: Tensor | None
    made: Sequence[Tensor | None]  # what autograd gets: parts of it, or None where they are delivered
    sums: Sequence[Tensor] = ()  # whose accumulators it is

    def begins(self) -> bool:
        return not self.sums or opens(self.sums)


def _target(parameters: Sequence[Tensor], wanted: bool, along: int) -> _Target | None:
    """None where they cannot be one matrix."""
    trained = [p for p in parameters if wanted and p.requires_grad]
    if not trained:
        return _Target(None, [None] * len(parameters))
    mains = [main for p in trained if (main := main_gradient(p)) is not None]
    if mains:
        whole = _joined(mains, along) if len(mains) == len(parameters) else None
        return None if whole is None else _Target(whole, [None] * len(mains), parameters)
    if len(trained) < len(parameters) or len({p.dtype for p in parameters}) > 1:
        return None
    made = torch.cat([torch.empty_like(p) for p in parameters], along)
    return _Target(made, made.split([p.shape[along] for p in parameters], along))


def _matrix(parts: Sequence[Tensor], along: int) -> Tensor:
    parts = [p.detach() for p in parts]
    joined = _joined(parts, along)
    return torch.cat(parts, along) if joined is None else joined


def _joined(parts: Sequence[Tensor], along: int) -> Tensor | None:
    """The matrix that they are in memory, one below the other or side by side."""
    if along == BELOW:
        return join_rows(parts)
    joined = join_rows([p.t() for p in parts])
    return None if joined is None else joined.t()


def lay_together(layers: Sequence[Sequence[Any]]) -> None:
    """Let the a of layers that may read the same x be one matrix, and each layer's b, as `Together` and `PerRow` take them.

    What a training step has in its own buffers stays there: it is multiplied by as well, through a copy.
    """
    parameters = [p for lows in layers for low in lows for p in (low.a, low.b)]
    if any(main_gradient(p) is not None for p in parameters) or len({p.dtype for p in parameters}) > 1:
        return
    make_one([low.a for lows in layers for low in lows], BELOW)
    for lows in layers:
        make_one([low.b for low in lows], BESIDE)


def make_one(parameters: Sequence[Tensor], along: int) -> None:
    """Move the parameters to where they are one matrix, one below the other or side by side."""
    turned = [p.detach().t() if along else p.detach() for p in parameters]
    for p, rows in zip(parameters, torch.cat(turned).split([t.shape[0] for t in turned])):
        p.data = rows.t() if along else rows
