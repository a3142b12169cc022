"""Losses of a linear head's logits that are never whole, and their gradients, computed in forward.

As in kernels/cross_entropy.py: logits of CHUNK tokens are turned into losses and into their own gradient, and two more products
give the gradients of hidden states and head. So the head's product runs once, and nothing is kept for backward but the gradient
of the hidden states. Here the losses are any function of the logits that torch can differentiate, or whatever overwrites the
logits by its gradient.

Distillation has losses of two heads: α τ² D + (1 − α) CE of each token (kernels/cross_entropy.py).

The factor τ² keeps the gradient's size when τ changes (Hinton et al. 2015).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import cross_entropy, divergence
from ...kernels.accumulate import add_product, deliver, main_gradient
from ...kernels.cross_entropy import loss_shape
from ...kernels.dispatch import Call

IGNORE = -100
# Tokens of logits at a time. H200, 16384 tokens, 32768 words: 5.7 ms against 6.6 with 1024, for 0.2 GB more.
CHUNK = 4096
ELEMENTS = 1 << 25  # of logits that are in fp32 at a time, 128 MB a copy

Losses = Callable[[Tensor, int, int], Tensor]
"""(logits of the tokens i to j of a chunk, i, j) -> their losses (j - i)"""
IntoGradient = Callable[[Tensor, int, int, Tensor | None, bool], Tensor]
"""(logits of the tokens first to last, first, last, scale, wanted) -> their losses; where a gradient is wanted, the logits are
overwritten by that of the losses' sum, times `scale`"""


class Head(NamedTuple):
    """A linear head and its input (N, H). The product is in the input's dtype."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @staticmethod
    def of(hidden: Tensor, head: Any, labels: Tensor) -> "Head":
        """Inputs where nothing is learnt become 0: they may be NaN, which a gradient of 0 would not undo."""
        return Head(hidden.masked_fill((labels == IGNORE).unsqueeze(-1), 0).flatten(0, -2), head.weight, head.bias)

    def logits(self, first: int, last: int) -> Tensor:
        x = self.x[first:last]
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def head_loss(head: Head, into_gradient: IntoGradient, scale: Tensor | None = None) -> Tensor:
    """Return the sum of the losses of all tokens, times `scale`.

    With `scale`, as a TrainStep gives it, backward must begin at this value with 1, once: a head's main_grad gets its gradient
    in forward.
    """
    return _HeadLoss.apply(*head, into_gradient, scale)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, into_gradient, scale):
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        owners, head = (weight, bias), Head(x, weight, bias)
        main = main_gradient(weight) if needs_weight else None
        in_forward = scale is not None and main is not None
        w, total = weight.to(x.dtype), torch.zeros((), dtype=torch.float64, device=x.device)
        dx = torch.empty_like(x) if needs_x else None
        dbias = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32)) if needs_bias else None
        dweight = main if in_forward else None
        if needs_weight and not in_forward:
            dweight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for first in range(0, len(x), CHUNK):
            last = min(first + CHUNK, len(x))
            z = head.logits(first, last)
            total += into_gradient(z, first, last, scale, any(ctx.needs_input_grad)).sum()
            if dx is not None:
                torch.mm(z, w, out=dx[first:last])
            if dweight is not None:
                add_product(dweight, z, x[first:last], (weight,) if in_forward else ())
            if dbias is not None:
                dbias += z.sum(0, dtype=dbias.dtype)
        ctx.owners, ctx.scaled = owners, scale is not None
        ctx.save_for_backward(dx, None if in_forward else dweight, dbias)
        total = total.to(torch.promote_types(x.dtype, torch.float32))
        return total if scale is None else total * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        dx, *gradients = ctx.saved_tensors
        factor = None if ctx.scaled else upstream
        if dx is not None and factor is not None:
            dx = dx * factor
        delivered = [None if g is None else deliver(owner, g, factor) for owner, g in zip(ctx.owners, gradients)]
        return dx, *delivered, None, None


def losses_into_gradient(z: Tensor, losses: Losses, scale: Tensor | None, wanted: bool) -> Tensor:
    """Return the losses of logits z (N, V); where a gradient is wanted, overwrite z by that of the losses' sum, times
    `scale`."""
    if not wanted:
        return torch.cat([losses(z[i:j], i, j) for i, j in ranges(*z.shape)])
    parts = []
    for i, j in ranges(*z.shape):
        with torch.enable_grad():
            leaf = z[i:j].detach().requires_grad_()
            part = losses(leaf, i, j)
            total = part.sum() if scale is None else part.sum() * scale
            z[i:j].copy_(torch.autograd.grad(total, leaf)[0])
        parts.append(part.detach())
    return torch.cat(parts)


def ranges(rows: int, words: int) -> list[tuple[int, int]]:
    step = max(1, ELEMENTS // words)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each label in fp32, 0 for -100."""
    losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view(labels.shape)


