"""Cross-entropy of integer labels, with the options that language models use.

For one row of logits z over V words, capped first when `softcap` is given (z ← c · tanh(z / c)), and its label y:

    loss = lse − (1 − ε) · z_y − ε · mean(z) + ζ · lse²        lse = log Σ exp z,  ε = label_smoothing,  ζ = z_loss

The loss is at least float32, whatever the logits are. A row whose label is `ignore_index` counts for nothing. A label that is
neither that nor in 0..V−1 makes its row's loss and gradient NaN: the host cannot look without waiting, and must not miss it.
"""

import torch
from torch import Tensor


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    words, labels = z.shape[-1], labels.long()  # of 8 bits, 156 would be an ignore_index of -100
    valid, inside = labels != ignore_index, (labels >= 0) & (labels < words)
    poison = torch.where(valid & ~inside, float("nan"), 1.0)
    lse = torch.logsumexp(z, -1)
    z_label = z.gather(-1, torch.where(inside, labels, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * z_label + z_loss * lse * lse  # lse² alone overflows from 2e19 on
    if label_smoothing:
        loss = loss - label_smoothing * z.mean(-1)
    loss = torch.where(valid, loss * poison, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum() if reduction == "mean" else loss.sum()
