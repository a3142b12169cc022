"""The products of one decoding step over packed weights: what decode_product computes with the numbers that they stand for."""

import torch
from torch import Tensor

from ..packed import Packed, unpack
from . import decode_product


@torch.no_grad()
def dequantize(weight: Packed, out: Tensor, turns: int = 1) -> Tensor:
    return out.copy_(unpack(weight).unflatten(0, (-1, turns)).transpose(0, 1).flatten(0, 1))


@torch.no_grad()
def quantized_norm_product(
    x: Tensor, norm: Tensor, eps: float, weight: Packed, bias: Tensor | None, out: Tensor, best: Tensor | None,
    arg: Tensor | None, dependent: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    return decode_product.norm_product(x, norm, eps, unpack(weight), None, None, bias, None, None, out, best, arg)


@torch.no_grad()
def quantized_norm_gate_up(
    x: Tensor, norm: Tensor, eps: float, gate_up: Packed, bias: Tensor | None, out: Tensor, dependent: int = 0
) -> Tensor:
    gate, up = unpack(gate_up).unflatten(0, (-1, 2)).unbind(1)
    gate_bias, up_bias = (None, None) if bias is None else bias.unflatten(0, (-1, 2)).unbind(1)
    return decode_product.norm_gate_up(x, norm, eps, gate, up, gate_bias, up_bias, out)


@torch.no_grad()
def quantized_add_product(h: Tensor, weight: Packed, bias: Tensor | None, x: Tensor, dependent: int = 0) -> Tensor:
    return decode_product.add_product(h, unpack(weight), bias, x)
