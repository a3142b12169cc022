"""What a row keeps: its last tokens in rings, and stores of entries. All of it lies still, and all places follow from positions
on the device, so a graph serves any length.

Token p of a row stands in slot p mod R of a ring. When token P is the row's last, slot s holds the latest position up to P
that falls on s: what a slot holds is computed, never kept. A ring for `span` tokens has R = span + T - 1 slots for steps of
T tokens: then the last of a step's tokens overwrites nothing that the first still reads, and guesses that turned out wrong are
overwritten before they count.

An entry is seen when its stretch has ended. One that a wrong guess ended is not seen before it is written again.

Legend: B rows, T tokens, R slots, S entries, D width, P a row's last position.
"""

from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.decode_product import Norm
from ...models.deepseek_v4.kernels.compressor import Pending, Windows, turned
from ...models.deepseek_v4.weights import EntryWeights
from ..runner import RunnerConfig

Tables = list[tuple[Tensor, Tensor]]


def mod(x: Tensor, size: int) -> Tensor:
    """0 to size - 1, of negative x too."""
    return torch.remainder(x, size)


class PlaceTable:
    """What follows from a token's place alone, for every place: how many stretches have ended, and the slot in a ring. A step
    looks up all of it in one launch."""

    def __init__(self, length: int, rates: set[int], sizes: set[int], device: torch.device) -> None:
        """rates: of stretches that end. sizes: of rings."""
        place = torch.arange(length, device=device, dtype=torch.int32)
        self.rate = {rate: line for line, rate in enumerate(sorted(rates))}
        self.size = {size: line for line, size in enumerate(sorted(sizes), len(rates))}
        ended = [torch.div(place + 1, rate, rounding_mode="floor") for rate in self.rate]
        self.lines = torch.stack([*ended, *(mod(place, size) for size in self.size)])  # int32


class Moment:
    """Where the tokens of one step stand, (B, T) int32, and what follows from that."""

    def __init__(self, position_BT: Tensor, tables: Tables, place_table: PlaceTable) -> None:
        self.tables, self.place_table, self.rows = tables, place_table, len(position_BT)
        self.places = position_BT.flatten()  # (N,)
        self.first = position_BT[:, 0].contiguous()
        self._found = place_table.lines.index_select(1, self.places)
        self._slots: dict[int, Tensor] = {}

    def closed(self, rate: int) -> Tensor:
        """(N,) int32: how many stretches have ended where each token stands."""
        return self._found[self.place_table.rate[rate]]

    def slot(self, size: int) -> Tensor:
        """(N,) int32: where each token goes in rings of so many slots that lie one behind the other, a row each."""
        if size not in self._slots:
            found = self._found[self.place_table.size[size]]
            if self.rows > 1:
                begun = torch.arange(0, self.rows * size, size, device=found.device, dtype=torch.int32)
                found = (found.view(self.rows, -1) + begun[:, None]).flatten()
            self._slots[size] = found
        return self._slots[size]


class Stretch:
    """A piece of a prompt: places start to end of rows that have `lengths_B` tokens."""

    def __init__(self, start: int, end: int, lengths_B: Tensor, tables: Tables) -> None:
        self.start, self.end, self.lengths, self.tables = start, end, lengths_B, tables
        self.position = torch.arange(start, end, device=lengths_B.device)
        self.places = self.position.int().repeat(len(lengths_B))  # (N,)
        self.last = lengths_B.clamp(max=end)[:, None] - 1  # of each row, as far as it has come

    def opened(self, table: int, rate: int) -> tuple[Tensor, Tensor]:
        """cos and sin (1, stretches, pairs) where the stretches of `rate` tokens begin."""
        cos, sin = self.tables[table]
        return cos[None, self.start : self.end : rate], sin[None, self.start : self.end : rate]


