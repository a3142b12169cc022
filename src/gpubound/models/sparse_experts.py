"""Experts of transformers' sparse blocks in training: its grouped products, with moves of tokens whose gradients are moves.

transformers' gradients of x[order] and bias[expert] are autograd's of an index, which sorts and adds: 1.1 of 21 ms in a layer
of gpt-oss-20b (H200, 2,048 tokens).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.dispatch import transformed
from ..layers.fused_weights import hooked
from ..layers.moe import OwnBias, Permuted, by_group, not_trained
from .registry import role_of


def run_experts(experts: Any, x: Tensor, ids: Tensor, shares: Tensor, unit: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute what `experts` compute of x (N, hidden), by the ids (N, S) of each row's experts and their shares.

    unit  what the experts compute of gate and up, (M, 2 I) -> (M, I)
    """
    if not computed(experts):
        return experts(x, ids, shares)

    def product(name: str, rows: Tensor) -> Tensor:
        weight = getattr(experts, name)
        y = F.grouped_mm(rows, weight if experts.is_transposed else weight.transpose(1, 2), offs=ends)
        return OwnBias.apply(y, getattr(experts, f"{name}_bias"), own) if experts.has_bias else y

    order, inverse, ends = by_group(ids, len(experts.gate_up_proj))
    own = ids.flatten()[order]
    rows = Permuted.apply(x.to(experts.gate_up_proj.dtype), order, inverse, ids.shape[1])
    y = product("down_proj", unit(product("gate_up_proj", rows)))
    y = Permuted.apply(y, inverse, order, 1).unflatten(0, ids.shape)
    return (y * shares[..., None]).sum(1).to(x.dtype)


def computed(experts: Any) -> bool:
    """Return whether `run_experts` computes: for a family's own experts, on one device, that F.grouped_mm takes. Others, with
    adapters or hooks, in fp32 on a GPU, run as they are."""
    if role_of(experts) != "Experts" or hooked(experts) or "forward" in vars(experts):
        return False
    if getattr(experts, "_is_expert_parallel", False):
        return False
    stacks = [experts._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    if any(w is None or w.dtype == torch.float64 or not_trained(w) for w in stacks) or transformed():
        return False
    return stacks[0].dtype == stacks[1].dtype  # type: ignore[union-attr]  # none is None here
