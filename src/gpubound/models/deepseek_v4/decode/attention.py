"""Attention of a layer: a window of tokens, and compressed entries of earlier tokens, all of them or those of an indexer.

Legend: B sequences, T tokens, H heads, D width of a head, S keys, K entries that the indexer chooses for a token.
"""

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....decode.runner import RunnerConfig
from ..family import IndexWeights, LatentWeights
from ..kernels import compress, index_scores, index_topk, sparse_attention, turn_heads
from ..kernels.attention import TurnedHeads
from .products import GEMV_ROWS, by_groups, products
from .state import Entries, EntryProducts, Moment, Stretch, TokenRing

PIECE = 128  # tokens of a prefill chunk whose scores are in memory at a time


class Index:
    """Indexer, which chooses entries by their scores. Ties go to the earlier entry."""

    routing_trace: Any = None  # called with the chosen entries during the reference check

    def __init__(self, weights: IndexWeights, build: RunnerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.entries = weights, Entries(weights.entries, build, dtype, device)

    def part(self, rows: slice) -> "Index":
        found = copy(self)
        found.entries = self.entries.part(rows)
        return found

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
        self.index = None if weights.index is None else Index(weights.index, build, dtype, device)

    def tensors(self) -> list[Tensor]:
        """Return the state: ring buffers and stores of entries."""
        stores = [held for held in (self.entries, self.index.entries if self.index else None) if held is not None]
        return [self.window.data, *(t for held in stores for t in held.tensors())]

    def part(self, rows: slice) -> "LatentAttention":
        """Return the attention of a slice of batch entries, over the same memory."""
        found = copy(self)
        found.window = self.window.part(rows)
        found.entries = None if self.entries is None else self.entries.part(rows)
        found.index = None if self.index is None else self.index.part(rows)
        return found

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
        sparse_attention(read.q, now.places, read.kv, w.window, w.sinks.float(), w.scale, y, store, ids, limit, *angles)
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
        found = []
        for first in range(0, T, PIECE):
            some = slice(first, min(first + PIECE, T))
            query = now.position[some, None]
            there = torch.arange(now.start + first - back, now.start + some.stop, device=u.device)
            seen = ((there >= 0) & (there <= query) & (there > query - w.window))[None].expand(B, -1, -1)
            keys = near[:, first : some.stop + back]
            if self.entries is not None:
                entry = self._entries_seen(read, now, some, store.shape[1])
                keys, seen = torch.cat([keys, store], 1), torch.cat([seen, entry], 2)
            found.append(attend(q[:, some], keys, seen, w.sinks, w.scale))
        y = torch.cat(found, 1).flatten(0, 1)
        (y,) = turn_heads([TurnedHeads(y, torch.empty_like(y))], now.places, *now.tables[w.table], back=True)
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
        seen = torch.zeros(*closed.shape, count + 1, device=closed.device, dtype=torch.bool)
        return seen.scatter(2, torch.where(chosen >= 0, chosen, count), True)[..., :count]

    def _read(self, u: Tensor, now: Moment | Stretch) -> Read:
        w, (B, T), angles = self.weights, u.shape[:2], now.tables[self.weights.table]
        entry = () if w.entries is None else (w.entries.kv, w.entries.gate)
        index = () if w.index is None else (w.index.entries.kv, w.index.entries.gate, w.index.share)
        low, kv, *others = (t.contiguous() for t in products(u.flatten(0, 1), w.norm, w.q_a, w.kv, *entry, *index))
        q, *index_q = products(low, w.q_a_norm, w.q_b, *(() if w.index is None else (w.index.q,)))

        pairs = [EntryProducts(*(t.unflatten(0, (B, T)) for t in pair)) for pair in (others[:2], others[2:4]) if pair]
        asking, key = self._heads(q, w.heads, None, w.eps), self._heads(kv, 1, w.kv_norm.weight, w.kv_norm.eps)
        if isinstance(now, Moment):
            key = key._replace(out=self.window.data[:B].flatten(0, 1)[:, None], slot=now.slot(self.window.size))
        index_heads = [] if w.index is None else [self._heads(index_q[0], w.index.heads)]
        turned, keys, *index_turned = turn_heads([asking, key, *index_heads], now.places, *angles)
        asked = Asked(pairs[1], index_turned[0], others[4]) if index_turned else None
        return Read(turned, keys.view(B, -1, kv.shape[-1]), pairs[0] if pairs else None, asked)

    def _heads(self, x: Tensor, count: int, weight: Tensor | None = None, eps: float | None = None) -> TurnedHeads:
        x = x.contiguous().unflatten(-1, (count, -1))
        return TurnedHeads(x, torch.empty_like(x, dtype=self.dtype), weight, eps)

    @property
    def reach(self) -> int:
        """Largest number of tokens in the window or in one entry."""
        return max([self.weights.window, *(held.weights.span for held in (self.entries,) if held is not None)])

    def bytes_seen(self, live: list[int]) -> int:
        """Return the bytes of the state that a step reads for sequences of the lengths `live`."""
        w, size = self.weights, self.dtype.itemsize
        read = [min(length, w.window) * w.kv.rows for length in live]
        if w.entries is not None:
            closed = [length // w.entries.rate for length in live]
            if w.index is not None:
                read += [count * len(w.index.entries.norm.weight) for count in closed]
                closed = [min(count, w.index.top) for count in closed]
            read += [count * w.kv.rows for count in closed]
        return size * sum(read)

    def report(self) -> tuple[str, str, str]:
        """Return (module, what the module reads, reason) for the decoder's report."""
        w = self.weights
        if w.entries is None:
            return "attention", f"a window of {w.window}", ""
        chosen = "all" if w.index is None else f"{w.index.top} by index"
        return "attention", f"a window of {w.window}, entries of {w.entries.rate} tokens: {chosen}", ""


def attend(q: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Compute attention (B, T, H, D) of q (B, T, H, D) over keys (B, S, D), which are also the values.

    seen   (B, T, S): mask of the keys that each token attends to. Keys that no token attends to may be NaN and are zeroed,
           since 0 · NaN is NaN
    sinks  (H,)
    """
    B, T, H, D = q.shape
    keys = keys.masked_fill(~seen.any(1)[..., None], 0.0)
    scores = torch.bmm(q.reshape(B, T * H, D), keys.transpose(1, 2)).view(B, T, H, -1).float() * scale
    scores = torch.where(seen[:, :, None], scores, float("-inf"))
    sink = sinks.float()[:, None].expand(B, T, H, 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(keys.dtype)
    return torch.bmm(weights.view(B, T * H, -1), keys).view(B, T, H, D)
