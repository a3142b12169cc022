"""Cross-entropy of x weightᵀ + bias: the head of a language model and its loss in one op."""

import torch
from torch import Tensor

from ..accumulate import widened
from ._last import last
from .cross_entropy import cross_entropy


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """`chunk` bounds memory in the fast form and means nothing here: the logits are whole, and in fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(wide) @ widened(weight, wide).t()
    if bias is not None:
        logits = logits + widened(bias, wide)
    loss = cross_entropy(logits, labels, ignore_index, label_smoothing, softcap, z_loss, reduction)
    return loss if grad_scale is None else last(loss * grad_scale.detach())
