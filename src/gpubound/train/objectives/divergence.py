"""Distillation losses of two heads whose logits are never whole: α τ² D + (1 − α) CE of each token (kernels/divergence.py).

The factor τ² keeps the gradient's size when τ changes (Hinton et al. 2015).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import divergence
from ...kernels.cross_entropy import loss_shape
from ...kernels.dispatch import Call
from .chunked_head import CHUNK, IGNORE, Head, overwritten_head_loss


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

    return overwritten_head_loss(student, into_gradient, scale)


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
