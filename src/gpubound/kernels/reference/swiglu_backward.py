import torch
from torch import Tensor


@torch.no_grad()
def swiglu_backward(dh: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a packed [gate | up] from that of h = silu(gate) · up, and h itself again."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    d, (gate, up) = dh.to(wide), gate_up.to(wide).chunk(2, -1)
    s = torch.sigmoid(gate)
    gradient = torch.cat([d * up * s * (1 + gate * (1 - s)), d * gate * s], -1)
    return gradient.to(gate_up.dtype), (gate * s * up).to(gate_up.dtype)
