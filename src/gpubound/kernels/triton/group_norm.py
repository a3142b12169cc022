"""GroupNorm over x (N, C, *). fp32 inside, the tensors' dtype at the edges; any number of places behind a channel.

Seen twice as a matrix: a row a group (N·G rows of D = C/G·S elements) for the statistics, a row a channel (N·C rows of S
places) for the rest, as weight and bias are one number there. A group of up to 16384 elements is held whole and read once; a
larger one is read twice.

Backward, with g = dy · weight and x̂ = (x − mean) · rstd: dx = rstd · (g − mean_D(g) − x̂ · mean_D(g · x̂)). One pass sums dy
and dy · x̂ over each channel's places; from these few numbers come the two means of every group, dweight and dbias (summed over
the samples); a second pass writes dx. No atomics: the same bits in every run.
"""

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..accumulate import deliver
from ._launch import first_order_only, power_of_two

TILE = 4096  # elements: 16 a thread at 8 warps
HELD = 4 * TILE  # the largest group one program holds whole: 64 elements a thread at 8 warps


@triton.jit(do_not_specialize=["rows"])
def _whole_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, rows, length, places, eps,
                  GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                  WEIGHT: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """mean, rstd and y of groups that fit a tile, a row a group."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * length + col[None]
    mask = (row < rows)[:, None] & (col < length)[None]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / length
    centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / length + eps)
    y = centred * rstd[:, None]
    channel = (row % GROUPS * PER_GROUP)[:, None] + (col // places)[None]
    if WEIGHT:
        y *= tl.load(w_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(b_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _moments_kernel(x_ptr, mean_ptr, rstd_ptr, rows, length, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """mean and rstd of groups larger than a tile, a row a group. Chan's rule merges blocks: E[x²] − mean² would cancel."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, length, BLOCK):
        col = start + tl.arange(0, BLOCK)
        at = row[:, None].to(tl.int64) * length + col[None]
        mask = (row < rows)[:, None] & (col < length)[None]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        count = tl.minimum(length - start, BLOCK).to(tl.float32)
        share = count / (start + count)
        block_mean = tl.sum(x, 1) / count
        centred = tl.where(mask, x - block_mean[:, None], 0.0)
        shift = block_mean - mean
        squares += tl.sum(centred * centred, 1) + shift * shift * (start * share)
        mean += shift * share
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, 1.0 / tl.sqrt(squares / length + eps), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _apply_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, rows, places,
                  CHANNELS: tl.constexpr, PER_GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                  WEIGHT: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """y from known statistics, a row a channel."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * places + col[None]
    here = row < rows
    mask = here[:, None] & (col < places)[None]
    mean = tl.load(mean_ptr + row // PER_GROUP, mask=here, other=0.0)
    scale = tl.load(rstd_ptr + row // PER_GROUP, mask=here, other=0.0)
    if WEIGHT:
        scale *= tl.load(w_ptr + row % CHANNELS, mask=here, other=0.0).to(tl.float32)
    y = (tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean[:, None]) * scale[:, None]
    if BIAS:
        y += tl.load(b_ptr + row % CHANNELS, mask=here, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _channel_sums_kernel(dy_ptr, x_ptr, mean_ptr, rstd_ptr, sums_ptr, rows, places,
                         PER_GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """sums[0] = Σ_places dy and sums[1] = Σ_places dy · x̂ of each channel of each sample."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    mean = tl.load(mean_ptr + row // PER_GROUP, mask=here, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + row // PER_GROUP, mask=here, other=0.0)[:, None]
    plain = tl.zeros([ROWS], tl.float32)
    with_x = tl.zeros([ROWS], tl.float32)
    for start in range(0, places, BLOCK):
        col = start + tl.arange(0, BLOCK)
        at = row[:, None].to(tl.int64) * places + col[None]
        mask = here[:, None] & (col < places)[None]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        plain += tl.sum(dy, 1)
        with_x += tl.sum(dy * (x - mean) * rstd, 1)
    tl.store(sums_ptr + row, plain, mask=here)
    tl.store(sums_ptr + rows + row, with_x, mask=here)


