"""Sparse MLP of a layer: routed experts, chosen by score or by token, and one shared expert.

Legend: N tokens, S experts per token.
"""

from typing import Any

import torch
from torch import Tensor

from ....decode.moe import PIECE
from ....kernels.dependent_launch import ahead
from ..family import MixtureWeights
from ..kernels import choose_experts
from ..kernels.products import Gated
from .experts import experts_of
from .products import GEMV_ROWS, products
from .state import normed


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
            routed = self.experts.few(u, w.norm, ids)  # a PDL fence (_pdl.py): the next launch reads before its wait
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
