"""Norms over rows. One pass over memory each way; fp32 inside, the tensors' dtype at the edges.

A program walks over tiles of rows, and backward sums the small weights' gradients over its own (_math.py). With x̂ the
normed row and g = dy · weight,

    RMSNorm        dx = rstd · (g − x̂ · mean(g · x̂))              dweight = Σ_rows dy · x̂
    LayerNorm      dx = rstd · (g − mean(g) − x̂ · mean(g · x̂))    dweight = Σ_rows dy · x̂         dbias = Σ_rows dy

Only the required gradients are computed: a frozen weight costs no sums (LoRA), an input without a gradient no store.

GroupNorm over x (N, C, *), of any number of elements per channel: a program holds a tile: channels of a group by their places,
or several whole groups when these are small. A group of one tile is read once. A group of several tiles is read twice, in two
launches: the first leaves the sums of each tile in memory, the second combines those of a group, in a fixed order, and does the
rest.

Backward, with g = dy · weight and x̂ = (x − mean) · rstd: dx = rstd · (g − mean_D(g) − x̂ · mean_D(g · x̂)). Both means come
from the sums of dy and dy · x̂ over each channel's places, which are also the parts of dbias and dweight. Nothing is added by
atomics: the same bits in every run.
"""

from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans.types import TilePlan, cdiv, job_of, power_of_two
from ._launch import first_order_only, launch
from ._math import _columns, _tile, _tile_of, add_both, deliver_parts, walk


