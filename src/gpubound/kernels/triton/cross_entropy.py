"""Cross-entropy of the caller's logits, and of x weightᵀ + bias, whose logits are computed here.

One program computes a row, of any vocabulary, in fp32. The formulas are in kernels/cross_entropy.py. A first pass over a row
keeps its running maximum and the sum of exp(z − maximum), from which lse follows. The gradient is

    dz = (p · (1 + 2 ζ lse) − ε / V − (1 − ε) · [is the label]) · (1 − (z / c)²)    p = exp(z − lse); last factor: softcap only

The caller's logits are not changed: backward computes their gradient from them and the saved lse. They are read twice in all.

The logits of x weightᵀ + bias are never whole in memory, and need no host sync. Tokens are processed in chunks. The logits of a
chunk are one product into a buffer that all chunks share; one launch turns them into losses and overwrites them by their
gradient; two more products compute the chunk's dx and add to dweight. So the gradients exist before backward brings the
upstream gradient u. There are two variants:

Without `grad_scale`, gradients are kept as if u and the mean's 1/count were one. Backward multiplies copies of them by both, on
the device, so it may run any number of times with any u. Cost: one pass over dx and dweight.

With `grad_scale`, that factor is in loss and gradients from the start, and the caller promises u = 1 and one backward: both are
checked. A weight with `main_grad` then gets its gradient in forward, from the products: it needs neither a buffer of the
weight's size nor a pass over one.

Legend: N tokens, H features, V vocabulary.

Divergence of a student's distribution from a teacher's: one program a row of both, of any vocabulary, in fp32.

A first pass over each row keeps its maximum and the sum of 2^(c (z − maximum)), c = log2(e) / τ. Of β = 0 the gradient, q − p,
needs no more, so that a second pass over both rows adds up the loss and writes it. Else the second pass finds Σ g, and a third
writes the gradient. Formulas are in kernels/cross_entropy.py. Logarithms are of base 2 inside: exp2 is one instruction.

Differences from the maximum come first: of logits near 100, z / τ − lse would lose the sixth digit of a probability.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..accumulate import add_product, deliver, main_gradient, product
from ..cross_entropy import last
from ..plans.types import TilePlan, cdiv, job_of
from ._launch import bump_versions, first_order_only, launch


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


def _flat_labels(labels: Tensor) -> Tensor:
    """One label after the other in memory, as the kernels read them: reshape alone would keep the stride of a column.

    In 64 bits, because torch compares 8-bit labels with an ignore_index of -100 as if that were 156.
    """
    return labels.reshape(-1).long().contiguous()


def _row_losses(
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


def _row_gradients(logits: Tensor, labels: Tensor, lse: Tensor, upstream: Tensor, options: Options) -> Tensor:
    """The gradient of logits as `_row_losses` takes them, from the gradient of every row's loss, or one for all."""
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


def _chunk_rows(tokens: int, features: int) -> int:
    """Tokens in a chunk: as many as features, so that its logits take no more memory than the weight; even chunks of 128s.

    Every chunk reads and writes the fp32 accumulator of the weight, so few large ones are faster. H200, 16384 tokens, forward
    and backward: 2048 features and 128256 words take 51 ms with 1024 tokens, 42.5 with 2048, 41.1 with 4096; 1024 features and
    32768 words 6.6 ms with 1024, 5.65 with 4096, for four times the logits. Who has the memory passes `chunk`.
    """
    most = max(128, features // 128 * 128)
    chunks = max(1, cdiv(tokens, most))
    return 128 * cdiv(cdiv(tokens, chunks), 128)


def _readable(logits: Tensor) -> Tensor:
    """`logits` as `_row_losses` takes them: two or three dimensions (such as logits[:, :-1]) where they lie, else a matrix."""
    logits = logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, options):
        flat = _flat_labels(labels)
        loss, lse = _row_losses(_readable(logits), flat, options)
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
        gradient = _row_gradients(_readable(logits), labels, lse, upstream, ctx.options)
        return gradient.view(logits.shape), None, None


def cross_entropy(logits, labels, ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0, reduction="mean"):
    return _CrossEntropy.apply(logits, labels, Options(ignore_index, label_smoothing, softcap, z_loss, reduction))


