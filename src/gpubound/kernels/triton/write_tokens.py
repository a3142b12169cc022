"""Values of tokens written to a cache: a program reads those of some tokens and a head once, and writes all copies.

They are moved as the widest words that divide a head. torch's indexed copy, an element a thread, wrote 1.4 TB/s of 4.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import cdiv, power_of_two
from ..write_tokens import TOKENS, as_integers
from ._launch import bump_versions

WARPS = 4  # of a program


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


@torch.no_grad()
def write_tokens(cache: Tensor, new: Tensor, blocks: Tensor, start: Tensor | int) -> Tensor:
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
        blocks.shape[2], len(stored), *values.stride()[:3], stored.shape[2], width, power_of_two(width), tile, num_warps=WARPS,
    )  # fmt: skip
    bump_versions(cache)
    return cache
