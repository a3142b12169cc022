"""Choice of experts with a program for each row, and the gate of a shared expert.

Chosen are the experts before which fewer than S stand, counted by comparing each with each, as in experts.py. Of groups, each
expert's value counts for its group's total where it is one of the BEST there; an expert is eligible where fewer than
`top_groups` groups have a greater total than its group. These go through memory between passes of one program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_product import Norm
from ..expert_choice import LEAST, ExpertRouting
from ..plans import power_of_two
from ._launch import bump_versions, options
from ._pdl import _begin, _end, _wait

COMPARED = 4096  # pairs of experts that a program compares at a time
_LEAST = tl.constexpr(LEAST)


@triton.jit
def _score(line, i, experts):
    logit = tl.load(line + i, mask=i < experts, other=0.0, cache_modifier=".cg")
    return 1.0 / (1.0 + tl.exp(-logit))


@triton.jit
def _value(line, correction_ptr, i, experts):
    """Value that an expert is chosen by; a NaN counts as infinite."""
    if correction_ptr is None:
        value = tl.load(line + i, mask=i < experts, other=0.0, cache_modifier=".cg")
    else:
        value = _score(line, i, experts) + tl.load(correction_ptr + i, mask=i < experts, other=0.0).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    return tl.where(i < experts, value, float("-inf"))


@triton.jit
def _select_experts_kernel(logits_ptr, correction_ptr, spare_ptr, ids_ptr, shares_ptr, factor, experts, size, top_groups,
                           S: tl.constexpr, E: tl.constexpr, EB: tl.constexpr, GROUPED: tl.constexpr,
                           NORMALISE: tl.constexpr, BEST: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, E)
    inside = i < experts
    line = logits_ptr + b * experts
    best, totals = spare_ptr + b * 2 * experts, spare_ptr + b * 2 * experts + experts
    _wait(DEPENDENT)
    _end(DEPENDENT)
    mine = _value(line, correction_ptr, i, experts)
    allowed = inside
    if GROUPED:
        place = tl.zeros([E], tl.int32)
        for start in range(0, E, EB):
            j = start + tl.arange(0, EB)
            other = _value(line, correction_ptr, j, experts)
            before = (other[None] > mine[:, None]) | ((other[None] == mine[:, None]) & (j[None] < i[:, None]))
            place += tl.sum((before & (j[None] // size == i[:, None] // size)).to(tl.int32), 1)
        tl.store(best + i, tl.where(place < BEST, mine, 0.0), mask=inside)
        tl.debug_barrier()
        total = tl.zeros([E], tl.float32)
        for start in range(0, E, EB):
            j = start + tl.arange(0, EB)
            part = tl.load(best + j, mask=j < experts, other=0.0, cache_modifier=".cg")
            total += tl.sum(tl.where(j[None] // size == i[:, None] // size, part[None], 0.0), 1)
        tl.store(totals + i, total, mask=inside)
        tl.debug_barrier()
        rank = tl.zeros([E], tl.int32)
        for start in range(0, E, EB):
            j = start + tl.arange(0, EB)
            other = tl.load(totals + j, mask=j < experts, other=0.0, cache_modifier=".cg")
            first = (j < experts) & (j % size == 0)  # one expert for each group
            ahead = (other[None] > total[:, None]) | ((other[None] == total[:, None]) & (j[None] // size < i[:, None] // size))
            rank += tl.sum((ahead & first[None]).to(tl.int32), 1)
        allowed = inside & (rank < top_groups)
        tl.debug_barrier()
        tl.store(totals + i, tl.where(allowed, mine, float("-inf")), mask=inside)
        tl.debug_barrier()
    mine = tl.where(allowed, mine, float("-inf"))
    place = tl.zeros([E], tl.int32)
    for start in range(0, E, EB):
        j = start + tl.arange(0, EB)
        if GROUPED:
            other = tl.load(totals + j, mask=j < experts, other=float("-inf"), cache_modifier=".cg")
        else:
            other = _value(line, correction_ptr, j, experts)
        before = (other[None] > mine[:, None]) | ((other[None] == mine[:, None]) & (j[None] < i[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    chosen = allowed & (place < S)
    if correction_ptr is None:  # a softmax over those that are chosen, or all
        logit = tl.load(line + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
        summed = chosen if NORMALISE else inside
        share = tl.where(summed, tl.exp(logit - tl.max(tl.where(summed, logit, float("-inf")), 0)), 0.0)
        share = share / tl.sum(share, 0)
    elif NORMALISE:
        share = _score(line, i, experts)
        share = share / (tl.sum(tl.where(chosen, share, 0.0), 0) + _LEAST)
    else:
        share = _score(line, i, experts)
    tl.store(ids_ptr + b * S + place, i, mask=chosen)
    tl.store(shares_ptr + b * S + place, share * factor, mask=chosen)


@triton.jit
def _gate_rows_kernel(x_ptr, norm_ptr, weight_ptr, h_ptr, eps, width, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
                      DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    col, row = tl.arange(0, C), tl.program_id(0).to(tl.int64)
    gain = tl.load(norm_ptr + col, mask=col < K, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=col < K, other=0.0).to(tl.float32)
    _wait(DEPENDENT)
    _end(DEPENDENT)
    x = tl.load(x_ptr + row * K + col, mask=col < K, other=0.0)
    y = tl.sum(x * gain * weight, 0) / tl.sqrt(tl.sum(x * x, 0) / K + eps)
    gate = 1.0 / (1.0 + tl.exp(-y))
    for start in range(0, width, W):
        at = start + tl.arange(0, W)
        h = tl.load(h_ptr + row * width + at, mask=at < width, other=0.0)
        tl.store(h_ptr + row * width + at, (h.to(tl.float32) * gate).to(h_ptr.dtype.element_ty), mask=at < width)


@torch.no_grad()
def select_experts(
    logits: Tensor, routing: ExpertRouting, spare: Tensor, ids: Tensor, shares: Tensor, dependent: int = 0
) -> tuple[Tensor, Tensor]:
    rows, experts = logits.shape
    block = power_of_two(experts)
    _select_experts_kernel[(rows,)](
        logits, routing.correction, spare, ids, shares, routing.factor, experts, experts // routing.groups, routing.top_groups,
        ids.shape[1], block, max(1, min(block, COMPARED // block)), routing.groups > 1, routing.normalise,
        routing.best, **options(4, dependent),
    )  # fmt: skip
    bump_versions(spare, ids, shares)
    return ids, shares


@torch.no_grad()
def gate_rows(x: Tensor, norm: Norm, weight: Tensor, h: Tensor, dependent: int = 0) -> Tensor:
    hidden = x.shape[1]
    block = power_of_two(hidden)
    _gate_rows_kernel[(len(x),)](
        x, norm.weight, weight, h, norm.eps, h.shape[1], hidden, block, 1024, **options(max(1, min(8, block // 512)), dependent)
    )
    bump_versions(h)
    return h
