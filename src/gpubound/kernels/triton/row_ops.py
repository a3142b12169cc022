"""Ops on rows: LayerNorm with a program for each row, and an activation with a program for each block of elements.

Rows added into a table at ids that may repeat: the gradient of a lookup. One sort, then one pass.

Sorted, equal ids are adjacent. The program at the first of a run sums the run's rows, in their order, and adds them to the
table's row; all others return at once. So the bits are the same in every run, and rows that were not looked up are not touched:
torch writes a dense table of gradients (0.5 GB at 1b) and adds that.

The sorted keys have 32 bits, which takes half the passes of 64. An id outside the table gets the lowest key, so that every
program sees it in the first key, and an ignored id gets the highest.

Values of tokens written to a cache: a program reads those of some tokens and a head once, and writes all copies.

They are moved as the widest words that divide a head. torch's indexed copy, an element a thread, wrote 1.4 TB/s of 4.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans.types import cdiv, power_of_two
from ..row_ops import TOKENS, as_integers
from ._launch import _begin, _end, _wait, at_once, in_place, options
from ._math import activated

BLOCK = 512  # elements of a program that activates


@triton.jit
def _layer_norm_rows_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, eps, K: tl.constexpr, C: tl.constexpr,
                            OFFSET: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    col = tl.arange(0, C)
    inside = col < K
    row = tl.program_id(0) * K
    gain = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    _wait(DEPENDENT)
    x = tl.load(x_ptr + row + col, mask=inside, other=0.0)
    _end(DEPENDENT)
    x = tl.where(inside, x - tl.sum(x, 0) / K, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / K + eps) * gain
    if bias_ptr is not None:
        y += bias
    tl.store(out_ptr + row + col, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activate_rows_kernel(x_ptr, by_ptr, out_ptr, count, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
                          DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    _wait(DEPENDENT)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    _end(DEPENDENT)
    y = activated(x, ACTIVATION)
    if by_ptr is not None:
        y *= tl.load(by_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@in_place
def layer_norm_rows(x, norm, out, dependent=0):
    block = power_of_two(x.shape[1])
    _layer_norm_rows_kernel[(len(x),)](
        x, norm.weight, norm.bias, out, norm.eps, x.shape[1], block, norm.offset,
        **options(max(1, min(8, block // 512)), at_once(dependent)),
    )  # fmt: skip
    return out


@in_place
def activate_rows(x, activation, out, dependent=0, by=None):
    count = x.numel()
    _activate_rows_kernel[(triton.cdiv(count, BLOCK),)](x, by, out, count, BLOCK, activation, **options(4, at_once(dependent)))
    return out


ROWS = 8  # of a run at a time: a padding id that fills a whole batch must not be summed row by row
COLUMNS, WARPS = 1024, 4  # of a program
KEYS = 1024  # of a program
UNKNOWN = tl.constexpr(-1)


@triton.jit(do_not_specialize=["count", "without", "size"])
def _keys_kernel(ids_ptr, keys_ptr, count, without, size, BLOCK: tl.constexpr):
    """The id itself where the table has it, UNKNOWN where it does not, the table's `size` where the row is left out."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(ids_ptr + i, mask=i < count, other=0).to(tl.int64)
    key = tl.where((wanted >= 0) & (wanted < size), wanted, UNKNOWN)
    key = tl.where(wanted == without, size, key)
    tl.store(keys_ptr + i, key.to(tl.int32), mask=i < count)


