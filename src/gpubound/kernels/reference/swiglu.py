"""SwiGLU: silu(gate) · up, with silu(g) = g · sigmoid(g). One packed tensor [gate | up], or two."""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate_half, up_half = gate.chunk(2, -1) if up is None else (gate, up)
    return (F.silu(gate_half.to(wide)) * up_half.to(wide)).to(gate.dtype)
