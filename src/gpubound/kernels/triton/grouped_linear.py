"""Grouped products. A kernel for few choices: a program owns some rows of one choice's weight, and reads no other weight.

Many choices, and every backward, are sorted by weight on the device and multiplied by F.grouped_mm:

    dx_n = Σ_s weight[ids_ns]ᵀ dy_ns        dweight_e = Σ over the choices of e, dyᵀ x
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..accumulate import deliver
from ..grouped_linear import FEW, by_group, grouped_linear_reference, not_trained
from ..plans.types import job_of
from ._launch import first_order_only, launch_product
from ._pdl import _row, _tile


@triton.jit
def _grouped_linear_kernel(x_ptr, w_ptr, ids_ptr, out_ptr, weights, rows, S: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
                           C: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """`rows` of a weight. WHOLE: no tile reaches beyond one."""
    first, choice = tl.program_id(0) * R, tl.program_id(1).to(tl.int64)
    row, col = tl.arange(0, R), tl.arange(0, C)
    number = tl.load(ids_ptr + choice).to(tl.int64)
    known = (number >= 0) & (number < weights)
    w_ptr += (tl.where(known, number, 0) * rows + first) * K
    x_ptr += choice // S * K
    EVEN: tl.constexpr = K % C == 0
    left = rows - first
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, K, C):
        w = _tile(w_ptr + start, row, col, left, K - start, K, WHOLE)
        total += w.to(tl.float32) * _row(x_ptr + start, col, K - start, EVEN)[None]
    y = tl.where(known, tl.sum(total, 1), float("nan"))
    tl.store(out_ptr + choice * rows + first + row, y.to(out_ptr.dtype.element_ty), mask=row < left)


def _known(ids: Tensor, weight: Tensor) -> Tensor:
    return ((ids >= 0) & (ids < len(weight)))[..., None]


def _few(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    weights, rows, width = weight.shape
    out = torch.empty(*ids.shape, rows, device=x.device, dtype=x.dtype)
    launch_product(
        _grouped_linear_kernel, job_of("product", "grouped", (rows, width, rows), weight), width, ids.numel(), 0,
        x.contiguous(), weight, ids.contiguous(), out, weights, rows, S=ids.shape[1],
    )  # fmt: skip
    return out


def _many(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    order, back, ends = by_group(ids.clamp(0, len(weight) - 1), len(weight))
    y = F.grouped_mm(x.index_select(0, order // ids.shape[1]), weight.transpose(1, 2), offs=ends)
    return torch.where(_known(ids, weight), y.index_select(0, back).view(*ids.shape, -1), torch.nan)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, ids):
        ctx.save_for_backward(x, weight, ids)
        ctx.owner = weight  # the saved one may come back without its main_grad (torch.utils.checkpoint)
        weight = weight.contiguous()
        return _few(x, weight, ids) if ids.numel() <= FEW else _many(x, weight, ids)

    @staticmethod
    def backward(ctx, dy):
        first_order_only("grouped_linear")
        x, weight, ids = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        if not_trained(weight):  # the self-test of few rows alone comes here: the door gives such training to the definition
            with torch.enable_grad():
                own = [t.detach().requires_grad_(need) for t, need in zip((x, weight), needed)]
                wanted = [t for t, need in zip(own, needed) if need]
                gradients = iter(torch.autograd.grad(grouped_linear_reference(*own, ids), wanted, dy))
            return *(next(gradients) if need else None for need in needed), None
        order, back, ends = by_group(ids.clamp(0, len(weight) - 1), len(weight))
        dy = torch.where(_known(ids, weight), dy, 0.0).to(weight.dtype).flatten(0, 1).index_select(0, order)
        dx = dw = None
        if needed[0]:
            each = F.grouped_mm(dy, weight.contiguous(), offs=ends).index_select(0, back)
            dx = each.view(*ids.shape, -1).float().sum(1).to(x.dtype)
        if needed[1]:
            dw = deliver(ctx.owner, F.grouped_mm(dy.t(), x.index_select(0, order // ids.shape[1]), offs=ends))
        return dx, dw, None


def grouped_linear(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return _GroupedLinear.apply(x, weight, ids)