@triton.jit(do_not_specialize=["count", "size"])
def _add_rows_kernel(table_ptr, keys_ptr, order_ptr, rows_ptr, count, size, cols,
                     ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    first = tl.program_id(0)
    wanted = tl.load(keys_ptr + first)
    before = tl.load(keys_ptr + first - 1, mask=first > 0, other=UNKNOWN - 1)
    broken = tl.load(keys_ptr) == UNKNOWN  # then the first row is NaN, whatever else is added to it
    if (wanted != before) & (wanted < size) & ((wanted != 0) | (not broken)):
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        more = wanted != UNKNOWN
        while more:
            place = first + tl.arange(0, ROWS)
            mine = tl.load(keys_ptr + place, mask=place < count, other=UNKNOWN) == wanted
            row = tl.load(order_ptr + place, mask=mine, other=0)
            at = row[:, None] * cols + col[None]
            total += tl.sum(tl.load(rows_ptr + at, mask=mine[:, None] & (col < cols)[None], other=0.0).to(tl.float32), 0)
            first += ROWS
            more = tl.min(mine.to(tl.int32), 0) > 0  # sorted: where the last one is mine, all are
        out = table_ptr + tl.maximum(wanted, 0).to(tl.int64) * cols + col
        total = tl.where(wanted == UNKNOWN, float("nan"), total)
        tl.store(out, tl.load(out, mask=col < cols, other=0.0) + total, mask=col < cols)


@in_place
def add_rows(table, ids, rows, without):
    (size, cols), count = table.shape, ids.numel()
    keys = torch.empty(count, device=ids.device, dtype=torch.int32)
    _keys_kernel[(cdiv(count, KEYS),)](ids.flatten().contiguous(), keys, count, without, size, KEYS, num_warps=WARPS)
    keys, order = keys.sort(stable=True)
    block = min(COLUMNS, power_of_two(cols))
    _add_rows_kernel[(count, cdiv(cols, block))](
        table, keys, order, rows.reshape(-1, cols).contiguous(), count, size, cols, ROWS, block, num_warps=WARPS
    )
    return table


MOST_WARPS = 4  # of a program


@triton.jit(do_not_specialize=["first", "tokens", "copies", "pages", "total"])
def _write_tokens_kernel(cache_ptr, new_ptr, blocks_ptr, start_ptr, first, tokens, copies, pages, total,
                         row_stride, token_stride, head_stride, L, W: tl.constexpr, WIDTH: tl.constexpr,
                         TOKENS: tl.constexpr):  # fmt: skip
    """W: words of a head; WIDTH: the least power of two that holds them."""
    row, head, heads = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    token, word = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside = token < tokens
    mask = inside[:, None] & (word < W)[None]
    place = new_ptr + row * row_stride + head * head_stride + token[:, None].to(tl.int64) * token_stride + word[None]
    x = tl.load(place, mask=mask, other=0)
    if start_ptr is not None:
        first = tl.load(start_ptr + row)
    position = first + token
    page = position // L
    known = inside & (position >= 0) & (page < pages)
    for copy in range(copies):
        block = tl.load(blocks_ptr + (row * copies + copy) * pages + page, mask=known, other=-1).to(tl.int64)
        exists = (block >= 0) & (block < total)
        at = (block * heads + head) * L + position % L
        tl.store(cache_ptr + at[:, None] * W + word[None], x, mask=mask & exists[:, None])


@in_place
def write_tokens(cache, new, blocks, start):
    stored, values = as_integers(cache), as_integers(new)
    if new.dim() == 3:
        stored, values = stored[..., None], values[..., None]
    elif values.stride(-1) != 1:
        values = values.contiguous()
    for word in (torch.int64, torch.int32):
        steps = (values.shape[-1], values.storage_offset(), stored.storage_offset(), *values.stride()[:-1])
        if new.dim() == 4 and not any(step * values.itemsize % word.itemsize for step in steps):
            stored, values = stored.view(word), values.view(word)
            break
    (rows, tokens, heads, width), tile = values.shape, min(TOKENS, power_of_two(new.shape[1]))
    each = isinstance(start, Tensor)
    _write_tokens_kernel[(cdiv(tokens, tile), rows, heads)](
        stored, values, blocks.contiguous(), start if each else None, 0 if each else start, tokens, blocks.shape[1],
        blocks.shape[2], len(stored), *values.stride()[:3], stored.shape[2], width, power_of_two(width), tile,
        num_warps=MOST_WARPS,
    )  # fmt: skip
    return cache
