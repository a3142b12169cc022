"""Cross-entropy of integer labels, with the options that language models use.

For one row of logits z over V words, capped first when `softcap` is given (z ← c · tanh(z / c)), and its label y:

    loss = lse − (1 − ε) · z_y − ε · mean(z) + ζ · lse²        lse = log Σ exp z,  ε = label_smoothing,  ζ = z_loss

The loss is at least float32, whatever the logits are. A row whose label is `ignore_index` counts for nothing. A label that is
neither that nor in 0..V−1 makes its row's loss and gradient NaN: the host cannot look without waiting, and must not miss it.
"""

import torch
from torch import Tensor

from .checks import INTEGERS
from .choose import implementation
from .ops import definition
from .selftest import draw


def options(smoothed: bool = True, capped: bool = True) -> tuple[int, float, float | None, float, str]:
    """Of an example: ignore_index, label_smoothing, softcap, z_loss, reduction."""
    return -100, 0.1 if smoothed else 0.0, 5.0 if capped else None, 1e-3, "mean"


def example_words(words: int) -> int:
    """As many words as it takes for an example to have the kernels of `words`, which may be a hundred times as many."""
    return words if words <= 8192 else 8192 + words % 16 + 16


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of logits (..., V) and integer labels (...), as in torch, with tanh soft-cap and z-loss added.

    The loss is float32. The mean is over the labels that are not `ignore_index`, counted on the device. Without any such
    label it is NaN, as in torch: use reduction="sum" where a whole batch may be masked. A label out of range makes its
    loss and gradient NaN, because an error would make the host wait for the device.
    """
    if logits.dim() == 0 or not logits.is_floating_point():
        raise ValueError(
            f"cross_entropy: logits must be a floating-point tensor (..., V), got {logits.dtype} {tuple(logits.shape)}; "
            f"cast it before the call."
        )
    check_words("cross_entropy", "logits", logits.shape[-1])
    check_labels("cross_entropy", "logits", logits, labels)
    check_options("cross_entropy", label_smoothing, softcap, z_loss, reduction, ("mean", "sum", "none"))
    shape = example_words(logits.shape[-1]), label_smoothing != 0, softcap is not None
    fast = implementation("cross_entropy", logits, None, shape)
    return fast(logits, labels, ignore_index, label_smoothing, softcap, z_loss, reduction)


@definition(lambda g, words=300, *kind: (draw(g, 5, words), draw_labels(g, 5, words), *options(*kind)))
def cross_entropy_reference(
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


def check_words(op: str, name: str, words: int) -> None:
    if words == 0:
        raise ValueError(f"{op}: {name} has a vocabulary of 0 words; there is no label to be right or wrong about.")


def check_labels(op: str, name: str, rows: Tensor, labels: Tensor) -> None:
    if labels.dtype not in INTEGERS or labels.shape != rows.shape[:-1]:
        raise ValueError(
            f"{op}: labels must be integers of shape {tuple(rows.shape[:-1])}, one for each row of {name}, "
            f"got {labels.dtype} {tuple(labels.shape)}; class probabilities are not supported."
        )
    if labels.device != rows.device:
        raise ValueError(
            f"{op}: labels are on {labels.device}, {name} on {rows.device}; move one of them to the other's device."
        )


def check_options(
    op: str, smoothing: float, softcap: float | None, z_loss: float, reduction: str, reductions: tuple[str, ...]
) -> None:
    if not 0 <= smoothing < 1:
        raise ValueError(
            f"{op}: label_smoothing must be at least 0 and below 1, got {smoothing}; 0 leaves the labels as they are."
        )
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"{op}: softcap must be a finite number above 0, got {softcap}; None leaves the logits as they are.")
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"{op}: z_loss must be a finite number of at least 0, got {z_loss}; 0 switches it off.")
    if reduction not in reductions:
        raise ValueError(f"{op}: reduction must be one of {', '.join(reductions)}, got {reduction!r}; see its docstring.")


def draw_labels(generator: torch.Generator, rows: int, words: int) -> Tensor:
    """Labels, the second of them ignored."""
    labels = torch.randint(words, (rows,), generator=generator, device="cpu")
    labels[1] = -100
    return labels
