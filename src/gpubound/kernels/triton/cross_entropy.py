"""Cross-entropy of logits that are the caller's, and of x weightᵀ + bias, whose logits are ours (kernels in _softmax_loss.py).

The caller's logits are left alone: backward computes their gradient from them and the saved lse. They are read twice in all.

Ours are never whole in memory, and cost no host sync. Tokens are taken in chunks. A chunk's logits are one product into a
buffer that all chunks share; one launch turns them into losses and overwrites them by their gradient; two more products give
the chunk's dx and add to dweight. So the gradients exist before backward brings the upstream gradient u. There are two ways:

Without `grad_scale`, gradients are kept as if u and the mean's 1/count were one. Backward multiplies copies of them by both, on
the device, so it may run any number of times with any u. Cost: one pass over dx and dweight.

With `grad_scale`, that factor is in loss and gradients from the start, and the caller promises u = 1 and one backward: both are
checked. A weight with `main_grad` then gets its gradient in forward, by the products themselves: neither a buffer of the
weight's size nor a pass over one.

Legend: N tokens, H features, V words.
"""

import torch
from torch import Tensor

from ..accumulate import add_product, deliver, main_gradient, product
from ..cross_entropy import last
from ..plans import cdiv
from ._launch import first_order_only
from ._softmax_loss import Options, chunk_rows, flat_labels, row_gradients, row_losses


def _readable(logits: Tensor) -> Tensor:
    """`logits` as `row_losses` takes them: two or three dimensions (such as logits[:, :-1]) where they lie, else a matrix."""
    logits = logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, options):
        flat = flat_labels(labels)
        loss, lse = row_losses(_readable(logits), flat, options)
        share = options.share(flat)
        ctx.save_for_backward(logits, flat, lse, share)
        ctx.options = options
        if options.reduction == "none":
            return loss.view(labels.shape)
        return loss.sum() if share is None else loss.sum() * share

    @staticmethod
    def backward(ctx, upstream):
        first_order_only("cross_entropy")
        logits, labels, lse, share = ctx.saved_tensors
        upstream = (upstream if share is None else upstream * share).reshape(-1).contiguous()
        gradient = row_gradients(_readable(logits), labels, lse, upstream, ctx.options)
        return gradient.view(logits.shape), None, None


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None,
    z_loss: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    return _CrossEntropy.apply(logits, labels, Options(ignore_index, label_smoothing, softcap, z_loss, reduction))


def _chunks(x_NH, weight, bias, labels, weights, options, wanted, rows, scale, dweight, dtype):
    """(losses, dx, dweight, dbias), gradients times `scale`; dweight is added to what comes in, or made in `dtype`."""
    want_x, want_weight, want_bias = wanted
    tokens, words = x_NH.shape[0], weight.shape[0]
    w, b = weight.to(x_NH.dtype), None if bias is None else bias.to(x_NH.dtype)
    dx = torch.empty(x_NH.shape, device=x_NH.device, dtype=x_NH.dtype) if want_x else None
    owners = () if dweight is None else (weight,)
    # Rows that begin at a multiple of 64 elements: cuBLAS and 16-byte loads want them aligned. dynamo wants out= contiguous.
    width = words if torch.compiler.is_compiling() else 64 * cdiv(words, 64)
    logits = torch.empty(min(rows, tokens), width, device=x_NH.device, dtype=x_NH.dtype)[:, :words]
    losses, dbias = [], None
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        part, z = x_NH[start:stop], logits[: stop - start]
        torch.mm(part, w.t(), out=z) if b is None else torch.addmm(b, part, w.t(), out=z)
        own = None if weights is None else weights[start:stop]
        losses.append(row_losses(z, labels[start:stop], options, write=any(wanted), scale=scale, weights=own)[0])
        if dx is not None:
            torch.mm(z, w, out=dx[start:stop])
        if want_weight and dweight is None:
            dweight = product(z, part, dtype)
        elif want_weight:
            add_product(dweight, z, part, owners)
        if want_bias:
            dbias = z.sum(0, dtype=torch.float32) if dbias is None else dbias.add_(z.sum(0, dtype=torch.float32))
    return torch.cat(losses), dx, dweight, dbias


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, labels, weights, grad_scale, options, chunk, wanted):
        x_NH, labels = x.reshape(-1, x.shape[-1]), flat_labels(labels)
        weights = None if weights is None else weights.detach().reshape(-1).contiguous()
        factor = options.share(labels)
        ctx.final = grad_scale is not None
        if ctx.final:
            scale = grad_scale.detach().float()
            factor = scale if factor is None else factor * scale
        ctx.owners = weight, bias
        main, main_bias = main_gradient(weight), None if bias is None else main_gradient(bias)
        rows = chunk or chunk_rows(*x_NH.shape)
        one_product = rows >= x_NH.shape[0] and main is None  # it rounds its own fp32 sum; several are summed in fp32 first
        losses, dx, dweight, dbias = _chunks(
            x_NH, weight, bias, labels, weights, options, wanted, rows, factor if ctx.final else None,
            main if ctx.final else None, weight.dtype if one_product else torch.float32,
        )  # fmt: skip
        if ctx.final and main is not None:
            dweight = None  # delivered
        elif dweight is not None and main is None:
            dweight = dweight.to(weight.dtype)
        if dbias is not None and main_bias is None:
            dbias = dbias.to(bias.dtype)
        ctx.save_for_backward(None if dx is None else dx.view(x.shape), dweight, dbias, None if ctx.final else factor)
        return losses.sum() if factor is None else losses.sum() * factor

    @staticmethod
    def backward(ctx, upstream):
        first_order_only("linear_cross_entropy")
        dx, *gradients, share = ctx.saved_tensors
        factor = None if ctx.final else upstream if share is None else upstream * share
        if dx is not None and factor is not None:
            dx = dx * factor
        delivered = [None if g is None else deliver(owner, g, factor) for g, owner in zip(gradients, ctx.owners)]
        return dx, *delivered, *[None] * 6


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0, reduction: str = "mean",
    chunk: int | None = None, grad_scale: Tensor | None = None, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias))
    options = Options(ignore_index, label_smoothing, softcap, z_loss, reduction)
    loss = _LinearCrossEntropy.apply(x, weight, bias, labels, weights, grad_scale, options, chunk, wanted)
    return loss if grad_scale is None else last(loss)
