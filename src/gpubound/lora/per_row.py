"""The adapters of one weight as one whose rank is the sum of theirs, of which each row of a batch has its own columns.

a lie one below the other and b side by side, as one matrix each where memory has them so (packing.py). So do their
gradients then, which one read of x and g gives. Legend as in adapter.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.accumulate import one_matrix
from ..kernels.adapter_routing import own_columns
from ..kernels.hash_dropout import Drop
from ..kernels.lora_grads import adapter_gradients
from .adapter import LowRank
from .packing import COLUMNS


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
