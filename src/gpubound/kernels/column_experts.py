"""Ops of a sparse MLP in one decoding step whose experts have biases, a clamped gated unit, and weights stored by column.

As in experts.py, the chosen experts' weights are read in place, once for each row that chose them.

Legend: B rows, S experts a row (its slots), E experts in all, I units of an expert.
"""

import torch
from torch import Tensor

from .decode_product import WRITTEN, Norm, check_stream, draw_stream, rms_normed
from .dispatch import implementation, require
from .experts import STACKED, check_plain, draw_routes
from .registry import definition, draw, zeros


def clamped_unit(both: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) · gate · sigmoid(alpha · gate) of [gate, up] pairs (..., 2 I), gate at most `limit` and up within it."""
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def column_gate_up(
    x: Tensor,
    norm: Norm,
    gate_up: Tensor,
    bias: Tensor,
    ids: Tensor,
    out: Tensor,
    alpha: float,
    limit: float,
    dependent: int = 0,
) -> Tensor:
    """out (B, S, I, in gate_up's dtype): the clamped units of each expert of each row, of rms_norm(x).

    gate_up (E, hidden, 2 I) and bias (E, 2 I): a unit's gate, then its up. ids (B, S) int32: an unknown one makes its slot NaN
    """
    op, (experts, _, columns) = "column_gate_up", gate_up.shape
    check_stream(op, x, norm)
    check_plain(op, norm)
    require(op, "gate_up", gate_up, None, ("experts", x.shape[1], 2 * out.shape[-1]), x.device, STACKED)
    require(op, "bias", bias, gate_up.dtype, (experts, columns), x.device, "it has one number for each column")
    require(op, "ids", ids, torch.int32, (len(x), "slots"), x.device, "select_experts writes it")
    require(op, "out", out, gate_up.dtype, (*ids.shape, columns // 2), x.device, WRITTEN)
    return implementation(op, gate_up)(x, norm, gate_up, bias, ids, out, alpha, limit, dependent)


@definition(lambda g: (*draw_stream(g, 48), draw(g, 5, 48, 80), draw(g, 5, 80), draw_routes()[0], zeros(2, 3, 40), 1.5, 2.0))
@torch.no_grad()
def column_gate_up_reference(
    x: Tensor, norm: Norm, gate_up: Tensor, bias: Tensor, ids: Tensor, out: Tensor, alpha: float, limit: float,
    dependent: int = 0,
) -> Tensor:  # fmt: skip
    normed = rms_normed(x, norm)
    for slot in range(ids.shape[1]):
        both = _times(gate_up, bias, ids[:, slot], normed)
        out[:, slot] = clamped_unit(both, alpha, limit).to(out.dtype)
    return out


def column_down(h: Tensor, down: Tensor, bias: Tensor, ids: Tensor, out: Tensor, dependent: int = 0) -> Tensor:
    """out (B, S, hidden, fp32) = h downᵀ + bias of each slot, for h (B, S, I), down (E, I, hidden) and bias (E, hidden)."""
    op, (experts, units, columns) = "column_down", down.shape
    require(op, "ids", ids, torch.int32, (len(h), "slots"), h.device, "select_experts writes it")
    require(op, "h", h, None, (*ids.shape, units), h.device, "a row of it belongs to each expert that was chosen")
    require(op, "down", down, None, (experts, units, columns), h.device, STACKED)
    require(op, "bias", bias, down.dtype, (experts, columns), h.device, "it has one number for each column")
    require(op, "out", out, torch.float32, (*ids.shape, columns), h.device, WRITTEN)
    return implementation(op, down)(h, down, bias, ids, out, dependent)


@definition(lambda g: (draw(g, 2, 3, 40), draw(g, 5, 40, 48), draw(g, 5, 48), draw_routes()[0], zeros(2, 3, 48)))
@torch.no_grad()
def column_down_reference(h: Tensor, down: Tensor, bias: Tensor, ids: Tensor, out: Tensor, dependent: int = 0) -> Tensor:
    for slot in range(ids.shape[1]):
        out[:, slot] = _times(down, bias, ids[:, slot], h[:, slot].to(out.dtype))
    return out


def add_slots(y: Tensor, shares: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    """x (B, hidden, fp32) += Σ share · y over the slots of a row, in their order, for y (B, S, hidden) and shares (B, S)."""
    require("add_slots", "y", y, torch.float32, ("rows", "slots", "hidden"), x.device, "column_down writes it")
    require("add_slots", "shares", shares, torch.float32, tuple(y.shape[:2]), x.device, "it holds a share for each slot")
    require("add_slots", "x", x, torch.float32, (y.shape[0], y.shape[2]), x.device, WRITTEN)
    return implementation("add_slots", y)(y, shares, x, dependent)


@definition(lambda g: (draw(g, 2, 3, 48).detach(), draw_routes()[1], draw(g, 2, 48).detach()))
@torch.no_grad()
def add_slots_reference(y: Tensor, shares: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    return x.add_((y * shares[..., None]).sum(1))


def _times(stack: Tensor, bias: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Each row of x times the expert that `ids` (B,) names for it, plus its bias; NaN where there is no such expert."""
    known = (ids >= 0) & (ids < len(stack))
    index = torch.where(known, ids, 0)
    y = torch.bmm(x[:, None], stack.index_select(0, index).to(x.dtype))[:, 0] + bias.index_select(0, index).to(x.dtype)
    return torch.where(known[:, None], y, torch.nan)
