"""Attention of a layer: a window of tokens, and behind it entries, all of them or those that an index chooses.

Legend: B rows, T tokens, H heads, D width of a head, S keys, K entries that a token chooses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.decoding import Linear
from ...models.deepseek_v4.weights import IndexWeights, LatentWeights
from ..contract import Build
from .state import Entries, Moment, Stretch, TokenRing, normed, turn_last

PIECE = 128  # tokens of a prompt whose scores are in memory at a time


def product(x: Tensor, layer: Linear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


class Index:
    """Scores of entries, for a token to choose by. Of equal scores the earlier entry's counts as higher."""

    def __init__(self, weights: IndexWeights, build: Build, dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.entries = weights, Entries(weights.entries, build, dtype, device)

    def queries(self, h: Tensor, low: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """q (B, T, H, D) and each head's share (B, T, H)."""
        w = self.weights
        cos, sin = (t[:, :, None] for t in angles)
        q = turn_last(product(low, w.q).unflatten(-1, (w.heads, -1)).float(), (cos, sin))
        return q.to(h.dtype), product(h, w.share).float() * (w.heads**-0.5 * q.shape[-1] ** -0.5)

    def choose(self, q: Tensor, share: Tensor, keys_BSD: Tensor, closed_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(entries (B, T, K), which of these are there)."""
        B, T, H, D = q.shape
        found = F.relu(torch.bmm(q.float().view(B, T * H, D), keys_BSD.float().transpose(1, 2))).view(B, T, H, -1)
        scores = (found * share[..., None]).sum(2)
        place = torch.arange(keys_BSD.shape[1], device=q.device)
        scores = torch.where(place < closed_BT[..., None], scores, float("-inf"))
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.weights.top]
        return chosen, chosen < closed_BT[..., None]


class LatentAttention:
    def __init__(self, weights: LatentWeights, build: Build, dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self.dtype = weights, dtype
        self.window = TokenRing(weights.window, len(weights.kv.weight), build, dtype, device)
        self.entries = None if weights.entries is None else Entries(weights.entries, build, dtype, device)
        self.index = None if weights.index is None else Index(weights.index, build, dtype, device)

    def tensors(self) -> list[Tensor]:
        """The state."""
        stores = [held for held in (self.entries, self.index.entries if self.index else None) if held is not None]
        return [self.window.data, *(t for held in stores for t in held.tensors())]

    def step(self, h: Tensor, now: Moment) -> Tensor:
        """What the rows' next tokens h (B, T, hidden) get."""
        w, (B, T) = self.weights, h.shape[:2]
        low, q, kv = self._project(h, now.angles(w.table))
        keys, seen = self.window.step(now, kv), now.window(w.window, self.window.size)
        if self.entries is not None:
            closed = now.closed(self.entries.weights.rate)
            store = self.entries.step(now, *self._pair(h, self.entries), w.table)
            if self.index is None:
                keys = torch.cat([keys, store], 1)
                place = torch.arange(store.shape[1], device=h.device)
                seen = torch.cat([seen, (place < closed[..., None])], 2)
            else:
                held = self.index.entries.step(now, *self._pair(h, self.index.entries), w.table)
                chosen, there = self.index.choose(*self.index.queries(h, low, now.angles(w.table)), held, closed)
                found = store[now.row[..., None], chosen]  # (B, T, K, D): each token has its own
                keys = torch.cat([keys[:, None].expand(-1, T, -1, -1), found], 2).flatten(0, 1)
                q, seen = q.flatten(0, 1)[:, None], torch.cat([seen, there], 2).flatten(0, 1)[:, None]
        y = attend(q, keys, seen, w.sinks, w.scale).view(B, T, w.heads, -1)
        return self._finish(y, now.angles(w.table))

    def prompt(self, h: Tensor, now: Stretch) -> Tensor:
        """What the tokens h (B, T, hidden) of a piece of a prompt get."""
        w, (B, T) = self.weights, h.shape[:2]
        low, q, kv = self._project(h, now.angles(w.table))
        back = w.window - 1
        near = torch.cat([self.window.before(now, back), kv], 1)
        self.window.prompt(now, kv)
        store = held = near[:, :0]
        index_q = index_share = q
        if self.entries is not None:
            store = self.entries.prompt(now, *self._pair(h, self.entries), w.table)
        if self.index is not None:
            held = self.index.entries.prompt(now, *self._pair(h, self.index.entries), w.table)
            index_q, index_share = self.index.queries(h, low, now.angles(w.table))
        found = []
        for first in range(0, T, PIECE):
            some = slice(first, min(first + PIECE, T))
            query = now.position[some, None]
            there = torch.arange(now.start + first - back, now.start + some.stop, device=h.device)
            seen = ((there >= 0) & (there <= query) & (there > query - w.window))[None].expand(B, -1, -1)
            keys = near[:, first : some.stop + back]
            if self.entries is not None:
                closed = torch.div(now.position[some] + 1, self.entries.weights.rate, rounding_mode="floor")[None]
                entry = (torch.arange(store.shape[1], device=h.device) < closed[..., None]).expand(B, -1, -1)
                if self.index is not None:
                    chosen, known = self.index.choose(index_q[:, some], index_share[:, some], held, closed.expand(B, -1))
                    entry = torch.zeros_like(entry, dtype=torch.bool).scatter(2, chosen, known)
                keys, seen = torch.cat([keys, store], 1), torch.cat([seen, entry], 2)
            found.append(attend(q[:, some], keys, seen, w.sinks, w.scale))
        return self._finish(torch.cat(found, 1), now.angles(w.table))

    def _project(self, h: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The queries' input, queries (B, T, H, D), keys (B, T, D)."""
        w = self.weights
        low = normed(product(h, w.q_a).float(), w.q_a_norm).to(h.dtype)
        q = product(low, w.q_b).unflatten(-1, (w.heads, -1)).float()
        q = F.rms_norm(q, q.shape[-1:], None, w.eps)
        kv = normed(product(h, w.kv).float(), w.kv_norm)
        cos, sin = (t[:, :, None] for t in angles)
        return low, turn_last(q, (cos, sin)).to(h.dtype), turn_last(kv, angles).to(h.dtype)

    @property
    def reach(self) -> int:
        """How many tokens back the furthest one lies that is seen or pooled with others."""
        return max([self.weights.window, *(held.weights.span for held in (self.entries,) if held is not None)])

    def bytes_seen(self, live: list[int]) -> int:
        """Of the state, by tokens of rows that are so long."""
        w, size = self.weights, self.dtype.itemsize
        read = [min(length, w.window) * len(w.kv.weight) for length in live]
        if w.entries is not None:
            closed = [length // w.entries.rate for length in live]
            if w.index is not None:
                read += [count * len(w.index.entries.norm.weight) for count in closed]
                closed = [min(count, w.index.top) for count in closed]
            read += [count * len(w.kv.weight) for count in closed]
        return size * sum(read)

    def report(self) -> tuple[str, str, str]:
        """(part, what it reads, why) for the decoder's table."""
        w = self.weights
        if w.entries is None:
            return "attention", f"a window of {w.window}", ""
        chosen = "all" if w.index is None else f"{w.index.top} by index"
        return "attention", f"a window of {w.window}, entries of {w.entries.rate} tokens: {chosen}", ""

    def _pair(self, h: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
        return product(h, entries.weights.kv), product(h, entries.weights.gate)

    def _finish(self, y: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Keys are values, so what is read has turned: it turns back from where the token stands."""
        w = self.weights
        cos, sin = (t[:, :, None] for t in angles)
        y = turn_last(y.float(), (cos, sin), back=True).to(self.dtype)
        B, T = y.shape[:2]
        groups = y.reshape(B * T, w.groups, -1).transpose(0, 1)
        low = torch.bmm(groups, w.o_a.weight.view(w.groups, -1, groups.shape[-1]).transpose(1, 2))
        return product(low.transpose(0, 1).reshape(B, T, -1), w.o_b)


def attend(q: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """(B, T, H, D) for q (B, T, H, D), keys (B, S, D), which are the values too, seen (B, T, S) and sinks (H,).

    What no token sees may be NaN: it is cleared, for a weight of zero does not.
    """
    B, T, H, D = q.shape
    keys = keys.masked_fill(~seen.any(1)[..., None], 0.0)
    scores = torch.bmm(q.reshape(B, T * H, D), keys.transpose(1, 2)).view(B, T, H, -1).float() * scale
    scores = torch.where(seen[:, :, None], scores, float("-inf"))
    sink = sinks.float()[:, None].expand(B, T, H, 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(keys.dtype)
    return torch.bmm(weights.view(B, T * H, -1), keys).view(B, T, H, D)
