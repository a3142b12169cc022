"""Loss and gradient of a row of logits, for both cross-entropies: one program a row, any vocabulary, fp32 inside.

The maths is in kernels/cross_entropy.py. A first pass over a row keeps its running maximum and the sum of exp(z − maximum),
from which lse follows. The gradient is

    dz = (p · (1 + 2 ζ lse) − ε / V − (1 − ε) · [is the label]) · (1 − (z / c)²)    p = exp(z − lse); last factor: softcap only
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans.types import TilePlan, cdiv, job_of
from ._launch import launch


@triton.jit
def _logits(row_ptr, col, words, other, cap, CAPPED: tl.constexpr):
    """Logits of one row in fp32, capped; `other` beyond the vocabulary."""
    z = tl.load(row_ptr + col, mask=col < words, other=other).to(tl.float32)
    if CAPPED:  # tanh x = 1 − 2 / (exp 2x + 1): no overflow, absolute error near 1e-7, so 1e-7 of the cap in a logit
        z = tl.where(col < words, cap * (1.0 - 2.0 / (tl.exp(2.0 * z / cap) + 1.0)), z)
    return z


@triton.jit
def _statistics(row_ptr, words, cap, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr):
    """(lse, Σ z) of one row."""
    top = -float("inf")
    total = 0.0
    plain = 0.0
    for start in range(0, words, BLOCK):
        col = start + tl.arange(0, BLOCK)
        z = _logits(row_ptr, col, words, -float("inf"), cap, CAPPED)
        higher = tl.maximum(top, tl.max(z, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far: -inf - -inf would be NaN
        total = total * tl.exp(top - base) + tl.sum(tl.exp(z - base), 0)
        top = higher
        if SMOOTHED:
            plain += tl.sum(tl.where(col < words, z, 0.0), 0)
    return top + tl.log(total), plain


@triton.jit
def _gradient(z, col, label, lse, words, smoothing, z_loss, cap, CAPPED: tl.constexpr):
    """The loss's gradient in the logits whose capped values are z."""
    dz = tl.exp(z - lse) * (1.0 + 2.0 * z_loss * lse) - smoothing / words - tl.where(col == label, 1.0 - smoothing, 0.0)
    if CAPPED:
        dz *= 1.0 - (z / cap) * (z / cap)
    return dz


# Where a chunk's labels and losses begin, and how many rows it has, is not worth another compilation.
@triton.jit(
    do_not_specialize=["inner", "ignore_index"],
    do_not_specialize_on_alignment=["labels_ptr", "weights_ptr", "loss_ptr", "lse_ptr", "scale_ptr"],
)
def _cross_entropy_loss_kernel(logits_ptr, labels_ptr, weights_ptr, loss_ptr, lse_ptr, scale_ptr, words, inner, outer_stride,
                               inner_stride, ignore_index, smoothing, z_loss, cap, CAPPED: tl.constexpr,
                               SMOOTHED: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, WRITE: tl.constexpr,
                               BLOCK: tl.constexpr):  # fmt: skip
    """A row's loss, times its weight if WEIGHTED, and lse. WRITE: its logits overwritten by that loss's gradient, times the
    scalar at scale_ptr if SCALED."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        if WRITE:
            for start in range(0, words, BLOCK):
                col = start + tl.arange(0, BLOCK)
                tl.store(row_ptr + col, tl.zeros([BLOCK], tl.float32).to(logits_ptr.dtype.element_ty), mask=col < words)
    else:
        inside = (label >= 0) & (label < words)
        # Before the first pass, whose reductions are barriers: after them a fast warp may already be overwriting this logit.
        z_label = _logits(row_ptr, tl.where(inside, label, 0), words, 0.0, cap, CAPPED)
        lse, plain = _statistics(row_ptr, words, cap, CAPPED, SMOOTHED, BLOCK)
        factor = tl.where(inside, 1.0, float("nan"))
        if WEIGHTED:
            factor *= tl.load(weights_ptr + row)
        loss = lse - (1.0 - smoothing) * z_label + z_loss * lse * lse
        if SMOOTHED:
            loss -= smoothing / words * plain
        tl.store(loss_ptr + row, loss * factor)
        tl.store(lse_ptr + row, lse)
        if WRITE:
            if SCALED:
                factor *= tl.load(scale_ptr)
            for start in range(0, words, BLOCK):
                col = start + tl.arange(0, BLOCK)
                z = _logits(row_ptr, col, words, 0.0, cap, CAPPED)
                dz = _gradient(z, col, label, lse, words, smoothing, z_loss, cap, CAPPED) * factor
                tl.store(row_ptr + col, dz.to(logits_ptr.dtype.element_ty), mask=col < words)


@triton.jit
def _cross_entropy_gradient_kernel(logits_ptr, labels_ptr, lse_ptr, upstream_ptr, out_ptr, words, inner, outer_stride,
                                   inner_stride, upstream_stride, ignore_index, smoothing, z_loss, cap,
                                   CAPPED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
    label = tl.load(labels_ptr + row)
    valid = label != ignore_index
    lse = tl.load(lse_ptr + row)
    poison = tl.where((label >= 0) & (label < words), 1.0, float("nan"))
    scale = tl.where(valid, tl.load(upstream_ptr + row * upstream_stride) * poison, 0.0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = _logits(row_ptr, col, tl.where(valid, words, 0), 0.0, cap, CAPPED)  # an ignored row is not read
    dz = _gradient(z, col, label, lse, words, smoothing, z_loss, cap, CAPPED) * scale
    tl.store(out_ptr + row * words + col, dz.to(out_ptr.dtype.element_ty), mask=col < words)


class Options(NamedTuple):
    """Options of a row's loss."""

    ignore_index: int
    smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str = "mean"

    def share(self, labels: Tensor) -> Tensor | None:
        """1 / (number of valid labels) for the mean, on the device: infinite when none is valid, and the mean 0 · ∞ = NaN."""
        return (labels != self.ignore_index).sum().float().reciprocal() if self.reduction == "mean" else None

    def scalars(self) -> tuple[int, float, float, float]:
        """ignore_index, smoothing, z_loss and cap, as the kernels take them."""
        return self.ignore_index, self.smoothing, self.z_loss, 1.0 if self.softcap is None else self.softcap


