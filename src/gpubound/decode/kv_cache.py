"""KV cache of all layers: contiguous rows, or pages that all rows share; in the model's dtype, or in 8 bits.

A token attends to what the cache holds, its own key and value included. In 8 bits these are the rounded ones, in a step as in a
prompt, so the tokens do not depend on how a prompt was chunked.

A pool of pages serves rows that do not all grow to `max_length`. A row gets the pages for its request's longest possible text
when the request begins, in a table on the device that a step only reads. Page 0 belongs to no row: values beyond a row's pages
(padding of a prompt, tokens drafted beyond a row's end, unused rows of a bucket) are written there, and no token of a result
reads them.

Legend: B rows, T tokens, K key and value heads, L positions a row, D width of a head.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import decode_attention, quantized_decode_attention
from ..kernels.decode_attention import KINDS, Heads, LayerCache, Scratch, decode, encode
from ..models.decoding import Shape
from .request import to_device

if TYPE_CHECKING:
    from .runner import RunnerConfig

PAGE = 64  # positions: a tile of the attention kernel


@dataclass(frozen=True)
class CacheLayout:
    """The format of the KV cache."""

    kind: str | None = None  # int8 or fp8, with a scale a token and kv head; None: the model's dtype
    pages: int | None = None  # of PAGE positions, shared by all rows; None: max_length positions for each row

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(f"decoder: cache: got {self.kind!r}, wanted {', '.join(KINDS)}, or None for the model's dtype.")

    @property
    def op(self) -> str:
        """The name of the attention kernel that reads it."""
        return "decode_attention" if self.kind is None else "quantized_decode_attention"

    def check(self, max_batch: int, max_length: int) -> None:
        """Raise a ValueError where the pages do not hold one token of every row, and one row of full length."""
        pages, least = self.pages, max(max_batch, pages_for(max_length))
        if pages is not None and (not isinstance(pages, int) or isinstance(pages, bool) or pages < least):
            raise ValueError(
                f"decoder: pages: got {pages!r}, wanted a number of {least} or more: pages of {PAGE} tokens, one at least for "
                f"each of max_batch={max_batch} rows, and enough for one row of max_length={max_length}."
            )

    def check_request(self, limits: list[int]) -> None:
        """Raise a ValueError where rows of up to these lengths need more pages than there are."""
        if self.pages is not None and (needed := sum(map(pages_for, limits))) > self.pages:
            raise ValueError(
                f"generate: {len(limits)} sequences of up to {max(limits)} tokens need {needed} pages of {PAGE} tokens, but "
                f"the decoder was built with pages={self.pages}; ask for fewer, for fewer new tokens, or build it with more."
            )


PLAIN = CacheLayout()


def pages_for(length: int) -> int:
    return -(-length // PAGE)


class Cache:
    """(layers, B, K, L, D) of keys and of values; in pages, (layers, pages, K, PAGE, D). Scales are without the D."""

    first = 0  # the cache's row of a step's first row; not 0 for a later lane

    def __init__(self, build: "RunnerConfig", layers: range, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        """layers: numbers of the layers whose keys and values are cached."""
        layout, rows, length = build.cache, build.max_batch, build.max_length
        self.layout, self.rows, self.length, self.dtype, self.layers = layout, rows, length, dtype, layers
        self.kind = None if layout.kind is None else KINDS[layout.kind]
        blocks, positions = (rows, length) if layout.pages is None else (layout.pages + 1, PAGE)
        size = len(layers), blocks, shape.kv_heads, positions, shape.head_dim
        self.k, self.v = (torch.zeros(size, device=device, dtype=self.kind or dtype) for _ in range(2))
        self.k_scale = self.v_scale = self.pages = None
        if self.kind is not None:
            self.k_scale, self.v_scale = (torch.zeros(size[:-1], device=device, dtype=torch.float32) for _ in range(2))
        if layout.pages is not None:
            self.pages = torch.zeros(rows, pages_for(length), device=device, dtype=torch.int32)
        self.targets: Tensor | None = None  # (B, C): rows that get C copies of each prompt; None: the first B

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def bytes_a_token(self) -> int:
        """The bytes of a token's keys and values in all layers, scales included."""
        return self.nbytes // (self.k.shape[1] * self.k.shape[3])

    def reserve(self, limits: Tensor) -> None:
        """Assign pages to the first rows for `limits` tokens each (int32, on the device), and none to other rows."""
        if self.pages is None:
            return
        counts = (limits.long() + PAGE - 1) // PAGE
        first = counts.cumsum(0) - counts + 1
        page = torch.arange(self.pages.shape[1], device=limits.device)
        self.pages.zero_()
        self.pages[: len(limits)] = torch.where(page < counts[:, None], first[:, None] + page, 0).int()

    def attend(
        self, number: int, qkv: Tensor, position: Tensor, heads: Heads, scratch: Scratch, out: Tensor, mode: int
    ) -> None:
        """Compute the attention of a step in layer `number`."""
        op = decode_attention if self.kind is None else quantized_decode_attention
        op(qkv, position, self._of(number, len(position)), heads, scratch, out, mode)

    def _of(self, number: int, batch: int) -> LayerCache:
        """Return the cache of layer `number` for the first rows."""
        place, mine = number - self.layers.start, slice(self.first, self.first + batch)
        rows = slice(None) if self.pages is not None else mine
        cache = LayerCache(self.k[place, rows], self.v[place, rows])
        if self.k_scale is not None and self.v_scale is not None:
            cache = cache._replace(k_scale=self.k_scale[place, rows], v_scale=self.v_scale[place, rows])
        return cache if self.pages is None else cache._replace(pages=self.pages[mine])

    def extend(self, number: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, T, K, D) of a prompt at positions from `start` on. Return all so far, (B, K, start + T, D)."""
        layer, rows, end = number - self.layers.start, len(k), start + k.shape[1]
        results = []
        for cache, scales, new in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if self.kind is None or scales is None:
                results.append(self._stored(cache[layer], rows, start, end, new))
                continue
            codes, scale = encode(new, self.kind)
            stored = self._stored(cache[layer].view(torch.uint8), rows, start, end, codes.view(torch.uint8))  # no index for fp8
            results.append(decode(stored.view(self.kind), self._stored(scales[layer], rows, start, end, scale), self.dtype))
        return results[0], results[1]

    def _stored(self, cache: Tensor, rows: int, start: int, end: int, new: Tensor) -> Tensor:
        """Write a prompt's values (B, T, K, ...) to a layer's cache, and return all of the rows up to `end`."""
        targets = self.targets
        if self.pages is None and targets is None:
            cache[:rows, :, start:end] = new.transpose(1, 2)
            return cache[:rows, :, :end]
        if self.pages is None:
            assert targets is not None
            words(cache, new)[targets, :, start:end] = words(new, cache).transpose(1, 2)[:, None]
            return cache[targets[:, 0], :, :end] if start else new.transpose(1, 2)
        pages = (self.pages[:rows, None] if targets is None else self.pages[targets]).long()  # (B, C, pages of a row)
        position = torch.arange(start, end, device=new.device)
        words(cache, new)[pages.index_select(2, position // PAGE), :, position % PAGE] = words(new, cache)[:, None]
        stored = cache[pages[:, 0, : pages_for(end)]]  # (B, pages, K, PAGE, ...)
        return stored.transpose(1, 2).flatten(2, 3)[:, :, :end]

    def clear_after(self, end: int) -> None:
        """Fill the positions of the targets from `end` on with zeros."""
        assert self.targets is not None
        for t in self.tensors:
            t[:, :, :, end:].index_fill_(1, self.targets.flatten(), 0)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` positions of the rows `sources` to the rows `targets`, of a cache without pages."""
        for t in self.tensors:
            for layer in t.view(torch.uint8) if t.dtype in KINDS.values() else t:
                layer[targets, :, :length] = layer[sources, :, :length]

    def rounded(self, x: Tensor) -> Tensor:
        """Return keys or values (..., D) as an 8-bit cache rounds them."""
        return x if self.kind is None else decode(*encode(x, self.kind), x.dtype)

    def poison(self) -> None:
        """Fill the cache with NaN. Quantised values are NaN where their scale is."""
        for t in self.tensors:
            t.view(torch.uint8).fill_(0x7F) if t.dtype in KINDS.values() else t.fill_(float("nan"))

    def report(self) -> list[tuple[str, str, str]]:
        """Return a row for the decoder's table; none for a cache in the model's dtype without pages."""
        if self.kind is None and self.pages is None:
            return []
        form = str(self.dtype).removeprefix("torch.") if self.kind is None else f"{self.layout.kind}, a scale a token and head"
        shared = "" if self.pages is None else f", {self.layout.pages} pages of {PAGE} tokens that all rows share"
        plain = 2 * self.k.shape[0] * self.rows * self.k.shape[2] * self.length * self.k.shape[4] * self.dtype.itemsize
        return [("cache", form + shared, f"{self.nbytes / 1e6:,.3g} MB; plain, {plain / 1e6:,.3g}")]


