"""Divergence of a student's next-token distribution from a teacher's, of two heads whose logits are never whole.

With q and p the softmax of the student's and the teacher's logits, each divided by the temperature τ, and m = (1 − β) q + β p,
the divergence of a token is that of generalised knowledge distillation (Agarwal et al. 2024):

    β = 0        KL(p ‖ q)                              forward: the student covers all that the teacher may say
    β = 1        KL(q ‖ p)                              reverse: it keeps to what the teacher finds likely
    between      β KL(p ‖ m) + (1 − β) KL(q ‖ m)        Jensen-Shannon, at β = 1/2 symmetric

and its loss, with the cross-entropy of the label, α τ² D + (1 − α) CE. The factor τ² keeps the gradient's size when τ changes
(Hinton et al. 2015).

Forward computes the gradients, too, as in kernels/cross_entropy.py: logits of CHUNK tokens are turned into losses and into
their own gradient, and two more products give the gradients of hidden states and head. So the student's product runs once, and
nothing is kept for backward but the gradient of the hidden states.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.accumulate import add_product, deliver, main_gradient

IGNORE = -100
CHUNK = 4096  # tokens of both heads' logits at a time: they share one product of the weight's gradient
ELEMENTS = 1 << 25  # of logits that are in fp32 at a time, 128 MB a copy


@dataclass(frozen=True)
class DistillationLoss:
    """alpha: the divergence's share of the loss, the rest is the cross-entropy's. beta and temperature as above."""

    alpha: float = 1.0
    beta: float = 0.0
    temperature: float = 1.0

    def losses(self, student: Tensor, teacher: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's divergence, times τ², and its cross-entropy, from logits (N, V); both are 0 where the label is
        -100. In fp32 or wider."""
        z, t = (logits.to(torch.promote_types(logits.dtype, torch.float32)) for logits in (student, teacher))
        distance = divergence(z / self.temperature, t / self.temperature, self.beta) * self.temperature**2
        return distance.masked_fill(labels == IGNORE, 0), F.cross_entropy(z, labels, ignore_index=IGNORE, reduction="none")

    def mixed(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        distance, entropy = self.losses(student, teacher, labels)
        return distance if self.alpha == 1 else torch.lerp(entropy, distance.to(entropy.dtype), self.alpha)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the divergence of each row of logits (N, V)."""
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if beta == 1:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = torch.logaddexp(log_q + math.log(1 - beta), log_p + math.log(beta))
    to_teacher, to_student = ((log.exp() * (log - log_m)).sum(-1) for log in (log_p, log_q))
    return beta * to_teacher + (1 - beta) * to_student


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


def head_losses(student: Head, teacher: Head, labels: Tensor, formula: DistillationLoss) -> tuple[Tensor, Tensor]:
    """Return the sums of `formula.losses` over all tokens, without a gradient."""
    sums = torch.zeros(2, dtype=torch.float64, device=labels.device)
    with torch.no_grad():
        for first, last in _ranges(len(labels), student.weight.shape[0]):
            z, t = student.logits(first, last), teacher.logits(first, last)
            sums += torch.stack([each.double().sum() for each in formula.losses(z, t, labels[first:last])])
    return sums[0], sums[1]


def head_loss(student: Head, teacher: Head, labels: Tensor, formula: DistillationLoss, scale: Tensor | None = None) -> Tensor:
    """Return the sum of the mixed losses over all tokens, times `scale`. No gradient goes to the teacher.

    With `scale`, as a TrainStep gives it, backward must begin at this value with 1, once: a head's main_grad gets its gradient
    in forward.
    """
    return _HeadLoss.apply(*student, teacher, labels, formula, scale)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, teacher, labels, formula, scale):
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        owners, student = (weight, bias), Head(x, weight, bias)
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
            z, t = student.logits(first, last), teacher.logits(first, last)
            total += losses_into_gradient(z, t, labels[first:last], formula, scale, any(ctx.needs_input_grad)).sum()
            if dx is not None:
                torch.mm(z, w, out=dx[first:last])
            if dweight is not None:
                add_product(dweight, z, x[first:last], (weight,) if in_forward else ())
            if dbias is not None:
                dbias += z.sum(0, dtype=dbias.dtype)
        ctx.owners, ctx.in_forward, ctx.scaled = owners, in_forward, scale is not None
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
        return dx, *delivered, None, None, None, None


def losses_into_gradient(
    z: Tensor, t: Tensor, labels: Tensor, formula: DistillationLoss, scale: Tensor | None, wanted: bool
) -> Tensor:
    """Return the mixed losses of logits z and t (N, V); where a gradient is wanted, overwrite z by that of the losses' sum,
    times `scale`."""
    if not wanted:
        return torch.cat([formula.mixed(z[i:j], t[i:j], labels[i:j]) for i, j in _ranges(*z.shape)])
    parts = []
    for i, j in _ranges(*z.shape):
        with torch.enable_grad():
            leaf = z[i:j].detach().requires_grad_()
            losses = formula.mixed(leaf, t[i:j], labels[i:j])
            total = losses.sum() if scale is None else losses.sum() * scale
            z[i:j].copy_(torch.autograd.grad(total, leaf)[0])
        parts.append(losses.detach())
    return torch.cat(parts)


def _ranges(rows: int, words: int) -> list[tuple[int, int]]:
    step = max(1, ELEMENTS // words)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]