def flat_labels(labels: Tensor) -> Tensor:
    """One label after the other in memory, as the kernels read them: reshape alone would keep the stride of a column.

    In 64 bits, because torch compares 8-bit labels with an ignore_index of -100 as if that were 156.
    """
    return labels.reshape(-1).long().contiguous()


def row_losses(
    logits: Tensor, labels: Tensor, options: Options, write: bool = False, scale: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, lse) of every row of `logits`, a matrix or (outer, inner, words) with a dense last dimension.

    `weights`, one fp32 number a row, multiply the losses. With `write` the logits are overwritten by the gradient, times the
    device scalar `scale` if given.
    """
    words, rows, inner, outer_stride, inner_stride = _layout(logits)
    loss, lse = torch.empty(2, rows, device=logits.device, dtype=torch.float32)

    def run(plan: TilePlan) -> None:
        _cross_entropy_loss_kernel[(rows,)](
            logits, labels, loss if weights is None else weights, loss, lse, loss if scale is None else scale, words, inner,
            outer_stride, inner_stride, *options.scalars(), options.softcap is not None, options.smoothing != 0,
            weights is not None, scale is not None, write, plan.elements, num_warps=plan.warps,
        )  # fmt: skip

    launch(job_of("losses", "forward", (words,), logits), run)
    return loss, lse


def row_gradients(logits: Tensor, labels: Tensor, lse: Tensor, upstream: Tensor, options: Options) -> Tensor:
    """The gradient of logits as `row_losses` takes them, from the gradient of every row's loss, or one for all."""
    words, rows, inner, outer_stride, inner_stride = _layout(logits)
    out = torch.empty(logits.shape, device=logits.device, dtype=logits.dtype)

    def run(plan: TilePlan) -> None:
        _cross_entropy_gradient_kernel[(rows, cdiv(words, plan.elements))](
            logits, labels, lse, upstream, out, words, inner, outer_stride, inner_stride, int(upstream.numel() > 1),
            *options.scalars(), options.softcap is not None, plan.elements, num_warps=plan.warps,
        )  # fmt: skip

    launch(job_of("losses", "backward", (words,), logits), run)
    return out


def _layout(logits: Tensor) -> tuple[int, int, int, int, int]:
    """(words, rows, rows of the inner dimension, outer stride, inner stride)."""
    words, inner = logits.shape[-1], logits.shape[-2]
    return words, logits.numel() // words, inner, 0 if logits.dim() == 2 else logits.stride(0), logits.stride(-2)


def chunk_rows(tokens: int, features: int) -> int:
    """Tokens in a chunk: as many as features, so that its logits take no more memory than the weight; even chunks of 128s.

    Every chunk reads and writes the fp32 accumulator of the weight, so few large ones are faster. H200, 16384 tokens, forward
    and backward: 2048 features and 128256 words take 51 ms with 1024 tokens, 42.5 with 2048, 41.1 with 4096; 1024 features and
    32768 words 6.6 ms with 1024, 5.65 with 4096, for four times the logits. Who has the memory passes `chunk`.
    """
    most = max(128, features // 128 * 128)
    chunks = max(1, cdiv(tokens, most))
    return 128 * cdiv(cdiv(tokens, chunks), 128)
