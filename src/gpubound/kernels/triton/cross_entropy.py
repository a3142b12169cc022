"""Cross-entropy of logits that are the caller's (kernels in _logits.py).

They are left alone: backward computes their gradient from them and the saved lse, so that they are read twice in all.
linear_cross_entropy.py owns its logits, and overwrites them by their gradient in the launch that reads them.
"""

import torch
import triton
from torch import Tensor

from ..plans.kinds import TilePlan
from ._launch import first_order_only, launch
from ._logits import Options, _cross_entropy_gradient_kernel, flat_labels, layout, loss_job, row_losses, valid_share


def _readable(logits: Tensor) -> Tensor:
    """`logits` as `row_losses` takes them: two or three dimensions (such as logits[:, :-1]) where they lie, else a matrix."""
    logits = logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, options, reduction):
        flat = flat_labels(labels)
        loss, lse = row_losses(_readable(logits), flat, options)
        share = valid_share(flat, options.ignore_index) if reduction == "mean" else None
        ctx.save_for_backward(logits, flat, lse, share)
        ctx.options = options
        if reduction == "none":
            return loss.view(labels.shape)
        return loss.sum() if share is None else loss.sum() * share

    @staticmethod
    def backward(ctx, upstream):
        first_order_only("cross_entropy")
        logits, labels, lse, share = ctx.saved_tensors
        upstream = (upstream if share is None else upstream * share).reshape(-1).contiguous()
        out, readable = torch.empty(logits.shape, device=logits.device, dtype=logits.dtype), _readable(logits)
        words, rows, inner, outer_stride, inner_stride = layout(readable)

        def run(plan: TilePlan) -> None:
            _cross_entropy_gradient_kernel[(rows, triton.cdiv(words, plan.elements))](
                readable, labels, lse, upstream, out, words, inner, outer_stride, inner_stride, int(upstream.numel() > 1),
                *ctx.options.scalars(), ctx.options.softcap is not None, plan.elements, num_warps=plan.warps,
            )  # fmt: skip

        launch(loss_job("backward", logits), run)
        return out, None, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    return _CrossEntropy.apply(logits, labels, Options(ignore_index, label_smoothing, softcap, z_loss), reduction)