def words(t: Tensor, other: Tensor) -> Tensor:
    """View keys or values (..., D) as wide integers, if both can be: an indexed copy moves an element a thread. Scales stay.

    As integers, because torch's deterministic index_put_ adds what it writes to a zero: a NaN's bits would change, and among
    int8 codes any bits occur.
    """
    size = torch.int64.itemsize
    fits = t.dim() == 4 and all(
        not any(step * one.itemsize % size for step in (one.shape[-1], one.storage_offset(), *one.stride()[:-1]))
        for one in (t, other)
    )
    return t.view(torch.int64) if fits else t


class PagePool:
    """The pages of a cache, given to rows. Without a cache in pages every row has its room."""

    def __init__(self, cache: Cache | None) -> None:
        self.cache, self.table = cache, None
        if cache is not None and cache.pages is not None and cache.layout.pages is not None:
            self.table = torch.zeros_like(cache.pages, device="cpu")
            self.free = list(range(1, 1 + cache.layout.pages))

    def fits(self, limit: int) -> bool:
        return self.table is None or pages_for(limit) <= len(self.free)

    def give(self, row: int, limit: int) -> None:
        """Give a row the pages for `limit` tokens."""
        if self.table is not None:
            count = pages_for(limit)
            self.table[row, :count] = torch.tensor([self.free.pop() for _ in range(count)], dtype=torch.int32, device="cpu")

    def take(self, row: int) -> None:
        """Take back the pages of a row. The row's steps write to page 0 from the next `upload` on."""
        if self.table is not None:
            self.free += [page for page in self.table[row].tolist() if page]
            self.table[row] = 0

    def move(self, source: int, target: int) -> None:
        if self.table is not None:
            self.table[target], self.table[source] = self.table[source].clone(), 0

    def upload(self) -> None:
        if self.table is not None and self.cache is not None and self.cache.pages is not None:
            self.cache.pages.copy_(to_device(self.table, self.cache.pages.device))
