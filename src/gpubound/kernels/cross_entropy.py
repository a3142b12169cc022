"""Cross-entropy of integer labels, with the options that language models use: of logits, or of a head and what it multiplies.

For a row of V logits z, in fp32 or wider, capped first when `softcap` is given (z ← c · tanh(z / c)), and its label y:

    loss = lse − (1 − ε) · z_y − ε · mean(z) + ζ · lse²        lse = log Σ exp z,  ε = label_smoothing,  ζ = z_loss

Divergence of a student's next-token distribution from a teacher's, and the cross-entropy of labels, in place of the logits.

With q and p the softmax of the student's and the teacher's logits, each divided by the temperature τ, and m = (1 − β) q + β p,
the divergence D of a row is that of generalised knowledge distillation (Agarwal et al. 2024), and g its gradient in log q,
up to a multiple of 1, which softmax takes away:

    β = 0        KL(p ‖ q)                              g = −p
    β = 1        KL(q ‖ p)                              g = q (log q − log p)
    between      β KL(p ‖ m) + (1 − β) KL(q ‖ m)        g = (1 − β) q (log q − log m)

The gradient in the student's logits z of α τ² D + (1 − α) CE is α τ (g − q Σ g) + (1 − α) (softmax(z) − [is the label]).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .accumulate import widened
from .dispatch import INTEGERS, implementation, require_device, require_last
from .registry import definition, doubles, draw, frozen


def loss_shape(words: int, label_smoothing: float = 0.0, softcap: float | None = None) -> tuple:
    """An example's words, whether it is smoothed, and capped. Few words have the kernels of a hundred times as many."""
    return words if words <= 8192 else 8192 + words % 16 + 16, label_smoothing != 0, softcap is not None


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
    require_last("cross_entropy", "logits", logits, "(..., V)")
    _check_words("cross_entropy", "logits", logits.shape[-1])
    _check_labels("cross_entropy", "logits", logits, labels)
    _check_options("cross_entropy", label_smoothing, softcap, z_loss, reduction, ("mean", "sum", "none"))
    shape = loss_shape(logits.shape[-1], label_smoothing, softcap)
    fast = implementation("cross_entropy", logits, None, shape)
    return fast(logits, labels, ignore_index, label_smoothing, softcap, z_loss, reduction)


