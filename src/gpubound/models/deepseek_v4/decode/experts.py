"""Experts of a sparse MLP: dense weights, or quantised weights in their published format.

`few` reads the chosen experts' weights in place. `many` sorts tokens by expert on the device; quantised weights are dequantised
first, several experts at a time. No method copies expert indices to the host.

Legend: N tokens, E experts, S of them a token, I width of an expert.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....decode.moe import each_expert, grouped, not_grouped
from ....kernels import dequantize, quantized_routed_down, quantized_routed_gate_up, routed_down, routed_gate_up, swiglu
from ....kernels.decode_product import Norm
from ....kernels.packed_weights import Packed
from ..family import MixtureWeights

WIDE = 1 << 28  # weights that are dequantised at a time: 512 MB in 16 bits


class LiveExperts:
    """Experts with the model's weights gate_up (E, 2 I, hidden) and down (E, hidden, I)."""

    reads = "routed_gate_up, routed_down"

    def __init__(self, weights: MixtureWeights) -> None:
        self.gate_up: Any = weights.gate_up
        self.down: Any = weights.down
        self.limit, self.gated = weights.limit, partial(swiglu, limit=weights.limit)
        self.count, self.width, self.dtype = self.sizes(weights)
        self.hidden = len(weights.norm.weight)
        self.nbytes = (self.gate_up.nbytes + self.down.nbytes) // self.count  # of one expert
        self.ungrouped = self.not_grouped()

    def sizes(self, weights: MixtureWeights) -> tuple[int, int, torch.dtype]:
        """Return the number of experts, their width and the compute dtype."""
        return len(self.gate_up), self.gate_up.shape[1] // 2, self.down.dtype

    def not_grouped(self) -> str | None:
        return not_grouped(self.gate_up, self.down)

    def few(self, u: Tensor, norm: Norm, ids: Tensor) -> Tensor:
        """Return the activations (N, S, width) of each chosen expert's gate and up, for the norm of u (N, hidden)."""
        return routed_gate_up(u, norm, self.gate_up, ids, self.room(ids), limit=self.limit)

    def few_down(self, routed: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """Return share · expert, (N, S, hidden) fp32, from the output of `few`."""
        return routed_down(routed, self.down, ids, shares, self.apart(ids))

    def room(self, ids: Tensor) -> Tensor:
        return torch.empty(*ids.shape, self.width, device=ids.device, dtype=self.dtype)

    def apart(self, ids: Tensor) -> Tensor:
        return torch.empty(*ids.shape, self.hidden, device=ids.device, dtype=torch.float32)

    def many(self, h: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """Return Σ share · expert, (N, hidden) fp32, for h (N, hidden) and ids (N, S) int64."""
        mlp = each_expert if self.ungrouped else grouped
        return mlp(h, ids, shares, self.gate_up, self.down, self.gated)

    def tensors(self) -> list[Tensor]:
        return [self.gate_up, self.down]

    def report(self) -> tuple[str, str]:
        """Return how the experts of many tokens are computed, and the reason if the GEMM is not grouped."""
        how = "every expert for all tokens, by torch" if self.ungrouped else "grouped by expert: F.grouped_mm"
        return how, self.ungrouped or ""


class CodedExperts(LiveExperts):
    """Experts with quantised weights: each a `Packed` that concatenates the experts' rows."""

    reads = "quantized_routed_gate_up, quantized_routed_down"

    def sizes(self, weights: MixtureWeights) -> tuple[int, int, torch.dtype]:
        return self.down.rows // self.gate_up.columns, self.down.columns, weights.gate.weight.dtype

    def not_grouped(self) -> str | None:
        rows = (self.like(1, 1, packed.columns) for packed in (self.gate_up, self.down))
        return not_grouped(*rows)

    def like(self, *shape: int) -> Tensor:
        """Allocate a buffer in the compute dtype."""
        return torch.empty(*shape, device=self.down.words.device, dtype=self.dtype)

    @property
    def at_once(self) -> int:
        """Number of experts that are dequantised at a time."""
        return max(1, min(self.count, WIDE // (3 * self.width * self.gate_up.columns)))

    def few(self, u: Tensor, norm: Norm, ids: Tensor) -> Tensor:
        return quantized_routed_gate_up(u, norm, self.gate_up, ids, self.room(ids), limit=self.limit)

    def few_down(self, routed: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return quantized_routed_down(routed, self.down, ids, shares, self.apart(ids))

    def many(self, h: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        y = torch.zeros(h.shape, device=h.device, dtype=torch.float32)
        mlp: Callable[..., Tensor] = each_expert if self.ungrouped else partial(grouped, some=True)
        for first, gate_up, down in self.numbers():
            y += mlp(h, ids - first, shares, gate_up, down, self.gated)
        return y

    def numbers(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the first expert, gate_up and down of each group of dequantised experts. All groups share one buffer."""
        hidden, at_once = self.gate_up.columns, self.at_once
        both = self.like(at_once, 2 * self.width, hidden), self.like(at_once, hidden, self.width)
        for first in range(0, self.count, at_once):
            count = min(at_once, self.count - first)
            for stack, packed in zip(both, (self.gate_up, self.down)):
                rows = slice(first * stack.shape[1], (first + count) * stack.shape[1])
                dequantize(packed.part(rows), stack[:count].flatten(0, 1))
            yield first, both[0][:count], both[1][:count]

    def tensors(self) -> list[Tensor]:
        return [t for packed in (self.gate_up, self.down) for t in (packed.words, packed.scale)]

    def report(self) -> tuple[str, str]:
        how, why = super().report()
        return f"numbers of {self.at_once} experts at a time, {how}", why


def experts_of(weights: MixtureWeights) -> LiveExperts:
    return (CodedExperts if isinstance(weights.gate_up, Packed) else LiveExperts)(weights)
