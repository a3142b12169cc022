"""Divergence of a student's distribution from a teacher's: one program a row of both, of any vocabulary, in fp32.

A first pass over each row keeps its maximum and the sum of 2^(c (z − maximum)), c = log2(e) / τ. Of β = 0 the gradient, q − p,
needs no more, so that a second pass over both rows adds up the loss and writes it. Else the second pass finds Σ g, and a third
writes the gradient. Formulas are in kernels/divergence.py. Logarithms are of base 2 inside: exp2 is one instruction.

Differences from the maximum come first: of logits near 100, z / τ − lse would lose the sixth digit of a probability.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans.types import TilePlan, job_of
from ._launch import bump_versions, launch

FORWARD, REVERSE, BETWEEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # KL(p ‖ q), KL(q ‖ p), 0 < β < 1
LN2, LOG2E = tl.constexpr(math.log(2)), tl.constexpr(1 / math.log(2))


@triton.jit
def _statistics(row_ptr, words, per, TEMPERED: tl.constexpr, BLOCK: tl.constexpr):
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
        z_top, z_sum, z_plain = _statistics(z_ptr, words, per, TEMPERED, BLOCK)
        t_top, t_sum, _plain = _statistics(t_ptr, words, per, False, BLOCK)
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
def divergence(
    student: Tensor, teacher: Tensor, labels: Tensor, alpha: float, beta: float, temperature: float, ignore_index: int,
    scale: Tensor | None, gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
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
