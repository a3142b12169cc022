"""Norms over the last dimension.

    RMSNorm        y = x / sqrt(mean(x²) + eps) · (weight + offset), and the same after a residual add
    LayerNorm      y = (x − mean) / sqrt(var + eps) · weight + bias

RMSNorm's offset is 0 but for families that store how far their gain is from 1 (Gemma). It is added inside, in fp32: in bf16
1 + w has lost most of w.
"""

import torch
from torch import Tensor

from .checks import require_residual, require_rows, too_wide
from .choose import implementation
from .ops import definition, draw, frozen


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension. Without a weight there is no gain."""
    require_rows("rms_norm", x, weight=weight)
    return implementation("rms_norm", x, too_wide(x), _shape(x, weight))(x, weight, eps, offset)


def _shape(x: Tensor, weight: Tensor | None) -> tuple:
    """A gain that does not train has a backward of its own."""
    still = weight is not None and not weight.requires_grad and x.requires_grad and torch.is_grad_enabled()
    return (x.shape[-1], True) if still else (x.shape[-1],)


def _gain(g: torch.Generator, cols: int, still: bool) -> Tensor:
    return frozen(draw(g, cols)) if still else draw(g, cols)


@definition(lambda g, cols=40, still=False: (draw(g, 3, cols), _gain(g, cols, still), 1e-6))
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
    require_residual("add_rms_norm", residual, x)
    return implementation("add_rms_norm", x, too_wide(x), _shape(x, weight))(x, residual, weight, eps, offset)


@definition(lambda g, cols=40, still=False: (draw(g, 3, cols), draw(g, 3, cols), _gain(g, cols, still), 1e-6))
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
