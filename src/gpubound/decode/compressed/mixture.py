"""The sparse MLP of such a layer: experts by their scores or by the token itself, and one that all tokens share.

A few rows read the chosen experts' weights where they lie (kernels/experts.py); more are sorted by their experts, on the
device. Nothing here asks the device which expert it was.

Legend: N tokens, E experts, S of them a token, I width of an expert.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels import add_routed, choose_experts, routed_gate_up, swiglu
from ...models.deepseek_v4.weights import MixtureWeights
from ..experts import PIECE, each_expert, grouped, not_grouped
from .products import NARROW, products
from .state import normed


class Mixture:
    def __init__(self, weights: MixtureWeights, number: int) -> None:
        self.weights, self.number = weights, number
        self.ungrouped = not_grouped(weights.gate_up, weights.down)
        self.overheard: Any = None  # the judge's Choices, while it listens

    def __call__(self, u: Tensor, token: Tensor) -> Tensor:
        """What is added for tokens (N,), whose streams mix to u (N, hidden) fp32."""
        w = self.weights
        scores, gate, up = products(u, w.norm, w.router, w.gate, w.up)
        ids, shares = self.choose(scores.contiguous(), token)
        if self.overheard is not None:
            self.overheard.add(self.number, ids)
        (shared,) = products(swiglu(gate, up, w.limit), None, w.shared_down)
        if len(u) <= NARROW:
            routed = torch.empty(*ids.shape, w.gate_up.shape[1] // 2, device=u.device, dtype=w.down.dtype)
            routed_gate_up(u, w.norm, w.gate_up, ids, routed, limit=w.limit)
            return add_routed(routed, w.down, ids, shares, shared)
        gated = partial(swiglu, limit=w.limit)
        mlp = each_expert if self.ungrouped else grouped
        h = normed(u, w.norm).to(w.down.dtype)
        pieces = zip(h.split(PIECE), ids.long().split(PIECE), shares.split(PIECE))
        return shared + torch.cat([mlp(x, some, share, w.gate_up, w.down, gated) for x, some, share in pieces])

    def choose(self, scores: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Experts (N, S) int32 and their shares (N, S) fp32. Of equal scores, the expert with the lower number comes first."""
        w, rows = self.weights, len(scores)
        ids = torch.empty(rows, w.slots, device=scores.device, dtype=torch.int32)
        shares = torch.empty(rows, w.slots, device=scores.device)
        return choose_experts(scores, w.correction, w.table, token if w.table is not None else None, w.scale, ids, shares)
