"""A sparse MLP in one decoding step: which experts a row is given, and what they make of it. x is the stream in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..experts import likeliest
from .decode_product import _normed


@torch.no_grad()
def route(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, normalise: bool, logits: Tensor, count: Tensor, ids: Tensor,
    weights: Tensor, dependent: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits.copy_(F.linear(_normed(x, norm, eps), router.to(x.dtype)))
    found, shares = likeliest(logits, ids.shape[1], normalise)
    return ids.copy_(found), weights.copy_(shares)


@torch.no_grad()
def routed_gate_up(
    x: Tensor, norm: Tensor, eps: float, gate_up: Tensor, ids: Tensor, out: Tensor, dependent: int = 0
) -> Tensor:
    normed = _normed(x, norm, eps)
    for slot in range(ids.shape[1]):
        gate, up = _times(gate_up, ids[:, slot], normed).chunk(2, -1)
        out[:, slot] = F.silu(gate) * up
    return out


@torch.no_grad()
def add_routed(h: Tensor, down: Tensor, ids: Tensor, weights: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    products = [_times(down, ids[:, slot], h[:, slot].to(x.dtype)) for slot in range(ids.shape[1])]
    return x.add_(torch.stack(products, 1).mul_(weights[..., None]).sum(1))


def _times(stack: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Each row of x times the expert that `ids` (B,) names for it; NaN where there is no such expert."""
    known = (ids >= 0) & (ids < len(stack))
    y = torch.bmm(stack.index_select(0, torch.where(known, ids, 0)).to(x.dtype), x[..., None])[..., 0]
    return torch.where(known[:, None], y, torch.nan)
