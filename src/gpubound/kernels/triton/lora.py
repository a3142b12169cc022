"""Products of a low-rank adapter (kernels/lora.py): three that are bound by memory, and the frozen product with the adapter.

Each of the three reads its tall matrix once: down (x, gives h = x aᵀ), up (y += h bᵀ in place), and both gradients in one
launch, whose programs own columns of x or of g and loop over the rows. If there are too few columns to fill the GPU, several
programs share a sum; the last of them adds up all partial sums in one order, so the bits are the same in every run.

Adapters of several weights that are multiplied as one form one adapter: a has the rows of all, and b is block-diagonal. Its
blocks are consecutive, and no tile spans two of them.

The product is one kernel (`product`). Where neither of its variants is the fastest, cuBLAS computes the product and `up`
adds to it.

Ranks are padded to a power of two, and processed 128 at a time. Legend as in kernels/lora.py.

In the frozen product with an adapter, h bᵀ is added to a tile before it is stored, so y is not read again.

Tiles are loaded by the copy engine of Hopper (TMA, tensor descriptors) or through pointers. The functions that all kernels of
adapters share are here, too: tiles, a dropout whose mask is recomputed, and blocks of columns.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...device import interpreted
from ..lora import Drop, OwnRanks, threshold
from ..plans.types import ProductPlan, cdiv, job_of, power_of_two
from ._launch import in_place, launch

RANKS = 128  # of a tile


@triton.jit
def _hash(i, first, second):
    """kernels/lora.py: _hash"""
    i = i + first
    i = (i ^ (i >> 16)) * 0x21F0AAAD + second
    i = (i ^ (i >> 15)) * 0x735A2D97
    return i ^ (i >> 15)


@triton.jit
def _keys(seed_ptr, site):
    seed = tl.load(seed_ptr)
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = _hash(low, site.to(tl.uint32), 0)
    return first, _hash(high, first, 0)


@triton.jit
def _kept(row, column, columns, first, second, limit):
    """Return which elements of a tile the dropout keeps."""
    i = row.to(tl.uint32)[:, None] * columns + column.to(tl.uint32)[None]
    return (_hash(i, first, second) >> 1).to(tl.int32) >= limit


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """total + a b, the second factor rounded to the dtype of the first."""
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        return tl.dot(a.to(tl.float32), b.to(a.dtype).to(tl.float32), total, input_precision=PRECISION)
    return tl.dot(a, b.to(a.dtype), total, input_precision=PRECISION)


@triton.jit
def _tile(ptr, row, column, rows, columns, along_row, along_column):
    """Elements of a matrix at `row` and `column`, 0 beyond its `rows` and `columns`; the strides lead from one to the next."""
    at = ptr + row.to(tl.int64)[:, None] * along_row + column[None] * along_column
    return tl.load(at, mask=(row < rows)[:, None] & (column < columns)[None], other=0.0)


@triton.jit
def _block(column, middle, last):
    """Return the number of the block, of up to three, that has the column. They begin at 0, `middle` and `last`."""
    return (column >= middle).to(tl.int32) + (column >= last).to(tl.int32)


def _dense(t: Tensor) -> Tensor:
    """A matrix whose rows a kernel can read: neighbours in memory."""
    return t if t.stride(1) == 1 else t.contiguous()


def _masked(drop: Drop | None) -> tuple[Tensor | None, int, int]:
    return (None, 0, 0) if drop is None else (drop.seed, drop.site, threshold(drop.p))


def _upscale(drop: Drop | None) -> float:
    return 1.0 if drop is None else 1 / (1 - drop.p)


def _arithmetic() -> dict[str, Any]:
    return {"PRECISION": _fp32_precision(), "WIDE": interpreted()}


def _fp32_precision() -> str:
    """Return the precision of torch's own fp32 products."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"  # type: ignore[attr-defined]


def _ranks(rank: int) -> int:
    return min(RANKS, max(16, power_of_two(rank)))


