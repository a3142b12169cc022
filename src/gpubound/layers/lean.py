"""What backward computes again rather than finding it kept: results of cheap passes over memory, never of a product.

Of a block's saved activations at 350m (625 MB at 16,384 tokens) 134 are the gated activation's result and 67 the two norms'.
Each is a function of what is kept anyway, so the bits do not change. Anyone who has the memory and wants the time may switch
them off.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import rms_norm, swiglu, swiglu_backward
from ..kernels.accumulate import weight_gradient

HIDDEN = True  # silu(gate) · up: written once more in the pass of its own backward
NORMED = True  # a norm's result: one more pass over the stream


class Normed(NamedTuple):
    """What a norm's result was made of."""

    stream: Tensor
    weight: Tensor
    eps: float

    def again(self) -> Tensor:
        return rms_norm(self.stream, self.weight, self.eps)


def mark(y: Tensor, stream: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Let whoever would keep the norm's result `y` for backward know how to have it again."""
    if NORMED and y.requires_grad and not torch.compiler.is_compiling():
        y.made_of = Normed(stream.detach(), weight.detach(), eps)  # type: ignore[attr-defined]
    return y


def origin(y: Tensor) -> Normed | None:
    return getattr(y, "made_of", None)


def gated_down(gate_up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) · up) weightᵀ of a packed [gate | up], keeping neither the activation nor its result."""
    return _GatedDown.apply(gate_up, weight.detach(), weight)


class _GatedDown(torch.autograd.Function):
    """The Parameter is kept on ctx for its main_grad, as in layers/product.py."""

    @staticmethod
    def forward(ctx, gate_up, plain, weight):
        ctx.save_for_backward(gate_up)
        ctx.plain, ctx.weight, ctx.version = plain, weight, weight._version
        return swiglu(gate_up) @ plain.to(gate_up.dtype).t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (gate_up,) = ctx.saved_tensors
        if ctx.weight._version != ctx.version:
            raise RuntimeError(
                "the weight of an MLP's last product was changed in place between forward and backward, so its gradient would "
                "be wrong; step the optimizer after backward."
            )
        gradient, h = swiglu_backward(g @ ctx.plain.to(g.dtype), gate_up)
        return gradient, None, weight_gradient(ctx.weight, g.reshape(-1, g.shape[-1]), h.reshape(-1, h.shape[-1]))