class TokenRing:
    """The last tokens of each row."""

    def __init__(self, span: int, width: int, build: RunnerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.size = span + build.tokens - 1
        self.data = torch.zeros(build.max_batch, self.size, width, device=device, dtype=dtype)

    def part(self, rows: slice) -> "TokenRing":
        """Of these rows alone, over the same memory."""
        found = copy(self)
        found.data = self.data[rows]
        return found

    def before(self, now: Stretch, count: int) -> Tensor:
        """(B, count, D) of the tokens before a piece of a prompt, in order; of what is before the first token, anything."""
        slots = mod(torch.arange(now.start - count, now.start, device=self.data.device), self.size)
        return self.data[: len(now.lengths)].index_select(1, slots)

    def prompt(self, now: Stretch, new_BTD: Tensor) -> None:
        """Keep of a piece of a prompt what later tokens read: the last tokens of each row, up to its length."""
        rows = len(new_BTD)
        slots = torch.arange(self.size, device=self.data.device)
        held = now.last - mod(now.last - slots, self.size)  # (B, R)
        from_piece = held - now.start
        index = from_piece.clamp(0, new_BTD.shape[1] - 1)[..., None].expand(-1, -1, new_BTD.shape[2])
        kept = torch.where(from_piece[..., None] >= 0, new_BTD.gather(1, index), self.data[:rows])
        self.data[:rows] = kept


class EntryProducts(NamedTuple):
    """What entries are pooled from: the products of tokens, (B, T, W) each."""

    kv: Tensor
    gate: Tensor


class Entries:
    """The entries of each row, and the rings that they are pooled from."""

    def __init__(self, weights: EntryWeights, build: RunnerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.weights = weights
        width = len(weights.norm.weight)
        count = (build.max_length - 1) // weights.rate + 1
        self.store = torch.zeros(build.max_batch, count, width, device=device, dtype=dtype)
        self.kv, self.gate = (TokenRing(weights.span, w.rows, build, dtype, device) for w in (weights.kv, weights.gate))

    def tensors(self) -> list[Tensor]:
        return [self.store, self.kv.data, self.gate.data]

    def part(self, rows: slice) -> "Entries":
        """Of these rows alone, over the same memory."""
        found = copy(self)
        found.store, found.kv, found.gate = self.store[rows], self.kv.part(rows), self.gate.part(rows)
        return found

    def windows(self, new: EntryProducts) -> Windows:
        """The stretches that a step's tokens are of, and where the entries of those that they end will be."""
        w, rows = self.weights, len(new.kv)
        return Windows(*new, Pending(self.kv.data[:rows], self.gate.data[:rows]), self.store[:rows], w.bias, w.norm)

    def prompt(self, now: Stretch, new: EntryProducts, table: int) -> Tensor:
        """The entries (B, S, D) up to the end of a piece that begins where a stretch does."""
        w, rows = self.weights, len(new.kv)
        back = w.span - w.rate
        count = -(-(now.end - now.start) // w.rate)
        behind = now.start + count * w.rate - now.end  # places of the last stretch that the piece does not have
        whole = [torch.cat([ring.before(now, back), x, x.new_zeros(rows, behind, x.shape[2])], 1)
                 for ring, x in ((self.kv, new.kv), (self.gate, new.gate))]  # fmt: skip
        kv, gate = (x.unfold(1, w.span, w.rate).transpose(2, 3) for x in whole)  # (B, count, span, C)
        first = now.start - back + torch.arange(count, device=kv.device)[:, None] * w.rate
        position = first + torch.arange(w.span, device=kv.device)
        there = ((position >= 0) & (position < now.end))[None]
        entry = pool(w, kv, gate, there, now.opened(table, w.rate))
        self.store[:rows, now.start // w.rate : now.start // w.rate + count] = entry
        self.kv.prompt(now, new.kv)
        self.gate.prompt(now, new.gate)
        return self.store[:rows, : now.end // w.rate]


def pool(w: EntryWeights, kv: Tensor, gate: Tensor, there: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Entries (..., D) of kv and gate (..., span, C): by channel, a mean weighed by a softmax of the gates over the tokens that
    are there. What is not there may be NaN.

    The products of an overlapping entry have two halves: of the tokens before its stretch it pools the first, of its own the
    second.
    """
    width = len(w.norm.weight)
    bias = w.bias.float()
    if w.overlapping:
        kv, gate, bias = (
            torch.cat([x[..., : x.shape[-2] - w.rate, :width], x[..., -w.rate :, width:]], -2)
            for x in (kv, gate, torch.cat([bias, bias]))
        )
    there = there[..., None]
    share = torch.where(there, gate.float() + bias, float("-inf")).softmax(-2)
    mean = (torch.where(there, kv.float(), 0.0) * share).sum(-2)
    return turned(normed(mean, w.norm), *angles)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Of fp32, in fp32."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight.float(), norm.eps)
