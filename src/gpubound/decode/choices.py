"""Which experts the tokens of a sequence were given, so that the certificate compares arithmetic where the choice is the same.

A choice is a comparison: where two experts' scores lie within rounding, one that rounds otherwise takes the other expert and
gets something else altogether, and neither is wrong. So a computation's logits are compared with what fp32 makes of the choice
that the computation made, and the choice by itself: how far below the best ones the scores of the chosen experts lie.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .live_experts import sparse_mlps


class Choices:
    """`ids`: the experts (T, S) by the number of the layer; none for a model whose layers are dense."""

    def __init__(self) -> None:
        self.ids: dict[int, Tensor] = {}
        self._missed: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self.ids)

    def add(self, number: int, ids: Tensor) -> None:
        """Those of the next tokens (T, S)."""
        self.ids[number] = torch.cat([self.ids[number], ids]) if number in self.ids else ids.clone()

    def judged(self, number: int, scores: Tensor) -> Tensor:
        """The choice in layer `number`, (T, S) int64, after it was compared with what the scores (T, E) would choose."""
        ids = self.ids[number].long()
        chosen, best = scores.gather(-1, ids).sort(-1, descending=True).values, scores.topk(ids.shape[1]).values
        spread = scores.std(-1, correction=0).clamp_min(1e-30)  # 0 if the router is all zeros
        self._missed.append((best - chosen).mean(-1) / spread)
        return ids

    @property
    def missed(self) -> float:
        """How far the chosen scores lie below the best ones, in deviations of a token's scores: the mean of all judged."""
        return float(torch.cat(self._missed).mean()) if self._missed else 0.0


@contextmanager
def listening(model: Any, sparse: bool) -> Iterator[Choices]:
    """What a model's own routers choose in the one forward that runs meanwhile."""
    found = Choices()

    def note(number: int) -> Any:
        return lambda router, inputs, outputs: found.add(number, outputs[2])

    blocks = sparse_mlps(model) if sparse else {}
    handles = [block.gate.register_forward_hook(note(number)) for number, block in blocks.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
