"""Adapters of nn.Embedding, as PEFT has them: the table gets scale · a bᵀ added, of which the rows that are asked for are made.

Dropout leaves them alone, for there is no x to drop from.

Legend: V words, O columns, R ranks; a (V, R), b (O, R).
"""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.accumulate import widened
from ..layers.embedding_and_head import table_rows
from .pair import Pair
from .pairs import ForwardAdapters, on


class TablePair(Pair):
    """A word's numbers of a lie side by side here, in PEFT's files V apart."""

    HALVES: ClassVar[dict[str, str]] = {"lora_embedding_A": "a", "lora_embedding_B": "b"}

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        words, columns = weight.shape
        return (words, rank), (columns, rank)

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def begin(self, init: bool | str, weight: Tensor) -> None:
        """PEFT's two ways: a zero and b at random, or both at random."""
        nn.init.normal_(self.a) if init is False else nn.init.zeros_(self.a)
        nn.init.normal_(self.b)

    def added(self, weight: Tensor) -> Tensor:
        return self.scale * (self.a.to(weight.dtype) @ self.b.to(weight.dtype).t())

    def filed(self, half: str) -> Tensor:
        value = super().filed(half)
        return value.t() if half == "lora_embedding_A" else value

    def take(self, half: str, value: Tensor) -> None:
        super().take(half, value.t() if half == "lora_embedding_A" else value)


class TableAdapters(ForwardAdapters):
    """The adapters of one nn.Embedding."""

    PAIR = TablePair

    @classmethod
    def unfit(cls, layer: nn.Embedding) -> str | None:
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            return "renormalises its rows, scales gradients by frequency, or makes sparse ones"
        return super().unfit(layer)

    @staticmethod
    def adapted(layer: Any, input: Tensor) -> Tensor:
        y = nn.Embedding.forward(layer, input)
        for pair in on(layer):
            h = pair.scale * table_rows(pair.a, input, layer.padding_idx)
            y = (y + F.linear(h.to(y.dtype), widened(pair.b, y.dtype))).to(y.dtype)  # autocast multiplies in 16 bits
        return y