def _chunks(x_NH, weight, bias, labels, weights, options, wanted, rows, scale, dweight, dtype, later):
    """(losses, dx, dweight, dbias, the last chunk's gradient of the logits), gradients times `scale`; dweight is added to what
    comes in, or made in `dtype`, or with `later` left to backward."""
    want_x, want_weight, want_bias = wanted
    tokens, words = x_NH.shape[0], weight.shape[0]
    w, b = weight.to(x_NH.dtype), None if bias is None else bias.to(x_NH.dtype)
    dx = torch.empty(x_NH.shape, device=x_NH.device, dtype=x_NH.dtype) if want_x else None
    owners = () if dweight is None else (weight,)
    # Rows that begin at a multiple of 64 elements: cuBLAS and 16-byte loads want them aligned. dynamo wants out= contiguous.
    width = words if torch.compiler.is_compiling() else 64 * cdiv(words, 64)
    logits = torch.empty(min(rows, tokens), width, device=x_NH.device, dtype=x_NH.dtype)[:, :words]
    losses, dbias, z = [], None, logits
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        part, z = x_NH[start:stop], logits[: stop - start]
        torch.mm(part, w.t(), out=z) if b is None else torch.addmm(b, part, w.t(), out=z)
        own = None if weights is None else weights[start:stop]
        losses.append(_row_losses(z, labels[start:stop], options, write=later or any(wanted), scale=scale, weights=own)[0])
        if dx is not None:
            torch.mm(z, w, out=dx[start:stop])
        if want_weight and dweight is None:
            dweight = product(z, part, dtype)
        elif want_weight:
            add_product(dweight, z, part, owners)
        if want_bias:
            dbias = z.sum(0, dtype=torch.float32) if dbias is None else dbias.add_(z.sum(0, dtype=torch.float32))
    return torch.cat(losses), dx, dweight, dbias, z if later else None  # else the logits are freed before dweight is cast


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, labels, weights, grad_scale, options, chunk, wanted):
        x_NH, labels = x.reshape(-1, x.shape[-1]), _flat_labels(labels)
        weights = None if weights is None else weights.detach().reshape(-1).contiguous()
        factor = options.share(labels)
        ctx.final = grad_scale is not None
        if ctx.final:
            scale = grad_scale.detach().float()
            factor = scale if factor is None else factor * scale
        ctx.owners = weight, bias
        main, main_bias = main_gradient(weight), None if bias is None else main_gradient(bias)
        rows = chunk or _chunk_rows(*x_NH.shape)
        one_product = rows >= x_NH.shape[0] and main is None  # it rounds its own fp32 sum; several are summed in fp32 first
        # Of few tokens the logits' gradient is smaller than the weight's, which backward would hold twice, its own and scaled.
        later = wanted[1] and one_product and not ctx.final and x_NH.shape[0] < x_NH.shape[1]
        losses, dx, dweight, dbias, dlogits = _chunks(
            x_NH, weight, bias, labels, weights, options, (wanted[0], wanted[1] and not later, wanted[2]), rows,
            factor if ctx.final else None, main if ctx.final else None, weight.dtype if one_product else torch.float32, later,
        )  # fmt: skip
        if ctx.final and main is not None:
            dweight = None  # delivered
        elif dweight is not None and main is None:
            dweight = dweight.to(weight.dtype)
        if dbias is not None and main_bias is None:
            dbias = dbias.to(bias.dtype)
        operands = (dlogits, x_NH) if later else (None, None)
        ctx.save_for_backward(
            None if dx is None else dx.view(x.shape), dweight, dbias, None if ctx.final else factor, *operands
        )
        return losses.sum() if factor is None else losses.sum() * factor

    @staticmethod
    def backward(ctx, upstream):
        first_order_only("linear_cross_entropy")
        dx, *gradients, share, dlogits, x_NH = ctx.saved_tensors
        factor = None if ctx.final else upstream if share is None else upstream * share
        if dx is not None and factor is not None:
            dx = dx * factor
        delivered = [None if g is None else deliver(owner, g, factor) for g, owner in zip(gradients, ctx.owners)]
        if dlogits is not None:
            delivered[0] = deliver(ctx.owners[0], product(dlogits, x_NH, ctx.owners[0].dtype).mul_(factor))  # type: ignore[arg-type]
        return dx, *delivered, *[None] * 6


