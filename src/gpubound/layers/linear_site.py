"""One linear product: y = x Wᵀ + b, of one weight or of several that lie one behind the other in memory.

Legend: N tokens, O outputs (a weight's rows), K inputs (its columns).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.accumulate import bias_gradients, join_rows, weight_gradients
from ..kernels.choose import transformed
from . import fp8, recompute


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias.

    A weight with a main_grad gets its gradient there (kernels/accumulate.py); otherwise this is F.linear.
    """
    if getattr(weight, "main_grad", None) is None or transformed():
        return F.linear(x, weight, bias)
    return multiply(x, weight.detach(), None if bias is None else bias.detach(), [weight], [] if bias is None else [bias])


def fused_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> Tensor:
    """x times several weights, their outputs side by side: (..., ΣO).

    One product when the weights lie one behind the other in memory (`Stacked` puts them so), else one each. The gradients
    go to the weights themselves.
    """
    _check(x, weights, biases)
    if transformed():  # torch.func sees through plain products alone
        each = biases if biases is not None else [None] * len(weights)
        return torch.cat([F.linear(x, w, b) for w, b in zip(weights, each)], -1)
    whole = join_rows([w.detach() for w in weights])
    whole_bias = None if biases is None else join_rows([b.detach() for b in biases])
    if whole is None or (biases is not None and whole_bias is None):
        each = biases if biases is not None else [None] * len(weights)
        return torch.cat([linear(x, w, b) for w, b in zip(weights, each)], -1)
    return multiply(x, whole, whole_bias, weights, biases or ())


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> None:
    if not weights:
        raise ValueError("fused_linear: weights is empty; pass at least one.")
    for i, weight in enumerate(weights):
        if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"fused_linear: weights[{i}] must have shape (outputs, {x.shape[-1]}) to match x, got {tuple(weight.shape)}; "
                f"each row holds one output's factors for x's last dimension."
            )
    if biases is not None and [b.shape for b in biases] != [w.shape[:1] for w in weights]:
        raise ValueError(
            f"fused_linear: biases must have shapes {[tuple(w.shape[:1]) for w in weights]} to match the weights, "
            f"got {[tuple(b.shape) for b in biases]}; pass one for each weight, or None."
        )


def multiply(x: Tensor, whole: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # autocast leaves fp64 alone, so do we
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if not torch.is_grad_enabled():
        return F.linear(x, whole.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if (site := fp8.site_of(weights, x)) is not None:
        return fp8.multiply(x, site, whole, bias, weights, biases)
    made_of = recompute.origin(x) if any(weight.requires_grad for weight in weights) else None
    return _Product.apply(x, made_of, whole, bias, len(weights), *weights, *biases)


class _Product(torch.autograd.Function):
    """y = x wholeᵀ + bias, with the gradients handed to the parameters that `whole` and `bias` are made of.

    The parameters are kept on ctx rather than saved: activation checkpointing gives back detached copies of what was saved,
    and those carry no main_grad. What save_for_backward would have seen to, that nobody changed them meanwhile, is checked
    here.
    """

    @staticmethod
    def forward(ctx, x, made_of, whole, bias, count, *parameters):
        ctx.save_for_backward(*((x, None) if made_of is None else made_of[:2]))
        ctx.eps = None if made_of is None else made_of.eps
        ctx.whole, ctx.count, ctx.parameters = whole, count, parameters
        ctx.versions = [p._version for p in parameters]
        return F.linear(x, whole.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x, norm = ctx.saved_tensors
        if [p._version for p in ctx.parameters] != ctx.versions:
            raise RuntimeError(
                "a weight of a fused product was changed in place between forward and backward, so its gradient would be "
                "wrong; step the optimizer after backward."
            )
        dx = g @ ctx.whole.to(g.dtype) if ctx.needs_input_grad[0] else None
        flat_g = g.reshape(-1, g.shape[-1])
        weights, biases = ctx.parameters[: ctx.count], ctx.parameters[ctx.count :]
        wanted = ctx.needs_input_grad[5:]
        if norm is not None and any(wanted[: ctx.count]):
            x = recompute.Normed(x, norm, ctx.eps).again()
        dw = _weight_gradients(weights, wanted, flat_g, x) if any(wanted[: ctx.count]) else [None] * len(weights)
        db = bias_gradients(biases, wanted[ctx.count :], flat_g)
        return dx, None, None, None, None, *dw, *db


def _weight_gradients(weights: Sequence[Tensor], wanted: Sequence[bool], g: Tensor, x: Tensor) -> list[Tensor | None]:
    """One product when every weight trains; else only the rows of those that do."""
    x = x.reshape(-1, x.shape[-1])
    if all(wanted[: len(weights)]):
        return list(weight_gradients(weights, g, x))
    parts = g.split([w.shape[0] for w in weights], 1)
    return [weight_gradients([w], part, x)[0] if want else None for w, part, want in zip(weights, parts, wanted)]
