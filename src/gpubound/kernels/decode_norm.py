"""Norms of a decoding step that ride in no product: before one on tensor cores, and between a product and the residual add.

B rows; everything is written in place. `dependent` as in decode_product.py.
"""

import torch
from torch import Tensor

from .checks import require
from .decode_product import WRITTEN, Norm, check_stream, draw_stream, form, rms_normed
from .dispatch import implementation
from .registry import definition, draw, zeros


def norm_rows(x: Tensor, norm: Norm, out: Tensor, dependent: int = 0) -> Tensor:
    """out (B, hidden, in the model's dtype) = rms_norm(x), the input of a product on tensor cores."""
    check_stream("norm_rows", x, norm)
    require("norm_rows", "out", out, None, tuple(x.shape), x.device, WRITTEN)
    return implementation("norm_rows", norm.weight, None, form(norm))(x, norm, out, dependent)


@definition(lambda g, offset=0.0: (*draw_stream(g, 48, offset), zeros(2, 48)))
@torch.no_grad()
def norm_rows_reference(x: Tensor, norm: Norm, out: Tensor, dependent: int = 0) -> Tensor:
    return out.copy_(rms_normed(x, norm))


def add_norm(y: Tensor, norm: Norm, x: Tensor, dependent: int = 0) -> Tensor:
    """x += rms_norm(y), both fp32 (B, hidden), and y = 0: the next `add_product` into y begins from nothing."""
    check_stream("add_norm", x, norm)
    require("add_norm", "y", y, torch.float32, tuple(x.shape), x.device, WRITTEN)
    return implementation("add_norm", norm.weight, None, form(norm))(y, norm, x, dependent)


@definition(lambda g, offset=0.0: (*draw_stream(g, 48, offset), draw(g, 2, 48).detach()))
@torch.no_grad()
def add_norm_reference(y: Tensor, norm: Norm, x: Tensor, dependent: int = 0) -> Tensor:
    x.add_(rms_normed(y, norm))
    y.zero_()
    return x
