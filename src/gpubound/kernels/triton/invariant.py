"""Batch-invariant products and attention (kernels/invariant.py): one order of sums for every number of rows.

Each result of a product is a sum over K in one accumulator of a program, which reads weights once for up to 64 rows: a decoding
step of few rows stays bound by memory. Tiles by pointers have one size; those by descriptors several, which were measured to
have equal bits.

A program of attention has as many tokens of a sequence as fill a tile together with the query heads of one key head, in a step
one token. It reads keys from the sequence's first on, in blocks. A block of which a row sees nothing leaves the row's bits: its
maximum stays, and it adds zeros.

Rows that begin with the same blocks read them in one program: their queries are lines of one tile, of which a step of one row
uses two to eight. What the sums were after these blocks is kept in fp32, and a row's own program goes on from it: the same
operations in the same order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...device import Chip, interpreted
from ..invariant import BLOCK, MEMBERS
from ..plans.types import SPARE, cdiv, job_of, power_of_two

# Of a tile of attention: those of one product of a warp group of Hopper's. In fp32, without tensor cores, the compiler writes
# out all multiplications of a tile: 64 rows of 128 took it 44 s.
ROWS = {2: 64, 4: 16}
GROUP = 8  # rows of tiles that programs take together, so that what they read stays in the L2
LOG2_E = 1.4426950408889634


@triton.jit
def _dot(a, b, total, WIDE: tl.constexpr):
    """total + a b."""
    if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["N"])
def _invariant_linear_kernel(x, weight, bias_ptr, y, N, O, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                             GROUP: tl.constexpr, DESCRIBED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
                             WIDE: tl.constexpr):  # fmt: skip
    """DESCRIBED: x, weight and y are tensor descriptors. EVEN: DEPTH divides K. FLAT: a program takes several tiles, and loads
    ahead across them."""
    down, across = tl.cdiv(N, ROWS), tl.cdiv(O, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLAT):
        band = tile // (GROUP * across)
        height = min(down - band * GROUP, GROUP)
        top = (band * GROUP + tile % (GROUP * across) % height) * ROWS
        left = tile % (GROUP * across) // height * COLUMNS
        row, column = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, K, DEPTH):
            if DESCRIBED:
                x_tile, w_tile = x.load([top, start]), weight.load([left, start]).T
            else:
                k = start + tl.arange(0, DEPTH)
                x_mask, w_mask = (row < N)[:, None], (column < O)[None]
                if not EVEN:
                    x_mask, w_mask = x_mask & (k < K)[None], w_mask & (k < K)[:, None]
                x_tile = tl.load(x + row.to(tl.int64)[:, None] * K + k[None], mask=x_mask, other=0.0)
                w_tile = tl.load(weight + column.to(tl.int64)[None] * K + k[:, None], mask=w_mask, other=0.0)
            total = _dot(x_tile, w_tile, total, WIDE)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + column, mask=column < O, other=0.0).to(tl.float32)[None]
        if DESCRIBED:
            y.store([top, left], total.to(y.dtype))
        else:
            at = y + row.to(tl.int64)[:, None] * O + column[None]
            tl.store(at, total.to(y.dtype.element_ty), mask=(row < N)[:, None] & (column < O)[None])


@triton.jit(do_not_specialize=["tokens", "stored", "length"])
def _invariant_attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sequence_ptr, first_ptr, bounds_ptr, position_ptr,
                                blocks_ptr, rows_ptr, shared_ptr, state_ptr, scale, k_block, k_head, v_block, v_head, tokens,
                                stored, length, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, H: tl.constexpr,
                                D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
                                PAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
                                PART: tl.constexpr, MEMBERS: tl.constexpr):  # fmt: skip
    """Without BLOCKS, sequences follow each other, and program i has the tokens of sequence_ptr[i] from first_ptr[i] on. With
    BLOCKS, a sequence has `tokens` tokens, and its keys are in that many blocks of a cache, which are PAGES or one row of
    `length` positions. The cache has `stored` blocks; a sequence with others, or with positions that are in none, gets NaN.

    PART: 1, a program has the blocks that up to MEMBERS rows share, of `tokens` rows of one token, and leaves their sums in
    state_ptr; 2, a row goes on from there; 0, it begins with its first key."""
    EACH: tl.constexpr = ROWS // GROUP
    kv = tl.program_id(1)
    line, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, head = line // GROUP, kv * GROUP + line % GROUP
    begin_key = 0
    if BLOCKS == 0:
        sequence, first = tl.load(sequence_ptr + tl.program_id(0)), tl.load(first_ptr + tl.program_id(0))
        begin = tl.minimum(tl.maximum(tl.load(bounds_ptr + sequence), 0), tokens)
        limit = tl.minimum(tl.load(bounds_ptr + sequence + 1), tokens) - begin  # keys of the sequence
        first = tl.maximum(first, 0)
        count, begin_token = tl.minimum(limit - first, EACH), begin + first
        end = first + count
    elif PART == 1:
        tiles = tl.cdiv(MEMBERS, EACH)
        rows_ptr += tl.program_id(0) // tiles * MEMBERS
        offset = tl.program_id(0) % tiles * EACH
        query = tl.load(rows_ptr + offset + token, mask=token < tl.minimum(MEMBERS - offset, EACH), other=-1)
        here, first = (query >= 0) & (query < tokens), 0
        furthest = tl.load(position_ptr + query, mask=here, other=-1)
        sequence = tl.max(tl.where(here & (furthest == tl.max(furthest, 0)), query, -1), 0)
        count, sequence = tl.where(sequence >= 0, 1, 0), tl.maximum(sequence, 0)
        end = tl.minimum(tl.load(shared_ptr + sequence) // BLOCK, BLOCKS) * BLOCK
        limit = end
    else:
        tiles = tl.cdiv(tokens, EACH)
        sequence, offset = tl.program_id(0) // tiles, tl.program_id(0) % tiles * EACH
        first = tl.load(position_ptr + sequence) + offset
        count, begin_token = tl.minimum(tokens - offset, EACH), sequence * tokens + offset
        limit = first + count
        end = tl.where((first >= 0) & (limit <= (BLOCKS * BLOCK if PAGES else length)), limit, 0)
    if count > 0:
        if PART == 1:
            position = tl.zeros([ROWS], tl.int32) + end
        else:
            here, query = token < count, begin_token + token
            position = first + tl.minimum(token, count - 1)
        q_at = (query.to(tl.int64) * H + head)[:, None] * D + d[None]
        q = tl.load(q_ptr + q_at, mask=here[:, None] & (d < D)[None], other=0.0)
        top, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        y = tl.zeros([ROWS, WIDTH], tl.float32)
        if PART > 0:
            state_at = state_ptr + (query.to(tl.int64) * H + head) * (D + 2)
        if PART == 2:
            begin_key = tl.minimum(tl.load(shared_ptr + sequence) // BLOCK, BLOCKS) * BLOCK
            begin_key = tl.where((begin_key > 0) & (begin_key < end), begin_key, 0)
            begun = token < tl.where(begin_key > 0, count, 0)
            top = tl.load(state_at + D, mask=begun, other=-float("inf"))
            total = tl.load(state_at + D + 1, mask=begun, other=0.0)
            y = tl.load(state_at[:, None] + d[None], mask=begun[:, None] & (d < D)[None], other=0.0)
        missing = tl.where(end == 0, 1, 0)
        if BLOCKS > 0:  # a block's number is asked for a block ahead: keys are asked for when it is there
            blocks_ptr += sequence * BLOCKS
            upcoming = tl.load(blocks_ptr + tl.minimum(begin_key // BLOCK, BLOCKS - 1) if PAGES else blocks_ptr)
        for start in range(begin_key, end, BLOCK):
            key = start + tl.arange(0, BLOCK)
            valid = key < limit
            if BLOCKS == 0:
                at = (begin + key).to(tl.int64)
                k_page, v_page, k_at, v_at = k_ptr, v_ptr, at * K_TOKEN, at * V_TOKEN
            else:
                block = upcoming.to(tl.int64)
                if PAGES:
                    upcoming = tl.load(blocks_ptr + tl.minimum(start // BLOCK + 1, BLOCKS - 1))
                at = key - start if PAGES else key
                k_page, v_page = k_ptr + block * k_block, v_ptr + block * v_block
                k_at, v_at = at * K_TOKEN, at * V_TOKEN
                known = tl.where((block >= 0) & (block < stored), limit, 0)
                valid = key < known
                missing = tl.where(known == 0, 1, missing)
            k = tl.load(k_page + kv * k_head + k_at[None] + d[:, None], mask=valid[None] & (d < D)[:, None], other=0.0)
            scores = _dot(q, k, tl.zeros([ROWS, BLOCK], tl.float32), WIDE) * scale
            scores = tl.where(key[None] <= position[:, None], scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            keep, weights = tl.exp2(top - higher), tl.exp2(scores - higher[:, None])
            total = total * keep + tl.sum(weights, 1)
            v = tl.load(v_page + kv * v_head + v_at[:, None] + d[None], mask=valid[:, None] & (d < D)[None], other=0.0)
            y = _dot(weights.to(v.dtype), v, y * keep[:, None], WIDE)
            top = higher
        if PART == 1:
            tl.store(state_at[:, None] + d[None], tl.where(missing > 0, float("nan"), y), mask=here[:, None] & (d < D)[None])
            tl.store(state_at + D, top, mask=here)
            tl.store(state_at + D + 1, total, mask=here)
        else:
            y = tl.where(missing > 0, float("nan"), y / tl.where(total > 0, total, 1.0)[:, None])
            tl.store(out_ptr + q_at, y.to(out_ptr.dtype.element_ty), mask=here[:, None] & (d < D)[None])
        if lse_ptr is not None:
            at = lse_ptr + head.to(tl.int64) * tokens + begin_token + token
            tl.store(at, (top + tl.log2(total)) * 0.6931471805599453, mask=here)


class LinearTile(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FP32 = LinearTile(64, 64, 32, 4, 3)
POINTERS = LinearTile(64, 64, 64, 4, 4)


def _tile(rows: int, outputs: int, multiprocessors: int) -> LinearTile:
    """Return the tile of a product in 16 bits by descriptors.

    All have the same bits: each result is one sum over K, in steps of 16, in one accumulator, whatever the tile (H200,
    8 to 16,384 rows; equal to cuBLAS, too, where that does not split the sum).

    H200, us by rows x outputs x inputs, cuBLAS in brackets: 16384 x 6144 x 1024 281 (272), 16384 x 1024 x 3072 133 (132), 4096
    x 151936 x 1024 1,753 (1,670); 256 x 4096 x 1024 7.1 (6.4), 256 x 6144 x 1024 12 (7.9), 256 x 1024 x 2048 7.9 (6.7), 256 x
    1024 x 3072 10.3 (8.5).
    """
    if cdiv(rows, 128) * cdiv(outputs, 256) >= multiprocessors:
        return LinearTile(128, 256, 64, 8, 3)
    return LinearTile(64, 128, 64, 4, 5) if outputs >= 4096 else LinearTile(64, 64, 128, 4, 4)


def _described(*tensors: Tensor) -> bool:
    """Return whether tensor descriptors take these matrices: in 16 bits, all rows at multiples of 16 bytes, on Hopper."""
    return _chip(tensors[0]).capability == 90 and all(
        t.element_size() == 2 and t.shape[1] % 8 == 0 and t.data_ptr() % 16 == 0 for t in tensors
    )


def _chip(x: Tensor) -> Chip:
    return job_of("invariant_linear", "", (), x).chip


@torch.no_grad()
def invariant_linear(x, weight, bias=None):
    if bias is None and _equal_to_torch(x, weight):
        return F.linear(x, weight)
    return _linear(x, weight, bias)


MOST_TRIED = 1 << 28  # results: the trial holds them twice, 1 GB in 16 bits
_equal: dict[tuple[Any, ...], bool] = {}  # whether torch's product has the kernel's bits, by sizes, dtype and device


def _equal_to_torch(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's product (cuBLAS) is known to have the bits of the kernel for these sizes.

    It has where it does not split the sum (H200: of 35 sizes all but few rows of 3,072 inputs), and is faster: 256 rows of a
    0.6b model's layer take 29 us in place of 37. The first call tries it on random numbers, and waits for the device; inside a
    capture the kernel computes sizes that were not tried.
    """
    if not x.is_cuda or not _described(x, weight) or len(x) * len(weight) > MOST_TRIED:
        return False
    key = *x.shape, len(weight), x.dtype, x.device
    if key not in _equal:
        if torch.cuda.is_current_stream_capturing():
            return False
        draws = torch.Generator(x.device).manual_seed(0)
        a, b = (torch.randn(t.shape, generator=draws, device=t.device, dtype=t.dtype) for t in (x, weight))
        _equal[key] = torch.equal(F.linear(a, b), _linear(a, b, None))
    return _equal[key]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (rows, inputs), outputs = x.shape, len(weight)
    y, multiprocessors = torch.empty(rows, outputs, device=x.device, dtype=x.dtype), _chip(x).sms
    described = _described(x, weight, y)
    tile = _tile(rows, outputs, multiprocessors) if described else POINTERS if x.element_size() == 2 else FP32
    tiles = cdiv(rows, tile.rows) * cdiv(outputs, tile.columns)
    flat = described and tiles > multiprocessors
    operands: tuple[Any, ...] = x, weight, bias, y
    if described:
        of = TensorDescriptor.from_tensor
        blocks = [tile.rows, tile.depth], [tile.columns, tile.depth], [tile.rows, tile.columns]
        operands = of(x, blocks[0]), of(weight, blocks[1]), bias, of(y, blocks[2])
    _invariant_linear_kernel[(min(tiles, multiprocessors) if flat else tiles,)](
        *operands, rows, outputs, inputs, tile.rows, tile.columns, tile.depth, GROUP, described,
        inputs % tile.depth == 0, flat, interpreted(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


@torch.no_grad()
def invariant_attention(q, k, v, bounds, scale):
    tokens, heads, _ = q.shape
    out, lse = torch.empty_like(q), torch.empty(heads, tokens, device=q.device, dtype=torch.float32)
    sequence, first = _tiles(bounds, tokens, _each(q, k))
    strides = [(0, t.stride(1), t.stride(0)) for t in (k, v)]
    _attend(len(sequence), q, k, v, out, lse, (sequence, first, bounds, None, None), scale, strides, tokens)
    return out, lse


@torch.no_grad()
def invariant_cached_attention(q, k, v, blocks, position, scale, shared=None):
    (batch, tokens, heads, width), out = q.shape, torch.empty_like(q)
    strides, each = [t.stride()[:3] for t in (k, v)], _each(q, k)
    operands = q, k, v, out, None, (None, None, None, position, blocks), scale, strides
    rows = _step_rows(q, k) if tokens == 1 else None
    if shared is None:
        _attend(batch * cdiv(tokens, each), *operands, tokens, rows=rows)
        return out
    state = torch.empty(batch, heads, width + 2, device=q.device, dtype=torch.float32)  # sums, maximum, sum of the weights
    _attend(len(shared.rows) * cdiv(MEMBERS, each), *operands, batch, (*shared, state), 1)
    _attend(batch, *operands, 1, (*shared, state), 2, rows)
    return out


def _attend(
    programs: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, indices: tuple[Tensor | None, ...],
    scale: float, strides: Sequence[tuple[int, ...]], tokens: int, shared: tuple[Tensor | None, ...] = (None, None, None),
    part: int = 0, rows: int | None = None,
) -> None:  # fmt: skip
    """indices: of a program's queries and keys. strides: of k and v, by block, head and token. rows: of a tile."""
    (heads, width), kv_heads, blocks = q.shape[-2:], k.shape[1], 0 if indices[-1] is None else indices[-1].shape[1]
    rows = rows or _rows(q, k)
    padded = max(16, power_of_two(width))
    bytes_shared, size = _chip(q).shared_bytes - SPARE, padded * q.element_size()  # and bytes of a key
    # A step over pages, 256 rows of 200 keys on an H200: 80 us by 2 stages, 82 by 3, 90 by one.
    most = 2 if blocks > 1 and q.shape[1] == 1 else 3
    stages = max(1, min(most, (bytes_shared - rows * size) // (2 * BLOCK * size))) if q.element_size() == 2 else 1
    _invariant_attention_kernel[(programs, kv_heads)](
        q, k, v, out, lse, *indices, *shared, scale * LOG2_E, *strides[0][:2], *strides[1][:2], tokens, len(k), k.shape[-2],
        strides[0][2], strides[1][2], heads, width, padded, heads // kv_heads, blocks, blocks > 1, rows, BLOCK, interpreted(),
        part, MEMBERS, num_warps=4 if rows > 16 or q.element_size() > 2 else 1, num_stages=stages,
    )  # fmt: skip


def _each(q: Tensor, k: Tensor) -> int:
    """Return the tokens of a tile."""
    return _rows(q, k) // (q.shape[-2] // k.shape[1])


def _rows(q: Tensor, k: Tensor) -> int:
    """Return the rows of a tile, which has one token at least."""
    return max(ROWS[q.element_size()], power_of_two(q.shape[-2] // k.shape[1]))


_agree: dict[tuple[Any, ...], bool] = {}  # whether tiles of few rows have the bits of the others, by sizes, dtype and device


def _step_rows(q: Tensor, k: Tensor) -> int | None:
    """Return the rows of the tile of one token: as few as a warp multiplies, where they are known to get a larger tile's bits.

    A program of 64 rows takes 82 kB of shared memory and one of 16 rows 37 (heads of 128), so that three times as many wait
    for their keys at the same time. H200, 256 rows of a 0.6b model with shared blocks, us at 140, 260, 600 keys: 44, 75, 165 by
    64 rows, 28, 61, 143 by 16; with the blocks of each apart 64, 89, 178 and 48, 75, 155. Where two waves of large ones hold
    all programs, four warps of each are faster than one. The first call tries it on random numbers, and waits for the device;
    inside a capture sizes that were not tried take the large tile.
    """
    (heads, width), kv_heads, rows = q.shape[-2:], k.shape[1], max(16, power_of_two(q.shape[-2] // k.shape[1]))
    many = len(q) * kv_heads > 4 * _chip(q).sms
    if not many or q.element_size() > 2 or width > 128 or rows > 16 or _chip(q).capability != 90 or interpreted():
        return None
    key = heads, kv_heads, width, q.dtype, q.device
    if q.is_cuda and key not in _agree:
        if torch.cuda.is_current_stream_capturing():
            return None
        draws = torch.Generator(q.device).manual_seed(0)
        shapes = (8, 1, heads, width), *[(41, kv_heads, BLOCK, width)] * 2
        query, keys, values = (torch.randn(s, generator=draws, device=q.device, dtype=q.dtype) for s in shapes)
        table = torch.arange(1, 41, device=q.device, dtype=torch.int32).view(8, 5)
        position = torch.arange(3, 320, 42, device=q.device, dtype=torch.int32)
        indices, strides, outputs = (None, None, None, position, table), [t.stride()[:3] for t in (keys, values)], []
        for tile in (None, rows):
            outputs.append(torch.empty_like(query))
            _attend(8, query, keys, values, outputs[-1], None, indices, width**-0.5, strides, 1, rows=tile)
        _agree[key] = torch.equal(*outputs)
    return rows if _agree.get(key, True) else None


def _tiles(bounds: Tensor, tokens: int, each: int) -> tuple[Tensor, Tensor]:
    """Return the sequence and the first token of as many programs as any bounds need; those that have none begin at its end."""
    lengths = bounds.diff()
    tiles = (lengths + each - 1) // each
    ends = tiles.cumsum(0)
    number = torch.arange(cdiv(tokens, each) + len(lengths), device=bounds.device)
    sequence = torch.searchsorted(ends, number, right=True).clamp_(max=len(lengths) - 1)
    first = torch.where(number < ends[-1], (number - ends[sequence] + tiles[sequence]) * each, lengths[sequence])
    return sequence.int(), first.int()