def linear_cross_entropy(
    x, weight, labels, bias=None, ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0, reduction="mean",
    chunk=None, grad_scale=None, weights=None,
):  # fmt: skip
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias))
    options = Options(ignore_index, label_smoothing, softcap, z_loss, reduction)
    loss = _LinearCrossEntropy.apply(x, weight, bias, labels, weights, grad_scale, options, chunk, wanted)
    return loss if grad_scale is None else last(loss)


FORWARD, REVERSE, BETWEEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # KL(p ‖ q), KL(q ‖ p), 0 < β < 1
LN2, LOG2E = tl.constexpr(math.log(2)), tl.constexpr(1 / math.log(2))


@triton.jit
def _divergence_statistics(row_ptr, words, per, TEMPERED: tl.constexpr, BLOCK: tl.constexpr):
    """(maximum, log2 Σ 2^(per (z − maximum)), the same at temperature 1) of one row."""
    top = -float("inf")
    total = 0.0
    plain = 0.0
    for start in range(0, words, BLOCK):
        col = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + col, mask=col < words, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far: -inf - -inf would be NaN
        total = total * tl.exp2(per * (top - base)) + tl.sum(tl.exp2(per * (z - base)), 0)
        if TEMPERED:
            plain = plain * tl.exp2((top - base) * LOG2E) + tl.sum(tl.exp2((z - base) * LOG2E), 0)
        top = higher
    if not TEMPERED:
        plain = total
    return top, tl.log2(total), tl.log2(plain)


@triton.jit
def _shifted(row_ptr, col, words, top):
    """Logits less the row's maximum; 0 beyond the vocabulary."""
    return tl.where(col < words, tl.load(row_ptr + col, mask=col < words, other=0.0).to(tl.float32) - top, 0.0)


@triton.jit
def _terms(log_q, log_p, q, p, beta, log_rest, log_beta, KIND: tl.constexpr):
    """Parts of a word in D and in Σ g, both in bits. A probability of 0 adds nothing."""
    if KIND == FORWARD:
        part = tl.where(p == 0.0, 0.0, p * (log_p - log_q))
        g = part
    elif KIND == REVERSE:
        g = tl.where(q == 0.0, 0.0, q * (log_q - log_p))
        part = g
    else:
        a = log_q + log_rest
        b = log_p + log_beta
        log_m = tl.maximum(a, b) + tl.log2(1.0 + tl.exp2(-tl.abs(a - b)))
        g = tl.where(q == 0.0, 0.0, (1.0 - beta) * q * (log_q - log_m))
        part = g + tl.where(p == 0.0, 0.0, beta * p * (log_p - log_m))
    return part, g


@triton.jit
def _write(row_ptr, col, words, dz, q, z, z_plain, label, far, scale, TEMPERED: tl.constexpr, MIXED: tl.constexpr):
    """Overwrite logits, z less the row's maximum, by `dz` of the divergence plus `far` times that of the cross-entropy."""
    if MIXED:
        own = tl.exp2(z * LOG2E - z_plain) if TEMPERED else q
        dz += far * (own - tl.where(col == label, 1.0, 0.0))
    tl.store(row_ptr + col, (dz * scale).to(row_ptr.dtype.element_ty), mask=col < words)


