"""KV cache of all layers: contiguous rows, or pages that all rows share; in the model's dtype, or in 8 bits.

A token attends to what the cache holds, its own key and value included. In 8 bits these are the rounded ones, in a step as in a
prompt, so the tokens do not depend on how a prompt was chunked.

A pool of pages serves rows that do not all grow to `max_length`. A row gets the pages for its request's longest possible text
when the request begins, in a table on the device that a step only reads. The samples of a prompt have its full pages once.
Page 0 belongs to no row: values beyond a row's pages (padding of a prompt, tokens drafted beyond a row's end, unused rows of a
bucket) are written there, and no token of a result reads them.

A layer with a sliding window keeps a ring of its last positions. Its pages are fixed, and a table that repeats them makes the
attention kernels read and write a ring as any other paged cache. A recurrent layer keeps a state (`LayerState`).

Legend: B rows, T tokens, K key and value heads, L positions a row, D width of a head.

`LayerState` is the state of a recurrent layer for each row: the last inputs of its convolution, and the matrix of its
recurrence.

The inputs are in a ring, that of position p at place p % P: a step that takes a rejected draft back writes them again. The
matrix is replaced by each step. A row at position 0 begins with zeros, whatever its state holds, so nothing is reset.

Legend: B rows, T tokens of a prompt, C channels, K taps of the convolution, P places of the ring.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import decode_attention, write_tokens
from ..kernels.decode_attention import KINDS, MANY, Heads, LayerCache, Scratch, decode, encode, listed, reads_shared
from ..kernels.invariant import MEMBERS, SharedKeys
from ..kernels.latent_attention import LatentCache
from ..kernels.row_ops import as_integers
from ..models.decoding import LatentAttentionWeights, LayerWeights, StateShape
from .request import to_device

if TYPE_CHECKING:
    from .runner import RunnerConfig


class LayerState:
    def __init__(self, shape: StateShape, rows: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """tokens: that a step takes, and steps take back"""
        self.taps = shape.taps
        self.ring = torch.zeros(rows, shape.taps - 1 + tokens, shape.channels, device=device, dtype=dtype)
        matrix = torch.zeros(rows, *shape.matrix, device=device, dtype=torch.float32) if shape.matrix else None
        self.matrix: Any = matrix  # None where the recurrence has none

    @property
    def tensors(self) -> list[Tensor]:
        return [self.ring] if self.matrix is None else [self.ring, self.matrix]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def extend(self, x: Tensor, start: int, targets: Tensor | None, ends: Tensor | None) -> Tensor:
        """Write inputs x (B, T, C) of a prompt from position `start` on. Return them after the K - 1 inputs before them.

        targets, ends: as of kv_cache.LayerStore.write
        """
        slots = self.ring.shape[1]
        position, source = ring_positions(x, slots, start, ends)
        before = self.ring[slice(len(x)) if targets is None else targets[:, 0]]
        earlier = torch.arange(start + 1 - self.taps, start, device=x.device)
        past, new = before[:, earlier % slots].masked_fill((earlier < 0)[:, None], 0), x[source]
        write_rows(self.ring, torch.where((position < start)[..., None], before, new), targets)
        return torch.cat([past, x], 1)

    def matrix_before(self, start: int, rows: int, targets: Tensor | None) -> Tensor:
        """Return the matrices (B, ...) of a prompt's rows before position `start`."""
        if start == 0:
            return self.matrix.new_zeros(rows, *self.matrix.shape[1:])
        return self.matrix[slice(rows) if targets is None else targets[:, 0]]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the state of the rows `sources` to the rows `targets`."""
        for t in self.tensors:
            t.index_copy_(0, targets, t[sources])


def ring_positions(x: Tensor, size: int, start: int, ends: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the last position (B, size) at each place of a ring once x (B, T, ...) of a prompt from `start` on is written, and
    its index in x. What is at a place whose position came before `start` stays."""
    (rows, tokens), device = x.shape[:2], x.device
    last = torch.full((rows,), start + tokens, device=device) if ends is None else ends.clamp(max=start + tokens)
    position = last[:, None] - 1 - (last[:, None] - 1 - torch.arange(size, device=device)) % size
    return position, (torch.arange(rows, device=device)[:, None], (position - start).clamp(min=0))


