"""The language model's head: its logits, or its loss without ever holding them all."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import linear_cross_entropy


class LMLoss(nn.Linear):
    """A linear head whose `loss` computes the cross-entropy chunk by chunk; calling it gives the logits."""

    def __init__(self, hidden: int, vocabulary: int, bias: bool = False, device=None, dtype=None) -> None:
        super().__init__(hidden, vocabulary, bias=bias, device=device, dtype=dtype)

    def loss(self, x: Tensor, labels: Tensor, **options) -> Tensor:
        return lm_loss(x, self.weight, labels, self.bias, **options)


def shift(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels moved one to the left, so that token t is scored against token t + 1; the last one has nothing to predict."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def lm_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    shifted: bool = False,
    total: Tensor | float | None = None,
    ignore_index: int = -100,
    **options,
) -> Tensor:
    """Cross-entropy of a linear head over x (..., hidden), in fp32.

    labels (...): the token at each position, or with `shifted` the one that the position must predict. The mean over the
    labels that are not ignore_index; with `total`, the sum divided by it (a micro-batch of a larger batch). `options` go to
    linear_cross_entropy.
    """
    if not shifted:
        labels = shift(labels, ignore_index)
    if total is None:
        return linear_cross_entropy(x, weight, labels, bias=bias, ignore_index=ignore_index, **options)
    return linear_cross_entropy(x, weight, labels, bias=bias, ignore_index=ignore_index, reduction="sum", **options) / total
