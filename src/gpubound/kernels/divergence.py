"""Divergence of a student's next-token distribution from a teacher's, and the cross-entropy of labels, in place of the logits.

With q and p the softmax of the student's and the teacher's logits, each divided by the temperature τ, and m = (1 − β) q + β p,
the divergence D of a row is that of generalised knowledge distillation (Agarwal et al. 2024), and g its gradient in log q,
up to a multiple of 1, which softmax takes away:

    β = 0        KL(p ‖ q)                              g = −p
    β = 1        KL(q ‖ p)                              g = q (log q − log p)
    between      β KL(p ‖ m) + (1 − β) KL(q ‖ m)        g = (1 − β) q (log q − log m)

The gradient in the student's logits z of α τ² D + (1 − α) CE is α τ (g − q Σ g) + (1 − α) (softmax(z) − [is the label]).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .cross_entropy import loss_shape
from .dispatch import INTEGERS, implementation, require_device
from .registry import definition, draw, frozen

ELEMENTS = 1 << 25  # of logits that the definition has in fp32 at a time, 128 MB a copy


def divergence(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
    scale: Tensor | None = None,
    gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """τ² D of each row of logits (N, V), the cross-entropy of its label, both in fp32, and with `gradient` the student's logits
    overwritten by the gradient of Σ α τ² D + (1 − α) CE, times the device scalar `scale`; else None.

    beta        0: KL(teacher ‖ student); 1: KL(student ‖ teacher); between: generalised Jensen-Shannon
    temperature τ, by which the logits of both are divided in D

    Rows whose label is `ignore_index` are not read; their results are 0. Any other label out of range makes a row NaN. autograd
    sees nothing of this op: call it under no_grad.
    """
    _check(student, teacher, labels, scale, gradient)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0 <= value <= 1:
            raise ValueError(f"divergence: {name} must be from 0 to 1, got {value}; it is a share.")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"divergence: temperature must be a finite number above 0, got {temperature}; 1 leaves the logits.")
    words = loss_shape(student.shape[1])[0]
    shape = words, float(alpha), float(beta), float(temperature), scale is not None, gradient
    fast = implementation("divergence", student, None, shape)
    return fast(student, teacher, labels, alpha, beta, temperature, ignore_index, scale, gradient)


def _example(generator: torch.Generator, words=300, alpha=0.7, beta=0.3, temperature=2.0, scaled=False, gradient=True) -> tuple:
    student, teacher = (frozen(draw(generator, 5, words)) for _ in range(2))
    labels = torch.randint(words, (5,), generator=generator, device="cpu")
    labels[1] = -100
    scale = torch.tensor(0.5, device="cpu", dtype=torch.float32) if scaled else None
    return student, teacher, labels, alpha, beta, temperature, -100, scale, gradient


@definition(_example)
@torch.no_grad()
def divergence_reference(
    student: Tensor, teacher: Tensor, labels: Tensor, alpha: float, beta: float, temperature: float, ignore_index: int,
    scale: Tensor | None, gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    distances, entropies, rows = [], [], max(1, ELEMENTS // student.shape[1])
    for own, t, y in zip(student.split(rows), teacher.split(rows), labels.long().split(rows), strict=True):
        valid, inside = y != ignore_index, (y >= 0) & (y < own.shape[1])
        z, t = (x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(~valid.unsqueeze(-1), 0) for x in (own, t))
        poison = torch.where(valid & ~inside, float("nan"), 1.0).to(z.dtype)
        label = torch.where(inside, y, 0)
        distance, slope = _distance_and_slope(z / temperature, t / temperature, beta)
        entropy = F.cross_entropy(z, label, reduction="none")
        distances.append(torch.where(valid, temperature**2 * distance * poison, 0))
        entropies.append(torch.where(valid, entropy * poison, 0))
        if gradient:
            dz = alpha * temperature * slope
            if alpha < 1:
                minus = z.new_full((len(z), 1), -1)
                dz += (1 - alpha) * z.softmax(-1).scatter_add_(1, label.unsqueeze(-1), minus)
            dz *= poison.unsqueeze(-1) if scale is None else (poison * scale).unsqueeze(-1)
            own.copy_(dz.masked_fill_(~valid.unsqueeze(-1), 0))
    return torch.cat(distances), torch.cat(entropies), student if gradient else None


def _distance_and_slope(u: Tensor, v: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(D, its gradient in u) of logits at the temperature. A word of probability 0 adds nothing: 0 log 0 = 0."""
    log_q, log_p = u.log_softmax(-1), v.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    if beta == 0:
        return (p * (log_p - log_q)).masked_fill(p == 0, 0).sum(-1), q - p
    log_m = log_p if beta == 1 else torch.logaddexp(log_q + math.log(1 - beta), log_p + math.log(beta))
    share = 1.0 if beta == 1 else 1 - beta
    g = (share * q * (log_q - log_m)).masked_fill(q == 0, 0)
    distance = g.sum(-1)
    if beta < 1:
        distance = distance + beta * (p * (log_p - log_m)).masked_fill(p == 0, 0).sum(-1)
    return distance, g - q * g.sum(-1, keepdim=True)


def _check(student: Tensor, teacher: Tensor, labels: Tensor, scale: Tensor | None, gradient: bool) -> None:
    if student.dim() != 2 or not student.is_floating_point() or student.shape[1] == 0:
        raise ValueError(
            f"divergence: student must be a floating-point matrix (N, V) of at least one word, got {student.dtype} "
            f"{tuple(student.shape)}; flatten it to one row a token."
        )
    if teacher.shape != student.shape or not teacher.is_floating_point():
        raise ValueError(
            f"divergence: teacher must be a floating-point matrix {tuple(student.shape)} to match student, got {teacher.dtype} "
            f"{tuple(teacher.shape)}; both give logits of the same tokens."
        )
    if labels.dtype not in INTEGERS or labels.shape != student.shape[:1]:
        raise ValueError(
            f"divergence: labels must be integers of shape {tuple(student.shape[:1])}, one for each row, got {labels.dtype} "
            f"{tuple(labels.shape)}; flatten them as the logits."
        )
    require_device("divergence", student, teacher=teacher, labels=labels, scale=scale)
    if scale is not None and (scale.dim() != 0 or not scale.is_floating_point()):
        raise ValueError(
            f"divergence: scale must be a floating-point scalar tensor, got {scale.dtype} {tuple(scale.shape)}; make it on the "
            f"device, as in 1 / tokens."
        )
    dense = student.shape[1] == 1 or student.stride(1) == 1
    if gradient and not (dense and (len(student) <= 1 or student.stride(0) >= student.shape[1])):
        raise ValueError(
            f"divergence: student must have dense rows that do not overlap, to be overwritten by the gradient, got the strides "
            f"{student.stride()}; pass student.contiguous()."
        )
    if gradient and student.requires_grad and torch.is_grad_enabled():
        raise ValueError("divergence: student requires a gradient, and this op overwrites it by one; call it under no_grad.")
