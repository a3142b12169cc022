"""Attention of a layer, over a window of tokens and compressed entries of earlier tokens, and its KV cache.

The KV cache of a sequence is ring buffers of its last tokens, and stores of compressed entries. Addresses are fixed, and
indices follow from positions on the device, so one CUDA graph serves any length.

Token p of a sequence is stored in slot p mod R of a ring. If P is the sequence's last position, slot s holds the latest
position up to P that maps to s: a slot's position is computed, not stored. A ring for `span` tokens has R = span + T - 1 slots
for steps of T tokens: the last token of a step then overwrites no slot that the first still reads, and rejected draft tokens
are overwritten before any token attends to them.

An entry is visible once its window of tokens has ended. An entry of rejected draft tokens is rewritten before it is visible. A
token attends to all visible entries, or to those that an indexer chooses.

Legend: B sequences, T tokens, H heads, D width of a head, R slots, S keys or entries, K entries that the indexer chooses.
"""

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....decode.runner import RunnerConfig
from ..family import EntryWeights, IndexWeights, LatentWeights
from ..kernels import compress, index_scores, index_topk, sparse_attention, turn_heads
from ..kernels.attention import Pending, TurnedHeads, Windows, turned
from .mixture import GEMV_ROWS, by_groups, normed, products

Tables = list[tuple[Tensor, Tensor]]


def mod(x: Tensor, size: int) -> Tensor:
    """Return x mod size, from 0 to size - 1 for negative x too."""
    return torch.remainder(x, size)


class PlaceTable:
    """Table over all positions: the number of complete entries, and the slot in each ring. A step reads it in one launch."""

    def __init__(self, length: int, rates: set[int], sizes: set[int], device: torch.device) -> None:
        """rates: tokens per entry. sizes: slots per ring."""
        place = torch.arange(length, device=device, dtype=torch.int32)
        self.rate = {rate: line for line, rate in enumerate(sorted(rates))}
        self.size = {size: line for line, size in enumerate(sorted(sizes), len(rates))}
        ended = [torch.div(place + 1, rate, rounding_mode="floor") for rate in self.rate]
        self.lines = torch.stack([*ended, *(mod(place, size) for size in self.size)])  # int32


class Moment:
    """Positions (B, T) int32 of the tokens of one step, and indices derived from them."""

    def __init__(self, position_BT: Tensor, tables: Tables, place_table: PlaceTable) -> None:
        self.tables, self.place_table, self.rows = tables, place_table, len(position_BT)
        self.positions = position_BT.flatten()  # (N,)
        self.first = position_BT[:, 0].contiguous()
        self._lines = place_table.lines.index_select(1, self.positions)
        self._slots: dict[int, Tensor] = {}

    def closed(self, rate: int) -> Tensor:
        """Return the number of complete entries at each token's position, (N,) int32."""
        return self._lines[self.place_table.rate[rate]]

    def slot(self, size: int) -> Tensor:
        """Return each token's index (N,) int32 in the concatenated rings of all sequences, of `size` slots each."""
        if size not in self._slots:
            slots = self._lines[self.place_table.size[size]]
            if self.rows > 1:
                begun = torch.arange(0, self.rows * size, size, device=slots.device, dtype=torch.int32)
                slots = (slots.view(self.rows, -1) + begun[:, None]).flatten()
            self._slots[size] = slots
        return self._slots[size]