def write_rows(state: Tensor, new: Tensor, targets: Tensor | None) -> None:
    """Write new rows (B, ...) to the first rows of a state, or to the rows `targets` (B, C), C copies each."""
    if targets is None:
        state[: len(new)] = new
    else:
        copies = new[:, None].expand(-1, targets.shape[1], *new.shape[1:]).flatten(0, 1)
        state.index_copy_(0, targets.flatten(), copies)


PAGE = 64  # positions: a tile of the attention kernel
COPIED = 1 << 28  # bytes of the copy in between where rows move: all layers at once, where they are short
Pairs = list[tuple[Tensor, Tensor]]  # a layer's tensor, and what is written to it
# Tiles that a program takes at least where rows' lengths differ widely. A row's 1,024 keys are one program's by default, where
# there are many rows: 256 rows of 288 keys on average, H200, ms a step of 0.6b: equal lengths 4.34, exponential ones 5.41.
UNEVEN = 24
# Keys of a part where parts are listed: those of UNEVEN tiles. Of 256 rows of 333 keys on average, and 1,742 at most, 9,500 of
# 12,288 programs of a grid have no part: a layer takes 114 us, by a list 103, with equal lengths 101 (H200).
PART = 16 * UNEVEN
# Keys of a program, and tiles of 16, where few rows have so many keys that one warp each for LONG of them fills a GPU: by tiles
# of 64 and 4 warps, 8 rows of 2,048 keys take 50 us a layer (H200, 0.6b; one row 17), of which reading takes 16.
LONG = 128


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


def ring_pages(window: int, tokens: int) -> int:
    """Return the pages of a row of a layer with a window, where a step takes, or steps take back, this many tokens."""
    return pages_for(window + tokens - 1)


class CachedLayer(NamedTuple):
    """The shape of a layer's keys and values, and how many of the last ones it reads."""

    kv_heads: int
    head_dim: int
    window: int = 0  # 0: all
    source: int | None = None  # the layer whose keys and values it reads; None: it has some
    latent: bool = False  # whether it has one row a token for all heads, and no values


def cached_layers(layers: Sequence[LayerWeights]) -> dict[int, CachedLayer | StateShape]:
    """Return what is cached of each layer, by its number."""
    result: dict[int, Any] = {}
    for number, layer in enumerate(layers):
        a = layer.attention
        if (state := a.state()) is not None:
            result[number] = state
        elif isinstance(a, LatentAttentionWeights):
            result[number] = CachedLayer(1, len(a.latent.weight), latent=True)
        elif a.source is None:
            result[number] = CachedLayer(a.kv_heads, a.head_dim, a.window)
        else:
            result[number] = result[a.source]._replace(window=a.window, source=a.source)
    return result


