"""LayerNorm with a program for each row, and an activation with a program for each block of elements."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import power_of_two
from ..row_ops import LayerNorm
from ._launch import at_once, bump_versions, options
from ._math import activated
from ._pdl import _begin, _end, _wait

BLOCK = 512  # elements of a program that activates


@triton.jit
def _layer_norm_rows_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, eps, K: tl.constexpr, C: tl.constexpr,
                            OFFSET: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    col = tl.arange(0, C)
    inside = col < K
    row = tl.program_id(0) * K
    gain = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    _wait(DEPENDENT)
    x = tl.load(x_ptr + row + col, mask=inside, other=0.0)
    _end(DEPENDENT)
    x = tl.where(inside, x - tl.sum(x, 0) / K, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / K + eps) * gain
    if bias_ptr is not None:
        y += bias
    tl.store(out_ptr + row + col, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activate_rows_kernel(x_ptr, by_ptr, out_ptr, count, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
                          DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    _wait(DEPENDENT)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    _end(DEPENDENT)
    y = activated(x, ACTIVATION)
    if by_ptr is not None:
        y *= tl.load(by_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@torch.no_grad()
def layer_norm_rows(x: Tensor, norm: LayerNorm, out: Tensor, dependent: int = 0) -> Tensor:
    block = power_of_two(x.shape[1])
    _layer_norm_rows_kernel[(len(x),)](
        x, norm.weight, norm.bias, out, norm.eps, x.shape[1], block, norm.offset,
        **options(max(1, min(8, block // 512)), at_once(dependent)),
    )  # fmt: skip
    bump_versions(out)
    return out


@torch.no_grad()
def activate_rows(x: Tensor, activation: str, out: Tensor, dependent: int = 0, by: Tensor | None = None) -> Tensor:
    count = x.numel()
    _activate_rows_kernel[(triton.cdiv(count, BLOCK),)](x, by, out, count, BLOCK, activation, **options(4, at_once(dependent)))
    bump_versions(out)
    return out
