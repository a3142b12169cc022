"""Ops for experts chosen from a router's logits, and for a shared expert with a gate, for one token of each row.

Legend: B rows, S experts a row (its slots), E experts in all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .decode_product import WRITTEN, Norm, check_stream, draw_stream, rms_normed
from .dispatch import implementation, require
from .registry import definition, draw, ints, zeros

LEAST = 1e-20  # added to the sum that scores are divided by


class ExpertRouting(NamedTuple):
    """Choice of experts by sigmoid scores plus a correction, and their shares by the scores alone, times a factor.

    Experts are in groups of equal size. Those of the `top_groups` groups are chosen whose best, or two best, sum to most.
    Without a correction, experts are chosen by their logits, and their shares are a softmax: of all experts, or if normalised
    over those that are chosen.
    """

    correction: Tensor | None  # (E,)
    normalise: bool  # divide the chosen scores by their sum
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    best: int = 2  # experts that count for their group


def selection(logits: Tensor, routing: ExpertRouting) -> Tensor:
    """Return the values by which experts are chosen, for logits (..., E); of groups that are not kept, the least of all.

    A NaN counts as infinite, so that chosen experts are always distinct.
    """
    correction = routing.correction
    values = logits if correction is None else logits.sigmoid() + correction.to(logits.dtype)
    values = values.masked_fill(values.isnan(), float("inf"))
    if routing.groups == 1:
        return values
    totals = values.unflatten(-1, (routing.groups, -1)).topk(routing.best).values.sum(-1)
    best = totals.sort(dim=-1, descending=True, stable=True).indices[..., : routing.top_groups]
    selected = torch.zeros_like(totals, dtype=torch.bool).scatter_(-1, best, True)
    selected = selected.repeat_interleave(logits.shape[-1] // routing.groups, -1)
    return torch.where(selected, values, values.amin(-1, keepdim=True) - 1)


def chosen_experts(logits: Tensor, slots: int, routing: ExpertRouting) -> tuple[Tensor, Tensor]:
    """Return (ids int64, shares), both (..., slots), for logits (..., E). Of equal values the lowest id comes first."""
    ids = selection(logits, routing).sort(dim=-1, descending=True, stable=True).indices[..., :slots]
    return ids, shares_of(logits, ids, routing)


def shares_of(logits: Tensor, ids: Tensor, routing: ExpertRouting) -> Tensor:
    """Return the shares of the experts `ids` (..., S)."""
    if routing.correction is None:
        shares = logits.gather(-1, ids).softmax(-1) if routing.normalise else logits.softmax(-1).gather(-1, ids)
        return shares * routing.factor
    shares = logits.sigmoid().gather(-1, ids)
    if routing.normalise:
        shares = shares / (shares.sum(-1, keepdim=True) + LEAST)
    return shares * routing.factor


def select_experts(
    logits: Tensor, routing: ExpertRouting, spare: Tensor, ids: Tensor, shares: Tensor, dependent: int = 0
) -> tuple[Tensor, Tensor]:
    """Choose S experts for each row of a router's logits: (ids, shares), as `chosen_experts`.

    logits  (B, E) fp32, as norm_product writes them
    spare   scratch (B, 2, E) fp32
    ids     (B, S) int32
    shares  (B, S) fp32
    """
    require("select_experts", "logits", logits, torch.float32, ("rows", "experts"), logits.device, "norm_product writes it")
    (rows, experts), slots = logits.shape, ids.shape[-1]
    if (correction := routing.correction) is not None:
        require("select_experts", "routing.correction", correction, None, (experts,), logits.device, "one for each expert")
    size = experts // max(1, routing.groups)
    fits = 0 < routing.top_groups <= routing.groups and size * routing.groups == experts
    fits &= routing.groups == 1 or size >= routing.best
    if not fits or not 0 < slots <= size * routing.top_groups:
        raise ValueError(
            f"select_experts: {experts} experts must be in groups of equal size, with {slots} slots in the kept ones, got "
            f"{routing.groups} groups, of which {routing.top_groups} are kept."
        )
    require("select_experts", "spare", spare, torch.float32, (rows, 2, experts), logits.device, WRITTEN)
    require("select_experts", "ids", ids, torch.int32, (rows, slots), logits.device, WRITTEN)
    require("select_experts", "shares", shares, torch.float32, (rows, slots), logits.device, WRITTEN)
    form = form_of_routing(routing)
    return implementation("select_experts", logits, None, form)(logits, routing, spare, ids, shares, dependent)


def form_of_routing(routing: ExpertRouting) -> tuple:
    """Return the example arguments for a routing; none for the default."""
    form = routing.groups > 1, routing.correction is None
    if routing.best != 2 or (routing.correction is None and not routing.normalise):
        return *form, routing.normalise, routing.best
    return form if any(form) else ()


def _example(g: torch.Generator, grouped: bool = False, softmax: bool = False, normalise: bool = True, best: int = 2) -> tuple:
    correction = None if softmax else draw(g, 8).detach()
    routing = ExpertRouting(correction, normalise, 2.5, *((4, 2) if grouped else (1, 1)), best)
    return draw(g, 2, 8).detach(), routing, zeros(2, 2, 8), ints(*[0] * 6).view(2, 3), zeros(2, 3)


@definition(_example)
@torch.no_grad()
def select_experts_reference(
    logits: Tensor, routing: ExpertRouting, spare: Tensor, ids: Tensor, shares: Tensor, dependent: int = 0
) -> tuple[Tensor, Tensor]:
    experts, shares_of_experts = chosen_experts(logits, ids.shape[1], routing)
    return ids.copy_(experts), shares.copy_(shares_of_experts)


def gate_rows(x: Tensor, norm: Norm, weight: Tensor, h: Tensor, dependent: int = 0) -> Tensor:
    """h (B, width) times sigmoid(rms_norm(x) weightᵀ), in place: the gate of a shared expert. weight (1, hidden)"""
    check_stream("gate_rows", x, norm, weight)
    require("gate_rows", "h", h, None, (len(x), "width"), x.device, WRITTEN)
    return implementation("gate_rows", weight)(x, norm, weight, h, dependent)


@definition(lambda g: (*draw_stream(g, 48), draw(g, 1, 48), draw(g, 2, 40)))
@torch.no_grad()
def gate_rows_reference(x: Tensor, norm: Norm, weight: Tensor, h: Tensor, dependent: int = 0) -> Tensor:
    return h.mul_((rms_normed(x, norm) @ weight.to(x.dtype).t()).sigmoid())
