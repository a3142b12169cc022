"""Norms over the last dimension, and a layer that stands in their place.

    RMSNorm        y = x / sqrt(mean(x²) + eps) · (weight + offset), and the same after a residual add
    LayerNorm      y = (x − mean) / sqrt(var + eps) · weight + bias
    Dynamic tanh   y = tanh(alpha · x) · weight + bias, a norm without statistics (Zhu et al. 2025, arXiv 2503.10622)

RMSNorm's offset is 0 but for families that store how far their gain is from 1 (Gemma). It is added inside, in fp32: in bf16
1 + w has lost most of w.
"""

import torch
from torch import Tensor

from .checks import require_device, require_rows, too_wide
from .choose import implementation
from .ops import definition, draw


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
    s = x + residual  # rounded once to x.dtype
    return rms_norm_reference(s, weight, eps, offset), s


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / sqrt(var + eps) · weight + bias over the last dimension."""
    require_rows("layer_norm", x, weight=weight, bias=bias)
    return implementation("layer_norm", x, too_wide(x), x.shape[-1:])(x, weight, bias, eps)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, cols), draw(g, cols), 1e-5))
def layer_norm_reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(wide)
    centred = centred - centred.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """tanh(alpha · x) · weight + bias, a norm without statistics. `alpha` is a tensor of one element."""
    require_rows("dynamic_tanh", x, weight=weight, bias=bias)
    if alpha.numel() != 1:
        raise ValueError(
            f"dynamic_tanh: alpha must hold one element, got shape {tuple(alpha.shape)}; reduce it before the call."
        )
    require_device("dynamic_tanh", "alpha", alpha, x)
    return implementation("dynamic_tanh", x, too_wide(x), x.shape[-1:])(x, alpha, weight, bias)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, 1), draw(g, cols), draw(g, cols)))
def dynamic_tanh_reference(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.tanh(alpha.to(wide).reshape(()) * x.to(wide)) * weight.to(wide)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
