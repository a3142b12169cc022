"""The embedding and the head of a language model: token lookup, and logits, or a loss that never stores all of them.

The gradient of a looked-up row is added to the row of the table's accumulator. Autograd makes a dense table of it: zeros, the
rows summed and rounded to 16 bits, the table added to the accumulator. At 1b that was 1.6 of a micro-batch's 125 ms, at 135m
0.17 of 6.7.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import cross_entropy, linear_cross_entropy
from ..kernels.accumulate import deliver_rows, main_gradient
from ..kernels.dispatch import transformed
from ..trace import fallback
from ..watch.pretend import PARAMETERS
from .fused_weights import Kernels, hooked

PART = 128  # rows of logits that are compared at a time
# Relative error allowed between two runs of the same model: two roundings to the dtype, and tf32 products.
AGREE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LARGEST = 300.0  # of the logits of the trial: a cap of 30 or 50 changes them beyond doubt, and even one of 3,000

LOSS: Kernels = "loss without whole logits: {}", ("linear_cross_entropy",)


def embedding(vocabulary: int, hidden: int, device=None, dtype=None) -> nn.Embedding:
    """Return an nn.Embedding. On the meta device nothing is drawn: a normal draw there imports torch._dynamo, 1.4 to 2 s."""
    weight = torch.empty(vocabulary, hidden, device=device, dtype=dtype)
    return nn.Embedding(vocabulary, hidden, _weight=weight if weight.is_meta else weight.normal_())


def look_up(table: Any, ids: Tensor) -> Tensor:
    """Return table(ids). A plain nn.Embedding whose weight has a main_grad gets its gradient there (kernels/accumulate.py)."""
    return table_rows(table._parameters["weight"], ids, table.padding_idx) if plain_table(table) else table(ids)


def table_rows(weight: Any, ids: Tensor, padding: int | None = None) -> Tensor:
    """Return weight[ids], whose gradient is added to weight's main_grad if it has one. The row `padding` gets none."""
    trains = torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_compiling() and not transformed()
    main = main_gradient(weight) if trains else None
    if main is not None and not main.is_contiguous():
        fallback("layers: an embedding's gradient into its main_grad", "the main_grad is not contiguous")
        main = None
    if main is None:
        return F.embedding(ids, weight, padding)
    return _LookUp.apply(ids, -1 if padding is None else padding, weight.detach(), weight)


def plain_table(table: Any) -> bool:
    """Return whether calling `table` does weight[ids] alone: no subclass, hook or adapter, no renormalised or scaled rows."""
    return (
        type(table) is nn.Embedding
        and not hooked(table)
        and "forward" not in vars(table)
        and table.max_norm is None
        and not (table.scale_grad_by_freq or table.sparse)
        and type(table._parameters.get("weight")) in PARAMETERS
    )


