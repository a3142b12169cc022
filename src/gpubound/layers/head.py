"""The language model's head: its logits, or its loss without ever holding them all."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import linear_cross_entropy
from .stacked import Kernels, hooked

# Relative error allowed between two runs of the same model: two roundings to the dtype, and tf32 products.
AGREE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LARGEST = 300.0  # of the logits that a model is tried with: a cap of 30 or 50 changes them beyond doubt, and even one of 3,000

LOSS: Kernels = "loss without whole logits: {}", ("linear_cross_entropy",)


class LMLoss(nn.Linear):
    """A linear head whose `loss` computes the cross-entropy chunk by chunk; calling it gives the logits."""

    def __init__(self, hidden: int, vocabulary: int, bias: bool = False, device=None, dtype=None) -> None:
        super().__init__(hidden, vocabulary, bias=bias, device=device, dtype=dtype)

    def loss(self, x: Tensor, labels: Tensor, **options) -> Tensor:
        return lm_loss(x, self.weight, labels, self.bias, **options)

    def fused_kernels(self) -> Kernels:
        return LOSS


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


@torch.no_grad()
def why_whole(head: nn.Module, logits: Callable[[], Tensor], hidden: Callable[[], Tensor]) -> str | None:
    """None when a model's logits are head(hidden states), else why not. `logits` runs the model, `hidden` all below its head.

    The head's weights have no say in it: they may be zero, or so small that a cap on the logits does not show. The head is
    looked at from outside instead: does it read the hidden states, and is what it gives, known and large for this once, what
    the model gives?
    """
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        kind = f"{type(head).__module__.split('.')[0]}.{type(head).__name__}"
        return f"its head (get_output_embeddings) is a {kind}, not a plain nn.Linear"
    if hooked(head):
        return "its head carries hooks"
    read: list[Tensor] = []
    given: list[Tensor] = []

    def instead(head: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        read.append(inputs[0])
        given.append(_known(output))
        return given[-1]

    hook = head.register_forward_hook(instead)
    try:
        got = logits()
    finally:
        hook.remove()
    if not read:
        return "its forward does not call its head"
    for what, a, b in (("the head's inputs", read[-1], hidden()), ("the logits", got, given[-1])):
        if a.shape != b.shape:
            return f"its forward does more than head(hidden states): {what} are {tuple(a.shape)}, not {tuple(b.shape)}"
        error = ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12)).item()
        if not error <= AGREE.get(b.dtype, AGREE[torch.float32]):
            return f"its forward does more than head(hidden states): {what} differ by {error:.1e}"
    return None


def _known(logits: Tensor) -> Tensor:
    """Logits of the same shape that differ from word to word and from token to token."""
    *_, tokens, words = logits.shape
    ramp = torch.linspace(-LARGEST, LARGEST, words, device=logits.device, dtype=logits.dtype)
    return (ramp * torch.linspace(0.5, 1.0, tokens, device=logits.device, dtype=logits.dtype)[:, None]).expand(logits.shape)
