"""Products of a low-rank adapter (kernels/lora.py): three that are bound by memory, and the frozen product with the adapter.

Each of the three reads its tall matrix once: down (x, gives h = x aᵀ), up (y += h bᵀ in place), and both gradients in one
launch, whose programs own columns of x or of g and loop over the rows. If there are too few columns to fill the GPU, several
programs share a sum; the last of them adds up all partial sums in one order, so the bits are the same in every run.

Adapters of several weights that are multiplied as one form one adapter: a has the rows of all, and b is block-diagonal. Its
blocks are consecutive, and no tile spans two of them.

The product is one kernel (_lora_product.py). Where neither of its variants is the fastest, cuBLAS computes the product and `up`
adds to it.

Ranks are padded to a power of two, and processed 128 at a time. Legend as in kernels/lora.py.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lora_arguments import Drop, Owners, OwnRanks
from ..plans import cdiv, job_of, power_of_two
from ..plans.types import ProductPlan
from ._launch import bump_versions, launch
from ._lora_product import (
    FP32_RANKS,
    _arithmetic,
    _block,
    _dense,
    _dot,
    _edges,
    _fit,
    _kept,
    _keys,
    _masked,
    _product,
    _ranks,
    _rows,
    _tile,
    _tile_rank,
    _upscale,
    _way,
    _within,
)


@triton.jit(do_not_specialize=["site", "limit", "scale", "tokens"])
def _lora_down_kernel(x_ptr, a_ptr, h_ptr, seed_ptr, site, limit, scale, ids_ptr, owner_ptr, scales_ptr, tokens,
                      along, N, K, R, middle, last, sx, sar, sak, sh, BLOCKS: tl.constexpr,
                      BLOCK: tl.constexpr, DEPTH: tl.constexpr, RANKS: tl.constexpr,
                      PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """ids_ptr: of the batch's rows, of `tokens` rows of x each, `along` from one to the next; None: all columns are kept.
    BLOCKS: each program sums over the columns of one of them.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    begin, end, of_block = 0, K, 0
    if BLOCKS > 1:
        block = tl.program_id(2)
        begin = tl.multiple_of(tl.where(block == 0, 0, tl.where(block == 1, middle, last)), 16)
        end = tl.multiple_of(tl.where(block == 0, middle, tl.where(block == 1, last, K)), 16)
        of_block = block * R
    if seed_ptr is not None:
        first, second = _keys(seed_ptr, site)
    total = tl.zeros([BLOCK, RANKS], tl.float32)
    for start in range(begin, end, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = _tile(x_ptr, row, k, N, end, sx, 1)
        if seed_ptr is not None:
            x = tl.where(_kept(row, k, K, first, second, limit), x, 0.0)
        total = _dot(x, _tile(a_ptr, k, rank, end, R, sak, sar), total, PRECISION, WIDE)
    if ids_ptr is not None:
        own = tl.load(ids_ptr + row // tokens * along, mask=row < N, other=-1)
        owner = tl.load(owner_ptr + of_block + rank, mask=rank < R, other=-1)
        factor = tl.load(scales_ptr + of_block + rank, mask=rank < R, other=0.0)
        total = tl.where(own[:, None] == owner[None], total * factor[None], 0.0)
    at = h_ptr + row.to(tl.int64)[:, None] * sh + (of_block + rank)[None]
    tl.store(at, (total * scale).to(h_ptr.dtype.element_ty), mask=(row < N)[:, None] & (rank < R)[None])


@triton.jit(do_not_specialize=["site", "limit", "scale"])
def _lora_up_kernel(y_ptr, h_ptr, b_ptr, seed_ptr, site, limit, scale, N, O, R, middle, last, sy, sh, sbo, sbr,
                    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, PRECISION: tl.constexpr,
                    WIDE: tl.constexpr):  # fmt: skip
    left = tl.program_id(0) * COLUMNS
    h_ptr += _block(left, middle, last) * R
    column = left + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < N)[:, None] & (column < O)[None]
    at = y_ptr + row.to(tl.int64)[:, None] * sy + column[None]
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for start in range(0, R, RANKS):
        rank = start + tl.arange(0, RANKS)
        total = _dot(_tile(h_ptr, row, rank, N, R, sh, 1), _tile(b_ptr, rank, column, R, O, sbr, sbo), total, PRECISION, WIDE)
    if seed_ptr is not None:
        first, second = _keys(seed_ptr, site)
        total = tl.where(_kept(row, column, O, first, second, limit), total * scale, 0.0)
    tl.store(at, (y + total).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["site", "limit", "scale", "tiles", "share", "a_begins", "b_begins"])
def _lora_gradients_kernel(x_ptr, gh_ptr, g_ptr, h_ptr, da_ptr, db_ptr, parts_ptr, count_ptr, seed_ptr, site, limit, scale,
                           tiles, share, N, K, O, RA, RB, middle, last, sx, sgh, sg, sh, sar, sak, sbo, sbr,
                           a_begins, b_begins, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
                           DEPTH: tl.constexpr, RANKS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The first `tiles` programs own columns of g and rows of db, the others columns of x and of da.

    SPLITS programs sum `share` rows each. The last of them to come adds up what all have written, in their order.
    """
    tile, split = tl.program_id(0), tl.program_id(2)
    of_b = tile < tiles
    tall, small = g_ptr if of_b else x_ptr, h_ptr if of_b else gh_ptr
    columns, R = O if of_b else K, RB if of_b else RA
    along_tall, along_small = sg if of_b else sx, sh if of_b else sgh
    left = (tile if of_b else tile - tiles) * BLOCK
    small += tl.where(of_b, _block(left, middle, last) * RB, 0)
    column = left + tl.arange(0, BLOCK)
    if tl.program_id(1) * RANKS >= R:
        return
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    if seed_ptr is not None:
        first, second = _keys(seed_ptr, site)
    total = tl.zeros([BLOCK, RANKS], tl.float32)
    for start in range(split * share, min(N, (split + 1) * share), DEPTH):
        row = start + tl.arange(0, DEPTH)
        t = _tile(tall, row, column, N, columns, along_tall, 1)
        if seed_ptr is not None:
            t = tl.where(of_b | _kept(row, column, K, first, second, limit), t, 0.0)
        total = _dot(tl.trans(t), _tile(small, row, rank, N, R, along_small, 1), total, PRECISION, WIDE)
    mine = tile * tl.num_programs(1) + tl.program_id(1)
    if SPLITS > 1:
        part = parts_ptr + mine * SPLITS * BLOCK * RANKS + tl.arange(0, BLOCK)[:, None] * RANKS + tl.arange(0, RANKS)[None]
        tl.store(part + split * BLOCK * RANKS, total)
        tl.debug_barrier()  # every thread's stores before the one thread that counts
        if tl.atomic_add(count_ptr + mine, 1, sem="acq_rel") < SPLITS - 1:
            return
        total = tl.zeros([BLOCK, RANKS], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(part + other * BLOCK * RANKS, cache_modifier=".cg")  # written by other multiprocessors
        tl.store(count_ptr + mine, 0)
    mask = (column < columns)[:, None] & (rank < R)[None]
    if of_b:
        if db_ptr is not None:
            at = db_ptr + column[:, None] * sbo + rank[None] * sbr
            if b_begins == 0:
                total += tl.load(at, mask=mask, other=0.0)
            tl.store(at, total.to(db_ptr.dtype.element_ty), mask=mask)
    else:
        if da_ptr is not None:
            at = da_ptr + column[:, None] * sak + rank[None] * sar
            total *= scale
            if a_begins == 0:
                total += tl.load(at, mask=mask, other=0.0)
            tl.store(at, total.to(da_ptr.dtype.element_ty), mask=mask)


@torch.no_grad()
def lora_down(
    x: Tensor, a: Tensor, scale: float = 1.0, drop: Drop | None = None, out: Tensor | None = None,
    rows: Owners | None = None, blocks: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    x, (count, columns), rank, of_blocks = _dense(x), x.shape, a.shape[0], len(blocks or (0,))
    h = torch.empty(count, of_blocks * rank, device=x.device, dtype=x.dtype) if out is None else out
    job = job_of("lora", "down", (_rows(count), columns, _ranks(rank)), x)
    own = (None, None, None, 1, 1) if rows is None else (*rows, max(count // max(len(rows.ids), 1), 1), rows.ids.stride(0))

    def run(plan: ProductPlan) -> None:
        _lora_down_kernel[(cdiv(count, plan.rows), cdiv(rank, plan.columns), of_blocks)](
            x, a, h, *_masked(drop), scale * _upscale(drop), *own, count, columns, rank, *_edges(blocks, columns),
            x.stride(0), *a.stride(), h.stride(0), BLOCKS=of_blocks, BLOCK=plan.rows,
            DEPTH=min(plan.depth, max(16, power_of_two(columns))), RANKS=plan.columns, **_arithmetic(), num_warps=plan.warps,
            num_stages=plan.stages,
        )  # fmt: skip

    launch(job, run)
    return h


@torch.no_grad()
def lora_up(y: Tensor, h: Tensor, b: Tensor, drop: Drop | None = None, blocks: Sequence[int] | None = None) -> Tensor:
    h, (rows, columns), rank = _dense(h).to(y.dtype), y.shape, b.shape[1]

    def run(plan: ProductPlan) -> None:
        width = _within(plan.columns, blocks)
        _lora_up_kernel[(cdiv(columns, width), cdiv(rows, plan.rows))](
            y, h, b, *_masked(drop), _upscale(drop), rows, columns, rank, *_edges(blocks, columns), y.stride(0), h.stride(0),
            *b.stride(), BLOCK=plan.rows, COLUMNS=width, RANKS=plan.depth, **_arithmetic(),
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip

    launch(job_of("lora", "up", (_rows(rows), columns, _ranks(rank)), y), run)
    bump_versions(y)
    return y


@torch.no_grad()
def lora_gradients(
    x: Tensor, gh: Tensor, g: Tensor, h: Tensor, da: Tensor | None, db: Tensor | None, drop: Drop | None = None,
    begins: tuple[bool, bool] = (True, True), blocks: Sequence[int] | None = None, arrivals: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    x, gh, g, h = (_dense(t).to(x.dtype) for t in (x, gh, g, h))
    (rows, inputs), outputs, ranks = x.shape, g.shape[1], h.shape[1]
    rank = ranks // len(blocks or (0,))
    args = (0 if da is None else inputs, 0 if db is None else outputs)
    job = job_of("lora", "gradients", (_rows(rows), sum(args), _ranks(ranks)), x)

    def run(plan: ProductPlan) -> None:
        width = _within(plan.rows, blocks)
        of_a, of_b = (cdiv(columns, width) for columns in args)
        grid = of_a + of_b, cdiv(ranks, plan.columns)
        splits = plan.splits if arrivals is not None and grid[0] * grid[1] <= arrivals.numel() else 1
        share = cdiv(cdiv(rows, splits), plan.depth) * plan.depth
        parts = x.new_empty(grid[0] * grid[1] * splits * width * plan.columns, dtype=torch.float32) if splits > 1 else None
        _lora_gradients_kernel[(*grid, splits)](
            x, gh, g, h, da, db, parts, arrivals, *_masked(drop), _upscale(drop), of_b, share, rows, inputs, outputs, ranks,
            rank, *_edges(blocks, outputs), *(t.stride(0) for t in (x, gh, g, h)), *((0, 0) if da is None else da.stride()),
            *((0, 0) if db is None else db.stride()), *map(int, begins), SPLITS=splits, BLOCK=width, DEPTH=plan.depth,
            RANKS=plan.columns, **_arithmetic(), num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip

    if any(args):
        launch(job, run)
    bump_versions(da, db)
    return da, db


@torch.no_grad()
def lora_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, drop: Drop | None = None,
    blocks: Sequence[int] | None = None, rows: OwnRanks | None = None,
) -> Tensor:  # fmt: skip
    x, h, weight = _dense(x), _dense(h).to(x.dtype), weight.to(x.dtype)
    bias = None if bias is None else bias.contiguous()
    own = _fit(rows, x.shape[0])
    tile_rank = _tile_rank(b.shape[1], own)
    way = _way(x, weight, tile_rank, drop, blocks)
    if way is None:
        bias = None if bias is None else bias.to(x.dtype)
        return lora_up(torch.nn.functional.linear(x, weight, bias), h, b, drop, blocks)
    if tile_rank > FP32_RANKS:
        b = b.to(x.dtype)
    return _product(x, weight, bias, h, b, way == "described", blocks, own)
