"""A short convolution by a program for each token and block of channels, which also writes its input to the ring."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import _begin, _end, _wait, at_once, bump_versions, options

BLOCK = 256  # channels of a program


@triton.jit
def _product(row_ptr, col, channels, inside, kind: tl.constexpr):
    """The input of the convolution of one token, as the ring holds it, in fp32."""
    gate = tl.load(row_ptr + col, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(row_ptr + 2 * channels + col, mask=inside, other=0.0).to(tl.float32)
    return (gate * value).to(kind).to(tl.float32)


@triton.jit
def _short_conv_kernel(x_ptr, position_ptr, ring_ptr, weight_ptr, bias_ptr, out_ptr, channels, PLACES: tl.constexpr,
                       TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    row, col = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, t = col < channels, row % TOKENS + tl.zeros([BLOCK], tl.int32)
    kind = ring_ptr.dtype.element_ty
    own = tl.load(weight_ptr + col * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(position_ptr + row, cache_modifier=".cg") + tl.zeros([BLOCK], tl.int32)  # before the fence: _launch.py
    _wait(DEPENDENT)
    _end(DEPENDENT)
    x_ptr += row.to(tl.int64) * 3 * channels
    ring_ptr += (row // TOKENS).to(tl.int64) * PLACES * channels
    x = _product(x_ptr, col, channels, inside, kind)
    total += own * x
    for j in tl.static_range(1, TAPS):
        tap = tl.load(weight_ptr + col * TAPS + TAPS - 1 - j, mask=inside, other=0.0).to(tl.float32)
        place = tl.maximum(position - j, 0) % PLACES
        before = tl.load(ring_ptr + place * channels + col, mask=inside & (position >= j) & (t < j), other=0.0).to(tl.float32)
        if TOKENS > 1:  # a token of the same step
            before += _product(x_ptr - j * 3 * channels, col, channels, inside & (t >= j), kind)
        total += tap * before
    y = total * tl.load(x_ptr + channels + col, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(position >= 0, y, float("nan"))
    tl.store(out_ptr + row.to(tl.int64) * channels + col, y.to(out_ptr.dtype.element_ty), mask=inside)
    here = ring_ptr + tl.maximum(position, 0) % PLACES * channels + col
    tl.store(here, x.to(kind), mask=inside & (position >= 0))


@torch.no_grad()
def short_conv(
    x: Tensor, position: Tensor, ring: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, dependent: int = 0
) -> tuple[Tensor, Tensor]:
    rows, slots, channels = ring.shape
    count = position.numel()
    _short_conv_kernel[(count, triton.cdiv(channels, BLOCK))](
        x, position, ring, weight, bias, out, channels, slots, weight.shape[1], count // rows, BLOCK,
        **options(4, at_once(dependent)),
    )  # fmt: skip
    bump_versions(out, ring)
    return out, ring
