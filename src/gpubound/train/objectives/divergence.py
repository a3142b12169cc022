"""Divergence of a student's next-token distribution from a teacher's, of two heads whose logits are never whole.

With q and p the softmax of the student's and the teacher's logits, each divided by the temperature τ, and m = (1 − β) q + β p,
the divergence of a token is that of generalised knowledge distillation (Agarwal et al. 2024):

    β = 0        KL(p ‖ q)                              forward: the student covers all that the teacher may say
    β = 1        KL(q ‖ p)                              reverse: it keeps to what the teacher finds likely
    between      β KL(p ‖ m) + (1 − β) KL(q ‖ m)        Jensen-Shannon, at β = 1/2 symmetric

and its loss, with the cross-entropy of the label, α τ² D + (1 − α) CE. The factor τ² keeps the gradient's size when τ changes
(Hinton et al. 2015).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunked_head import IGNORE, Head, Losses, head_loss, ranges


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


def head_losses(student: Head, teacher: Head, labels: Tensor, formula: DistillationLoss) -> tuple[Tensor, Tensor]:
    """Return the sums of `formula.losses` over all tokens, without a gradient."""
    sums = torch.zeros(2, dtype=torch.float64, device=labels.device)
    with torch.no_grad():
        for first, last in ranges(len(labels), student.weight.shape[0]):
            z, t = student.logits(first, last), teacher.logits(first, last)
            sums += torch.stack([each.double().sum() for each in formula.losses(z, t, labels[first:last])])
    return sums[0], sums[1]


def student_loss(
    student: Head, teacher: Head, labels: Tensor, formula: DistillationLoss, scale: Tensor | None = None
) -> Tensor:
    """Return the sum of the mixed losses over all tokens, times `scale` (see `head_loss`). No gradient goes to the teacher."""

    def of_chunk(first: int, last: int) -> Losses:
        t, y = teacher.logits(first, last), labels[first:last]
        return lambda z, i, j: formula.mixed(z, t[i:j], y[i:j])

    return head_loss(student, of_chunk, scale)
