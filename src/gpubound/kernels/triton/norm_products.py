"""A program owns some rows of one weight, and reads x whole, as in decode_product.py: each weight is read once."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_product import Norm
from ..norm_products import MOST
from ..plans import job_of
from ._launch import launch_product
from ._step import _begin, _end, _products, _tile, _wait


@triton.jit(do_not_specialize=["s1", "s2", "s3", "s4", "s5", "s6", "s7", "rows"])
def _norm_products_kernel(x_ptr, norm_ptr, w0, w1, w2, w3, w4, w5, w6, w7, out_ptr, eps, s1, s2, s3, s4, s5, s6, s7, rows,
                          B: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
                          GAIN: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """s1 to s7: the rows of `out` where the second and later weights begin; of those that are not there, its end."""
    _begin(DEPENDENT)
    first = tl.program_id(0) * R
    w_ptr, begun = w0, 0
    w_ptr, begun = tl.where(first >= s1, w1, w_ptr), tl.where(first >= s1, s1, begun)
    w_ptr, begun = tl.where(first >= s2, w2, w_ptr), tl.where(first >= s2, s2, begun)
    w_ptr, begun = tl.where(first >= s3, w3, w_ptr), tl.where(first >= s3, s3, begun)
    w_ptr, begun = tl.where(first >= s4, w4, w_ptr), tl.where(first >= s4, s4, begun)
    w_ptr, begun = tl.where(first >= s5, w5, w_ptr), tl.where(first >= s5, s5, begun)
    w_ptr, begun = tl.where(first >= s6, w6, w_ptr), tl.where(first >= s6, s6, begun)
    w_ptr, begun = tl.where(first >= s7, w7, w_ptr), tl.where(first >= s7, s7, begun)
    w_ptr += (first - begun).to(tl.int64) * K
    row, col, left = tl.arange(0, R), tl.arange(0, C), rows - first
    w = _tile(w_ptr, row, col, left, K, K, WHOLE)
    _wait(DEPENDENT)
    for b in tl.static_range(B):
        if b > 0 and C < K:
            w = _tile(w_ptr, row, col, left, K, K, WHOLE)
        total, square = _products(x_ptr + b * K, norm_ptr, w_ptr, w, row, col, left, K, R, C, WHOLE, GAIN)
        if b == B - 1:
            _end(DEPENDENT)
        y = tl.sum(total, 1)
        if GAIN is not None:
            y /= tl.sqrt(tl.sum(square, 0) / K + eps)
        tl.store(out_ptr + b * rows.to(tl.int64) + first + row, y, mask=row < left)


@torch.no_grad()
def norm_products(x: Tensor, norm: Norm | None, weights: Sequence[Tensor], out: Tensor) -> Tensor:
    weight, eps, gain = (None, 0.0, None) if norm is None else norm
    (rows, width), parts = (out.shape[1], x.shape[1]), [len(one) for one in weights]
    ends = [*accumulate(parts), *[rows] * (MOST - len(parts))]
    given = [*weights, *[weights[0]] * (MOST - len(weights))]
    launch_product(
        _norm_products_kernel, job_of("product", "qkv", (rows, width, *parts), weights[0]), width, 1, 0, x, weight, *given, out,
        eps, *ends[: MOST - 1], rows, B=len(x), GAIN=gain,
    )  # fmt: skip
    return out
