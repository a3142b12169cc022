"""A sparse MLP: a router gives each token to a few experts, and each expert is a gated MLP.

Tokens are sorted by expert on the device, and the experts' products are one grouped product whose offsets are on the device:
the host reads no choices, so a step with experts is captured like any other. Tokens are moved by permutations, whose gradients
are permutations, too: no sum is in an order that changes from run to run.

Legend: N tokens, S experts a token (its slots), E experts, I their width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import swiglu
from ..trace import fallback
from .fused_weights import Kernels


class Router(nn.Module):
    """Router that chooses the S likeliest experts of each token; their shares are divided by their sum."""

    def __init__(self, hidden: int, experts: int, slots: int, device=None, dtype=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden, device=device, dtype=dtype).normal_(0, hidden**-0.5))
        self.slots = slots

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (N, hidden) -> (probabilities of all experts (N, E), shares (N, S), ids (N, S)); the first two in fp32."""
        probabilities = F.linear(x, self.weight.to(x.dtype)).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        shares, ids = probabilities.topk(self.slots, -1)
        return probabilities, shares / shares.sum(-1, keepdim=True), ids


class MoE(nn.Module):
    """Sparse MLP: y = Σ share · down_e(silu(gate_e(x)) · up_e(x)) over the experts e that the router chooses.

    balanced  in training a call stores the layer's `imbalance` in `load`, for a loss term
    """

    load: Tensor | None = None

    def __init__(
        self, hidden: int, intermediate: int, experts: int, slots: int, balanced: bool = False, device=None, dtype=None
    ) -> None:
        super().__init__()
        self.balanced = balanced
        if not 1 <= slots <= experts:
            raise ValueError(f"MoE: slots: got {slots} of {experts} experts; wanted between 1 and all of them.")
        where = {"device": device, "dtype": dtype}
        self.router = Router(hidden, experts, slots, **where)
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden, **where).normal_(0, hidden**-0.5))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate, **where).normal_(0, intermediate**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)

    def mix(self, x: Tensor) -> Tensor:
        rows, weights = x.flatten(0, -2), self._parameters
        probabilities, shares, ids = self._modules["router"](rows)  # type: ignore[misc]
        if self.balanced and self.training:
            self.load = imbalance(probabilities, ids)
        order, inverse, ends = by_group(ids, probabilities.shape[1])
        packed = grouped_product(Permuted.apply(rows, order, inverse, ids.shape[1]), weights["gate_up_proj"], ends)
        y = grouped_product(swiglu(packed), weights["down_proj"], ends)
        y = Permuted.apply(y, inverse, order, 1).view(*ids.shape, -1)
        return (y * shares[..., None].to(y.dtype)).sum(1).view(x.shape)

    def unread(self, rows: int) -> int:
        """Return the bytes of experts that are not read for this number of rows, if all rows choose different ones."""
        experts = len(self.gate_up_proj)
        left = max(0, experts - rows * self.router.slots)
        return left * (self.gate_up_proj.nbytes + self.down_proj.nbytes) // experts

    def fused_kernels(self) -> Kernels:
        return "tokens sorted by expert; grouped products (torch); {}", ("swiglu",)


def imbalance(probabilities: Tensor, ids: Tensor) -> Tensor:
    """Return E Σ_e (fraction of choices of e) (its mean probability): 1 for an even load, E where one expert has all of it.

    Only the probabilities get a gradient.
    """
    experts = probabilities.shape[1]
    chosen = F.one_hot(ids, experts).sum((0, 1)).to(probabilities.dtype) / ids.numel()
    return experts * (chosen * probabilities.mean(0)).sum()


def not_grouped(*stacks: Tensor) -> str | None:
    """Return why F.grouped_mm cannot take these weights, or only by asking the device for the ends."""
    if any(w.shape[2] * w.element_size() % 16 or w.data_ptr() % 16 for w in stacks):
        return "F.grouped_mm wants rows of a multiple of 16 bytes"
    first = stacks[0]
    if not first.is_cuda:
        return None
    if first.dtype != torch.bfloat16:
        return f"F.grouped_mm takes bfloat16 on the device, not {str(first.dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(first.device)[0] not in (9, 10):
        return "F.grouped_mm reads its offsets on the host but for compute capability 9 and 10"
    return None


def not_trained(weight: Tensor) -> str | None:
    """Return why F.grouped_mm cannot take it both ways, as a backward does."""
    return not_grouped(weight, weight.transpose(1, 2))


def by_group(ids: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (order, back, ends) of ids: ids.flatten()[order] is sorted, `back` undoes it, `ends` is F.grouped_mm's."""
    ordered, order = ids.flatten().sort(stable=True)
    every = torch.arange(groups, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ordered, every, right=True, out_int32=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return order, back, ends


def grouped_product(x: Tensor, weights: Any, ends: Tensor) -> Tensor:
    """Multiply rows of x (M, K) up to ends[0] by weights[0]ᵀ, the next ones up to ends[1] by weights[1]ᵀ; weights (E, O, K)."""
    if weights.dtype != x.dtype:
        fallback("layers: products of experts", f"{weights.dtype} experts are cast to {x.dtype} in each call")
        weights = weights.to(x.dtype)
    why = "F.grouped_mm takes no doubles" if x.dtype == torch.float64 else not_trained(weights)
    if why is None:
        return F.grouped_mm(x, weights.transpose(-2, -1), offs=ends)
    fallback("layers: products of experts", f"{why}; every expert multiplies all rows")
    own = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)[:, None]
    y = x.new_zeros(len(x), weights.shape[1])
    for number, weight in enumerate(weights):
        y = torch.where(own == number, F.linear(x, weight), y)
    return y


class Permuted(torch.autograd.Function):
    """Rows of x, each repeated `copies` times, in the order `order`. `inverse` undoes it in backward: autograd's gradient of an
    index adds atomically, in any order."""

    @staticmethod
    def forward(ctx, x, order, inverse, copies):
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies if copies > 1 else order]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (inverse,) = ctx.saved_tensors
        g = g[inverse]
        return (g.unflatten(0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else g), None, None, None


class OwnBias(torch.autograd.Function):
    """Add bias[own[m]] to each row m of y (M, O), in place. The gradient of bias (E, O) is a product by ones, which is exact in
    16 bits and sums in fp32: autograd's gradient of an index sorts the rows and adds thousands of them individually."""

    @staticmethod
    def forward(ctx, y, bias, own):
        ctx.save_for_backward(own)
        ctx.experts = len(bias)
        ctx.mark_dirty(y)
        return y.add_(bias[own])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (own,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return g, None, None
        return g, (own == torch.arange(ctx.experts, device=own.device)[:, None]).to(g.dtype) @ g, None
