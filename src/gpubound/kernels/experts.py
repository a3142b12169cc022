"""Ops of a sparse MLP in one decoding step. As in decode_product.py, outputs are written in place, one token for each row.

The experts of a row are chosen and read on the device: no rows are sorted, padded or gathered, and of the stacked weights only
the chosen experts' are read, once for each row that chose them. It takes three launches: `route`, `routed_gate_up`,
`add_routed`, with no other launch between them where they use PDL.

Legend: B rows, S experts a row (its slots), E experts in all, I width of an expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_product import ACTIVATIONS, WRITTEN, Norm, check_activation, check_stream, draw_stream, rms_normed
from .dispatch import implementation, require
from .gated import INFINITE, check_limit
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
@torch.no_grad()
def route_reference(
    x: Tensor, norm: Norm, router: Tensor, normalise: bool, logits: Tensor, count: Tensor, ids: Tensor, weights: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits.copy_(F.linear(rms_normed(x, norm), router.to(x.dtype)))
    experts, shares = likeliest(logits, ids.shape[1], normalise)
    return ids.copy_(experts), weights.copy_(shares)


def routed_gate_up(
    x: Tensor,
    norm: Norm,
    gate_up: Tensor,
    ids: Tensor,
    out: Tensor,
    dependent: int = 0,
    limit: float = INFINITE,
    activation: str = "silu",
) -> Tensor:
    """out (B, S, I, in gate_up's dtype) = f(n gateᵀ) · (n upᵀ) for each expert of each row, where n is the RMSNorm of x.

    gate_up   (E, 2 I, hidden): an expert's gate, then its up
    activation  f, one of decode_product.ACTIVATIONS
    limit     n gateᵀ counts as at most this, n upᵀ as within it; a NaN stays one
    ids       (B, S) int32. The host does not read them: an id that no expert has makes its slot NaN, in add_routed too
    """
    check_stream("routed_gate_up", x, norm)
    check_plain("routed_gate_up", norm)
    require("routed_gate_up", "gate_up", gate_up, None, ("experts", 2 * out.shape[-1], x.shape[1]), x.device, STACKED)
    require("routed_gate_up", "ids", ids, torch.int32, (len(x), "slots"), x.device, "route writes it")
    require("routed_gate_up", "out", out, gate_up.dtype, (*ids.shape, out.shape[-1]), x.device, WRITTEN)
    check_limit("routed_gate_up", limit)
    check_activation("routed_gate_up", activation)
    kernel = implementation("routed_gate_up", gate_up, None, () if activation == "silu" else (activation,))
    return kernel(x, norm, gate_up, ids, out, dependent, limit, activation)


@definition(lambda g, activation="silu": (
    *draw_stream(g, 48), draw(g, 5, 80, 48), draw_routes()[0], zeros(2, 3, 40), 0, INFINITE, activation
))  # fmt: skip
@torch.no_grad()
def routed_gate_up_reference(
    x: Tensor, norm: Norm, gate_up: Tensor, ids: Tensor, out: Tensor, dependent: int = 0, limit: float = INFINITE,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    normed = rms_normed(x, norm)
    for slot in range(ids.shape[1]):
        gate, up = times(gate_up, ids[:, slot], normed).chunk(2, -1)
        out[:, slot] = ACTIVATIONS[activation](gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return out


def add_routed(h: Tensor, down: Tensor, ids: Tensor, weights: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    """x += Σ weight · h downᵀ over the slots of a row, in their order: the down product of a sparse MLP, with the residual.

    h (B, S, I), down (E, hidden, I), ids and weights (B, S). With `dependent` the kernel reads ids and weights while the kernel
    before it still runs. That one must be the `routed_gate_up` with the same ids.
    """
    require("add_routed", "down", down, None, ("experts", "outputs", h.shape[-1]), x.device, STACKED)
    check_slots("add_routed", h, down.shape[2], ids, weights, x, down.shape[1])
    return implementation("add_routed", down)(h, down, ids, weights, x, dependent)


@definition(lambda g: (draw(g, 2, 3, 40), draw(g, 5, 48, 40), *draw_routes(), draw(g, 2, 48).detach()))
@torch.no_grad()
def add_routed_reference(h: Tensor, down: Tensor, ids: Tensor, weights: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
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


def check_slots(op: str, h: Tensor, inner: int, ids: Tensor, weights: Tensor, x: Tensor, outer: int) -> None:
    """Check the slots that a down product reads, and the stream that it adds to."""
    check_read(op, h, inner, ids, weights, x)
    require(op, "x", x, torch.float32, (len(ids), outer), x.device, WRITTEN)


def check_read(op: str, h: Tensor, inner: int, ids: Tensor, weights: Tensor, x: Tensor) -> None:
    require(op, "ids", ids, torch.int32, (len(h), "slots"), x.device, "route writes it")
    require(op, "h", h, None, (*ids.shape, inner), x.device, "a row of it belongs to each expert that was chosen")
    require(op, "weights", weights, torch.float32, tuple(ids.shape), x.device, "it holds a share for each id")


def draw_routes() -> tuple[Tensor, Tensor]:
    """Ids and weights: three of five experts for each of two rows."""
    return ints(4, 0, 2, 2, 3, 1).view(2, 3), doubles(0.5, 0.3, 0.2, 0.4, 0.3, 0.1).float().view(2, 3)


def _routing() -> tuple[Tensor, ...]:
    """Logits, count, and where ids and weights go."""
    return zeros(2, 5), ints(0, 0), ints(*[0] * 6).view(2, 3), zeros(2, 3)
