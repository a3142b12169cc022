"""GeGLU: gelu(gate) · up. "none" is gelu(g) = g · Φ(g) with the normal distribution Φ; "tanh" its usual approximation."""

import torch
import torch.nn.functional as F
from torch import Tensor


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate_half, up_half = gate.chunk(2, -1) if up is None else (gate, up)
    return (F.gelu(gate_half.to(wide), approximate=approximate) * up_half.to(wide)).to(gate.dtype)
