"""A low-rank adapter of a linear product: y += scale · drop(x) aᵀ bᵀ, as a part of its site (layers/linear_site.py).

Several of them, on one weight or on weights that are multiplied as one, are computed together: x is read once for all of their
aᵀ, and once more for all of their gradients. For backward they keep x and the narrow product h.

Legend: N tokens, K inputs, O outputs, R ranks; x (N, K), a (R, K), b (O, R), h (N, R), g (N, O) the output's gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.accumulate import join_rows, main_gradient, opens
from ..kernels.aside import aside
from ..kernels.lora import Drop, adapter_gradients, drawn, lora_down, lora_gradients, lora_up
from ..kernels.rows import Owners
from ..layers.linear_site import Adapter, Factors, Spanning, rows_of

WORTH_A_LAUNCH = 16 << 20
"""Bytes of x. On an H200 the gradients of a and b take 4.7 us at 3 MB, which is a launch, and 36 at 64 MB, half of it for x."""


class LowRank(Adapter):
    """What one adapter is. `dropout` is an nn.Dropout, which drops while it is in training mode, or another module: none."""

    routing: Any = None  # which rows of a batch have which columns of h (rows.py); None: all have all

    def __init__(self, a: Tensor, b: Tensor, scale: float = 1.0, dropout: nn.Module | None = None):
        self.parameters = self.a, self.b = a, b
        self.all_a = [a]
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

    def gradients(self, x: Tensor, gh: Tensor, g: Tensor, h: Tensor, drop: Drop | None, wants_a: bool) -> list[Tensor | None]:
        """Those of `parameters`, but of a only where it is wanted here, too."""
        wanted = wants_a and self.a.requires_grad, self.b.requires_grad
        return adapter_gradients(self.a, self.b, x, gh, g, h, drop, wanted)


class Together(Adapter):
    """Adapters over parts of one product, in the order of these parts, of one scale and one mask of dropout."""

    seen: Any  # of the rows' adapters, by what their routing knows them again in backward

    def __init__(self, members: Sequence[Spanning]):
        start = members[0].start
        self.lows: list[LowRank] = [member.adapter for member in members]  # type: ignore[misc]
        self.spans = [member._replace(start=member.start - start, stop=member.stop - start) for member in members]
        self.ranks = [low.a.shape[0] for low in self.lows]
        self.parameters = [p for low in self.lows for p in low.parameters]
        self.scale, self.rate, self.routing = self.lows[0].scale, self.lows[0].rate, self.lows[0].routing

    def forward(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        h, kept = self._down(x)
        y = y.view(-1, y.shape[-1])
        for low, span, part in zip(self.lows, self.spans, h.split(self.ranks, 1)):
            lora_up(span.of(y), part, low.b)
        return kept

    def factors(self, x: Tensor) -> tuple[Factors, Sequence[Tensor]] | None:
        if len(self.lows) > 1:
            return None
        h, kept = self._down(x)
        return Factors(h, self.lows[0].b.detach()), kept

    def _down(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        drop = drawn(self.rate, x.device)
        ids = None if self.routing is None else self.routing.begin(self, x)
        h = lora_down(rows_of(x), self._a(), self.scale, drop, None, self._owners(ids, self.lows))
        return h, (h, *(t for t in (ids, None if drop is None else drop.seed) if t is not None))

    def share(self, g: Tensor, kept: Sequence[Tensor]) -> Factors:
        h, *rest = kept
        ids = None if self.routing is None else self.routing.again(self, rest.pop(0))
        gh = h.new_empty(h.shape)
        for low, span, out in zip(self.lows, self.spans, gh.split(self.ranks, 1)):
            lora_down(span.of(g), low.b.detach().t(), self.scale, None, out, self._owners(ids, [low]))
        return Factors(gh, self._a().t(), Drop(self.rate, rest[0]) if rest else None)

    def _owners(self, ids: Tensor | None, lows: Sequence[LowRank]) -> Owners | None:
        return None if ids is None else self.routing.owners(ids, lows)

    def backward(
        self, g: Tensor, x: Tensor, kept: Sequence[Tensor], dx: Tensor | None, share: Factors | None = None
    ) -> Sequence[Tensor | None]:
        if share is None:
            share = self.share(g, kept)
            if dx is not None:
                lora_up(dx, *share)
        delivered = self._deliver_all_a(g, x, kept[0], share)
        narrow, wide = share.h.split(self.ranks, 1), kept[0].split(self.ranks, 1)
        made: list[Tensor | None] = []
        for low, span, gh, h in zip(self.lows, self.spans, narrow, wide):
            made += low.gradients(x, gh, span.of(g), h, share.drop, not delivered)
        return made

    def _deliver_all_a(self, g: Tensor, x: Tensor, h: Tensor, share: Factors) -> bool:
        """The gradients of all a into their accumulators by one launch that reads x once, where that is worth a launch."""
        trained = [a for low in self.lows for a in low.all_a]
        mains = [main for a in trained if a.requires_grad and (main := main_gradient(a)) is not None]
        if len(self.lows) == 1 or len(mains) < len(trained) or x.nbytes < WORTH_A_LAUNCH:
            return False
        if (joined := join_rows(mains)) is None:
            return False
        begins = opens(trained)
        aside(
            trained[0],
            lambda: lora_gradients(x, share.h, g, h, joined, None, share.drop, (begins, True)),
            *(x, share.h),
        )
        return True

    def _a(self) -> Tensor:
        """All a, one below the other."""
        each = [low.a.detach() for low in self.lows]
        joined = join_rows(each)
        return torch.cat(each) if joined is None else joined