# Where a chunk's labels and losses begin, and how many rows it has, is not worth another compilation.
@triton.jit(
    do_not_specialize=["ignore_index"],
    do_not_specialize_on_alignment=["labels_ptr", "distance_ptr", "entropy_ptr", "scale_ptr"],
)
def _divergence_kernel(student_ptr, teacher_ptr, labels_ptr, distance_ptr, entropy_ptr, scale_ptr, words, student_stride,
                       teacher_stride, ignore_index, per, squared, near, far, beta, log_rest, log_beta,
                       KIND: tl.constexpr, TEMPERED: tl.constexpr, MIXED: tl.constexpr, SCALED: tl.constexpr,
                       WRITE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """near and far: what the gradients of D and of the cross-entropy are multiplied by, α τ and 1 − α."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr = student_ptr + row * student_stride
    t_ptr = teacher_ptr + row * teacher_stride
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(distance_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        if WRITE:
            for start in range(0, words, BLOCK):
                col = start + tl.arange(0, BLOCK)
                tl.store(z_ptr + col, tl.zeros([BLOCK], tl.float32).to(student_ptr.dtype.element_ty), mask=col < words)
    else:
        inside = (label >= 0) & (label < words)
        # Before the first pass, whose reductions are barriers: after them a fast warp may already be overwriting this logit.
        z_label = tl.load(z_ptr + tl.where(inside, label, 0)).to(tl.float32)
        z_top, z_sum, z_plain = _divergence_statistics(z_ptr, words, per, TEMPERED, BLOCK)
        t_top, t_sum, _plain = _divergence_statistics(t_ptr, words, per, False, BLOCK)
        factor = tl.where(inside, 1.0, float("nan"))
        scale = factor
        if SCALED:
            scale *= tl.load(scale_ptr)
        parts = tl.zeros([BLOCK], tl.float32)
        slopes = tl.zeros([BLOCK], tl.float32)
        for start in range(0, words, BLOCK):
            col = start + tl.arange(0, BLOCK)
            z = _shifted(z_ptr, col, words, z_top)
            log_q = per * z - z_sum
            log_p = per * _shifted(t_ptr, col, words, t_top) - t_sum
            q = tl.exp2(log_q)
            p = tl.exp2(log_p)
            part, g = _terms(log_q, log_p, q, p, beta, log_rest, log_beta, KIND)
            parts += tl.where(col < words, part, 0.0)
            if KIND != FORWARD:
                slopes += tl.where(col < words, g, 0.0)
            elif WRITE:
                _write(z_ptr, col, words, near * (q - p), q, z, z_plain, label, far, scale, TEMPERED, MIXED)
        tl.store(distance_ptr + row, tl.sum(parts, 0) * LN2 * squared * factor)
        tl.store(entropy_ptr + row, ((z_top - z_label) + z_plain * LN2) * factor)
        if WRITE and KIND != FORWARD:
            slope = tl.sum(slopes, 0)
            for start in range(0, words, BLOCK):
                col = start + tl.arange(0, BLOCK)
                z = _shifted(z_ptr, col, words, z_top)
                log_q = per * z - z_sum
                log_p = per * _shifted(t_ptr, col, words, t_top) - t_sum
                q = tl.exp2(log_q)
                part, g = _terms(log_q, log_p, q, q, beta, log_rest, log_beta, KIND)
                dz = near * LN2 * (g - q * slope)
                _write(z_ptr, col, words, dz, q, z, z_plain, label, far, scale, TEMPERED, MIXED)


@torch.no_grad()
def divergence(student, teacher, labels, alpha, beta, temperature, ignore_index, scale, gradient):
    rows, words = student.shape
    z, t = (x if words == 1 or x.stride(1) == 1 else x.contiguous() for x in (student, teacher))
    distance, entropy = torch.empty(2, rows, device=student.device, dtype=torch.float32)
    kind = FORWARD if beta == 0 else REVERSE if beta == 1 else BETWEEN
    logs = (math.log2(1 - beta), math.log2(beta)) if 0 < beta < 1 else (0.0, 0.0)

    def run(plan: TilePlan) -> None:
        _divergence_kernel[(rows,)](
            z, t, labels.long().contiguous(), distance, entropy, distance if scale is None else scale.float(), words,
            z.stride(0), t.stride(0), ignore_index, 1 / (math.log(2) * temperature), float(temperature) ** 2,
            float(alpha * temperature), float(1 - alpha), float(beta), *logs, kind.value, temperature != 1, alpha < 1,
            scale is not None, gradient, plan.elements, num_warps=plan.warps,
        )  # fmt: skip

    launch(job_of("divergence", "forward", (words,), student), run)
    if gradient:
        bump_versions(student)
    return distance, entropy, student if gradient else None