class LayerStore:
    """Keys and values of some layers, (layers, B, K, L, D) each; in pages, (layers, pages, K, PAGE, D). Scales lack the D.

    Of latent attention `k` has one row a token for all heads, and there are no values.
    """

    pages: Tensor | None = None  # (B, pages of a row) int32: where each row is stored
    blocks: Tensor | None = None  # (B, C, pages of a row): where each copy of a prompt is written; see `Cache.aim`
    window = 0  # the last positions that the layers attend to; 0: all

    def __init__(
        self, layers: int, blocks: int, positions: int, like: CachedLayer, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate `blocks` rows or pages of `positions`. dtype: the model's, or one of KINDS."""
        size = layers, blocks, like.kv_heads, positions, like.head_dim
        self.k = torch.zeros(size, device=device, dtype=dtype)
        self.v = torch.zeros((*size[:-1], 0 if like.latent else like.head_dim), device=device, dtype=dtype)
        self.k_scale = self.v_scale = None
        if dtype in KINDS.values():
            self.k_scale, self.v_scale = (torch.zeros(size[:-1], device=device, dtype=torch.float32) for _ in range(2))
        self.bytes_a_token = self.nbytes // (layers * blocks * positions)  # of a layer's keys and values, with their scales

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None and t.numel()]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def of(self, place: int, rows: slice) -> LayerCache:
        """Return the cache of the store's layer number `place` for these rows."""
        stored = slice(None) if self.pages is not None else rows
        cache = LayerCache(self.k[place, stored], self.v[place, stored])
        if self.k_scale is not None and self.v_scale is not None:
            cache = cache._replace(k_scale=self.k_scale[place, stored], v_scale=self.v_scale[place, stored])
        return cache if self.pages is None else cache._replace(pages=self.pages[rows])

    def write(self, pairs: Pairs, start: int, targets: Tensor | None, ends: Tensor | None) -> list[Tensor]:
        """Write a prompt's values (B, T, K, ...) to the tensors of one layer, from position `start` on.

        Return what the prompt attends to of each tensor: all values of the rows so far, or those since the first in a window.

        targets: (B, C) rows that get C copies each; None: the first B. ends: (B,) positions after the rows' last tokens, after
        which the prompts are padded; None: there is no padding.
        """
        rows, tokens = pairs[0][1].shape[:2]
        end = start + tokens
        if self.pages is None and targets is None:
            for cache, new in pairs:
                cache[:rows, :, start:end] = new.transpose(1, 2)
            return [cache[:rows, :, :end] for cache, _ in pairs]
        if self.pages is None:
            assert targets is not None
            blocks = targets[..., None]
        else:
            assert targets is None or self.blocks is not None
            blocks = self.pages[:rows, None] if self.blocks is None else self.blocks  # (B, C, pages of a row)
        for cache, new in pairs:
            write_tokens(cache, new, blocks, start)
        if not start:
            return [new.transpose(1, 2) for _, new in pairs]
        if self.pages is None:
            return [cache[blocks[:, 0, 0], :, :end] for cache, _ in pairs]
        stored = blocks[:, 0, : pages_for(end)]
        return [cache[stored].transpose(1, 2).flatten(2, 3)[:, :, :end] for cache, _ in pairs]  # (B, pages, K, PAGE, ...)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` positions of the rows `sources` to the rows `targets`. Pages move by their table instead."""
        for t in map(as_integers, self.tensors if self.pages is None else ()):
            if t.dim() == 5 and not t.shape[-1] * t.itemsize % 8:
                t = t.view(torch.int64)
            copied = len(sources) * t[0, 0, :, :length].nbytes  # of a layer
            for layers in t.split(max(1, COPIED // max(1, copied))):
                layers[:, targets, :, :length] = layers[:, sources, :, :length]


class WindowRing(LayerStore):
    """Keys and values of layers with a window: `count` pages a row, where position p is at p % (count · PAGE).

    The attention kernels read it by a table of pages that repeats, and their window hides the positions that are overwritten.
    The tokens of one step fit into it besides the window: no token overwrites a key that the step, or a later one in the place
    of a rejected draft, still reads.
    """

    def __init__(
        self, layers: int, rows: int, length: int, count: int, like: CachedLayer, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers, rows * count, PAGE, like, dtype, device)
        self.window, self.count = like.window, count
        first = count * torch.arange(rows, device=device, dtype=torch.int32)
        self.pages = first[:, None] + torch.arange(pages_for(length), device=device, dtype=torch.int32) % count

    def write(self, pairs: Pairs, start: int, targets: Tensor | None, ends: Tensor | None) -> list[Tensor]:
        size, first = self.count * PAGE, max(0, start + 1 - self.window)  # in the window of the first token
        position, source = ring_positions(pairs[0][1], size, start, ends)
        earlier, results = torch.arange(first, start, device=position.device) % size, []
        for cache, new in pairs:
            rings = cache.unflatten(0, (-1, self.count))
            before = rings[slice(len(new)) if targets is None else targets[:, 0]].transpose(2, 3).flatten(1, 2)
            stays = (position < start).view(*position.shape, *[1] * (new.dim() - 2))
            after = torch.where(stays, before, new[source]).unflatten(1, (self.count, PAGE)).transpose(2, 3)
            results.append((torch.cat([before[:, earlier], new], 1) if start else new).transpose(1, 2))
            write_rows(as_integers(rings), as_integers(after), targets)
        return results

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        for t in self.tensors:
            for layer in as_integers(t).unflatten(1, (-1, self.count)):
                layer[targets] = layer[sources]


class Cache:
    """Keys and values of all layers with attention, in stores of layers that keep the same positions in one shape; states of
    the others.

    Layers with a window have a `WindowRing` of its last positions, where that is shorter than `max_length`. Layers that share
    an earlier layer's keys and values have nothing.
    """

    first = 0  # the cache's row of a step's first row; not 0 for a later lane
    targets: Tensor | None = None  # see LayerStore.write
    ends: Tensor | None = None
    shared: LayerStore | None = None  # the first one whose pages all rows share, by the one table
    sharing = False  # whether attention reads what rows have in common once
    uneven = False  # whether attention splits the keys of long rows among more programs
    most = 0  # keys that steps are known to read of a row at most; 0: all positions
    many = False  # whether rows' keys fill a GPU, though rows do not: see `keys_fill`
    listed = 0  # entries of `parts` that attention reads in the place of a grid of rows and parts; 0: none

    def __init__(
        self,
        build: "RunnerConfig",
        layers: Mapping[int, "CachedLayer | StateShape"],
        dtype: torch.dtype,
        device: torch.device,
        rings: bool = True,
    ) -> None:
        """layers: by their numbers. rings: False keeps all positions of every layer."""
        layout, self.rows, self.length = build.cache, build.max_batch + build.spare, build.max_length
        self.layout, self.dtype, self.numbers, self.device = layout, dtype, [*layers], device
        self.kind = None if layout.kind is None else KINDS[layout.kind]
        self.layers = {number: layer for number, layer in layers.items() if isinstance(layer, CachedLayer)}
        if self.kind is not None and any(layer.latent for layer in self.layers.values()):
            raise ValueError(
                f"decoder: cache: got {layout.kind!r} for a model whose cache holds latents, which have no 8-bit form; "
                "leave it out."
            )
        tokens = build.tokens + build.redone
        self.states: dict[int, LayerState] = {}
        for number, shape in layers.items():
            if isinstance(shape, StateShape):
                self.states[number] = LayerState(shape, self.rows, tokens, dtype, device)
        groups: dict[tuple[CachedLayer, int], list[int]] = {}  # layers by their shape, window, and the pages of its ring
        for number, layer in self.layers.items():
            pages = ring_pages(layer.window, tokens) if layer.window and rings else 0
            key = (layer, pages) if 0 < pages < pages_for(self.length) else (layer._replace(window=0), 0)
            if layer.source is None:
                groups.setdefault(key, []).append(number)
        self.stores: list[LayerStore] = []
        self._indices: dict[int, tuple[LayerStore, int]] = {}
        rest, table = (self.kind or dtype, device), None
        for (like, pages), numbers in groups.items():
            if pages:
                store: LayerStore = WindowRing(len(numbers), self.rows, self.length, pages, like, *rest)
            elif layout.pages is None:
                store = LayerStore(len(numbers), self.rows, self.length, like, *rest)
            else:
                store = LayerStore(len(numbers), layout.pages + 1, PAGE, like, *rest)
                if table is None:
                    self.shared = store
                    table = torch.zeros(self.rows, pages_for(self.length), device=device, dtype=torch.int32)
                store.pages = table
            self.stores.append(store)
            self._indices |= {number: (store, place) for place, number in enumerate(numbers)}
        self._indices |= {n: self._indices[layer.source] for n, layer in self.layers.items() if layer.source is not None}
        self._readers = Counter(store for store, _ in self._indices.values())
        self._sources = {layer.source for layer in self.layers.values()}
        self._extended: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of a prompt that later layers share
        together = torch.full((max(1, self.rows // 2), MEMBERS), -1, device=device, dtype=torch.int32)
        self.common = SharedKeys(together, torch.zeros(self.rows, device=device, dtype=torch.int32))
        self.parts = torch.full((2 * self.rows,), -1, device=device, dtype=torch.int32)
        self.ringed = any(isinstance(store, WindowRing) for store in self.stores)

    @property
    def pages(self) -> Tensor | None:
        """The table of the pages that all rows share."""
        return None if self.shared is None else self.shared.pages

    def aim(self, targets: Tensor | None) -> None:
        """Let the next prompt be written to the rows `targets` (B, C), C copies of each; None: to the first rows."""
        self.targets, blocks = targets, None if targets is None else self.copies(targets)
        for store in self.stores:
            if store.pages is self.pages:
                store.blocks = blocks

    def copies(self, targets: Tensor) -> Tensor | None:
        """Return the pages (B, C, P) of the rows `targets` (B, C), and -1 where a copy has the page of the first one."""
        if self.pages is None:
            return None
        blocks = self.pages[targets]
        again = blocks == blocks[:, :1]
        again[:, 0] = False
        return blocks.masked_fill(again, -1)

    @property
    def whole(self) -> LayerStore:
        """The one store of a cache without rings, of layers of one shape."""
        (store,) = self.stores
        return store

    def keys_values(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values (B, K, L, D)."""
        store, place = self._indices[number]
        return store.k[place], store.v[place]

    @property
    def tensors(self) -> list[Tensor]:
        return [t for stores in (self.stores, self.states.values()) for store in stores for t in store.tensors]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def bytes_read(self, lengths: list[int]) -> int:
        """Return the bytes of keys, values and states that a step of rows of these lengths reads."""
        total = sum(state.nbytes for state in self.states.values()) // self.rows * len(lengths)
        for store, layers in self._readers.items():
            read = map(min, lengths, repeat(store.window)) if store.window else lengths
            total += store.bytes_a_token * layers * sum(read)
        return total

    def reserve(self, limits: Sequence[int]) -> None:
        """Assign pages to the first rows for `limits` tokens each, and none to other rows."""
        if self.pages is None:
            return
        table, first = torch.zeros(self.pages.shape, dtype=self.pages.dtype, device="cpu"), 1
        for row, limit in zip(table, limits):
            row[: pages_for(limit)] = torch.arange(first, first + pages_for(limit), device="cpu")
            first += pages_for(limit)
        self.pages.copy_(to_device(table, self.pages.device))

    def check_request(self, limits: list[int]) -> None:
        """Raise a ValueError where rows of up to these lengths need more pages than there are."""
        if self.shared is not None:
            self.layout.check_request(limits)

    def attend(
        self, number: int, qkv: Tensor, position: Tensor, heads: Heads, scratch: Scratch, out: Tensor, mode: int
    ) -> None:
        """Compute the attention of a step in layer `number`."""
        store, place = self._indices[number]
        cache = store.of(place, slice(self.first, self.first + len(position)))
        scratch = scratch._replace(most=self.most)
        if self.uneven:
            parts = self.parts[: self.listed] if self.listed and scratch.tiles >= UNEVEN else None
            scratch = scratch._replace(tiles=min(scratch.tiles, UNEVEN), parts=parts)
        if self.many:
            scratch = scratch._replace(tiles=LONG // 16, many=True)
        if not mode and reads_shared(cache, heads, out.dtype):
            cache = cache._replace(shared=self.shared_by(len(position)))
        decode_attention(qkv, position, cache, heads, scratch, out, mode)

    def group(self, groups: Iterable[list[int]], tokens: list[int]) -> None:
        """Write which rows begin with the same tokens, and with how many (B)."""
        lines = [rows[at : at + MEMBERS] for rows in groups for at in range(0, len(rows), MEMBERS) if len(rows) > 1]
        slots = [number * MEMBERS + place for number, line in enumerate(lines) for place in range(len(line))]
        grouped = [row for line in lines for row in line]
        # A list of every place took 0.25 ms, at each refill.
        table, counts = (torch.zeros(t.numel(), dtype=torch.int32, device="cpu") for t in self.common)
        table.fill_(-1)[slots] = torch.tensor(grouped, dtype=torch.int32, device="cpu")
        counts[grouped] = torch.tensor([tokens[row] for row in grouped], dtype=torch.int32, device="cpu")
        self.common.rows.copy_(to_device(table.view_as(self.common.rows), self.device))
        self.common.counts.copy_(to_device(counts, self.device))

    def fills(self, rows: int) -> bool:
        """Return whether a program for each row and key head fills a GPU; if not, each row's keys are split anyway."""
        return rows * max((layer.kv_heads for layer in self.layers.values()), default=0) >= MANY

    def keys_fill(self, keys: list[int]) -> bool:
        """Return whether the keys that rows read fill a GPU, one warp for LONG of them: in 16 bits, and heads of up to 128."""
        layers = self.layers.values()
        usual = self.kind is None and max((layer.head_dim for layer in layers), default=256) <= 128
        return usual and sum(keys) * max(layer.kv_heads for layer in layers) >= MANY // 2 * LONG

    def list_parts(self, keys: list[int]) -> int:
        """Write the parts of rows that read up to so many keys, the longest rows' first. Return how many `attend` is to read,
        0 where there are too many."""
        counts = [min(-(-count // PART), 16) or 1 for count in keys]
        step = max(1, len(keys) // 2)  # each number of entries is a capture
        size = -(-sum(counts) // step) * step
        if size > len(self.parts):
            return 0
        order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
        entries = [listed(row, part, counts[row]) for row in order for part in range(counts[row])]
        entries += [-1] * (size - len(entries))
        self.parts[:size].copy_(to_device(torch.tensor(entries, dtype=torch.int32, device="cpu"), self.device))
        return size

    def shared_by(self, rows: int) -> SharedKeys | None:
        """Return what the first rows have in common, while attention reads it once."""
        if not self.sharing:
            return None
        return SharedKeys(self.common.rows[: max(1, rows // 2)], self.common.counts[:rows])

    def extend(self, number: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, T, K, D) of a prompt at positions from `start` on.

        Return those that the prompt attends to, (B, K, S, D); the last T are the new ones.
        """
        result = self._write(number, start, k, v)
        if number in self._sources:
            self._extended[number] = result
        return result

    def extended(self, number: int) -> tuple[Tensor, Tensor]:
        """Return what `extend` has returned of the layer whose keys and values layer `number` shares."""
        source = self.layers[number].source
        assert source is not None
        return self._extended[source]

    def end_prompt(self) -> None:
        """Free the keys and values of a prompt that layers shared."""
        self._extended.clear()

    def _write(self, number: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        store, place = self._indices[number]
        if self.kind is None or store.k_scale is None or store.v_scale is None:
            k, v = store.write([(store.k[place], k), (store.v[place], v)], start, self.targets, self.ends)
            return k, v
        pairs: Pairs = []
        for cache, scales, new in ((store.k, store.k_scale, k), (store.v, store.v_scale, v)):
            codes, scale = encode(new, self.kind)
            pairs += [(as_integers(cache[place]), as_integers(codes)), (scales[place], scale)]  # fp8 has no index
        k, k_scale, v, v_scale = store.write(pairs, start, self.targets, self.ends)
        return decode(k.view(self.kind), k_scale, self.dtype), decode(v.view(self.kind), v_scale, self.dtype)

    def latents(self, number: int, rows: int) -> LatentCache:
        """Return the latents of layer `number` for the first rows."""
        store, place = self._indices[number]
        cache = store.of(place, slice(self.first, self.first + rows))
        return LatentCache(cache.k, cache.pages)

    def extend_latents(self, number: int, start: int, rows: Tensor) -> Tensor:
        """Write a prompt's latents (B, T, 1, width) at positions from `start` on. Return all so far, (B, 1, S, width)."""
        store, place = self._indices[number]
        (result,) = store.write([(store.k[place], rows)], start, self.targets, self.ends)
        return result

    def clear_after(self, end: int) -> None:
        """Fill the positions of the targets from `end` on with zeros, of a cache without rings and pages."""
        assert self.targets is not None
        for t in (t for store in self.stores for t in store.tensors):
            t[:, :, :, end:].index_fill_(1, self.targets.flatten(), 0)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` positions of the rows `sources` to the rows `targets`, except in pages that rows share.

        States are copied as they are: those of the rows' last tokens.
        """
        for store in self.stores:
            store.move(sources, targets, length)
        for state in self.states.values():
            state.move(sources, targets)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages of the pool."""
        for t in (t for store in self.stores if store.pages is self.pages for t in store.tensors):
            for layer in as_integers(t):
                layer[targets] = layer[sources]

    def rounded(self, x: Tensor) -> Tensor:
        """Return keys or values (..., D) as an 8-bit cache rounds them."""
        return x if self.kind is None else decode(*encode(x, self.kind), x.dtype)

    def poison(self) -> None:
        """Fill the cache with NaN. Quantised values are NaN where their scale is."""
        for t in self.tensors:
            t.view(torch.uint8).fill_(0x7F) if t.dtype in KINDS.values() else t.fill_(float("nan"))

    def report(self) -> list[tuple[str, str, str]]:
        """Return a row for the decoder's table; none for a cache of all positions in the model's dtype."""
        states = sum(state.nbytes for state in self.states.values())
        key = [("state", f"of {len(self.states)} layers", f"{states / 1e6:,.3g} MB")] if states else []
        latent = bool(self.stores) and not self.stores[0].v.numel()
        if not self.stores or (self.kind is None and self.shared is None and not self.ringed and not latent):
            return key
        form = str(self.dtype).removeprefix("torch.") if self.kind is None else f"{self.layout.kind}, a scale a token and head"
        parts = [form] if self.shared is None else [form, f"{self.layout.pages} pages of {PAGE} tokens that all rows share"]
        parts += [
            f"{len(store.k)} layers keep {store.count * PAGE} tokens for a window of {store.window}"
            for store in self.stores
            if isinstance(store, WindowRing)
        ]
        if latent:
            parts.insert(1, f"latents of {self.stores[0].k.shape[-1]} numbers a token")
        width = sum(store.k.shape[0] * store.k.shape[2] * store.k.shape[4] for store in self.stores)
        plain = (1 if latent else 2) * self.rows * self.length * width * self.dtype.itemsize
        return [("cache", ", ".join(parts), f"{(self.nbytes - states) / 1e6:,.3g} MB; plain, {plain / 1e6:,.3g}"), *key]


class PagePool:
    """The pages of a cache, given to rows, some of them to several rows. Without a cache in pages every row has its room."""

    def __init__(self, cache: Cache | None) -> None:
        self.cache = None if cache is None or cache.layout.pages is None or cache.pages is None else cache
        if self.cache is not None and cache is not None and cache.layout.pages is not None:
            self.free = list(range(1, 1 + cache.layout.pages))
            self.users = [0] * (1 + cache.layout.pages)  # rows that have a page
        self.rows: list[list[int]] = [[] for _ in range(0 if cache is None else cache.rows)]  # each row's pages

    def fits(self, limit: int, ended: Iterable[int]) -> bool:
        """Return whether there are pages for `limit` tokens, those of the rows that have `ended` included."""
        if self.cache is None:
            return True
        counts = Counter(page for row in ended for page in self.rows[row])
        return pages_for(limit) <= len(self.free) + sum(self.users[page] == count for page, count in counts.items())

    def give(self, row: int, limit: int, source: int | None = None, tokens: int = 0) -> bool:
        """Replace the pages of a row by those for `limit` tokens; return False where there are too few.

        source: a row whose pages of its first `tokens` tokens it gets, too: all that are full, its own ones even if not.
        """
        if self.cache is None:
            return True
        shared = [] if source is None else self.rows[source][: pages_for(tokens) if source == row else tokens // PAGE]
        own = [page for page in self.rows[row] if self.users[page] == 1 and page not in shared]
        if (needed := pages_for(limit) - len(shared)) > len(self.free) + len(own):
            return False
        for page in shared:
            self.users[page] += 1
        self.take(row)
        new = [self.free.pop() for _ in range(needed)]
        for page in new:
            self.users[page] = 1
        self.rows[row] = shared + new
        return True

    def take(self, row: int) -> None:
        """Take back the pages of a row. The row's steps write to page 0 from the next `upload` on."""
        if self.cache is not None:
            for page in self.rows[row]:
                self.users[page] -= 1
                if not self.users[page]:
                    self.free.append(page)
            self.rows[row] = []

    def move(self, source: int, target: int) -> None:
        if self.cache is not None:
            self.rows[target], self.rows[source] = self.rows[source], []

    def copy_tails(self, copied: list[tuple[int, int, int]]) -> None:
        """Copy the last page of a row's first tokens, unless it is full: (from a row, to a row, tokens) each."""
        pages = [
            (self.rows[source][tokens // PAGE], self.rows[target][tokens // PAGE])
            for source, target, tokens in copied
            if tokens % PAGE
        ]
        if pages and self.cache is not None:
            self.cache.copy_pages(*to_device(torch.tensor(pages, device="cpu").t().contiguous(), self.cache.device))

    def upload(self) -> None:
        if self.cache is not None and self.cache.pages is not None:
            most = self.cache.pages.shape[1]
            table = torch.tensor([row + [0] * (most - len(row)) for row in self.rows], dtype=torch.int32, device="cpu")
            self.cache.pages.copy_(to_device(table, self.cache.device))
