"""The adapters of one weight as one whose rank is the sum of theirs, of which each row of a batch has its own columns.

a lie one below the other and b side by side, as one matrix each where memory has them so (`lay_together`). So do their
gradients then, which one read of x and g gives. Legend as in adapter.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.accumulate import main_gradient, one_matrix
from ..kernels.adapters import adapter_gradients
from ..kernels.dropping import Drop
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
        return one_matrix(self.all_a)

    @property
    def b(self) -> Tensor:  # type: ignore[override]
        return one_matrix(self.all_b, beside=True)

    def plain(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.rate) if self.rate else x
        h = F.linear(x, torch.cat(self.all_a).to(x.dtype))
        own = self.routing.owners(self.routing.ids_of(x), [self])
        return F.linear(own_columns(h.flatten(0, -2), own).view(h.shape), torch.cat(self.all_b, BESIDE).to(x.dtype))

    def gradients(self, x: Tensor, gh: Tensor, g: Tensor, h: Tensor, drop: Drop | None) -> list[Tensor | None]:
        wanted = [p.requires_grad for p in self.parameters]
        return adapter_gradients(self.all_a, self.all_b, x, gh, g, h, drop, wanted, beside=True)


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
