"""GeGLU: gelu(gate) · up. "none" is gelu(g) = g · Φ(g) with the normal distribution Φ; "tanh" its usual approximation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .choose import implementation
from .ops import definition
from .swiglu import check_gated, draw_gated, gated_shape


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """gelu(gate) · up, packed or separate as in `swiglu`. `approximate` is as in torch's gelu: "tanh", or "none" for exact."""
    if approximate not in ("tanh", "none"):
        raise ValueError(
            f"geglu: approximate must be 'tanh' or 'none', got {approximate!r}; take the one the model was trained with."
        )
    check_gated("geglu", gate, up)
    return implementation("geglu", gate, None, gated_shape(gate, up))(gate, up, approximate)


@definition(lambda g, cols=40, packed=False: (*draw_gated(g, cols, packed), "tanh"))
def geglu_reference(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate_half, up_half = gate.chunk(2, -1) if up is None else (gate, up)
    return (F.gelu(gate_half.to(wide), approximate=approximate) * up_half.to(wide)).to(gate.dtype)