@definition(lambda g, words=300, *kind: (draw(g, 5, words), _draw_labels(g, 5, words), *_options(*kind)), gradient=True)
def cross_entropy_reference(logits, labels, ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0, reduction="mean"):
    words, labels = logits.shape[-1], labels.long()  # of 8 bits, 156 would be an ignore_index of -100
    valid, inside = labels != ignore_index, (labels >= 0) & (labels < words)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z.masked_fill(~valid.unsqueeze(-1), 0.0)  # not read: a NaN there, times a gradient of 0, would be NaN
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    poison = torch.where(valid & ~inside, float("nan"), 1.0).to(z.dtype)  # of two numbers it has the default dtype
    lse = torch.logsumexp(z, -1)
    z_label = z.gather(-1, torch.where(inside, labels, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * z_label + z_loss * lse * lse  # lse² alone overflows from 2e19 on
    if label_smoothing:
        loss = loss - label_smoothing * z.mean(-1)
    loss = torch.where(valid, loss * poison, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum() if reduction == "mean" else loss.sum()


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
    weights: Tensor | None = None,
) -> Tensor:
    """cross_entropy(x weightᵀ + bias, labels) for x (..., H) and weight (V, H), without the whole logits in memory.

    Products run in x's dtype (under autocast, in autocast's). The loss is float32. The options are those of
    `cross_entropy`. If a gradient is needed, forward computes it too, chunk by chunk. Memory in use meanwhile, for N tokens
    of s bytes a number:

        chunk · V · s  logits  +  N · H · s  dx  +  V · H · 4  dweight, summed in fp32 (V · H · s if one chunk holds all)

    `chunk` is the number of tokens taken at a time. By default it is H, which keeps the logits no larger than the weight.
    The gradient of a frozen tensor is not computed and takes no memory.

    `weights` (...), float32, multiply each label's loss in the sum, such as 1 / t of a diffusion model's tokens. That of an
    ignored label is not read. They are constants: no gradient goes to them.

    A training step that knows the factor on its loss (1 / tokens of all micro-batches) passes it as `grad_scale`, a float
    scalar on the device. Loss and gradients are multiplied by it. In return the caller promises to run backward exactly
    once, from the loss itself. Backward then needs no further pass over the gradients. A weight with `main_grad` needs no
    dweight: forward adds its products to main_grad. So with grad_scale, call this under no_grad when you do not want the
    gradients, and do not call it inside activation checkpointing. Without grad_scale, backward adds to main_grad, and any
    upstream gradient and any number of backwards give correct results.
    """
    _check_linear(x, weight, bias, chunk, grad_scale)
    _check_labels("linear_cross_entropy", "x", x, labels)
    _check_options("linear_cross_entropy", label_smoothing, softcap, z_loss, reduction, ("mean", "sum"))
    if weights is not None:
        _check_weights(labels, weights, reduction)
    shape = *loss_shape(weight.shape[0], label_smoothing, softcap), grad_scale is not None, weights is not None
    arguments = (weight, labels, bias, ignore_index, label_smoothing, softcap, z_loss, reduction, chunk, grad_scale, weights)
    if not torch.is_autocast_enabled(x.device.type):
        return implementation("linear_cross_entropy", x, None, shape)(x, *arguments)
    x = x.to(torch.get_autocast_dtype(x.device.type))
    with torch.autocast(x.device.type, enabled=False):  # it would round the fp32 parts as well
        return implementation("linear_cross_entropy", x, None, shape)(x, *arguments)


def _linear_example(generator, words=300, smoothed=True, capped=True, scaled=False, weighted=False):
    x, weight, labels = draw(generator, 5, 40), draw(generator, words, 40), _draw_labels(generator, 5, words)
    scale = torch.tensor(0.5, device="cpu", dtype=torch.float32) if scaled else None
    bias, (*options, reduction) = draw(generator, words), _options(smoothed, capped)
    if not weighted:
        return x, weight, labels, bias, *options, reduction, 3, scale
    return x, weight, labels, bias, *options, "sum", 3, scale, doubles(2, 9, 0.5, 0, 7).float()


@definition(_linear_example, gradient=True)
def linear_cross_entropy_reference(
    x, weight, labels, bias=None, ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0, reduction="mean",
    chunk=None, grad_scale=None, weights=None,
):  # fmt: skip
    """`chunk` bounds memory in the fast form and means nothing here: the logits are whole, and in fp32."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(compute_dtype) @ widened(weight, compute_dtype).t()
    if bias is not None:
        logits = logits + widened(bias, compute_dtype)
    options = (ignore_index, label_smoothing, softcap, z_loss)
    if weights is None:
        loss = cross_entropy_reference(logits, labels, *options, reduction)
    else:
        own = torch.where(labels.long() != ignore_index, weights.detach(), 0.0)
        loss = (cross_entropy_reference(logits, labels, *options, "none") * own).sum()
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


def _check_words(op: str, name: str, words: int) -> None:
    if words == 0:
        raise ValueError(f"{op}: {name} has a vocabulary of 0 words; there is no label to be right or wrong about.")


def _check_labels(op: str, name: str, rows: Tensor, labels: Tensor) -> None:
    if labels.dtype not in INTEGERS or labels.shape != rows.shape[:-1]:
        raise ValueError(
            f"{op}: labels must be integers of shape {tuple(rows.shape[:-1])}, one for each row of {name}, "
            f"got {labels.dtype} {tuple(labels.shape)}; class probabilities are not supported."
        )
    if labels.device != rows.device:
        raise ValueError(
            f"{op}: labels are on {labels.device}, {name} on {rows.device}; move one of them to the other's device."
        )


def _check_options(
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


def _check_weights(labels: Tensor, weights: Tensor, reduction: str) -> None:
    op = "linear_cross_entropy"
    if weights.dtype != torch.float32 or weights.shape != labels.shape:
        raise ValueError(
            f"{op}: weights must be torch.float32 of shape {tuple(labels.shape)}, one for each label, got {weights.dtype} "
            f"{tuple(weights.shape)}; cast or expand them."
        )
    require_device(op, labels, weights=weights)
    if reduction != "sum":
        raise ValueError(f"{op}: weights: reduction must be 'sum' with them, got {reduction!r}; divide by your own count.")


def _draw_labels(generator, rows, words):
    """Labels, the second of them ignored."""
    labels = torch.randint(words, (rows,), generator=generator, device="cpu")
    labels[1] = -100
    return labels


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int | None, grad_scale: Tensor | None) -> None:
    op = "linear_cross_entropy"
    require_last(op, "x", x, "(..., H)")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not weight.is_floating_point():
        raise ValueError(
            f"{op}: weight must be a floating-point matrix (V, {x.shape[-1]}) to match x, got {weight.dtype} "
            f"{tuple(weight.shape)}; give the head as a linear layer holds it."
        )
    _check_words(op, "weight", weight.shape[0])
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ValueError(
            f"{op}: bias must be a floating-point tensor ({weight.shape[0]},) to match weight, got {bias.dtype} "
            f"{tuple(bias.shape)}; it needs one value for each word."
        )
    require_device(op, x, weight=weight, bias=bias, grad_scale=grad_scale)
    if chunk is not None and chunk < 1:
        raise ValueError(
            f"{op}: chunk must be at least 1 token, got {chunk}; leave it out for logits no larger than the weight."
        )
    if grad_scale is not None and (grad_scale.dim() != 0 or not grad_scale.is_floating_point()):
        raise ValueError(
            f"{op}: grad_scale must be a floating-point scalar tensor, got {grad_scale.dtype} {tuple(grad_scale.shape)}; "
            f"make it on the device, as in 1 / tokens."
        )


def _options(smoothed: bool = True, capped: bool = True) -> tuple[int, float, float | None, float, str]:
    """Return an example's ignore_index, label_smoothing, softcap, z_loss, reduction."""
    return -100, 0.1 if smoothed else 0.0, 5.0 if capped else None, 1e-3, "mean"


ELEMENTS = 1 << 25  # of logits that the definition has in fp32 at a time, 128 MB a copy


def divergence(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
    scale: Tensor | None = None,
    gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """τ² D of each row of logits (N, V), the cross-entropy of its label, both in fp32, and with `gradient` the student's logits
    overwritten by the gradient of Σ α τ² D + (1 − α) CE, times the device scalar `scale`; else None.

    beta        0: KL(teacher ‖ student); 1: KL(student ‖ teacher); between: generalised Jensen-Shannon
    temperature τ, by which the logits of both are divided in D

    Rows whose label is `ignore_index` are not read; their results are 0. Any other label out of range makes a row NaN. autograd
    sees nothing of this op: call it under no_grad.
    """
    _check(student, teacher, labels, scale, gradient)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0 <= value <= 1:
            raise ValueError(f"divergence: {name} must be from 0 to 1, got {value}; it is a share.")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"divergence: temperature must be a finite number above 0, got {temperature}; 1 leaves the logits.")
    words = loss_shape(student.shape[1])[0]
    shape = words, float(alpha), float(beta), float(temperature), scale is not None, gradient
    fast = implementation("divergence", student, None, shape)
    return fast(student, teacher, labels, alpha, beta, temperature, ignore_index, scale, gradient)


def _example(generator, words=300, alpha=0.7, beta=0.3, temperature=2.0, scaled=False, gradient=True):
    student, teacher = (frozen(draw(generator, 5, words)) for _ in range(2))
    labels = torch.randint(words, (5,), generator=generator, device="cpu")
    labels[1] = -100
    scale = torch.tensor(0.5, device="cpu", dtype=torch.float32) if scaled else None
    return student, teacher, labels, alpha, beta, temperature, -100, scale, gradient


@definition(_example)
def divergence_reference(student, teacher, labels, alpha, beta, temperature, ignore_index, scale, gradient):
    distances, entropies, rows = [], [], max(1, ELEMENTS // student.shape[1])
    for own, t, y in zip(student.split(rows), teacher.split(rows), labels.long().split(rows), strict=True):
        valid, inside = y != ignore_index, (y >= 0) & (y < own.shape[1])
        z, t = (x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(~valid.unsqueeze(-1), 0) for x in (own, t))
        poison = torch.where(valid & ~inside, float("nan"), 1.0).to(z.dtype)
        label = torch.where(inside, y, 0)
        distance, slope = _distance_and_slope(z / temperature, t / temperature, beta)
        entropy = F.cross_entropy(z, label, reduction="none")
        distances.append(torch.where(valid, temperature**2 * distance * poison, 0))
        entropies.append(torch.where(valid, entropy * poison, 0))
        if gradient:
            dz = alpha * temperature * slope
            if alpha < 1:
                minus = z.new_full((len(z), 1), -1)
                dz += (1 - alpha) * z.softmax(-1).scatter_add_(1, label.unsqueeze(-1), minus)
            dz *= poison.unsqueeze(-1) if scale is None else (poison * scale).unsqueeze(-1)
            own.copy_(dz.masked_fill_(~valid.unsqueeze(-1), 0))
    return torch.cat(distances), torch.cat(entropies), student if gradient else None


def _distance_and_slope(u: Tensor, v: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(D, its gradient in u) of logits at the temperature. A word of probability 0 adds nothing: 0 log 0 = 0."""
    log_q, log_p = u.log_softmax(-1), v.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    if beta == 0:
        return (p * (log_p - log_q)).masked_fill(p == 0, 0).sum(-1), q - p
    log_m = log_p if beta == 1 else torch.logaddexp(log_q + math.log(1 - beta), log_p + math.log(beta))
    share = 1.0 if beta == 1 else 1 - beta
    g = (share * q * (log_q - log_m)).masked_fill(q == 0, 0)
    distance = g.sum(-1)
    if beta < 1:
        distance = distance + beta * (p * (log_p - log_m)).masked_fill(p == 0, 0).sum(-1)
    return distance, g - q * g.sum(-1, keepdim=True)


def _check(student: Tensor, teacher: Tensor, labels: Tensor, scale: Tensor | None, gradient: bool) -> None:
    if student.dim() != 2 or not student.is_floating_point() or student.shape[1] == 0:
        raise ValueError(
            f"divergence: student must be a floating-point matrix (N, V) of at least one word, got {student.dtype} "
            f"{tuple(student.shape)}; flatten it to one row a token."
        )
    if teacher.shape != student.shape or not teacher.is_floating_point():
        raise ValueError(
            f"divergence: teacher must be a floating-point matrix {tuple(student.shape)} to match student, got {teacher.dtype} "
            f"{tuple(teacher.shape)}; both give logits of the same tokens."
        )
    if labels.dtype not in INTEGERS or labels.shape != student.shape[:1]:
        raise ValueError(
            f"divergence: labels must be integers of shape {tuple(student.shape[:1])}, one for each row, got {labels.dtype} "
            f"{tuple(labels.shape)}; flatten them as the logits."
        )
    require_device("divergence", student, teacher=teacher, labels=labels, scale=scale)
    if scale is not None and (scale.dim() != 0 or not scale.is_floating_point()):
        raise ValueError(
            f"divergence: scale must be a floating-point scalar tensor, got {scale.dtype} {tuple(scale.shape)}; make it on the "
            f"device, as in 1 / tokens."
        )
    dense = student.shape[1] == 1 or student.stride(1) == 1
    if gradient and not (dense and (len(student) <= 1 or student.stride(0) >= student.shape[1])):
        raise ValueError(
            f"divergence: student must have dense rows that do not overlap, to be overwritten by the gradient, got the strides "
            f"{student.stride()}; pass student.contiguous()."
        )
    if gradient and student.requires_grad and torch.is_grad_enabled():
        raise ValueError("divergence: student requires a gradient, and this op overwrites it by one; call it under no_grad.")
