"""Gated short convolution of LFM2 in one decoding step, for one or a few tokens of each of B rows.

A row's inputs of the convolution are in a ring: that of position p is at place p % P. So a step shifts nothing, and the same
step may be repeated. Inputs before a row's first position are zeros, whatever its ring holds.

Legend: B rows, T tokens a row in a step, C channels, K taps of the convolution, P places of the ring, at least K - 1 + T.
"""

from typing import Any

import torch
from torch import Tensor

from .decode_product import WRITTEN
from .dispatch import SIXTEEN_BITS, implementation, require
from .registry import definition, draw, ints, zeros


def short_conv(
    x: Tensor, position: Tensor, ring: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, dependent: int = 0
) -> tuple[Tensor, Tensor]:
    """out = c · conv(b · v), for the three parts b, c, v of a product's rows: (out, ring). The ring gets the products b · v.

    x         (B T, 3 C) fp32, as norm_product writes it, or 16 bits; all tokens of a row before those of the next
    position  (B,) or (B, T) int32: positions in order without a gap. For one below 0, out is NaN and nothing is written
    ring      (B, P, C)
    weight    (C, K): the last tap is that of the token itself
    out       (B T, C)
    """
    require("short_conv", "ring", ring, None, ("rows", "places", "channels"), x.device, "it is written in place")
    (rows, slots, channels), count = ring.shape, position.numel()
    require("short_conv", "position", position, torch.int32, (rows, *position.shape[1:]), x.device, "one for each token")
    require("short_conv", "x", x, product_dtype(x), (count, 3 * channels), x.device, "a product writes it")
    require("short_conv", "weight", weight, None, (channels, "taps"), x.device, "it has the taps of each channel")
    if bias is not None:
        require("short_conv", "bias", bias, None, (channels,), x.device, "it has one number for each channel")
    require("short_conv", "out", out, None, (count, channels), x.device, WRITTEN)
    if slots < (least := weight.shape[1] - 1 + count // rows):
        raise ValueError(f"short_conv: ring: got {slots} places, wanted {least} or more: a place for each input that is read.")
    kernel = implementation("short_conv", weight, None, _shape(weight, bias, count // rows, x.dtype != torch.float32))
    return kernel(x, position, ring, weight, bias, out, dependent)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a product x must have: fp32, or 16 bits, as cuBLAS writes it."""
    return x.dtype if x.dtype in SIXTEEN_BITS else torch.float32


def _shape(weight: Tensor, bias: Tensor | None, tokens: int, rounded: bool) -> tuple:
    """Return the example arguments; none for one token and three taps."""
    shape = weight.shape[1], bias is not None, tokens, rounded
    return () if shape == (3, False, 1, False) else shape


def draw_product(g: torch.Generator, rows: int, columns: int, rounded: bool) -> Tensor:
    """Return the product of an example. rounded: in the weights' dtype, which a self-test gives what asks for a gradient"""
    x = draw(g, rows, columns)
    return x if rounded else x.detach()


def _example(g: torch.Generator, taps: int = 3, bias: bool = False, tokens: int = 1, rounded: bool = False) -> tuple:
    """Two rows of 40 channels, one at its first position."""
    position, slots = ints(0, 7)[:, None] + ints(*range(tokens)), taps - 1 + tokens
    return (
        draw_product(g, 2 * tokens, 120, rounded), position.contiguous(), draw(g, 2, slots, 40).detach(), draw(g, 40, taps),
        draw(g, 40) if bias else None, zeros(2 * tokens, 40),
    )  # fmt: skip


@definition(_example)
@torch.no_grad()
def short_conv_reference(
    x: Tensor, position: Tensor, ring: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, dependent: int = 0
) -> tuple[Tensor, Tensor]:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    gate, output_gate, value = x.view(len(ring), -1, 3, ring.shape[2]).unbind(2)  # (B, T, C)
    convolved = ring_convolution(gate * value, position, ring, weight, bias)
    known = (position >= 0).view(len(ring), -1, 1)
    out.copy_(torch.where(known, output_gate * convolved, torch.nan).flatten(0, 1))
    return out, ring


def check_recurrence(op: str, x: Tensor, position: Tensor, ring: Tensor, state: Tensor, conv: Tensor, shape: Any) -> None:
    """Check what a step reads and writes besides a layer's own parameters. shape: has its `columns`, `channels` and `matrix`"""
    rows = len(ring)
    require(op, "x", x, product_dtype(x), (rows, shape.columns), x.device, "a product writes it")
    require(op, "position", position, torch.int32, (rows,), x.device, "a step takes one token of each row")
    require(op, "ring", ring, None, (rows, "places", shape.channels), x.device, "it is written in place")
    require(op, "state", state, torch.float32, (rows, *shape.matrix), x.device, "it is written in place")
    require(op, "parameters.conv", conv, None, (shape.channels, "taps"), x.device, "it has the taps of each channel")
    if ring.shape[1] < conv.shape[1]:
        raise ValueError(f"{op}: ring: got {ring.shape[1]} places, wanted {conv.shape[1]} or more, one for each tap.")


def ring_convolution(x: Tensor, position: Tensor, ring: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the causal convolution (B, T, C) of new inputs x (B, T, C) after those of a ring, which gets them."""
    B, T, _ = x.shape
    taps, slots = weight.shape[1], ring.shape[1]
    at, rows = position.view(B, -1).long(), torch.arange(B, device=x.device)
    x = x.to(ring.dtype).to(x.dtype)  # as the ring holds them
    total = torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x).clone()
    for t in range(T):
        for j in range(taps):
            if j <= t:
                earlier = x[:, t - j]
            else:
                place = at[:, t] - j
                earlier = torch.where((place >= 0)[:, None], ring[rows, place % slots].to(x.dtype), 0.0)
            total[:, t] += weight[:, taps - 1 - j].to(x.dtype) * earlier
    for t in range(T):
        here = at[:, t] % slots
        ring[rows, here] = torch.where((at[:, t] >= 0)[:, None], x[:, t].to(ring.dtype), ring[rows, here])
    return total
