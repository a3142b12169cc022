"""Kernel of choose_experts. One warp finds a row's S largest scores without barriers. Further programs of the launch compute
the shared expert's activation.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....kernels.plans.types import cdiv, power_of_two
from .....kernels.triton._launch import bump_versions, options
from .....kernels.triton._pdl import _begin, _wait
from .....kernels.triton.gated import _activated, _limited
from ..chosen_experts import LEAST, Gated

WARP = 1024  # experts per warp
WIDE = 512  # columns of the shared expert per program
_TAKEN = tl.constexpr(-(1 << 31))  # below every score


@triton.jit
def _score(logit):
    """Return √softplus. For a small e, 1 + e loses its digits; log(1 + e) · e / ((1 + e) - 1) corrects the loss."""
    logit = logit.to(tl.float32)
    e = tl.exp(-tl.abs(logit))
    whole = 1.0 + e
    log1p = tl.where(whole == 1.0, e, tl.log(whole) * (e / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.sqrt(tl.where(logit > 0.0, logit, 0.0) + log1p)


@triton.jit
def _ranked(logits_ptr, correction_ptr, i, experts):
    """Return int32 keys in the order of score + correction. A NaN counts as infinite."""
    there = i < experts
    score = _score(tl.load(logits_ptr + i, mask=there, other=0.0))
    score += tl.load(correction_ptr + i, mask=there, other=0.0).to(tl.float32)
    score = tl.where(score != score, float("inf"), tl.where(score == 0.0, 0.0, score))
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(there, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _TAKEN)


@triton.jit
def _best(logits_ptr, correction_ptr, slot, experts, S: tl.constexpr, E: tl.constexpr):
    """Return the S experts of the largest keys, ties going to the lowest index.

    Two 32-bit warp reductions are one instruction each; a 64-bit reduction is ten shuffles.
    """
    e = tl.arange(0, E)
    rank, found = _ranked(logits_ptr, correction_ptr, e, experts), slot * 0 - 1
    for nth in tl.static_range(S):
        first = tl.min(tl.where(rank == tl.max(rank, 0), e, E), 0)
        found = tl.where(slot == nth, first, found)
        rank = tl.where(e == first, _TAKEN, rank)
    return found


@triton.jit
def _gated_part(gate_ptr, up_ptr, out_ptr, gate_row, up_row, limit, part, I: tl.constexpr, WIDE: tl.constexpr):
    ACROSS: tl.constexpr = (I + WIDE - 1) // WIDE
    b, col = (part // ACROSS).to(tl.int64), part % ACROSS * WIDE + tl.arange(0, WIDE)
    there = col < I
    gate = tl.load(gate_ptr + b * gate_row + col, mask=there, other=0.0)
    gate, up = _limited(gate, tl.load(up_ptr + b * up_row + col, mask=there, other=0.0), limit)
    value, _ = _activated(gate, "silu")
    tl.store(out_ptr + b * I + col, value * up, mask=there)


@triton.jit(do_not_specialize=["rows", "experts"])
def _choose_experts_kernel(logits_ptr, correction_ptr, table_ptr, token_ptr, scale, ids_ptr, shares_ptr, rows, experts,
                           gate_ptr, up_ptr, out_ptr, gate_row, up_row, limit, S: tl.constexpr, SP: tl.constexpr,
                           E: tl.constexpr, LEAST: tl.constexpr, I: tl.constexpr, WIDE: tl.constexpr,
                           DEPENDENT: tl.constexpr):  # fmt: skip
    """Choose experts, and compute the shared expert's activation. I 0: no activation.

    The kernel is a fence (_pdl.py): the next launch, the experts' gate and up, starts after the wait, since it cannot prefetch
    weights before the experts are chosen. If its programs started while earlier launches ran, they were unevenly distributed
    over multiprocessors (four H200s: 14.3 us a layer instead of 10.6)."""
    _wait(DEPENDENT)
    _begin(DEPENDENT)
    if tl.program_id(0) >= rows:
        if I > 0:
            _gated_part(gate_ptr, up_ptr, out_ptr, gate_row, up_row, limit, tl.program_id(0) - rows, I, WIDE)
    else:
        b = tl.program_id(0).to(tl.int64)
        logits_ptr += b * experts
        slot = tl.arange(0, SP)
        if table_ptr is not None:
            token = tl.load(token_ptr + b)
            i = tl.load(table_ptr + token * S + slot, mask=slot < S, other=-1).to(tl.int32)
        else:
            i = _best(logits_ptr, correction_ptr, slot, experts, S, E)
        known = (i >= 0) & (i < experts)
        score = tl.where(known, _score(tl.load(logits_ptr + i, mask=known, other=0.0)), float("nan"))
        whole = tl.sum(tl.where(slot < S, score, 0.0), 0) + LEAST
        tl.store(ids_ptr + b * S + slot, i, mask=slot < S)
        tl.store(shares_ptr + b * S + slot, score / whole * scale, mask=slot < S)


@torch.no_grad()
def choose_experts(
    logits: Tensor, correction: Tensor | None, table: Tensor | None, token: Tensor | None, scale: float, ids: Tensor,
    shares: Tensor, gated: Gated | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    (rows, experts), slots = logits.shape, ids.shape[1]
    beside: tuple[Any, ...] = (None, None, None, 0, 0, 0.0)
    block, width, made = power_of_two(experts), 0, tuple[Tensor, ...]()
    if gated is not None:
        gate, up, limit, out = gated
        width, beside, made = out.shape[1], (gate, up, out, gate.stride(0), up.stride(0), limit), (out,)
    _choose_experts_kernel[(rows + rows * cdiv(width, WIDE),)](
        logits, correction, table, token, scale, ids, shares, rows, experts, *beside, slots, power_of_two(slots), block, LEAST,
        width, WIDE, **options(max(1, block // WARP)),
    )  # fmt: skip
    bump_versions(ids, shares, *made)
    return ids, shares, *made
