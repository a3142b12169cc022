"""Cross-entropy of x weightᵀ + bias: the head of a language model and its loss in one op."""

import torch
from torch import Tensor

from .accumulate import widened
from .choose import implementation
from .cross_entropy import (
    check_labels,
    check_options,
    check_words,
    cross_entropy_reference,
    draw_labels,
    example_words,
    options,
)
from .ops import definition
from .selftest import draw


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
    """cross_entropy(x weightᵀ + bias, labels) for x (..., H) and weight (V, H), without the whole logits in memory.

    Products run in x's dtype (under autocast, in autocast's). The loss is float32. The options are those of
    `cross_entropy`. If a gradient is needed, forward computes it too, chunk by chunk. Memory in use meanwhile, for N tokens
    of s bytes a number:

        chunk · V · s  logits  +  N · H · s  dx  +  V · H · 4  dweight, summed in fp32 (V · H · s if one chunk holds all)

    `chunk` is the number of tokens taken at a time. By default it is H, which keeps the logits no larger than the weight.
    The gradient of a frozen tensor is not computed and takes no memory.

    A training step that knows the factor on its loss (1 / tokens of all micro-batches) passes it as `grad_scale`, a float
    scalar on the device. Loss and gradients are multiplied by it. In return the caller promises to run backward exactly
    once, from the loss itself. Backward then needs no further pass over the gradients. A weight with `main_grad` needs no
    dweight: forward adds its products to main_grad. So with grad_scale, call this under no_grad when you do not want the
    gradients, and do not call it inside activation checkpointing. Without grad_scale, backward adds to main_grad, and any
    upstream gradient and any number of backwards give correct results.
    """
    _check_linear(x, weight, bias, chunk, grad_scale)
    check_labels("linear_cross_entropy", "x", x, labels)
    check_options("linear_cross_entropy", label_smoothing, softcap, z_loss, reduction, ("mean", "sum"))
    shape = example_words(weight.shape[0]), label_smoothing != 0, softcap is not None
    arguments = (weight, labels, bias, ignore_index, label_smoothing, softcap, z_loss, reduction, chunk, grad_scale)
    if not torch.is_autocast_enabled(x.device.type):
        return implementation("linear_cross_entropy", x, None, shape)(x, *arguments)
    x = x.to(torch.get_autocast_dtype(x.device.type))
    with torch.autocast(x.device.type, enabled=False):  # it would round the fp32 parts as well
        return implementation("linear_cross_entropy", x, None, shape)(x, *arguments)


@definition(
    lambda g, words=300, *kind: (
        draw(g, 5, 40),
        draw(g, words, 40),
        draw_labels(g, 5, words),
        draw(g, words),
        *options(*kind),
        3,
    )
)
def linear_cross_entropy_reference(
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
    loss = cross_entropy_reference(logits, labels, ignore_index, label_smoothing, softcap, z_loss, reduction)
    return loss if grad_scale is None else last(loss * grad_scale.detach())


def last(loss: Tensor) -> Tensor:
    """`loss`, whose backward checks what `grad_scale` promises: one backward, from an upstream gradient of 1. No sync."""
    return _Last.apply(loss)


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        ctx.spent = False
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, upstream):
        if ctx.spent:
            raise RuntimeError(
                "linear_cross_entropy: with grad_scale the gradients are made for one backward, and this is the second; "
                "leave grad_scale out to run backward again."
            )
        ctx.spent = True
        torch._assert_async(
            upstream == 1,
            "linear_cross_entropy: with grad_scale backward must start at the loss itself, with a gradient of 1; "
            "put any factor into grad_scale.",
        )
        return upstream


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int | None, grad_scale: Tensor | None) -> None:
    op = "linear_cross_entropy"
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(
            f"{op}: x must be a floating-point tensor (..., H), got {x.dtype} {tuple(x.shape)}; cast it before the call."
        )
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not weight.is_floating_point():
        raise ValueError(
            f"{op}: weight must be a floating-point matrix (V, {x.shape[-1]}) to match x, got {weight.dtype} "
            f"{tuple(weight.shape)}; give the head as a linear layer holds it."
        )
    check_words(op, "weight", weight.shape[0])
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ValueError(
            f"{op}: bias must be a floating-point tensor ({weight.shape[0]},) to match weight, got {bias.dtype} "
            f"{tuple(bias.shape)}; it needs one value for each word."
        )
    for name, t in (("weight", weight), ("bias", bias), ("grad_scale", grad_scale)):
        if t is not None and t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device}, x on {x.device}; move one of them to the other's device.")
    if chunk is not None and chunk < 1:
        raise ValueError(
            f"{op}: chunk must be at least 1 token, got {chunk}; leave it out for logits no larger than the weight."
        )
    if grad_scale is not None and (grad_scale.dim() != 0 or not grad_scale.is_floating_point()):
        raise ValueError(
            f"{op}: grad_scale must be a floating-point scalar tensor, got {grad_scale.dtype} {tuple(grad_scale.shape)}; "
            f"make it on the device, as in 1 / tokens."
        )
