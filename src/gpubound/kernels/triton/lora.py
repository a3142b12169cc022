"""A low-rank adapter's products (kernels/lora.py): three that memory bounds, and the frozen product with the adapter in it.

Each of the three reads its tall matrix once: down (x, gives h), up (y, changed in place), and both gradients in one launch,
whose programs own columns of x or of g and walk along the rows. Where columns are too few to fill the GPU, some programs share
a sum; the last of them adds up all their parts in one order, so the bits are the same in every run.

Adapters of several weights that are multiplied as one are one adapter: a has the rows of all, and b is block-diagonal. Its
blocks lie one behind the other, and no tile spans two of them.

The four may overlap by programmatic dependent launch: `down` lets its successor in at once. The product multiplies x by weight
meanwhile, and waits for h when it comes to add h bᵀ; `dependent` says that the kernel before it made h.

The product is one kernel. It adds h bᵀ to a tile before it is stored, so y is not read again; its tiles come in by the copy
engine of Hopper (TMA, tensor descriptors) or through pointers. Where neither form is the faster one, cuBLAS makes the
product and `up` adds to it.

Ranks are padded to a power of two, and taken 128 at a time. Legend as in kernels/lora.py.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...device import interpreted
from ..accumulate import bias_gradients, weight_gradient
from ..adapters import adapter_gradients
from ..lora import Drop, threshold
from ..plans import Job, job_of, power_of_two
from ..plans.kinds import ProductPlan
from ..rows import Owners
from ._launch import first_order_only, launch, options
from ._step import _begin, _wait

RANKS = 128  # of a tile
# Of the product by descriptors, at most: three tiles in flight and 128 x 256 sums take 229,416 of Hopper's 232,448 bytes then,
# and 344,064 for 130.
PRODUCT_RANKS = 64
# Ranks up to which the product takes an fp32 b as it is. Tiles of 64 do not fit beside three tiles in flight: the compiler asks
# for 262,184 bytes then.
FP32_RANKS = 32
NARROWEST = 64  # columns of a product's tile, if it is to be faster than cuBLAS and another pass
GROUP = 8  # rows of tiles that programs take together, so that what they read stays in the L2
# Multiplications from which cuBLAS and another pass over y are faster than the product's pointer form. H200, bf16: 2048 x 768 x
# 768 8.3 us against 6.5 + 3.5, 8192 x 4096 x 4096 557 against 349 + 38.
POINTERS = 2 * 10**10


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
    """Which elements of a tile the dropout keeps."""
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
    """Which of up to three blocks a column is in. They begin at 0, `middle` and `last`."""
    return (column >= middle).to(tl.int32) + (column >= last).to(tl.int32)


@triton.jit(do_not_specialize=["site", "limit", "scale", "tokens"])
def _lora_down_kernel(x_ptr, a_ptr, h_ptr, seed_ptr, site, limit, scale, ids_ptr, owner_ptr, scales_ptr, tokens, along, N, K, R,
                      middle, last, sx, sar, sak, sh, EARLY: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
                      DEPTH: tl.constexpr, RANKS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """ids_ptr: of the batch's rows, of `tokens` rows of x each, `along` from one to the next; None: all columns are kept.
    BLOCKS: each program sums over the columns of one of them.
    """
    _begin(EARLY)
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
                           DEPTH: tl.constexpr, RANKS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
                           DEPENDENT: tl.constexpr):  # fmt: skip
    """The first `tiles` programs own columns of g and rows of db, those behind them columns of x and of da.

    SPLITS programs sum `share` rows each. The last of them to come adds up what all have written, in their order.
    """
    _begin(DEPENDENT)
    _wait(DEPENDENT)
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
        at = parts_ptr + mine * SPLITS * BLOCK * RANKS + tl.arange(0, BLOCK)[:, None] * RANKS + tl.arange(0, RANKS)[None]
        tl.store(at + split * BLOCK * RANKS, total)
        tl.debug_barrier()  # every thread's stores before the one thread that counts
        if tl.atomic_add(count_ptr + mine, 1, sem="acq_rel") < SPLITS - 1:
            return
        total = tl.zeros([BLOCK, RANKS], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(at + other * BLOCK * RANKS, cache_modifier=".cg")  # written by other multiprocessors
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


@triton.jit
def _lora_product_kernel(x, weight, bias_ptr, h, b, y, N, O, K, R, middle, last, sx, swo, swk, sh, sbo, sbr, sy,
                         DESCRIBED: tl.constexpr, RANKS_DESCRIBED: tl.constexpr, WEIGHT_ALONG: tl.constexpr,
                         B_ALONG: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
                         DEPTH: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
                         PRECISION: tl.constexpr, WIDE: tl.constexpr, FLAT: tl.constexpr,
                         DEPENDENT: tl.constexpr):  # fmt: skip
    """DESCRIBED: x, weight and y are tensor descriptors; RANKS_DESCRIBED: h and b are. The ALONG ones have their rows in memory
    as they are named, (O, K) and (O, R); else columns are rows there. COUNT tiles of ranks.

    FLAT: a program takes several tiles, and loads ahead across them. It is never DEPENDENT: a wait within such a loop leaves
    the compiler one tile in flight, of three.
    """
    tall, wide = tl.cdiv(N, BLOCK), tl.cdiv(O, COLUMNS)
    for tile in tl.range(tl.program_id(0), tall * wide, tl.num_programs(0), flatten=FLAT):
        band = tile // (GROUP * wide)
        height = min(tall - band * GROUP, GROUP)
        top = (band * GROUP + tile % (GROUP * wide) % height) * BLOCK
        left = tile % (GROUP * wide) // height * COLUMNS
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
        _wait(DEPENDENT)
        for i in tl.static_range(COUNT):
            if RANKS_DESCRIBED:
                ht = h.load([top, of_block + i * RANKS])
                bt = b.load([left, i * RANKS]).T if B_ALONG else b.load([i * RANKS, left])
            else:
                rank = i * RANKS + tl.arange(0, RANKS)
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
    """What torch's own fp32 products are."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"  # type: ignore[attr-defined]


