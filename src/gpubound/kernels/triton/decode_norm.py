"""Norms of a decoding step by themselves (kernels/decode_norm.py): a program a row, which it holds whole."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_product import Norm
from ..plans import power_of_two
from ._launch import bump_versions, options
from ._pdl import _begin, _end, _gained, _wait


@triton.jit
def _norm_rows_kernel(x_ptr, norm_ptr, out_ptr, eps, K: tl.constexpr, C: tl.constexpr, GAIN: tl.constexpr,
                      DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    col = tl.arange(0, C)
    row = tl.program_id(0) * K
    gain = _gained(1.0, norm_ptr, col, K, False, GAIN)
    _wait(DEPENDENT)
    x = tl.load(x_ptr + row + col, mask=col < K, other=0.0)
    _end(DEPENDENT)
    y = x / tl.sqrt(tl.sum(x * x, 0) / K + eps) * gain
    tl.store(out_ptr + row + col, y.to(out_ptr.dtype.element_ty), mask=col < K)


@triton.jit
def _add_norm_kernel(y_ptr, norm_ptr, x_ptr, eps, K: tl.constexpr, C: tl.constexpr, GAIN: tl.constexpr,
                     DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    col = tl.arange(0, C)
    at, in_range = tl.program_id(0) * K + col, col < K
    gain = _gained(1.0, norm_ptr, col, K, False, GAIN)
    _wait(DEPENDENT)
    x, y = tl.load(x_ptr + at, mask=in_range, other=0.0), tl.load(y_ptr + at, mask=in_range, other=0.0)
    _end(DEPENDENT)
    tl.store(x_ptr + at, x + y / tl.sqrt(tl.sum(y * y, 0) / K + eps) * gain, mask=in_range)
    tl.store(y_ptr + at, tl.zeros([C], tl.float32), mask=in_range)


@torch.no_grad()
def norm_rows(x: Tensor, norm: Norm, out: Tensor, dependent: int = 0) -> Tensor:
    weight, eps, offset = norm
    block = power_of_two(x.shape[1])
    _norm_rows_kernel[(x.shape[0],)](x, weight, out, eps, x.shape[1], block, offset, **options(_warps(block), dependent))
    bump_versions(out)
    return out


@torch.no_grad()
def add_norm(y: Tensor, norm: Norm, x: Tensor, dependent: int = 0) -> Tensor:
    weight, eps, offset = norm
    block = power_of_two(x.shape[1])
    _add_norm_kernel[(x.shape[0],)](y, weight, x, eps, x.shape[1], block, offset, **options(_warps(block), dependent))
    bump_versions(y, x)
    return x


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))
