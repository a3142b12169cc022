"""Ops of a sparse MLP in one decoding step. As in decode_product.py, outputs are written in place, one token for each row.

The experts of a row are chosen and read on the device: no rows are sorted, padded or gathered, and of the stacked weights only
the chosen experts' are read, once for each row that chose them. It takes three launches: `route`, `routed_gate_up`,
`add_routed`, with no other launch between them where they use PDL.

`select_experts` chooses from a router's logits, and `gate_rows` is the gate of a shared expert. `column_gate_up`, `column_down`
and `add_slots` are for experts with biases, a clamped gated unit, and weights stored by column, or packed by row.

Legend: B rows, S experts a row (its slots), E experts in all, I width of an expert.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_product import ACTIVATIONS, WRITTEN, Norm, check_activation, check_stream, draw_stream, rms_normed
from .dispatch import implementation, require
from .gated import INFINITE, check_limit
from .packed_weights import Packed, check_experts, check_packed, unpack
from .registry import definition, doubles, draw, ints, zeros

STACKED = "an expert's weight follows the other's"


def likeliest(logits: Tensor, slots: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """(ids int64, weights in logits' dtype), both (..., slots): the experts with the greatest logits, and their shares.

    Of equal logits the lowest id comes first. A NaN counts as infinite, so that ids are always distinct experts; whatever is
    not finite makes every weight NaN, as a softmax does. normalise: shares of what was chosen, not of all.
    """
    ids = logits.masked_fill(logits.isnan(), float("inf")).sort(dim=-1, descending=True, stable=True).indices[..., :slots]
    shares = logits.softmax(-1).gather(-1, ids)
    return ids, shares / shares.sum(-1, keepdim=True) if normalise else shares


def route(
    x: Tensor,
    norm: Norm,
    router: Tensor,
    normalise: bool,
    logits: Tensor,
    count: Tensor,
    ids: Tensor,
    weights: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor]:
    """Choose S experts for each row: (ids, weights), those with the largest rms_norm(x) routerᵀ (see `likeliest`).

    router     (E, hidden)
    normalise  True: the weights of the chosen experts sum to 1 (Mixtral, Qwen3's norm_topk_prob); False: those of all do
    logits     scratch (B, E) fp32
    count      scratch (B,) int32, zeros; each launch leaves zeros
    ids        (B, S) int32
    weights    (B, S) fp32
    """
    check_stream("route", x, norm, router)
    check_plain("route", norm)
    rows, slots = x.shape[0], ids.shape[-1]
    if not 0 < slots <= router.shape[0]:
        raise ValueError(f"route: ids has {slots} slots a row, wanted 1 to {router.shape[0]}, the number of experts.")
    require("route", "logits", logits, torch.float32, (rows, router.shape[0]), x.device, WRITTEN)
    require("route", "count", count, torch.int32, (rows,), x.device, WRITTEN)
    require("route", "ids", ids, torch.int32, (rows, slots), x.device, WRITTEN)
    require("route", "weights", weights, torch.float32, (rows, slots), x.device, WRITTEN)
    return implementation("route", router)(x, norm, router, normalise, logits, count, ids, weights, dependent)


@definition(lambda g: (*draw_stream(g, 48), draw(g, 5, 48), True, *_routing()))
def route_reference(x, norm, router, normalise, logits, count, ids, weights, dependent=0):
    logits.copy_(F.linear(rms_normed(x, norm), router.to(x.dtype)))
    experts, shares = likeliest(logits, ids.shape[1], normalise)
    return ids.copy_(experts), weights.copy_(shares)


def routed_gate_up(
    x: Tensor,
    norm: Norm,
    gate_up: Tensor | Packed,
    ids: Tensor,
    out: Tensor,
    dependent: int = 0,
    limit: float = INFINITE,
    activation: str = "silu",
) -> Tensor:
    """out (B, S, I) = f(n gateᵀ) · (n upᵀ) for each expert of each row, where n is the RMSNorm of x.

    gate_up   (E, 2 I, hidden): an expert's gate, then its up; or those rows packed as one, (E 2 I, hidden)
    activation  f, one of decode_product.ACTIVATIONS
    limit     n gateᵀ counts as at most this, n upᵀ as within it; a NaN stays one
    ids       (B, S) int32. The host does not read them: an id that no expert has makes its slot NaN, in add_routed too
    out       in gate_up's dtype; of packed ones in any
    """
    check_stream("routed_gate_up", x, norm, *((gate_up,) if isinstance(gate_up, Packed) else ()))
    check_plain("routed_gate_up", norm)
    require("routed_gate_up", "ids", ids, torch.int32, (len(x), "slots"), x.device, "route writes it")
    dtype, unit = None if isinstance(gate_up, Packed) else gate_up.dtype, () if activation == "silu" else (activation,)
    require("routed_gate_up", "out", out, dtype, (*ids.shape, out.shape[-1]), x.device, WRITTEN)
    check_limit("routed_gate_up", limit)
    check_activation("routed_gate_up", activation)
    if isinstance(gate_up, Packed):
        check_experts("routed_gate_up", "gate_up", gate_up, 2 * out.shape[-1])
        kernel = implementation("quantized_routed_gate_up", out, None, (gate_up.kind, *unit))
    else:
        require("routed_gate_up", "gate_up", gate_up, None, ("experts", 2 * out.shape[-1], x.shape[1]), x.device, STACKED)
        kernel = implementation("routed_gate_up", gate_up, None, unit)
    return kernel(x, norm, gate_up, ids, out, dependent, limit, activation)


@definition(lambda g, activation="silu": (
    *draw_stream(g, 48), draw(g, 5, 80, 48), draw_routes()[0], zeros(2, 3, 40), 0, INFINITE, activation
))  # fmt: skip
def routed_gate_up_reference(x, norm, gate_up, ids, out, dependent=0, limit=INFINITE, activation="silu"):
    normed = rms_normed(x, norm)
    for slot in range(ids.shape[1]):
        gate, up = times(gate_up, ids[:, slot], normed).chunk(2, -1)
        out[:, slot] = ACTIVATIONS[activation](gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return out


def add_routed(h: Tensor, down: Tensor | Packed, ids: Tensor, weights: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    """x += Σ weight · h downᵀ over the slots of a row, in their order: the down product of a sparse MLP, with the residual.

    h (B, S, I), down (E, hidden, I), or packed as one (E hidden, I), ids and weights (B, S). With `dependent` the kernel reads
    ids and weights while the kernel before it still runs. That one must be the `routed_gate_up` with the same ids.
    """
    outputs = check_down("add_routed", h, down, ids, weights, x)
    require("add_routed", "x", x, torch.float32, (len(ids), outputs), x.device, WRITTEN)
    if isinstance(down, Packed):
        return implementation("quantized_add_routed", h, None, (down.kind,))(h, down, ids, weights, x, dependent)
    return implementation("add_routed", down)(h, down, ids, weights, x, dependent)


@definition(lambda g: (draw(g, 2, 3, 40), draw(g, 5, 48, 40), *draw_routes(), draw(g, 2, 48).detach()))
def add_routed_reference(h, down, ids, weights, x, dependent=0):
    products = [times(down, ids[:, slot], h[:, slot].to(x.dtype)) for slot in range(ids.shape[1])]
    return x.add_(torch.stack(products, 1).mul_(weights[..., None]).sum(1))


def times(stack: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Each row of x times the expert that `ids` (B,) names for it; NaN where there is no such expert."""
    known = (ids >= 0) & (ids < len(stack))
    y = torch.bmm(stack.index_select(0, torch.where(known, ids, 0)).to(x.dtype), x[..., None])[..., 0]
    return torch.where(known[:, None], y, torch.nan)


def check_plain(op: str, norm: Norm) -> None:
    if norm.offset:
        raise ValueError(f"{op}: norm.offset must be 0, got {norm.offset}; add it to norm.weight before the call.")


def check_down(op: str, h: Tensor, down: Tensor | Packed, ids: Tensor, weights: Tensor, out: Tensor) -> int:
    """Check what a down product reads, and return the number of its outputs, whose last dimension `out` has."""
    if isinstance(down, Packed):
        check_packed(op, down, out)
        check_experts(op, "down", down, out.shape[-1])
    else:
        require(op, "down", down, None, ("experts", "outputs", h.shape[-1]), out.device, STACKED)
    require(op, "ids", ids, torch.int32, (len(h), "slots"), out.device, "route writes it")
    require(op, "h", h, None, (*ids.shape, down.shape[-1]), out.device, "a row of it belongs to each expert that was chosen")
    require(op, "weights", weights, torch.float32, tuple(ids.shape), out.device, "it holds a share for each id")
    return out.shape[-1] if isinstance(down, Packed) else down.shape[1]


def draw_routes() -> tuple[Tensor, Tensor]:
    """Ids and weights: three of five experts for each of two rows."""
    return ints(4, 0, 2, 2, 3, 1).view(2, 3), doubles(0.5, 0.3, 0.2, 0.4, 0.3, 0.1).float().view(2, 3)


def _routing() -> tuple[Tensor, ...]:
    """Logits, count, and where ids and weights go."""
    return zeros(2, 5), ints(0, 0), ints(*[0] * 6).view(2, 3), zeros(2, 3)


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
    shape = routing_shape(routing)
    return implementation("select_experts", logits, None, shape)(logits, routing, spare, ids, shares, dependent)


def routing_shape(routing: ExpertRouting) -> tuple:
    """Return the example arguments for a routing; none for the default."""
    shape = routing.groups > 1, routing.correction is None
    if routing.best != 2 or (routing.correction is None and not routing.normalise):
        return *shape, routing.normalise, routing.best
    return shape if any(shape) else ()


def _example(g, grouped=False, softmax=False, normalise=True, best=2):
    correction = None if softmax else draw(g, 8).detach()
    routing = ExpertRouting(correction, normalise, 2.5, *((4, 2) if grouped else (1, 1)), best)
    return draw(g, 2, 8).detach(), routing, zeros(2, 2, 8), ints(*[0] * 6).view(2, 3), zeros(2, 3)


@definition(_example)
def select_experts_reference(logits, routing, spare, ids, shares, dependent=0):
    experts, shares_of_experts = chosen_experts(logits, ids.shape[1], routing)
    return ids.copy_(experts), shares.copy_(shares_of_experts)


def gate_rows(x: Tensor, norm: Norm, weight: Tensor, h: Tensor, dependent: int = 0) -> Tensor:
    """h (B, width) times sigmoid(rms_norm(x) weightᵀ), in place: the gate of a shared expert. weight (1, hidden)"""
    check_stream("gate_rows", x, norm, weight)
    require("gate_rows", "h", h, None, (len(x), "width"), x.device, WRITTEN)
    return implementation("gate_rows", weight)(x, norm, weight, h, dependent)


@definition(lambda g: (*draw_stream(g, 48), draw(g, 1, 48), draw(g, 2, 40)))
def gate_rows_reference(x, norm, weight, h, dependent=0):
    return h.mul_((rms_normed(x, norm) @ weight.to(x.dtype).t()).sigmoid())


def clamped_unit(both: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) · gate · sigmoid(alpha · gate) of [gate, up] pairs (..., 2 I), gate at most `limit` and up within it."""
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def column_gate_up(
    x: Tensor,
    norm: Norm,
    gate_up: Tensor | Packed,
    bias: Tensor,
    ids: Tensor,
    out: Tensor,
    alpha: float,
    limit: float,
    dependent: int = 0,
) -> Tensor:
    """out (B, S, I, in gate_up's dtype, of packed ones in any): the clamped units of each expert of each row, of rms_norm(x).

    gate_up  (E, hidden, 2 I): a unit's gate, then its up; or those columns packed as rows, (E 2 I, hidden)
    bias     (E, 2 I)
    ids      (B, S) int32: an unknown one makes its slot NaN
    """
    op, columns = "column_gate_up", 2 * out.shape[-1]
    check_stream(op, x, norm, *((gate_up,) if isinstance(gate_up, Packed) else ()))
    check_plain(op, norm)
    dtype = check_columns(op, "gate_up", gate_up, x.shape[1], bias, columns, x.device)
    require(op, "ids", ids, torch.int32, (len(x), "slots"), x.device, "select_experts writes it")
    require(op, "out", out, dtype, (*ids.shape, columns // 2), x.device, WRITTEN)
    if isinstance(gate_up, Packed):
        kernel = implementation("quantized_column_gate_up", out, None, (gate_up.kind,))
    else:
        kernel = implementation(op, gate_up)
    return kernel(x, norm, gate_up, bias, ids, out, alpha, limit, dependent)


@definition(lambda g: (*draw_stream(g, 48), draw(g, 5, 48, 80), draw(g, 5, 80), draw_routes()[0], zeros(2, 3, 40), 1.5, 2.0))
def column_gate_up_reference(x, norm, gate_up, bias, ids, out, alpha, limit, dependent=0):
    normed = rms_normed(x, norm)
    for slot in range(ids.shape[1]):
        both = _times_columns(gate_up, bias, ids[:, slot], normed)
        out[:, slot] = clamped_unit(both, alpha, limit).to(out.dtype)
    return out


def column_down(h: Tensor, down: Tensor | Packed, bias: Tensor, ids: Tensor, out: Tensor, dependent: int = 0) -> Tensor:
    """out (B, S, hidden, fp32) = h downᵀ + bias of each slot, for h (B, S, I), down (E, I, hidden) and bias (E, hidden).

    down may be packed, (E hidden, I)
    """
    op, columns = "column_down", out.shape[-1]
    require(op, "ids", ids, torch.int32, (len(h), "slots"), h.device, "select_experts writes it")
    require(op, "h", h, None, (*ids.shape, down.shape[1]), h.device, "a row of it belongs to each expert that was chosen")
    check_columns(op, "down", down, h.shape[-1], bias, columns, h.device)
    require(op, "out", out, torch.float32, (*ids.shape, columns), h.device, WRITTEN)
    if isinstance(down, Packed):
        return implementation("quantized_column_down", h, None, (down.kind,))(h, down, bias, ids, out, dependent)
    return implementation(op, down)(h, down, bias, ids, out, dependent)


@definition(lambda g: (draw(g, 2, 3, 40), draw(g, 5, 40, 48), draw(g, 5, 48), draw_routes()[0], zeros(2, 3, 48)))
def column_down_reference(h, down, bias, ids, out, dependent=0):
    for slot in range(ids.shape[1]):
        out[:, slot] = _times_columns(down, bias, ids[:, slot], h[:, slot].to(out.dtype))
    return out


def add_slots(y: Tensor, shares: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    """x (B, hidden, fp32) += Σ share · y over the slots of a row, in their order, for y (B, S, hidden) and shares (B, S)."""
    require("add_slots", "y", y, torch.float32, ("rows", "slots", "hidden"), x.device, "column_down writes it")
    require("add_slots", "shares", shares, torch.float32, tuple(y.shape[:2]), x.device, "it holds a share for each slot")
    require("add_slots", "x", x, torch.float32, (y.shape[0], y.shape[2]), x.device, WRITTEN)
    return implementation("add_slots", y)(y, shares, x, dependent)


@definition(lambda g: (draw(g, 2, 3, 48).detach(), draw_routes()[1], draw(g, 2, 48).detach()))
def add_slots_reference(y, shares, x, dependent=0):
    return x.add_((y * shares[..., None]).sum(1))


def check_columns(
    op: str, name: str, stack: Tensor | Packed, inputs: int, bias: Tensor, columns: int, device: torch.device
) -> torch.dtype | None:
    """Check experts (E, inputs, columns), or packed (E columns, inputs), and their biases. Return the dtype of dense ones."""
    if isinstance(stack, Packed):
        check_packed(op, stack, bias)
        check_experts(op, name, stack, columns)
        experts, dtype = stack.rows // columns, None
    else:
        require(op, name, stack, None, ("experts", inputs, columns), device, STACKED)
        experts, dtype = len(stack), stack.dtype
    require(op, "bias", bias, dtype, (experts, columns), device, "it has one number for each column")
    return dtype


def chosen_columns(stack: Tensor | Packed, ids: Tensor, columns: int) -> Tensor:
    """Return the weights (n, inputs, columns) of the experts `ids`, of packed ones in fp32."""
    if isinstance(stack, Packed):
        return unpack(stack.experts(ids, columns)).unflatten(0, (len(ids), columns)).transpose(1, 2)
    return stack.index_select(0, ids)


def _times_columns(stack: Tensor | Packed, bias: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Each row of x times the expert that `ids` (B,) names for it, plus its bias; NaN where there is no such expert."""
    known = (ids >= 0) & (ids < len(bias))
    index = torch.where(known, ids, 0)
    weights = chosen_columns(stack, index, bias.shape[1]).to(x.dtype)
    y = torch.bmm(x[:, None], weights)[:, 0] + bias.index_select(0, index).to(x.dtype)
    return torch.where(known[:, None], y, torch.nan)