@triton.jit(do_not_specialize=["rows", "groups"])
def _input_kernel(dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, g_ptr, dx_ptr, rows, groups, places,
                  CHANNELS: tl.constexpr, PER_GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                  WEIGHT: tl.constexpr):  # fmt: skip
    """dx; g_ptr holds mean_D(g) of every group, then mean_D(g · x̂) of every group."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * places + col[None]
    here = row < rows
    mask = here[:, None] & (col < places)[None]
    group = row // PER_GROUP
    mean = tl.load(mean_ptr + group, mask=here, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + group, mask=here, other=0.0)[:, None]
    g_mean = tl.load(g_ptr + group, mask=here, other=0.0)[:, None]
    gx_mean = tl.load(g_ptr + groups + group, mask=here, other=0.0)[:, None]
    g = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if WEIGHT:
        g *= tl.load(w_ptr + row % CHANNELS, mask=here, other=0.0).to(tl.float32)[:, None]
    x_hat = (tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
    tl.store(dx_ptr + at, (rstd * (g - g_mean - x_hat * gx_mean)).to(dx_ptr.dtype.element_ty), mask=mask)


def _tile(length: int, most: int = TILE) -> tuple[int, int]:
    """(columns, rows) of a tile over a matrix whose rows have `length` elements."""
    block = min(power_of_two(length), most)
    return block, max(1, TILE // block)


def _forward(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd)."""
    samples, channels = x.shape[:2]
    places, per_group = prod(x.shape[2:]), channels // groups
    rows, length = samples * groups, per_group * places
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    w, b = x if weight is None else weight, x if bias is None else bias
    flags = (weight is not None, bias is not None)
    y = torch.empty_like(x)
    mean, rstd = torch.empty(2, rows, device=x.device, dtype=torch.float32).unbind(0)
    if length <= HELD:
        block, at_once = _tile(length, HELD)
        _whole_kernel[(triton.cdiv(rows, at_once),)](
            x, w, b, y, mean, rstd, rows, length, places, eps, groups, per_group, block, at_once, *flags, num_warps=8
        )
        return y, mean, rstd
    block, at_once = _tile(length)
    _moments_kernel[(triton.cdiv(rows, at_once),)](x, mean, rstd, rows, length, eps, block, at_once, num_warps=8)
    block, at_once = _tile(places)
    rows = samples * channels
    _apply_kernel[(triton.cdiv(rows, at_once), triton.cdiv(places, block))](
        x, w, b, y, mean, rstd, rows, places, channels, per_group, block, at_once, *flags, num_warps=8
    )
    return y, mean, rstd


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, groups: int, need_dx: bool
) -> tuple[Tensor | None, Tensor]:
    """(dx or None, sums (2, N, C) of dy and of dy · x̂ over the places)."""
    samples, channels = x.shape[:2]
    places, per_group = prod(x.shape[2:]), channels // groups
    rows = samples * channels
    block, at_once = _tile(places)
    tiles = triton.cdiv(rows, at_once)
    sums = torch.empty(2, samples, channels, device=x.device, dtype=torch.float32)
    _channel_sums_kernel[(tiles,)](dy, x, mean, rstd, sums, rows, places, per_group, block, at_once, num_warps=8)
    if not need_dx:
        return None, sums
    g = sums if weight is None else sums * weight
    g = g.view(2, samples * groups, per_group).sum(-1) / (per_group * places)
    dx = torch.empty_like(x)
    _input_kernel[(tiles, triton.cdiv(places, block))](
        dy, x, x if weight is None else weight.contiguous(), mean, rstd, g, dx, rows, samples * groups, places,
        channels, per_group, block, at_once, weight is not None, num_warps=8,
    )  # fmt: skip
    return dx, sums


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, groups, weight, bias, eps):
        x = x.contiguous()
        y, mean, rstd = _forward(x, groups, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups = groups
        ctx.weight, ctx.bias = weight, bias  # saved ones may come back without their main_grad (torch.utils.checkpoint)
        return y

    @staticmethod
    def backward(ctx, dy):
        first_order_only("group_norm")
        need_dx, _, need_dw, need_db, _ = ctx.needs_input_grad
        x, weight, mean, rstd = ctx.saved_tensors
        dx, sums = _backward(dy.contiguous(), x, weight, mean, rstd, ctx.groups, need_dx)
        if not (need_dw or need_db):
            return dx, None, None, None, None
        db, dw = sums.sum(1).unbind(0)
        return dx, None, deliver(ctx.weight, dw) if need_dw else None, deliver(ctx.bias, db) if need_db else None, None


def group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return _GroupNorm.apply(x, groups, weight, bias, eps)