@triton.jit(do_not_specialize=["rows", "adjacent"])
def _norm_forward_kernel(x_ptr, r_ptr, w_ptr, b_ptr, s_ptr, y_ptr, mean_ptr, rstd_ptr, rows, eps, adjacent, gap,
                         COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HINT: tl.constexpr,
                         ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
                         OFFSET: tl.constexpr = 0.0):  # fmt: skip
    """gap: elements of x after each `adjacent` of its rows, as between two tokens' heads in a product of several weights."""
    if WEIGHT:
        w = _columns(w_ptr, COLS, BLOCK)
        if OFFSET != 0.0:
            w += OFFSET
    if BIAS:
        b = _columns(b_ptr, COLS, BLOCK)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, at, mask = _tile(first, rows, COLS, BLOCK, ROWS)
        x = _tile_of(x_ptr, at if gap is None else at + (row // adjacent).to(tl.int64)[:, None] * gap, mask, HINT)
        if ADD:
            x += _tile_of(r_ptr, at, mask, HINT)
            s = x.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + at, s, mask=mask)
            x = s.to(tl.float32)  # the norm of what was stored, so that forward and backward see one s
        if CENTRE:
            mean = tl.sum(x, 1) / COLS
            x = x - mean[:, None]  # two passes over registers: E[x²] − mean² cancels when the mean is large
            if BLOCK != COLS:
                x = tl.where(mask, x, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / COLS + eps)
        y = x * rstd[:, None]
        if WEIGHT:
            y *= w[None]
        if BIAS:
            y += b[None]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
        if CENTRE:
            tl.store(mean_ptr + row, mean, mask=row < rows)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(dy_ptr, ds_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, parts_ptr, rows,
                          COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HINT: tl.constexpr,
                          ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr,
                          DB: tl.constexpr, OFFSET: tl.constexpr = 0.0):  # fmt: skip
    col = tl.arange(0, BLOCK)
    if WEIGHT:
        w = _columns(w_ptr, COLS, BLOCK)
        if OFFSET != 0.0:
            w += OFFSET
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, at, mask = _tile(first, rows, COLS, BLOCK, ROWS)
        dy = _tile_of(dy_ptr, at, mask, HINT)
        x = _tile_of(x_ptr, at, mask, HINT)
        if ADD:  # before the row's sum, whose barrier no load is moved across
            ds = tl.load(ds_ptr + at, mask=mask, other=0.0, eviction_policy=HINT)
        if CENTRE:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        x_hat = (x - mean if CENTRE else x) * rstd
        if DX:
            g = dy  # 0 where masked, so the sums below need no mask although x_hat is not 0 there in general
            if WEIGHT:
                g = dy * w[None]
            if CENTRE:
                plain, with_x = tl.reduce((g, g * x_hat), 1, add_both)
                g = g - (plain / COLS)[:, None]
            else:
                with_x = tl.sum(g * x_hat, 1)
            dx = rstd * (g - x_hat * (with_x / COLS)[:, None])
            if ADD:
                dx += ds.to(tl.float32)
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if DW:
            dw += tl.sum(dy * x_hat, 0)
        if DB:
            db += tl.sum(dy, 0)
    parts_ptr += tl.program_id(0) * (DW + DB) * COLS + col
    if DW:
        tl.store(parts_ptr, dw, mask=col < COLS)
    if DB:
        tl.store(parts_ptr + DW * COLS, db, mask=col < COLS)


class _Norm(torch.autograd.Function):
    """LayerNorm where `centre`, else RMSNorm: y, or (y, s) when there is a residual. An unused output's gradient is None.

    A residual of fewer bits than x gets dx as its gradient, which autograd rounds.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, offset, centre, strided=False):
        if not torch.compiler.is_compiling():  # dynamo knows no such call, and gives zeros
            ctx.set_materialize_grads(False)
        r = None if residual is None else residual.contiguous()
        adjacent, gap = _gap(x) if strided else (1, 0)
        x = x if gap else x.contiguous()
        s, y = x if r is None else torch.empty_like(x), x.new_empty(x.shape) if r is None else torch.empty_like(r)
        w, b = (x if t is None else t.contiguous() for t in (weight, bias))
        rstd = torch.empty(prod(x.shape[:-1]), device=x.device, dtype=torch.float32)
        mean = torch.empty_like(rstd) if centre else None
        walk(
            _norm_forward_kernel, _op(centre, r), "forward", x, 0,
            (x, x if r is None else r, w, b, s, y, rstd if mean is None else mean, rstd), eps=eps, adjacent=adjacent,
            gap=gap or None, ADD=r is not None, CENTRE=centre, WEIGHT=weight is not None, BIAS=bias is not None, OFFSET=offset,
        )  # fmt: skip
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.offset = offset
        ctx.small = weight, bias  # under torch.utils.checkpoint the saved ones come back as copies without their main_grad
        return y if residual is None else (y, s)

    @staticmethod
    def backward(ctx, dy, ds=None):
        x, weight, mean, rstd = ctx.saved_tensors
        centre = mean is not None
        first_order_only(_op(centre, None))
        if dy is None:
            return ds, ds, None, None, None, None, None, None
        need_x, need_residual, need_dw, need_db, *_ = ctx.needs_input_grad
        need_dx, sums = need_x or need_residual, need_dw + need_db
        dy, ds = dy.contiguous(), None if ds is None else ds.contiguous()
        w, dx = x if weight is None else weight.contiguous(), torch.empty_like(x) if need_dx else None
        (parts,) = walk(
            _norm_backward_kernel, _op(centre, ds), "backward", x, sums if centre else 1,
            (dy, dy if ds is None else ds, x, w, rstd if mean is None else mean, rstd, x if dx is None else dx),
            [(sums, x.shape[-1])], ADD=ds is not None, CENTRE=centre, WEIGHT=weight is not None, DX=need_dx, DW=need_dw,
            DB=need_db, OFFSET=ctx.offset,
        )  # fmt: skip
        owners = [owner for owner, needed in zip(ctx.small, (need_dw, need_db)) if needed]
        args = deliver_parts(parts, owners) if owners else ()
        dw, db = args[0] if need_dw else None, args[-1] if need_db else None
        return dx, dx if need_residual else None, dw, db, None, None, None, None


def _gap(x: Tensor) -> tuple[int, int]:
    """Return how many rows of x (..., H, C) are adjacent, and how many elements lie between them and the next ones; 1 and 0
    of a tensor that is contiguous, or must be made so."""
    if x.is_contiguous() or x.dim() < 3 or x.stride(-1) != 1 or x.stride(-2) != x.shape[-1]:
        return 1, 0
    outer = [(size, step) for size, step in zip(x.shape[:-2], x.stride()[:-2]) if size > 1]  # of one, any step
    if any(before[1] != size * step for before, (size, step) in pairwise(outer)):
        return 1, 0
    return x.shape[-2], outer[-1][1] - x.shape[-2] * x.shape[-1]


def _op(centre: bool, residual: Tensor | None) -> str:
    """Return the op whose plan is used. `residual`: the residual, or the gradient of the sum with it."""
    return "layer_norm" if centre else "rms_norm" if residual is None else "add_rms_norm"


def rms_norm(x, weight=None, eps=1e-6, offset=0.0):
    return _Norm.apply(x, None, weight, None, eps, offset, False, not torch.is_grad_enabled())  # else x is saved, without a gap


def add_rms_norm(x, residual, weight=None, eps=1e-6, offset=0.0):
    return _Norm.apply(x, residual, weight, None, eps, offset, False)


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    return _Norm.apply(x, None, weight, bias, eps, 0.0, True)


at_once, sums_alone, the_rest = range(3)  # for the host: torch.compile cannot trace a constexpr
AT_ONCE, SUMS_ALONE, THE_REST = tl.constexpr(at_once), tl.constexpr(sums_alone), tl.constexpr(the_rest)
"""what a launch does: all, where a tile has whole groups; else first the sums of each tile, then all that needs them"""


@triton.jit
def _tile_number(STEP: tl.constexpr):
    """The program's tile. The second launch begins at the end, with tiles that the first has just read."""
    if STEP == THE_REST:
        return tl.num_programs(0) - 1 - tl.program_id(0)
    return tl.program_id(0)


@triton.jit
def _group_tile(
    tile, rows, places, tiles, across, PER_GROUP: tl.constexpr, G: tl.constexpr, CH: tl.constexpr, PL: tl.constexpr
):
    """(group and channel in it of each line of the tile, offsets (lines, PL), their mask, the tile's number in its group).

    A line is a channel. Two dimensions, not three: of (G, CH, PL) Triton 3.6 makes 3000 stores to shared memory.
    """
    number = tile % tiles
    line = tl.arange(0, G * CH)
    group = tile // tiles * G + line // CH
    channel = number // across * CH + line % CH
    place = number % across * PL + tl.arange(0, PL)
    at = (group.to(tl.int64) * PER_GROUP + channel)[:, None] * places + place[None]
    mask = ((group < rows) & (channel < PER_GROUP))[:, None] & (place < places)[None]
    return group, channel, at, mask, number


@triton.jit
def _over_group(a, G: tl.constexpr, CH: tl.constexpr):
    """Sum one value a line over the lines of its group; each line gets the sum."""
    if G == 1:
        return tl.sum(a, 0) + tl.zeros_like(a)
    sums = tl.sum(tl.reshape(a, [G, CH]), 1)
    return tl.reshape(tl.broadcast_to(sums[:, None], [G, CH]), [G * CH])


@triton.jit
def _count(number, places, across, PER_GROUP: tl.constexpr, CH: tl.constexpr, PL: tl.constexpr):
    """Elements of a group's tile of that number."""
    return tl.minimum(PER_GROUP - number // across * CH, CH) * tl.minimum(places - number % across * PL, PL)


@triton.jit
def _store_parts(parts_ptr, tile, first, second):
    """Store two numbers of a tile, which all of its lines have: it is one group's."""
    part = parts_ptr + tile.to(tl.int64) * 2
    tl.store(part, tl.max(first, 0))
    tl.store(part + 1, tl.max(second, 0))


@triton.jit
def _load_parts(parts_ptr, group, tiles, TILES: tl.constexpr):
    """(the numbers of a group's tiles, the first and the second that each has stored)"""
    i = tl.arange(0, TILES)
    at = parts_ptr + group.to(tl.int64) * tiles * 2 + i * 2
    return i, tl.load(at, mask=i < tiles, other=0.0), tl.load(at + 1, mask=i < tiles, other=0.0)


@triton.jit
def _tile_mean(x, mask, count, G: tl.constexpr, CH: tl.constexpr):
    """(the mean of each line's group in the tile, the sum of squares around it)"""
    mean = _over_group(tl.sum(x, 1), G, CH) / count
    centred = tl.where(mask, x - mean[:, None], 0.0)  # E[x²] − mean² cancels when the mean is large
    return mean, _over_group(tl.sum(centred * centred, 1), G, CH)


@triton.jit
def _normalise(x, mean, squares, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, at, mask, group, channel, rows, places, eps,
               GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    c, here = group % GROUPS * PER_GROUP + channel, channel < PER_GROUP
    rstd = tl.rsqrt(squares / (PER_GROUP * places) + eps)
    scale = rstd
    if WEIGHT:
        scale *= tl.load(w_ptr + c, mask=here, other=0.0).to(tl.float32)
    y = (x - mean[:, None]) * scale[:, None]
    if BIAS:
        y += tl.load(b_ptr + c, mask=here, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    first = (group < rows) & (channel == 0)
    tl.store(mean_ptr + group, mean, mask=first)
    tl.store(rstd_ptr + group, rstd, mask=first)


@triton.jit(do_not_specialize=["rows", "tiles", "across"])
def _group_norm_forward_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, parts_ptr, rows, places, tiles, across, eps,
                               STEP: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, G: tl.constexpr,
                               CH: tl.constexpr, PL: tl.constexpr, TILES: tl.constexpr, HINT: tl.constexpr,
                               WEIGHT: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    tile = _tile_number(STEP)
    group, channel, at, mask, number = _group_tile(tile, rows, places, tiles, across, PER_GROUP, G, CH, PL)
    if STEP == SUMS_ALONE:
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        mean, squares = _tile_mean(x, mask, _count(number, places, across, PER_GROUP, CH, PL), G, CH)
        _store_parts(parts_ptr, tile, mean, squares)
    else:
        x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
        if STEP == AT_ONCE:
            mean, squares = _tile_mean(x, mask, PER_GROUP * places, G, CH)
        else:
            i, means, all_squares = _load_parts(parts_ptr, tile // tiles, tiles, TILES)
            counts = tl.where(i < tiles, _count(i, places, across, PER_GROUP, CH, PL), 0).to(tl.float32)
            full, zero = tl.sum(means * counts, 0) / (PER_GROUP * places), tl.zeros([G * CH], tl.float32)
            shift = means - full
            mean, squares = full + zero, tl.sum(all_squares + counts * shift * shift, 0) + zero
        _normalise(x, mean, squares, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, at, mask, group, channel, rows, places, eps,
                   GROUPS, PER_GROUP, WEIGHT, BIAS)  # fmt: skip


@triton.jit
def _backward_sums(dy, x, w, mean, rstd, sums_ptr, group, c, here, number, across, GROUPS: tl.constexpr,
                   PER_GROUP: tl.constexpr, G: tl.constexpr, CH: tl.constexpr, WEIGHT: tl.constexpr,
                   SUMS: tl.constexpr):  # fmt: skip
    """(Σ g, Σ g · x̂) over each line's group in the tile. Those of dy go to `sums`, by channel."""
    plain, with_x = tl.reduce((dy, dy * (x - mean) * rstd), 1, add_both)
    if SUMS:
        line = sums_ptr + (group // GROUPS * across + number % across).to(tl.int64) * (2 * GROUPS * PER_GROUP) + c
        tl.store(line, with_x, mask=here)
        tl.store(line + GROUPS * PER_GROUP, plain, mask=here)
    if WEIGHT:
        plain, with_x = plain * w, with_x * w
    return _over_group(plain, G, CH), _over_group(with_x, G, CH)


@triton.jit
def _input_gradient(dy, x, w, mean, rstd, plain, with_x, count, WEIGHT: tl.constexpr):
    g = dy
    if WEIGHT:
        g = dy * w[:, None]
    share = 1.0 / count
    return rstd * (g - (plain * share)[:, None] - (x - mean) * rstd * (with_x * share)[:, None])


@triton.jit(do_not_specialize=["rows", "tiles", "across"])
def _group_norm_backward_kernel(dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, sums_ptr, parts_ptr, rows, places, tiles,
                                across, STEP: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, G: tl.constexpr,
                                CH: tl.constexpr, PL: tl.constexpr, TILES: tl.constexpr, HINT: tl.constexpr,
                                WEIGHT: tl.constexpr, SUMS: tl.constexpr, DX: tl.constexpr):  # fmt: skip
    """sums (N · across, 2, C): a row for each sample and run of places, Σ dy · x̂ and Σ dy of each channel there."""
    tile = _tile_number(STEP)
    group, channel, at, mask, number = _group_tile(tile, rows, places, tiles, across, PER_GROUP, G, CH, PL)
    here = (group < rows) & (channel < PER_GROUP)
    c = group % GROUPS * PER_GROUP + channel
    mean = tl.load(mean_ptr + group, mask=group < rows, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + group, mask=group < rows, other=0.0)[:, None]
    w = mean
    if WEIGHT:
        w = tl.load(w_ptr + c, mask=here, other=0.0).to(tl.float32)
    if STEP == SUMS_ALONE:
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)
    if STEP == THE_REST:
        _, all_plain, all_with_x = _load_parts(parts_ptr, tile // tiles, tiles, TILES)
        zero = tl.zeros([G * CH], tl.float32)
        plain, with_x = tl.sum(all_plain, 0) + zero, tl.sum(all_with_x, 0) + zero
    else:
        plain, with_x = _backward_sums(dy, x, w, mean, rstd, sums_ptr, group, c, here, number, across, GROUPS, PER_GROUP, G,
                                       CH, WEIGHT, SUMS)  # fmt: skip
    if STEP == SUMS_ALONE:
        if DX:
            _store_parts(parts_ptr, tile, plain, with_x)
    elif DX:
        dx = _input_gradient(dy, x, w, mean, rstd, plain, with_x, PER_GROUP * places, WEIGHT)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class Tiling(NamedTuple):
    """Division of groups of `per_group` channels of `places` into tiles of (groups, channels, places)."""

    shape: tuple[int, int, int]
    across: int  # tiles along the places
    tiles: int  # of a group
    programs: int


def _tiling(rows: int, per_group: int, positions: int, elements: int) -> Tiling:
    """For `rows` groups in all and tiles of at most `elements`, each side a power of two."""
    along = min(power_of_two(positions), elements)
    channels = min(power_of_two(per_group), elements // along)
    across = cdiv(positions, along)
    tiles = cdiv(per_group, channels) * across
    groups = min(power_of_two(rows), elements // (along * channels)) if tiles == 1 else 1
    return Tiling((groups, channels, along), across, tiles, cdiv(rows, groups) * tiles)


def _launch(kernel: Any, way: str, x: Tensor, groups: int, tensors: tuple[Tensor, ...], **constants: Any) -> Tensor:
    """Launch a kernel over the tiles of x: (N · runs of places, 2, C), each run's sums, empty unless SUMS are wanted."""
    samples, channels = x.shape[:2]
    positions, per_group, rows = prod(x.shape[2:]), channels // groups, samples * groups

    def run(plan: TilePlan) -> Tensor:
        cut = _tiling(rows, per_group, positions, plan.elements)
        steps = [at_once] if cut.tiles == 1 else [sums_alone, the_rest] if constants.get("DX", True) else [sums_alone]
        parts = torch.empty(rows if len(steps) == 2 else 0, cut.tiles, 2, device=x.device, dtype=torch.float32)
        runs = samples * cut.across if constants.get("SUMS") else 0
        sums = torch.empty(runs, 2, channels, device=x.device, dtype=torch.float32)
        for step in steps:
            kernel[(cut.programs,)](
                *tensors, *((sums,) if way == "backward" else ()), parts, rows, positions, cut.tiles, cut.across, STEP=step,
                GROUPS=groups, PER_GROUP=per_group, G=cut.shape[0], CH=cut.shape[1], PL=cut.shape[2],
                TILES=power_of_two(cut.tiles) if step == the_rest else 1, HINT=plan.hint, **constants, num_warps=plan.warps,
            )  # fmt: skip
        return sums

    return launch(job_of("group_norm", way, (per_group, positions), x), run)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, groups, weight, bias, eps):
        x = x.contiguous()
        y = torch.empty_like(x)
        mean, rstd = torch.empty(2, x.shape[0] * groups, device=x.device, dtype=torch.float32).unbind(0)
        w, b = (x if t is None else t.contiguous() for t in (weight, bias))
        _launch(
            _group_norm_forward_kernel, "forward", x, groups, (x, w, b, y, mean, rstd),
            eps=eps, WEIGHT=weight is not None, BIAS=bias is not None,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups = groups
        ctx.weight, ctx.bias = weight, bias  # saved ones may come back without their main_grad (torch.utils.checkpoint)
        return y

    @staticmethod
    def backward(ctx, dy):
        first_order_only("group_norm")
        need_dx, _, need_dw, need_db, _ = ctx.needs_input_grad
        need_sums = need_dw or need_db
        x, weight, mean, rstd = ctx.saved_tensors
        w, dx = x if weight is None else weight.contiguous(), torch.empty_like(x) if need_dx else None
        sums = _launch(
            _group_norm_backward_kernel, "backward", x, ctx.groups,
            (dy.contiguous(), x, w, mean, rstd, x if dx is None else dx),
            WEIGHT=weight is not None, SUMS=need_sums, DX=need_dx,
        )  # fmt: skip
        if not need_sums:
            return dx, None, None, None, None
        # Who is frozen or absent has a stand-in, without an accumulator, whose gradient is dropped.
        stand_in = mean.new_empty(sums.shape[-1])
        dw, db = deliver_parts(sums, [ctx.weight if need_dw else stand_in, ctx.bias if need_db else stand_in])
        return dx, None, dw if need_dw else None, db if need_db else None, None


def group_norm(x, groups, weight=None, bias=None, eps=1e-5):
    return _GroupNorm.apply(x, groups, weight, bias, eps)