def _rows(count: int) -> int:
    """For plans: a step's number of tokens, which differs a little from step to step."""
    return -(-count // 256) * 256


def _edges(blocks: Sequence[int] | None, columns: int) -> tuple[int, int]:
    """Return the first columns of the second and third block: the number of columns if there is none."""
    starts = [0, *accumulate(blocks or ())][1:-1]
    return tuple((*starts, columns, columns)[:2])  # type: ignore[return-value]


def _within(width: int, blocks: Sequence[int] | None) -> int:
    """At most `width` columns, so that no tile of them spans two blocks."""
    while any(size % width for size in (blocks or ())[:-1]):
        width //= 2
    return width


# Of the product by descriptors, at most: three tiles in flight and 128 x 256 sums take 229,416 of Hopper's 232,448 bytes then,
# and 344,064 for 130.
PRODUCT_RANKS = 64
# Ranks up to which the product takes an fp32 b unrounded. Tiles of 64 do not fit with three tiles in flight: the compiler asks
# for 262,184 bytes then.
FP32_RANKS = 32
TILES = 16, 32, 64  # ranks of an adapter that a tile can take alone
LOWEST = 64  # rows of a tile that lies within a row of the batch, if it is to be worth while
NARROWEST = 64  # columns of a product's tile, if it is to be faster than cuBLAS and another pass
GROUP = 8  # rows of tiles that programs take together, so that what they read stays in the L2
# Multiplications from which cuBLAS and another pass over y are faster than the product's pointer form. H200, bf16: 2048 x 768 x
# 768 8.3 us against 6.5 + 3.5, 8192 x 4096 x 4096 557 against 349 + 38.
POINTERS = 2 * 10**10


@triton.jit
def _lora_product_kernel(x, weight, bias_ptr, h, b, y, ids_ptr, tokens, along, N, O, K, R, middle, last, sx, swo, swk, sh,
                         sbo, sbr, sy,
                         DESCRIBED: tl.constexpr, RANKS_DESCRIBED: tl.constexpr, WEIGHT_ALONG: tl.constexpr,
                         B_ALONG: tl.constexpr, COUNT: tl.constexpr, APART: tl.constexpr,
                         BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
                         DEPTH: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
                         PRECISION: tl.constexpr, WIDE: tl.constexpr, FLAT: tl.constexpr):  # fmt: skip
    """DESCRIBED: x, weight and y are tensor descriptors; RANKS_DESCRIBED: h and b are. The ALONG ones have their rows in memory
    as they are named, (O, K) and (O, R); else columns are rows there. COUNT tiles of ranks, APART from one to the next.

    ids_ptr: of the batch's rows, of `tokens` rows of x each, `along` from one to the next; a tile lies within one of them, and
    takes the ranks of its adapter alone. None: it takes all.

    FLAT: a program takes several tiles, and loads ahead across them.
    """
    tall, across = tl.cdiv(N, BLOCK), tl.cdiv(O, COLUMNS)
    for tile in tl.range(tl.program_id(0), tall * across, tl.num_programs(0), flatten=FLAT):
        band = tile // (GROUP * across)
        height = min(tall - band * GROUP, GROUP)
        top = (band * GROUP + tile % (GROUP * across) % height) * BLOCK
        left = tile % (GROUP * across) // height * COLUMNS
        row, column = top + tl.arange(0, BLOCK), left + tl.arange(0, COLUMNS)
        of_block = _block(left, middle, last) * R
        total = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for start in range(0, K, DEPTH):
            if DESCRIBED:
                xt = x.load([top, start])
                wt = weight.load([left, start]).T if WEIGHT_ALONG else weight.load([start, left])
            else:
                k = start + tl.arange(0, DEPTH)
                xt, wt = _tile(x, row, k, N, K, sx, 1), _tile(weight, k, column, K, O, swk, swo)
            total = _dot(xt, wt, total, PRECISION, WIDE)
        own = 0
        if ids_ptr is not None:
            own = tl.load(ids_ptr + top // tokens * along).to(tl.int32)
            own = tl.where((own >= 0) & (own < APART // RANKS), own, 0) * RANKS  # h is zero where a row has no adapter
        for i in tl.static_range(COUNT):
            begin = own + i * APART
            if RANKS_DESCRIBED:
                ht = h.load([top, of_block + begin])
                bt = b.load([left, begin]).T if B_ALONG else b.load([begin, left])
            else:
                rank = begin + tl.arange(0, RANKS)
                ht, bt = _tile(h + of_block, row, rank, N, R, sh, 1), _tile(b, rank, column, R, O, sbr, sbo)
            total = _dot(ht, bt, total, PRECISION, WIDE)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + column, mask=column < O, other=0.0).to(tl.float32)[None]
        if not DESCRIBED:
            at = y + row.to(tl.int64)[:, None] * sy + column[None]
            tl.store(at, total.to(y.dtype.element_ty), mask=(row < N)[:, None] & (column < O)[None])
        elif PARTS == 2:
            near, far = tl.split(tl.permute(tl.reshape(total, (BLOCK, 2, COLUMNS // 2)), (0, 2, 1)))
            y.store([top, left], near.to(y.dtype))
            y.store([top, left + COLUMNS // 2], far.to(y.dtype))
        else:
            y.store([top, left], total.to(y.dtype))


def _described(t: Tensor) -> bool:
    """Return whether a tensor descriptor takes this matrix: dense rows, everything at multiples of 16 bytes."""
    apart = t.stride(0) >= t.shape[1] and t.stride(0) * t.element_size() % 16 == 0
    return t.stride(1) == 1 and apart and t.data_ptr() % 16 == 0


def _along(t: Tensor) -> bool:
    return t.stride(1) == 1


def _in_memory(t: Tensor) -> Tensor:
    """The matrix, or its transpose where that has dense rows."""
    return t if _along(t) else t.t()


def _way(x: Tensor, weight: Tensor, rank: int, drop: Drop | None, blocks: Sequence[int] | None = None) -> str | None:
    """The kernel's form for these: "described", "pointers", or None, and cuBLAS makes the product.

    With dropout the kernel would hold a second tile of sums. fp32 has no tensor cores but by rounding to tf32. Descriptors are
    for Hopper: compiled for 10.0, Triton 3.9 ends in "PassManager::run failed".
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    too_narrow = _within(NARROWEST, blocks) < NARROWEST
    if drop is not None or too_narrow or (x.dtype == torch.float32 and not interpreted()):
        return None
    if (
        job_of("lora", "", (), x).chip.capability == 90
        and rank <= PRODUCT_RANKS
        and _described(x)
        and _described(_in_memory(weight))
        and outputs % 8 == 0
    ):
        return "described"
    return "pointers" if rows * inputs * outputs < POINTERS else None


def _fit(rows: OwnRanks | None, tokens: int) -> OwnRanks | None:
    """`rows` if a tile of the product can keep to the ranks of one adapter."""
    return rows if rows is not None and rows.ranks in TILES and tokens // len(rows.ids) % LOWEST == 0 else None


def _tile_rank(rank: int, own: OwnRanks | None) -> int:
    """Ranks that a tile takes."""
    return rank if own is None else rank // own.adapters


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, described: bool,
    blocks: Sequence[int] | None = None, own: OwnRanks | None = None,
) -> Tensor:  # fmt: skip
    """`own` is what `_fit` gives."""
    (rows, inputs), outputs, rank = x.shape, weight.shape[0], b.shape[1]
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
    along, b_along, ranks = _along(weight), _along(b), min(PRODUCT_RANKS, _ranks(_tile_rank(rank, own)))
    # A tile that the copy engine takes begins at a multiple of 16 bytes, that of a block of h at rank: else the GPU stops with
    # "an illegal instruction".
    even = not blocks or rank * h.element_size() % 16 == 0
    ranks_described = described and even and _described(h) and _described(_in_memory(b))
    job = job_of("lora", "described" if described else "pointers", (_rows(rows), outputs, ranks), x)

    def run(plan: ProductPlan) -> None:
        if (width := _within(plan.columns, blocks)) < plan.columns:
            plan = plan._replace(columns=width, parts=1)
        tile, apart = ranks, ranks
        routed: tuple = None, 1, 1
        if own is not None:
            tokens, tile, apart = rows // len(own.ids), own.ranks, own.ranks * own.adapters
            plan, routed = plan._replace(rows=math.gcd(plan.rows, tokens)), (own.ids, tokens, own.ids.stride(0))
        tiles = cdiv(rows, plan.rows) * cdiv(outputs, plan.columns)
        flat = described and tiles > job.chip.sms
        args: tuple = (x, weight, bias, h, b, y)
        if described:
            tall, across, deep = plan.rows, plan.columns, plan.depth
            of = TensorDescriptor.from_tensor
            args = (
                of(x, [tall, deep]), of(_in_memory(weight), [across, deep] if along else [deep, across]), bias, h, b,
                of(y, [tall, across // plan.parts]),
            )  # fmt: skip
            if ranks_described:
                theirs = of(h, [tall, tile]), of(_in_memory(b), [across, tile] if b_along else [tile, across])
                args = (*args[:3], *theirs, args[5])
        _lora_product_kernel[(min(tiles, job.chip.sms) if described else tiles,)](
            *args, *routed, rows, outputs, inputs, rank, *_edges(blocks, outputs), x.stride(0), *weight.stride(), h.stride(0),
            *b.stride(), y.stride(0), DESCRIBED=described, RANKS_DESCRIBED=ranks_described, WEIGHT_ALONG=along,
            B_ALONG=b_along, COUNT=cdiv(rank, apart), APART=apart, RANKS=tile, BLOCK=plan.rows, COLUMNS=plan.columns,
            DEPTH=plan.depth, PARTS=plan.parts, GROUP=GROUP, FLAT=flat, **_arithmetic(), num_warps=plan.warps,
            num_stages=plan.stages,
        )  # fmt: skip

    launch(job, run)
    return y


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
def lora_down(x, a, scale=1.0, drop=None, out=None, rows=None, blocks=None):
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


@in_place
def lora_up(y, h, b, drop=None, blocks=None):
    h, (rows, columns), rank = _dense(h).to(y.dtype), y.shape, b.shape[1]

    def run(plan: ProductPlan) -> None:
        width = _within(plan.columns, blocks)
        _lora_up_kernel[(cdiv(columns, width), cdiv(rows, plan.rows))](
            y, h, b, *_masked(drop), _upscale(drop), rows, columns, rank, *_edges(blocks, columns), y.stride(0), h.stride(0),
            *b.stride(), BLOCK=plan.rows, COLUMNS=width, RANKS=plan.depth, **_arithmetic(),
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip

    launch(job_of("lora", "up", (_rows(rows), columns, _ranks(rank)), y), run)
    return y


@in_place
def lora_gradients(x, gh, g, h, da, db, drop=None, begins=(True, True), blocks=None, arrivals=None):
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
    return da, db


@torch.no_grad()
def lora_product(x, weight, bias, h, b, drop=None, blocks=None, rows=None):
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
