"""Ops between the products of one decoding step: LayerNorm of the stream, and the activation of an MLP without a gate.

As in decode_product.py, outputs are written in place, one token for each of B rows, and `dependent` is a mode of programmatic
dependent launch. A LayerNorm has its own launch: within a product, each weight's row would need two more sums.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_product import ACTIVATED, WRITTEN
from .dispatch import implementation, require
from .registry import definition, draw, zeros


class LayerNorm(NamedTuple):
    """A LayerNorm, as the ops of a decoding step take one."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float = 0.0  # the gain is offset + weight


def layer_norm_rows(x: Tensor, norm: LayerNorm, out: Tensor, dependent: int = 0) -> Tensor:
    """out (B, hidden, in any dtype) = (x − mean) / sqrt(variance + eps) · (offset + weight) + bias, of fp32 x (B, hidden)."""
    require("layer_norm_rows", "x", x, torch.float32, ("rows", len(norm.weight)), x.device, "it is the stream")
    for name, t in (("norm.weight", norm.weight), ("norm.bias", norm.bias)):
        if t is not None:
            require("layer_norm_rows", name, t, None, x.shape[1:], x.device, "it has one number for each column of x")
    require("layer_norm_rows", "out", out, None, tuple(x.shape), x.device, WRITTEN)
    form = (norm.bias is not None, norm.offset)
    return implementation("layer_norm_rows", norm.weight, None, () if form == (True, 0.0) else form)(x, norm, out, dependent)


@definition(lambda g, bias=True, offset=0.0: (
    draw(g, 2, 48).detach(), LayerNorm(draw(g, 48), draw(g, 48) if bias else None, 1e-5, offset), zeros(2, 48)
))  # fmt: skip
@torch.no_grad()
def layer_norm_rows_reference(x: Tensor, norm: LayerNorm, out: Tensor, dependent: int = 0) -> Tensor:
    return out.copy_(layer_normed(x, norm))


def layer_normed(x: Tensor, norm: LayerNorm) -> Tensor:
    """Return the LayerNorm of x in its dtype."""
    gain, bias = norm.weight.to(x.dtype) + norm.offset, None if norm.bias is None else norm.bias.to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], gain, bias, norm.eps)


def activate_rows(x: Tensor, activation: str, out: Tensor, dependent: int = 0, by: Tensor | None = None) -> Tensor:
    """out (B, width, in the model's dtype) = activation(x) of a product x (B, width) in fp32; one of ACTIVATED.

    by: fp32 of x's shape, that it is multiplied by
    """
    require("activate_rows", "x", x, torch.float32, ("rows", "width"), x.device, "norm_product writes it")
    require("activate_rows", "out", out, None, tuple(x.shape), x.device, WRITTEN)
    if activation not in ACTIVATED:
        raise ValueError(f"activate_rows: activation must be one of {', '.join(ACTIVATED)}, got {activation!r}.")
    if by is not None:
        require("activate_rows", "by", by, torch.float32, tuple(x.shape), x.device, "it has one number for each of x")
    shape: tuple = (activation, True) if by is not None else () if activation == "gelu_tanh" else (activation,)
    return implementation("activate_rows", out, None, shape)(x, activation, out, dependent, by)


@definition(lambda g, activation="gelu_tanh", by=False: (
    draw(g, 2, 48).detach(), activation, draw(g, 2, 48), 0, draw(g, 2, 48).detach() if by else None
))  # fmt: skip
@torch.no_grad()
def activate_rows_reference(x: Tensor, activation: str, out: Tensor, dependent: int = 0, by: Tensor | None = None) -> Tensor:
    y = ACTIVATED[activation](x)
    return out.copy_(y if by is None else y * by)
