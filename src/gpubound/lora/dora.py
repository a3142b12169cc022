"""DoRA: the rows of weight + scale · b a get lengths m of their own, which train beside a and b.

    y = f ⊙ x (weight + scale · b a)ᵀ + bias        f = m / ‖weight + scale · b a‖, row by row

The norm is a constant to backward, as in the paper (arXiv 2402.09353, section 4.3) and in PEFT. What is added to the product
x weightᵀ is (f − 1) ⊙ drop(x) weightᵀ + f ⊙ scale · drop(x) aᵀ bᵀ, in plain torch. That multiplies by the weight once more, and
backward does all of it again: a fallback, which is counted.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..device import without_autocast
from ..kernels.accumulate import deliver
from ..kernels.hash_dropout import Drop, drawn, dropped
from ..layers.linear_formats import Adapter, format_of, rows_of, whole
from ..layers.quantized_base import written
from ..trace import fallback
from .pair import Pair


class Dora(Adapter):
    """What one of them is: `LowRank` with lengths m (O,)."""

    def __init__(self, pair: "DoraPair", weight: Tensor):
        self.parameters = self.a, self.b, self.m = pair.a, pair.b, pair.m
        self.scale, self.dropout, self.weight = pair.scale, pair.dropout, weight

    @property
    def identity(self) -> tuple:
        return (*super().identity, self.scale)

    @property
    def rate(self) -> float:
        return self.dropout.p if self.dropout.training else 0.0

    def plain(self, x: Tensor) -> Tensor:
        return self._added(F.dropout(x, self.rate) if self.rate else x, *self.parameters)

    def _added(self, x: Tensor, a: Tensor, b: Tensor, m: Tensor) -> Tensor:
        with without_autocast(x.device):  # x is in its dtype already, and the norm is in fp32
            weight = dense(self.weight, x.dtype)
            f = (m / lengths(weight, a, b, self.scale)).to(torch.promote_types(x.dtype, torch.float32))
            low = F.linear(F.linear(x, a.to(x.dtype)) * self.scale, b.to(x.dtype))
            return (f - 1).to(x.dtype) * F.linear(x, weight) + f.to(x.dtype) * low

    def forward(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        fallback("lora: an adapter's product", "DoRA runs in plain torch, and multiplies by the weight once more")
        drop = drawn(self.rate, x.device)
        y += self._added(dropped(rows_of(x), drop), *self.parameters).view(y.shape)
        return () if drop is None else (drop.seed,)

    def backward(self, g: Tensor, x: Tensor, kept: Sequence[Tensor], dx: Tensor | None) -> Sequence[Tensor | None]:
        drop = Drop(self.dropout.p, kept[0]) if kept else None
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in (x, *self.parameters)]
        leaves[0].requires_grad_(dx is not None)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            made = iter(torch.autograd.grad(self._added(dropped(leaves[0], drop), *leaves[1:]), wanted, g))
        if dx is not None:
            dx += next(made)
        return [deliver(p, next(made)) if p.requires_grad else None for p in self.parameters]


class DoraPair(Pair):
    HALVES: ClassVar[dict[str, str]] = {**Pair.HALVES, "lora_magnitude_vector": "m"}

    def __init__(self, weight: Tensor, rank: int, alpha: float, dropout: float, rslora: bool):
        super().__init__(weight, rank, alpha, dropout, rslora)
        self.m = nn.Parameter(torch.empty(self.b.shape[0], dtype=self.b.dtype, device=self.b.device))

    @torch.no_grad()
    def begin(self, init: bool | str, weight: Tensor) -> None:
        super().begin(init, weight)
        self.m.copy_(lengths(dense(weight, self.m.dtype), self.a, self.b, self.scale))

    def added(self, weight: Tensor) -> Tensor:
        f = self.m / lengths(weight, self.a, self.b, self.scale)
        return f[:, None].to(weight.dtype) * (weight + super().added(weight)) - weight

    def part(self, weight: Tensor) -> Adapter:
        return Dora(self, weight)


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return written([weight], dtype) if format_of(weight).coded else whole(weight.detach()).to(dtype)


@torch.no_grad()
def lengths(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """‖weight + scale · b a‖ of each row."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.linalg.vector_norm(weight.to(wide) + scale * (b.to(wide) @ a.to(wide)), dim=1)
