"""RMSNorm: y = x / sqrt(mean(x²) + eps) · (weight + offset), and the same after a residual add.

The offset is 0 but for families that store how far their gain is from 1 (Gemma). It is added inside, in fp32: in bf16 1 + w has
lost most of w.
"""

import torch
from torch import Tensor

from .checks import require_device, require_rows, too_wide
from .choose import implementation
from .ops import definition
from .selftest import draw


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension. Without a weight there is no gain."""
    require_rows("rms_norm", x, weight=weight)
    return implementation("rms_norm", x, too_wide(x), x.shape[-1:])(x, weight, eps, offset)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, cols), 1e-6))
def rms_norm_reference(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    y = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * (weight.to(wide) + offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(y, s) with s = x + residual and y = rms_norm(s): the residual is added in the same pass."""
    require_rows("add_rms_norm", x, weight=weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: residual must match x, {tuple(x.shape)} {x.dtype}, "
            f"got {tuple(residual.shape)} {residual.dtype}; cast or reshape it before the call."
        )
    require_device("add_rms_norm", "residual", residual, x)
    return implementation("add_rms_norm", x, too_wide(x), x.shape[-1:])(x, residual, weight, eps, offset)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, 3, cols), draw(g, cols), 1e-6))
def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(y, s): s = x + residual, rounded once to x.dtype, and y its norm."""
    s = x + residual
    return rms_norm_reference(s, weight, eps, offset), s