def _early(job: Job) -> int:
    """1 where a kernel may let its successor in before it ends."""
    return int(job.chip.capability >= 90 and not interpreted())


def _ranks(rank: int) -> int:
    return min(RANKS, max(16, power_of_two(rank)))


def _rows(count: int) -> int:
    """For plans: a step's number of tokens, which differs a little from step to step."""
    return -(-count // 256) * 256


def _edges(blocks: Sequence[int] | None, columns: int) -> tuple[int, int]:
    """Where the second and third block begin: beyond all columns where there is none."""
    starts = [0, *accumulate(blocks or ())][1:-1]
    return tuple((*starts, columns, columns)[:2])  # type: ignore[return-value]


def _within(width: int, blocks: Sequence[int] | None) -> int:
    """At most `width` columns, so that no tile of them spans two blocks."""
    while any(size % width for size in (blocks or ())[:-1]):
        width //= 2
    return width


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
        _lora_down_kernel[(triton.cdiv(count, plan.rows), triton.cdiv(rank, plan.columns), of_blocks)](
            x, a, h, *_masked(drop), scale * _upscale(drop), *own, count, columns, rank, *_edges(blocks, columns), x.stride(0),
            *a.stride(), h.stride(0), EARLY=_early(job), BLOCKS=of_blocks, BLOCK=plan.rows,
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
        _lora_up_kernel[(triton.cdiv(columns, width), triton.cdiv(rows, plan.rows))](
            y, h, b, *_masked(drop), _upscale(drop), rows, columns, rank, *_edges(blocks, columns), y.stride(0), h.stride(0),
            *b.stride(), BLOCK=plan.rows, COLUMNS=width, RANKS=plan.depth, **_arithmetic(),
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip

    launch(job_of("lora", "up", (_rows(rows), columns, _ranks(rank)), y), run)
    return y


@torch.no_grad()
def lora_gradients(
    x: Tensor, gh: Tensor, g: Tensor, h: Tensor, da: Tensor | None, db: Tensor | None, drop: Drop | None = None,
    begins: tuple[bool, bool] = (True, True), blocks: Sequence[int] | None = None, arrivals: Tensor | None = None,
    dependent: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    x, gh, g, h = (_dense(t).to(x.dtype) for t in (x, gh, g, h))
    (rows, inputs), outputs, ranks = x.shape, g.shape[1], h.shape[1]
    rank = ranks // len(blocks or (0,))
    given = (0 if da is None else inputs, 0 if db is None else outputs)
    job = job_of("lora", "gradients", (_rows(rows), sum(given), _ranks(ranks)), x)

    def run(plan: ProductPlan) -> None:
        width = _within(plan.rows, blocks)
        of_a, of_b = (triton.cdiv(columns, width) for columns in given)
        grid = of_a + of_b, triton.cdiv(ranks, plan.columns)
        splits = plan.splits if arrivals is not None and grid[0] * grid[1] <= arrivals.numel() else 1
        share = triton.cdiv(triton.cdiv(rows, splits), plan.depth) * plan.depth
        parts = x.new_empty(grid[0] * grid[1] * splits * width * plan.columns, dtype=torch.float32) if splits > 1 else None
        _lora_gradients_kernel[(*grid, splits)](
            x, gh, g, h, da, db, parts, arrivals, *_masked(drop), _upscale(drop), of_b, share, rows, inputs, outputs, ranks,
            rank, *_edges(blocks, outputs), *(t.stride(0) for t in (x, gh, g, h)), *((0, 0) if da is None else da.stride()),
            *((0, 0) if db is None else db.stride()), *map(int, begins), SPLITS=splits, BLOCK=width, DEPTH=plan.depth,
            RANKS=plan.columns, **_arithmetic(), num_stages=plan.stages, **options(plan.warps, dependent * _early(job)),
        )  # fmt: skip

    if any(given):
        launch(job, run)
    return da, db


def _described(t: Tensor) -> bool:
    """Whether a tensor descriptor takes this matrix: dense rows, everything at multiples of 16 bytes."""
    apart = t.stride(0) >= t.shape[1] and t.stride(0) * t.element_size() % 16 == 0
    return t.stride(1) == 1 and apart and t.data_ptr() % 16 == 0


def _along(t: Tensor) -> bool:
    return t.stride(1) == 1


def _in_memory(t: Tensor) -> Tensor:
    """The matrix, or its transpose where that has dense rows."""
    return t if _along(t) else t.t()


@torch.no_grad()
def lora_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, drop: Drop | None = None,
    blocks: Sequence[int] | None = None, dependent: bool = False,
) -> Tensor:  # fmt: skip
    given = x, h, weight, b
    x, h, weight = _dense(x), _dense(h).to(x.dtype), weight.to(x.dtype)
    way = _way(x, weight, b.shape[1], drop, blocks)
    if way is None:
        bias = None if bias is None else bias.to(x.dtype)
        return lora_up(torch.nn.functional.linear(x, weight, bias), h, b, drop, blocks)
    if b.shape[1] > FP32_RANKS:
        b = b.to(x.dtype)
    copied = any(one is not other for one, other in zip((x, h, weight, b), given))  # by the kernel before this one
    return _product(x, weight, bias, h, b, way == "described", blocks, dependent and not copied)


def _way(x: Tensor, weight: Tensor, rank: int, drop: Drop | None, blocks: Sequence[int] | None = None) -> str | None:
    """The kernel's form for these: "described", "pointers", or None, and cuBLAS makes the product.

    With dropout the kernel would hold a second tile of sums. fp32 has no tensor cores but by rounding to tf32. Descriptors are
    for Hopper: compiled for 10.0, Triton 3.9 ends in "PassManager::run failed".
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    narrow = _within(NARROWEST, blocks) < NARROWEST
    if drop is not None or narrow or (x.dtype == torch.float32 and not interpreted()):
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


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, described: bool,
    blocks: Sequence[int] | None = None, dependent: bool = False,
) -> Tensor:  # fmt: skip
    (rows, inputs), outputs, rank = x.shape, weight.shape[0], b.shape[1]
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
    along, b_along, ranks = _along(weight), _along(b), min(PRODUCT_RANKS, _ranks(rank))
    ranks_described = described and _described(h) and _described(_in_memory(b))
    job = job_of("lora", "described" if described else "pointers", (_rows(rows), outputs, ranks), x)

    def run(plan: ProductPlan) -> None:
        if (width := _within(plan.columns, blocks)) < plan.columns:
            plan = plan._replace(columns=width, parts=1)
        tiles = triton.cdiv(rows, plan.rows) * triton.cdiv(outputs, plan.columns)
        flat = described and tiles > job.chip.sms
        given: tuple = (x, weight, bias, h, b, y)
        if described:
            tall, wide, deep = plan.rows, plan.columns, plan.depth
            of = TensorDescriptor.from_tensor
            given = (
                of(x, [tall, deep]), of(_in_memory(weight), [wide, deep] if along else [deep, wide]), bias, h, b,
                of(y, [tall, wide // plan.parts]),
            )  # fmt: skip
            if ranks_described:
                theirs = of(h, [tall, ranks]), of(_in_memory(b), [wide, ranks] if b_along else [ranks, wide])
                given = (*given[:3], *theirs, given[5])
        _lora_product_kernel[(min(tiles, job.chip.sms) if described else tiles,)](
            *given, rows, outputs, inputs, rank, *_edges(blocks, outputs), x.stride(0), *weight.stride(), h.stride(0),
            *b.stride(), y.stride(0), DESCRIBED=described, RANKS_DESCRIBED=ranks_described, WEIGHT_ALONG=along,
            B_ALONG=b_along, COUNT=triton.cdiv(rank, ranks), BLOCK=plan.rows, COLUMNS=plan.columns, DEPTH=plan.depth,
            RANKS=ranks, PARTS=plan.parts, GROUP=GROUP, FLAT=flat, **_arithmetic(), num_stages=plan.stages,
            **options(plan.warps, dependent * (not flat) * _early(job)),
        )  # fmt: skip

    launch(job, run)
    return y


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale, drop):
        rows = _dense(x.reshape(-1, x.shape[-1]))
        h = lora_down(rows, a, scale, drop)
        ctx.save_for_backward(rows, h, weight, a, b)  # for backward to see that nobody has changed the last three
        ctx.owners, ctx.scale, ctx.drop, ctx.shape = (weight, bias, a, b), scale, drop, x.shape
        return lora_product(rows, weight, bias, h, b, dependent=True).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, g):
        first_order_only("lora_linear")
        x, h, weight, a, b = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *wanted, _, _ = ctx.needs_input_grad
        g = _dense(g.reshape(-1, g.shape[-1]))
        gh = lora_down(g, b.t(), ctx.scale) if wants_x or wanted[0] else h
        w, down = weight, a
        weight, bias, a, b = ctx.owners  # with their accumulators
        # Before dx, whose product runs beside this: it needs no h until its end.
        ours = adapter_gradients([a], [b], x, gh, g, h, ctx.drop, wanted, dependent=True)
        dx = lora_product(g, w.t(), None, gh, down.t(), ctx.drop, None, True).view(ctx.shape) if wants_x else None
        dw = weight_gradient(weight, g, x) if wants_weight else None
        (db,) = bias_gradients([bias], [wants_bias], g) if bias is not None else (None,)
        return dx, dw, db, *ours, None, None


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, drop: Drop | None = None
) -> Tensor:
    return _LoraLinear.apply(x, weight, bias, a, b, scale, drop)
