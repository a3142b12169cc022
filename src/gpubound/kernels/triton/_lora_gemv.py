"""The three products of a low-rank adapter that memory bounds: h = x aᵀ, y + h bᵀ, and the gradients of a and b (lora.py)."""

import triton
import triton.language as tl

from ._lora_tiles import _block, _dot, _kept, _keys, _tile


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