class Stretch:
    """Prefill chunk: positions start to end of sequences that have `lengths_B` tokens."""

    def __init__(self, start: int, end: int, lengths_B: Tensor, tables: Tables) -> None:
        self.start, self.end, self.lengths, self.tables = start, end, lengths_B, tables
        self.position = torch.arange(start, end, device=lengths_B.device)
        self.positions = self.position.int().repeat(len(lengths_B))  # (N,)
        self.last = lengths_B.clamp(max=end)[:, None] - 1  # last position of each sequence up to the chunk's end

    def opened(self, table: int, rate: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin (1, entries, pairs) at the first position of each entry of `rate` tokens."""
        cos, sin = self.tables[table]
        return cos[None, self.start : self.end : rate], sin[None, self.start : self.end : rate]


class TokenRing:
    """Ring buffer of the last tokens of each sequence."""

    def __init__(self, span: int, width: int, build: RunnerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.size = span + build.tokens + build.redone - 1
        self.data = torch.zeros(build.max_batch, self.size, width, device=device, dtype=dtype)

    def part(self, rows: slice) -> "TokenRing":
        """Return the ring of a slice of batch entries, over the same memory."""
        ring = copy(self)
        ring.data = self.data[rows]
        return ring

    def before(self, now: Stretch, count: int) -> Tensor:
        """Return the `count` tokens (B, count, D) before a prefill chunk. Before the first token, values are undefined."""
        slots = mod(torch.arange(now.start - count, now.start, device=self.data.device), self.size)
        return self.data[: len(now.lengths)].index_select(1, slots)

    def prompt(self, now: Stretch, new_BTD: Tensor) -> None:
        """Write a prefill chunk to the ring: the last tokens of each sequence, up to its length."""
        rows = len(new_BTD)
        slots = torch.arange(self.size, device=self.data.device)
        last = now.last - mod(now.last - slots, self.size)  # (B, R)
        from_piece = last - now.start
        index = from_piece.clamp(0, new_BTD.shape[1] - 1)[..., None].expand(-1, -1, new_BTD.shape[2])
        values = torch.where(from_piece[..., None] >= 0, new_BTD.gather(1, index), self.data[:rows])
        self.data[:rows] = values


class EntryProducts(NamedTuple):
    """Products of tokens, (B, T, W) each, from which entries are pooled."""

    kv: Tensor
    gate: Tensor


class Entries:
    """Compressed entries of each sequence, and the rings from which entries are pooled."""

    def __init__(self, weights: EntryWeights, build: RunnerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.weights = weights
        width = len(weights.norm.weight)
        count = (build.max_length - 1) // weights.rate + 1
        self.store = torch.zeros(build.max_batch, count, width, device=device, dtype=dtype)
        self.kv, self.gate = (TokenRing(weights.span, w.rows, build, dtype, device) for w in (weights.kv, weights.gate))

    def tensors(self) -> list[Tensor]:
        return [self.store, self.kv.data, self.gate.data]

    def part(self, rows: slice) -> "Entries":
        """Return the entries of a slice of batch entries, over the same memory."""
        entries = copy(self)
        entries.store, entries.kv, entries.gate = self.store[rows], self.kv.part(rows), self.gate.part(rows)
        return entries

    def windows(self, new: EntryProducts) -> Windows:
        """Return the arguments of `compress` for a step's tokens."""
        w, rows = self.weights, len(new.kv)
        return Windows(*new, Pending(self.kv.data[:rows], self.gate.data[:rows]), self.store[:rows], w.bias, w.norm)

    def prompt(self, now: Stretch, new: EntryProducts, table: int) -> Tensor:
        """Write the entries of a prefill chunk, and return all entries (B, S, D) up to its end.

        The chunk must begin at a multiple of `rate`.
        """
        w, rows = self.weights, len(new.kv)
        back = w.span - w.rate
        count = -(-(now.end - now.start) // w.rate)
        missing = now.start + count * w.rate - now.end  # positions of the last entry after the chunk's end
        padded = [torch.cat([ring.before(now, back), x, x.new_zeros(rows, missing, x.shape[2])], 1)
                 for ring, x in ((self.kv, new.kv), (self.gate, new.gate))]  # fmt: skip
        kv, gate = (x.unfold(1, w.span, w.rate).transpose(2, 3) for x in padded)  # (B, count, span, C)
        first = now.start - back + torch.arange(count, device=kv.device)[:, None] * w.rate
        position = first + torch.arange(w.span, device=kv.device)
        valid = ((position >= 0) & (position < now.end))[None]
        entry = pool(w, kv, gate, valid, now.opened(table, w.rate))
        self.store[:rows, now.start // w.rate : now.start // w.rate + count] = entry
        self.kv.prompt(now, new.kv)
        self.gate.prompt(now, new.gate)
        return self.store[:rows, : now.end // w.rate]


def pool(w: EntryWeights, kv: Tensor, gate: Tensor, valid: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Pool kv and gate (..., span, C) to entries (..., D): per channel, a mean of kv weighted by the softmax of the gates.

    Only tokens with `valid` set count; the others may be NaN. The products of an overlapping entry have two halves: an entry
    pools the first half from the preceding window, and the second half from its window.
    """
    width = len(w.norm.weight)
    bias = w.bias.float()
    if w.overlapping:
        kv, gate, bias = (
            torch.cat([x[..., : x.shape[-2] - w.rate, :width], x[..., -w.rate :, width:]], -2)
            for x in (kv, gate, torch.cat([bias, bias]))
        )
    valid = valid[..., None]
    share = torch.where(valid, gate.float() + bias, float("-inf")).softmax(-2)
    mean = (torch.where(valid, kv.float(), 0.0) * share).sum(-2)
    return turned(normed(mean, w.norm), *angles)


PIECE = 128  # tokens of a prefill chunk whose scores are in memory at a time


class Index:
    """Indexer, which chooses entries by their scores. Ties go to the earlier entry."""

    routing_trace: Any = None  # called with the chosen entries during the reference check

    def __init__(self, weights: IndexWeights, build: RunnerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.entries = weights, Entries(weights.entries, build, dtype, device)

    def part(self, rows: slice) -> "Index":
        index = copy(self)
        index.entries = self.entries.part(rows)
        return index

    def choose(self, q: Tensor, share: Tensor, rows: int, closed: Tensor) -> Tensor:
        """Return the chosen entries (N, K) int32 in ascending order, padded with -1.

        q       (N, H, D), with rotary position embedding
        share   (N, H): weights of the heads
        closed  (N,): number of entries that each token may attend to
        """
        w, keys = self.weights, self.entries.store[:rows]
        scores = torch.empty(len(q), keys.shape[1], device=q.device, dtype=torch.float32)
        ids = torch.empty(len(q), min(w.top, keys.shape[1]), device=q.device, dtype=torch.int32)
        index_scores(q, keys, share, closed, (w.heads * q.shape[-1]) ** -0.5, scores)
        index_topk(scores, closed, ids)
        if self.routing_trace is not None:
            self.routing_trace(ids)
        return ids


class Asked(NamedTuple):
    """Inputs of the indexer for a layer's tokens, N = B T."""

    entry: EntryProducts
    q: Tensor  # (N, H, D), with RoPE
    share: Tensor  # (N, H)


class Read(NamedTuple):
    """Queries, keys and products of a layer's tokens."""

    q: Tensor  # (N, H, D), with RoPE
    kv: Tensor  # with RoPE: (B, T, D) in prefill; in a step (B, R, D), the ring that has its tokens
    entry: EntryProducts | None
    asked: Asked | None


class LatentAttention:
    def __init__(self, weights: LatentWeights, build: RunnerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.dtype = weights, dtype
        self.window = TokenRing(weights.window, weights.kv.rows, build, dtype, device)
        self.entries = None if weights.entries is None else Entries(weights.entries, build, dtype, device)
        self.index = None if weights.indexer is None else Index(weights.indexer, build, dtype, device)

    def tensors(self) -> list[Tensor]:
        """Return the state: ring buffers and stores of entries."""
        stores = [entries for entries in (self.entries, self.index.entries if self.index else None) if entries is not None]
        return [self.window.data, *(t for entries in stores for t in entries.tensors())]

    def part(self, rows: slice) -> "LatentAttention":
        """Return the attention of a slice of batch entries, over the same memory."""
        attention = copy(self)
        attention.window = self.window.part(rows)
        attention.entries = None if self.entries is None else self.entries.part(rows)
        attention.index = None if self.index is None else self.index.part(rows)
        return attention

    def step(self, u: Tensor, now: Moment) -> Tensor:
        """Compute the attention output (N, channels) of a decoding step, before its last product, o_b.

        u (B, T, hidden) fp32: the attention's input, from the streams
        """
        w, B = self.weights, len(u)
        read = self._read(u, now)
        store, ids, limit = None, None, None
        if self.entries is not None and read.entry is not None:
            limit = now.closed(self.entries.weights.rate)
            windows = [self.entries.windows(read.entry)]
            if self.index is not None and read.asked is not None:
                windows.append(self.index.entries.windows(read.asked.entry))
            compress(windows, now.first, *now.tables[w.table])
            store = windows[0].store  # all entries, (B, S, D)
            if self.index is not None and read.asked is not None:
                ids, limit = self.index.choose(read.asked.q, read.asked.share, B, limit), None
        y = torch.empty(read.q.shape, device=u.device, dtype=torch.float32 if len(read.q) <= GEMV_ROWS else self.dtype)
        angles = now.tables[w.table]
        sparse_attention(read.q, now.positions, read.kv, w.window, w.sinks.float(), w.scale, y, store, ids, limit, *angles)
        return by_groups(y.reshape(len(y), w.groups, -1), w.o_a)

    def prompt(self, u: Tensor, now: Stretch) -> Tensor:
        """Compute the attention output (N, channels) of a prefill chunk, before o_b."""
        w, (B, T) = self.weights, u.shape[:2]
        read = self._read(u, now)
        q, back = read.q.unflatten(0, (B, T)), w.window - 1
        near = torch.cat([self.window.before(now, back), read.kv], 1)
        self.window.prompt(now, read.kv)
        store = near[:, :0]
        if self.entries is not None and read.entry is not None:
            store = self.entries.prompt(now, read.entry, w.table)
        if self.index is not None and read.asked is not None:
            self.index.entries.prompt(now, read.asked.entry, w.table)
        outputs = []
        for first in range(0, T, PIECE):
            some = slice(first, min(first + PIECE, T))
            query = now.position[some, None]
            position = torch.arange(now.start + first - back, now.start + some.stop, device=u.device)
            mask = ((position >= 0) & (position <= query) & (position > query - w.window))[None].expand(B, -1, -1)
            keys = near[:, first : some.stop + back]
            if self.entries is not None:
                entry = self._entries_seen(read, now, some, store.shape[1])
                keys, mask = torch.cat([keys, store], 1), torch.cat([mask, entry], 2)
            outputs.append(attend(q[:, some], keys, mask, w.sinks, w.scale))
        y = torch.cat(outputs, 1).flatten(0, 1)
        (y,) = turn_heads([TurnedHeads(y, torch.empty_like(y))], now.positions, *now.tables[w.table], back=True)
        return by_groups(y.reshape(len(y), w.groups, -1), w.o_a)

    def _entries_seen(self, read: Read, now: Stretch, some: slice, count: int) -> Tensor:
        """Return a mask (B, t, count) of the entries that the tokens `some` of a prefill chunk attend to."""
        assert self.entries is not None
        B, T = read.kv.shape[:2]
        closed = torch.div(now.position[some] + 1, self.entries.weights.rate, rounding_mode="floor").int().repeat(B, 1)
        if self.index is None or read.asked is None:
            return torch.arange(count, device=closed.device) < closed[..., None]
        q, share = (t.unflatten(0, (B, T))[:, some].flatten(0, 1).contiguous() for t in (read.asked.q, read.asked.share))
        chosen = self.index.choose(q, share, B, closed.flatten()).view(*closed.shape, -1).long()
        mask = torch.zeros(*closed.shape, count + 1, device=closed.device, dtype=torch.bool)
        return mask.scatter(2, torch.where(chosen >= 0, chosen, count), True)[..., :count]

    def _read(self, u: Tensor, now: Moment | Stretch) -> Read:
        w, (B, T), angles = self.weights, u.shape[:2], now.tables[self.weights.table]
        entry = () if w.entries is None else (w.entries.kv, w.entries.gate)
        index = () if w.indexer is None else (w.indexer.entries.kv, w.indexer.entries.gate, w.indexer.share)
        low, kv, *others = (t.contiguous() for t in products(u.flatten(0, 1), w.norm, w.q_a, w.kv, *entry, *index))
        q, *index_q = products(low, w.q_a_norm, w.q_b, *(() if w.indexer is None else (w.indexer.q,)))

        pairs = [EntryProducts(*(t.unflatten(0, (B, T)) for t in pair)) for pair in (others[:2], others[2:4]) if pair]
        asking, key = self._heads(q, w.heads, None, w.eps), self._heads(kv, 1, w.kv_norm.weight, w.kv_norm.eps)
        if isinstance(now, Moment):
            key = key._replace(out=self.window.data[:B].flatten(0, 1)[:, None], slot=now.slot(self.window.size))
        index_heads = [] if w.indexer is None else [self._heads(index_q[0], w.indexer.heads)]
        turned, keys, *index_turned = turn_heads([asking, key, *index_heads], now.positions, *angles)
        asked = Asked(pairs[1], index_turned[0], others[4]) if index_turned else None
        return Read(turned, keys.view(B, -1, kv.shape[-1]), pairs[0] if pairs else None, asked)

    def _heads(self, x: Tensor, count: int, weight: Tensor | None = None, eps: float | None = None) -> TurnedHeads:
        x = x.contiguous().unflatten(-1, (count, -1))
        return TurnedHeads(x, torch.empty_like(x, dtype=self.dtype), weight, eps)

    @property
    def reach(self) -> int:
        """Largest number of tokens in the window or in one entry."""
        return max([self.weights.window, *(entries.weights.span for entries in (self.entries,) if entries is not None)])

    def bytes_seen(self, live: list[int]) -> int:
        """Return the bytes of the state that a step reads for sequences of the lengths `live`."""
        w, size = self.weights, self.dtype.itemsize
        read = [min(length, w.window) * w.kv.rows for length in live]
        if w.entries is not None:
            closed = [length // w.entries.rate for length in live]
            if w.indexer is not None:
                read += [count * len(w.indexer.entries.norm.weight) for count in closed]
                closed = [min(count, w.indexer.top) for count in closed]
            read += [count * w.kv.rows for count in closed]
        return size * sum(read)

    def report(self) -> tuple[str, str, str]:
        """Return (module, what the module reads, reason) for the decoder's report."""
        w = self.weights
        if w.entries is None:
            return "attention", f"a window of {w.window}", ""
        chosen = "all" if w.indexer is None else f"{w.indexer.top} by index"
        return "attention", f"a window of {w.window}, entries of {w.entries.rate} tokens: {chosen}", ""


def attend(q: Tensor, keys: Tensor, mask: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Compute attention (B, T, H, D) of q (B, T, H, D) over keys (B, S, D), which are also the values.

    mask   (B, T, S): mask of the keys that each token attends to. Keys that no token attends to may be NaN and are zeroed,
           since 0 · NaN is NaN
    sinks  (H,)
    """
    B, T, H, D = q.shape
    keys = keys.masked_fill(~mask.any(1)[..., None], 0.0)
    scores = torch.bmm(q.reshape(B, T * H, D), keys.transpose(1, 2)).view(B, T, H, -1).float() * scale
    scores = torch.where(mask[:, :, None], scores, float("-inf"))
    sink = sinks.float()[:, None].expand(B, T, H, 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(keys.dtype)
    return torch.bmm(weights.view(B, T * H, -1), keys).view(B, T, H, D)
