"""RMSNorm: y = x / sqrt(mean(x²) + eps) · weight, and the same after a residual add."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    y = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(wide)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(y, s): s = x + residual, rounded once to x.dtype, and y its norm."""
    s = x + residual
    return rms_norm(s, weight, eps), s
