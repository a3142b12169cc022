"""SwiGLU's backward that gives its result again."""

import torch
from torch import Tensor

from .choose import implementation
from .ops import definition
from .selftest import draw
from .swiglu import check_gated


def swiglu_backward(dh: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(the gradient of a packed gate_up (..., 2 I), h again) from dh (..., I), the gradient of h = silu(gate) · up.

    For an autograd.Function that multiplies h and would rather not keep it until backward.
    """
    check_gated("swiglu_backward", gate_up, None)
    if dh.shape != (*gate_up.shape[:-1], gate_up.shape[-1] // 2) or dh.dtype != gate_up.dtype or dh.device != gate_up.device:
        raise ValueError(
            f"swiglu_backward: dh must be half of gate_up, {tuple(gate_up.shape)} {gate_up.dtype} on {gate_up.device}, "
            f"got {tuple(dh.shape)} {dh.dtype} on {dh.device}; pass the gradient of its SwiGLU."
        )
    return implementation("swiglu_backward", gate_up, None, dh.shape[-1:])(dh, gate_up)


@definition(lambda g, cols=40: (draw(g, 16, cols), draw(g, 16, 2 * cols)))
@torch.no_grad()
def swiglu_backward_reference(dh: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a packed [gate | up] from that of h = silu(gate) · up, and h itself again."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    d, (gate, up) = dh.to(wide), gate_up.to(wide).chunk(2, -1)
    s = torch.sigmoid(gate)
    gradient = torch.cat([d * up * s * (1 + gate * (1 - s)), d * gate * s], -1)
    return gradient.to(gate_up.dtype), (gate * s * up).to(gate_up.dtype)
