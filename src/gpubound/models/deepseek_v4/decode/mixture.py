"""Sparse MLP of a layer, with routed experts, chosen by score or by token, and one shared expert; and the GEMMs of all layers.

For few rows, a kernel with a fused norm reads each weight once, in one launch for all weights with the same input
(kernels/products.py). For many rows, the norm is computed once and the products are GEMMs on tensor cores; fp8 weights are
dequantised first.

Experts have dense weights, or quantised weights in their published format. `few` reads the chosen experts' weights in place.
`many` sorts tokens by expert on the device; quantised weights are dequantised first, several experts at a time. No method
copies expert indices to the host.

Legend: N tokens, E experts, S experts per token, I width of an expert.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....decode.moe import PIECE, each_expert, grouped, not_grouped
from ....kernels import dequantize, routed_gate_up, swiglu
from ....kernels.decode_product import Norm, ahead
from ....kernels.packed_weights import Packed
from ..family import LinearWeights, MixtureWeights
from ..kernels import choose_experts, norm_products, routed_down
from ..kernels.products import MOST, MOST_CODED, Fp8Blocks, Gated, numbers

GEMV_ROWS = 8  # rows


def products(x: Tensor, norm: Norm | None, *layers: LinearWeights) -> list[Tensor]:
    """Multiply rms_norm(x), or x if norm is None, by each layer: (N, rows) fp32 each, for x (N, width) fp32."""
    if len(x) > GEMV_ROWS:
        h = x if norm is None else F.rms_norm(x, x.shape[-1:], norm.weight.float(), norm.eps)
        return [product(h.to(layer.weight.dtype), layer).float() for layer in layers]
    outputs: dict[int, Tensor] = {}
    for some in _launches(layers):
        weights = [layers[number].weight for number in some]
        outputs |= zip(some, norm_products(x, norm, weights).split([layers[number].rows for number in some], 1))
    return [
        outputs[number] if layer.bias is None else outputs[number] + layer.bias.float() for number, layer in enumerate(layers)
    ]


def _launches(layers: Sequence[LinearWeights]) -> Iterator[list[int]]:
    """Yield the indices of the layers of each launch, fp8 layers first."""
    coded = [number for number, layer in enumerate(layers) if isinstance(layer.weight, Fp8Blocks)]
    plain = [number for number in range(len(layers)) if number not in coded]
    while coded or plain:
        first, coded = coded[:MOST_CODED], coded[MOST_CODED:]
        room = MOST - len(first)
        yield [*first, *plain[:room]]
        plain = plain[room:]


def product(x: Tensor, layer: LinearWeights) -> Tensor:
    return F.linear(x, _matrix(layer, x.dtype), layer.bias)


def by_groups(x: Tensor, layer: LinearWeights) -> Tensor:
    """Multiply x (N, groups, width) by a grouped layer: (N, rows), fp32 up to GEMV_ROWS tokens, otherwise in x's dtype."""
    if len(x) <= GEMV_ROWS:
        return norm_products(x.float(), None, [layer.weight])
    weight = _matrix(layer, x.dtype).unflatten(0, (x.shape[1], -1)).transpose(1, 2)
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).reshape(len(x), -1)


def _matrix(layer: LinearWeights, dtype: torch.dtype) -> Tensor:
    return numbers(layer.weight, dtype) if isinstance(layer.weight, Fp8Blocks) else layer.weight


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Return the RMSNorm of x in fp32."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight.float(), norm.eps)


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


class Mixture:
    def __init__(self, weights: MixtureWeights, number: int) -> None:
        self.weights, self.number = weights, number
        self.experts = experts_of(weights)
        self.routing_trace: Any = None  # a RoutingTrace during the reference check

    def __call__(self, u: Tensor, token: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the MLP output of tokens (N,) with input u (N, hidden) fp32.

        For up to GEMV_ROWS tokens, return the shared expert's output and the routed experts' outputs (N, S, hidden) separately.
        """
        w = self.weights
        scores, gate, up = products(u, w.norm, w.router, w.gate, w.up)
        ids, shares, gated = self.choose(scores.contiguous(), token, Gated(gate, up, w.limit, gate.new_empty(gate.shape)))
        if self.routing_trace is not None:
            self.routing_trace.add(self.number, ids)
        if len(u) <= GEMV_ROWS:
            routed = self.experts.few(u, w.norm, ids)  # a PDL fence (_launch.py): the next launch reads before its wait
            with ahead():
                (shared,) = products(gated, None, w.shared_down)
            return shared, self.experts.few_down(routed, ids, shares)
        (shared,) = products(gated, None, w.shared_down)
        h = normed(u, w.norm).to(self.experts.dtype)
        pieces = zip(h.split(PIECE), ids.long().split(PIECE), shares.split(PIECE))
        return shared + torch.cat([self.experts.many(*piece) for piece in pieces]), None

    def choose(self, scores: Tensor, token: Tensor, gated: Gated) -> tuple[Tensor, ...]:
        """Return expert indices (N, S) int32, their shares (N, S) fp32, and gated.out. Ties go to the lower index."""
        w, rows = self.weights, len(scores)
        ids = torch.empty(rows, w.slots, device=scores.device, dtype=torch.int32)
        shares = torch.empty(rows, w.slots, device=scores.device, dtype=torch.float32)
        known = token if w.table is not None else None
        return choose_experts(scores, w.correction, w.table, known, w.scale, ids, shares, gated)
