"""What backward computes again rather than finding it kept: results of cheap passes over memory, never of a product.

Of a block's saved activations at 350m (625 MB at 16,384 tokens) 134 are the gated activation's result and 67 the two norms'.
Each is a function of what is kept anyway, so the bits do not change. It costs 2 % of the step there (86.6 to 88.3 ms) for 4.5
GiB. Small results are kept: at 135m and 1,024 tokens 60 more launches are 3 % (6.65 to 6.83 ms) for 0.2 GiB. Who has the
memory and wants the time keeps them all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import rms_norm, swiglu, swiglu_backward
from ..kernels.accumulate import weight_gradient
from ..kernels.choose import transformed

LEAST_BYTES: float = 8 << 20  # of a result that is computed again
KEEP_ALL = float("inf")


@contextmanager
def recomputing(least: float) -> Iterator[None]:
    """Inside, results of `least` bytes and more are computed again."""
    global LEAST_BYTES
    before, LEAST_BYTES = LEAST_BYTES, least
    try:
        yield
    finally:
        LEAST_BYTES = before


class Normed(NamedTuple):
    """What a norm's result was made of."""

    stream: Tensor
    weight: Tensor
    eps: float

    def again(self) -> Tensor:
        return rms_norm(self.stream, self.weight, self.eps)


def mark(y: Tensor, stream: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Let whoever would keep the norm's result `y` for backward know how to have it again."""
    if y.requires_grad and y.nbytes >= LEAST_BYTES and not torch.compiler.is_compiling():
        y.made_of = Normed(stream.detach(), weight.detach(), eps)  # type: ignore[attr-defined]
    return y


def origin(y: Tensor) -> Normed | None:
    return getattr(y, "made_of", None)


def gated_down(gate_up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) · up) weightᵀ of a packed [gate | up], keeping neither the activation nor its result."""
    if transformed():  # torch.func sees through plain products alone
        return F.linear(swiglu(gate_up), weight)
    return _GatedDown.apply(gate_up, weight.detach(), weight)


class _GatedDown(torch.autograd.Function):
    """The Parameter is kept on ctx for its main_grad, as in layers/linear_site.py."""

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
