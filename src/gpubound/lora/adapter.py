"""A low-rank adapter of a linear product: y += scale · drop(x) aᵀ bᵀ, as a part of its site (layers/linear_site.py).

Several of them, on one weight or on weights that are multiplied as one, are computed together: x is read once for all of their
aᵀ, and once more for all of their gradients. For backward they keep x and the narrow product h.

Legend: N tokens, K inputs, O outputs, R ranks; x (N, K), a (R, K), b (O, R), h (N, R), g (N, O) the output's gradient.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.accumulate import weight_gradient, weight_gradients
from ..layers.linear_site import Adapter, Spanning, rows_of


class LowRank(Adapter):
    """What one adapter is. `dropout` is an nn.Dropout, which drops while it is in training mode, or another module: none."""

    def __init__(self, a: Tensor, b: Tensor, scale: float = 1.0, dropout: nn.Module | None = None):
        self.parameters = self.a, self.b = a, b
        self.scale, self.dropout = scale, dropout

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
            alike.setdefault((low.scale, low.rate), []).append(member)
        return [Spanning(Together(group), group[0].start, group[-1].stop) for group in alike.values()]

    def plain(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.rate) if self.rate else x
        return F.linear(F.linear(x, self.a.to(x.dtype)) * self.scale, self.b.to(x.dtype))


class Together(Adapter):
    """Adapters over parts of one product, in the order of these parts, of one scale and one mask of dropout."""

    def __init__(self, members: Sequence[Spanning]):
        start = members[0].start
        self.lows: list[LowRank] = [member.adapter for member in members]  # type: ignore[misc]
        self.spans = [member._replace(start=member.start - start, stop=member.stop - start) for member in members]
        self.parameters = [p for low in self.lows for p in low.parameters]
        self.scale, self.rate = self.lows[0].scale, self.lows[0].rate

    def forward(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        x, y = rows_of(x), y.view(-1, y.shape[-1])
        keep = (torch.rand(x.shape, device=x.device) >= self.rate,) if self.rate else ()
        h = self._dropped(x, keep) @ self._a(x.dtype).t() * self.scale
        for low, span, part in zip(self.lows, self.spans, self._parts(h)):
            span.of(y).addmm_(part, low.b.to(y.dtype).t())
        return h, *keep

    def backward(self, g: Tensor, x: Tensor, kept: Sequence[Tensor], dx: Tensor | None) -> Sequence[Tensor | None]:
        h, *keep = kept
        each = [span.of(g) for span in self.spans]
        gh = torch.cat([part @ low.b.to(g.dtype) for part, low in zip(each, self.lows)], 1) * self.scale
        if dx is not None:
            dx.add_(self._dropped(gh @ self._a(g.dtype), keep))
        dropped = self._dropped(x, keep)
        if all(low.a.requires_grad for low in self.lows):
            da = list(weight_gradients([low.a for low in self.lows], gh, dropped))
        else:
            da = [
                weight_gradient(low.a, p, dropped) if low.a.requires_grad else None
                for low, p in zip(self.lows, self._parts(gh))
            ]
        db = [
            weight_gradient(low.b, p, q) if low.b.requires_grad else None for low, p, q in zip(self.lows, each, self._parts(h))
        ]
        return [gradient for pair in zip(da, db) for gradient in pair]

    def _a(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([low.a.to(dtype) for low in self.lows])

    def _parts(self, h: Tensor) -> Sequence[Tensor]:
        return h.split([low.a.shape[0] for low in self.lows], 1)

    def _dropped(self, x: Tensor, keep: Sequence[Tensor]) -> Tensor:
        return torch.where(keep[0], x / (1 - self.rate), 0.0) if keep else x