@torch.no_grad()
def head_token_losses(hidden: Tensor, head: Any, labels: Tensor) -> Tensor:
    """Return `token_losses` of the head's logits, which exist for CHUNK tokens at a time."""
    weight, bias = head.weight.to(hidden.dtype), None if head.bias is None else head.bias.to(hidden.dtype)
    chunks = zip(hidden.flatten(0, -2).split(CHUNK), labels.flatten().split(CHUNK), strict=True)
    return torch.cat([token_losses(F.linear(x, weight, bias), y) for x, y in chunks]).view(labels.shape)


@dataclass(frozen=True)
class DistillationLoss:
    """alpha: the divergence's share of the loss, the rest is the cross-entropy's. beta and temperature: see the kernel."""

    alpha: float = 1.0
    beta: float = 0.0
    temperature: float = 1.0

    @torch.no_grad()
    def losses(self, student: Tensor, teacher: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's divergence, times τ², and its cross-entropy, from logits (N, V); both are 0 where the label is
        -100. In fp32 or wider, without a gradient."""
        distance, entropy, _ = divergence(student, teacher, labels, self.alpha, self.beta, self.temperature, IGNORE)
        return distance, entropy

    @torch.no_grad()
    def into_gradient(self, z: Tensor, t: Tensor, labels: Tensor, scale: Tensor | None, wanted: bool) -> Tensor:
        """Return the mixed losses of logits z and t (N, V); where a gradient is wanted, overwrite z by that of their sum, times
        `scale`."""
        distance, entropy, _ = divergence(
            z, t, labels, self.alpha, self.beta, self.temperature, IGNORE, scale if wanted else None, wanted
        )
        return distance if self.alpha == 1 else torch.lerp(entropy, distance, self.alpha)

    def call(self, words: int) -> Call:
        """Return the op's call in a training step."""
        return "divergence", (loss_shape(words)[0], float(self.alpha), float(self.beta), float(self.temperature), True, True)


def head_losses(student: Head, teacher: Head, labels: Tensor, formula: DistillationLoss) -> tuple[Tensor, Tensor]:
    """Return the sums of `formula.losses` over all tokens, without a gradient."""
    sums = torch.zeros(2, dtype=torch.float64, device=labels.device)
    with torch.no_grad():
        for first in range(0, len(labels), CHUNK):
            last = min(first + CHUNK, len(labels))
            z, t = student.logits(first, last), teacher.logits(first, last)
            sums += torch.stack([each.double().sum() for each in formula.losses(z, t, labels[first:last])])
    return sums[0], sums[1]


def student_loss(
    student: Head, teacher: Head, labels: Tensor, formula: DistillationLoss, scale: Tensor | None = None
) -> Tensor:
    """Return the sum of the mixed losses over all tokens, times `scale` (see `head_loss`). No gradient goes to the teacher."""

    def into_gradient(z: Tensor, first: int, last: int, scale: Tensor | None, wanted: bool) -> Tensor:
        return formula.into_gradient(z, teacher.logits(first, last), labels[first:last], scale, wanted)

    return head_loss(student, into_gradient, scale)


def logits_loss(z: Tensor, t: Tensor, labels: Tensor, formula: DistillationLoss, scale: Tensor | None = None) -> Tensor:
    """Return the sum of the mixed losses of whole logits (N, V), times `scale`."""
    return _LogitsLoss.apply(z, t, labels, formula, scale)


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, t, labels, formula, scale):
        wanted = ctx.needs_input_grad[0]
        dz = z.clone(memory_format=torch.contiguous_format) if wanted else z
        total = formula.into_gradient(dz, t, labels, scale, wanted).sum()
        ctx.save_for_backward(dz if wanted else None)
        return total if scale is None else total * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        (dz,) = ctx.saved_tensors
        return dz * upstream, None, None, None, None
