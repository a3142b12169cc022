"""A sparse MLP's products in one decoding step, over packed weights (packed.py): experts.py says what they compute.

The experts' weights are packed as one, whose rows are those of one expert after the other. As in experts.py, which experts a
row is given is read on the device, and of the packed weights only theirs are read.

Legend: B rows, S experts a row (its slots), E experts in all, I width of an expert.
"""

import torch
from torch import Tensor

from .checks import require
from .choose import implementation
from .decode_product import WRITTEN, draw_stream
from .experts import add_routed_reference, check_ids, draw_routes, routed_gate_up_reference
from .ops import definition
from .packed import Packed, unpack
from .quantized_product import check_packed, check_packed_stream, draw_packed
from .selftest import draw


def quantized_routed_gate_up(
    x: Tensor, norm: Tensor, eps: float, gate_up: Packed, ids: Tensor, out: Tensor, dependent: int = 0
) -> Tensor:
    """out (B, S, I, in the model's dtype) = silu(n gateᵀ) · (n upᵀ) for each expert of each row, where n is the RMSNorm of x.

    gate_up   (E 2 I, hidden) packed: an expert's gate, its up, the next expert's gate, ...
    ids       (B, S) int32. An id that no expert has makes its slot NaN, in quantized_add_routed too
    """
    check_packed_stream("quantized_routed_gate_up", x, norm, gate_up)
    check_ids("quantized_routed_gate_up", ids, x.shape[0], x.device)
    require("quantized_routed_gate_up", "out", out, norm.dtype, (*ids.shape, out.shape[-1]), x.device, WRITTEN)
    _check_experts("quantized_routed_gate_up", "gate_up", gate_up, 2 * out.shape[-1])
    return implementation("quantized_routed_gate_up", norm)(x, norm, eps, gate_up, ids, out, dependent)


@definition(lambda g: (*draw_stream(g, 48), draw_packed(g, 5 * 80, 48, "int4"), draw_routes()[0], torch.zeros(2, 3, 40)))
@torch.no_grad()
def quantized_routed_gate_up_reference(
    x: Tensor, norm: Tensor, eps: float, gate_up: Packed, ids: Tensor, out: Tensor, dependent: int = 0
) -> Tensor:
    return routed_gate_up_reference(x, norm, eps, unpack(gate_up).unflatten(0, (-1, 2 * out.shape[2])), ids, out)


def quantized_add_routed(h: Tensor, down: Packed, ids: Tensor, weights: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    """x += Σ weight · h downᵀ over the slots of a row, in their order: the down product of a sparse MLP, with the residual.

    h (B, S, I), down (E hidden, I) packed, ids and weights (B, S). With `dependent` the kernel reads ids and weights while the
    kernel before it still runs. That one must be the `quantized_routed_gate_up` with the same ids.
    """
    check_ids("quantized_add_routed", ids, h.shape[0], x.device)
    check_packed("quantized_add_routed", down)
    why = "a row of it belongs to each expert that was chosen"
    require("quantized_add_routed", "h", h, None, (*ids.shape, down.columns), x.device, why)
    shares = "it holds a share for each id"
    require("quantized_add_routed", "weights", weights, torch.float32, tuple(ids.shape), x.device, shares)
    require("quantized_add_routed", "x", x, torch.float32, (h.shape[0], x.shape[-1]), x.device, WRITTEN)
    _check_experts("quantized_add_routed", "down", down, x.shape[-1])
    return implementation("quantized_add_routed", h)(h, down, ids, weights, x, dependent)


@definition(lambda g: (draw(g, 2, 3, 40), draw_packed(g, 5 * 48, 40, "int8"), *draw_routes(), draw(g, 2, 48).detach()))
@torch.no_grad()
def quantized_add_routed_reference(
    h: Tensor, down: Packed, ids: Tensor, weights: Tensor, x: Tensor, dependent: int = 0
) -> Tensor:
    return add_routed_reference(h, unpack(down).unflatten(0, (-1, x.shape[1])), ids, weights, x)


def _check_experts(op: str, name: str, weight: Packed, rows: int) -> None:
    if not rows or weight.rows % rows or not weight.rows:
        raise ValueError(
            f"{op}: {name} has {weight.rows} rows, wanted {rows} for each expert; pack the experts' weights as one, "
            "pack(stack.flatten(0, 1), kind)."
        )