class _LookUp(torch.autograd.Function):
    """The Parameter is kept on ctx for its main_grad, as in layers/linear_product.py."""

    @staticmethod
    def forward(ctx, ids, padding, values, weight):
        ctx.save_for_backward(ids)
        ctx.padding, ctx.weight = padding, weight
        return F.embedding(ids, values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (ids,) = ctx.saved_tensors
        deliver_rows(ctx.weight, ids, g, ctx.padding)
        return None, None, None, None


class LMLoss(nn.Linear):
    """Linear head whose `loss` computes the cross-entropy chunk by chunk; calling it returns the logits."""

    def __init__(self, hidden: int, vocabulary: int, bias: bool = False, device=None, dtype=None) -> None:
        super().__init__(hidden, vocabulary, bias=bias, device=device, dtype=dtype)

    def loss(self, x: Tensor, labels: Tensor, **options) -> Tensor:
        return lm_loss(x, self.weight, labels, self.bias, **options)

    def fused_kernels(self) -> Kernels:
        return LOSS


def shift(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Shift labels by one to the left, so that token t is scored against token t + 1; the last one is ignored."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def within(labels: Tensor, segment_ids: Tensor | None, ignore_index: int = -100) -> Tensor:
    """Return the labels (B, T) of packed rows without those of each example's first token, which nothing precedes."""
    if segment_ids is None:
        return labels
    first = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=False)
    return labels.masked_fill(first, ignore_index)


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
    """Compute the cross-entropy of a linear head over x (..., hidden), in fp32.

    labels (...): the token at each position, or with `shifted` the one that the position must predict. The mean over those
    that are not ignore_index; with `total`, the sum divided by it. `options` go to linear_cross_entropy.
    """
    if not shifted:
        labels = shift(labels, ignore_index)
    if total is None:
        return linear_cross_entropy(x, weight, labels, bias=bias, ignore_index=ignore_index, **options)
    return linear_cross_entropy(x, weight, labels, bias=bias, ignore_index=ignore_index, reduction="sum", **options) / total


def plain_head(head: Any) -> bool:
    """Return whether calling the head computes its weight's product alone, without a bias."""
    plain = type(head) in (LMLoss, nn.Linear) and not hooked(head) and head.bias is None
    return plain and type(head._parameters.get("weight")) in PARAMETERS


def logits_loss(logits: Tensor, labels: Tensor, total: Tensor | float | None = None, ignore_index: int = -100) -> Tensor:
    """Compute the loss of given logits (..., V)."""
    wanted, reduction = shift(labels, ignore_index).flatten(), "mean" if total is None else "sum"
    loss = cross_entropy(logits.flatten(0, -2), wanted, ignore_index=ignore_index, reduction=reduction)
    return loss if total is None else loss / total


def head_of(model: Any) -> Any:
    """Return the module that computes the logits, if the model names one as transformers' models do; else None. Of a
    ForSequenceClassification it is `score`."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return getattr(model, "score", None) if head is None else head


@torch.no_grad()
def head_mismatch(
    head: nn.Module, logits: Callable[[], Tensor], hidden: Callable[[], Tensor], cap: float | None = None
) -> str | None:
    """Return None if a model's logits are head(hidden states), else why not.

    logits  runs the model
    hidden  runs all below its head
    cap     logits are cap · tanh(head(hidden states) / cap)

    The head's weights may be zero, or so small that a cap on the logits does not show. So the trial replaces the head's result
    by known, large values, and compares the model's logits with these, and the head's input with the hidden states.
    """
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        kind = f"{type(head).__module__.split('.')[0]}.{type(head).__name__}"
        return f"its head (get_output_embeddings) is a {kind}, not a plain nn.Linear"
    if hooked(head):
        return "its head carries hooks"
    inputs_read: list[Tensor] = []
    outputs: list[Tensor] = []

    def replace_logits(head: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        inputs_read.append(inputs[0])
        known = _known(output) if cap is None else _known(output) * (2 * cap / LARGEST)
        outputs.append(known if cap is None else cap * torch.tanh(known.float() / cap).to(known.dtype))
        return known

    with head.register_forward_hook(replace_logits):
        got = logits()
    if not inputs_read:
        return "its forward does not call its head"
    for what, a, b in (("the head's inputs", inputs_read[-1], hidden()), ("the logits", got, outputs[-1])):
        if a.shape != b.shape:
            return f"its forward does more than head(hidden states): {what} are {tuple(a.shape)}, not {tuple(b.shape)}"
        rows = zip(*(t.reshape(-1, t.shape[-1]).split(PART) for t in (a, b)))  # all logits in fp32 could be gigabytes
        norms = torch.stack([torch.stack([(x.float() - y.float()).norm(), y.float().norm()]) for x, y in rows]).norm(dim=0)
        error = (norms[0] / norms[1].clamp_min(1e-12)).item()
        if not error <= AGREE.get(b.dtype, AGREE[torch.float32]):
            return f"its forward does more than head(hidden states): {what} differ by {error:.1e}"
    return None


def _known(logits: Tensor) -> Tensor:
    """Return logits of the same shape that differ between words of the vocabulary and between positions."""
    *_, tokens, vocabulary = logits.shape
    ramp = torch.linspace(-LARGEST, LARGEST, vocabulary, device=logits.device, dtype=logits.dtype)
    return (ramp * torch.linspace(0.5, 1.0, tokens, device=logits.device, dtype=logits.dtype)[:, None]).expand(logits.shape)
