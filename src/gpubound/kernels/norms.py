"""Norms over the last dimension.

    RMSNorm        y = x / sqrt(mean(x²) + eps) · (weight + offset), and the same after a residual add
    LayerNorm      y = (x − mean) / sqrt(var + eps) · weight + bias

RMSNorm's offset is 0 but for families that store how far their gain is from 1 (Gemma). It is added inside, in fp32: in bf16
1 + w has lost most of w.

GroupNorm: x (N, C, *) is normalised over each of `groups` runs of channels with all that follows.
"""

from math import prod

import torch
from torch import Tensor

from .dispatch import TOO_WIDE, WIDEST, implementation, require_columns, require_residual, require_rows
from .registry import definition, draw, frozen


def norm_shape(cols: int, weight: Tensor | None) -> tuple:
    """Return the shape of an RMSNorm's call. A gain that does not train has another backward kernel, and fewer; a call without
    gradients, such as an objective's trial, launches none and takes the shape of those that train."""
    return (cols,) if weight is None or weight.requires_grad else (cols, True)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension. Without a weight there is no gain."""
    require_rows("rms_norm", x, weight=weight)
    unable = TOO_WIDE if x.shape[-1] > WIDEST else None
    return implementation("rms_norm", x, unable, norm_shape(x.shape[-1], weight))(x, weight, eps, offset)


def _gain(g: torch.Generator, cols: int, frozen_weight: bool) -> Tensor:
    return frozen(draw(g, cols)) if frozen_weight else draw(g, cols)


@definition(lambda g, cols=40, frozen_weight=False: (draw(g, 3, cols), _gain(g, cols, frozen_weight), 1e-6), gradient=True)
def rms_norm_reference(x, weight=None, eps=1e-6, offset=0.0):
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    x_compute = x.to(compute_dtype)
    y = x_compute * torch.rsqrt(x_compute.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * (weight.to(compute_dtype) + offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(y, s) with s = x + residual and y = rms_norm(s): the residual is added in the same pass.

    s has x's dtype, and y has the residual's. Under autocast these differ. Then x is the stream in fp32, the residual is what
    products gave in 16 bits, and y is what the next products read.
    """
    require_rows("add_rms_norm", x, weight=weight)
    require_residual("add_rms_norm", residual, x, rounded=True)
    shape = norm_shape(x.shape[-1], weight)
    if residual.dtype != x.dtype:
        shape = x.shape[-1], len(shape) > 1, residual.dtype
    unable = TOO_WIDE if x.shape[-1] > WIDEST else None
    return implementation("add_rms_norm", x, unable, shape)(x, residual, weight, eps, offset)


def _residual(g: torch.Generator, cols: int, rounded: torch.dtype | None) -> Tensor:
    residual = draw(g, 3, cols)
    return residual if rounded is None else residual.detach().to(rounded)


@definition(
    lambda g, cols=40, frozen_weight=False, rounded=None: (
        draw(g, 3, cols), _residual(g, cols, rounded), _gain(g, cols, frozen_weight), 1e-6,
    ), gradient=True,
)  # fmt: skip
def add_rms_norm_reference(x, residual, weight=None, eps=1e-6, offset=0.0):
    s = x + residual  # rounded once to x.dtype
    return rms_norm_reference(s, weight, eps, offset).to(residual.dtype), s


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / sqrt(var + eps) · weight + bias over the last dimension."""
    require_rows("layer_norm", x, weight=weight, bias=bias)
    unable = TOO_WIDE if x.shape[-1] > WIDEST else None
    return implementation("layer_norm", x, unable, x.shape[-1:])(x, weight, bias, eps)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, cols), draw(g, cols), 1e-5), gradient=True)
def layer_norm_reference(x, weight=None, bias=None, eps=1e-5):
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(compute_dtype)
    centred = centred - centred.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(compute_dtype)
    if bias is not None:
        y = y + bias.to(compute_dtype)
    return y.to(x.dtype)


def group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """GroupNorm as torch's: x (N, C, *) is normed in `groups` groups of channels. Each channel has a weight and a bias."""
    require_rows("group_norm", x)
    if x.dim() < 2:
        raise ValueError(f"group_norm: x must have shape (samples, channels, ...), got {tuple(x.shape)}; add what is missing.")
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(
            f"group_norm: groups must divide x's {channels} channels, got {groups}; choose a divisor of {channels}."
        )
    require_columns("group_norm", x, (channels,), "channels", weight=weight, bias=bias)
    return implementation("group_norm", x)(x, groups, weight, bias, eps)


@definition(lambda g: (draw(g, 2, 6, 5, 7), 3, draw(g, 6), draw(g, 6), 1e-5), gradient=True)
def group_norm_reference(x, groups, weight=None, bias=None, eps=1e-5):
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    samples, channels, *positions = x.shape
    rows = x.to(compute_dtype).reshape(samples, groups, channels // groups * prod(positions))
    y = layer_norm_reference(rows, eps=eps).reshape(x.shape)
    per_channel = (channels, *(1 for _ in positions))
    if weight is not None:
        y = y * weight.to(compute_dtype).reshape(per_channel)
    if bias is not None:
        y = y + bias.to(compute_dtype).reshape(per_channel)
    return y.to(x.dtype)
