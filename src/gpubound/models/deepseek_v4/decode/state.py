"""KV cache of a sequence: ring buffers of its last tokens, and stores of compressed entries. Addresses are fixed, and indices
follow from positions on the device, so one CUDA graph serves any length.

Token p of a sequence is stored in slot p mod R of a ring. If P is the sequence's last position, slot s holds the latest
position up to P that maps to s: a slot's position is computed, not stored. A ring for `span` tokens has R = span + T - 1 slots
for steps of T tokens: the last token of a step then overwrites no slot that the first still reads, and rejected draft tokens
are overwritten before any token attends to them.

An entry is visible once its window of tokens has ended. An entry of rejected draft tokens is rewritten before it is visible.

Legend: B sequences, T tokens, R slots, S entries, D width, P a sequence's last position.
"""

from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from ....decode.runner import RunnerConfig
from ....kernels.decode_product import Norm
from ..family import EntryWeights
from ..kernels.compressor import Pending, Windows, turned

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
        self.places = position_BT.flatten()  # (N,)
        self.first = position_BT[:, 0].contiguous()
        self._found = place_table.lines.index_select(1, self.places)
        self._slots: dict[int, Tensor] = {}

    def closed(self, rate: int) -> Tensor:
        """Return the number of complete entries at each token's position, (N,) int32."""
        return self._found[self.place_table.rate[rate]]

    def slot(self, size: int) -> Tensor:
        """Return each token's index (N,) int32 in the concatenated rings of all sequences, of `size` slots each."""
        if size not in self._slots:
            found = self._found[self.place_table.size[size]]
            if self.rows > 1:
                begun = torch.arange(0, self.rows * size, size, device=found.device, dtype=torch.int32)
                found = (found.view(self.rows, -1) + begun[:, None]).flatten()
            self._slots[size] = found
        return self._slots[size]


class Stretch:
    """Prefill chunk: positions start to end of sequences that have `lengths_B` tokens."""

    def __init__(self, start: int, end: int, lengths_B: Tensor, tables: Tables) -> None:
        self.start, self.end, self.lengths, self.tables = start, end, lengths_B, tables
        self.position = torch.arange(start, end, device=lengths_B.device)
        self.places = self.position.int().repeat(len(lengths_B))  # (N,)
        self.last = lengths_B.clamp(max=end)[:, None] - 1  # last position of each sequence up to the chunk's end

    def opened(self, table: int, rate: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin (1, entries, pairs) at the first position of each entry of `rate` tokens."""
        cos, sin = self.tables[table]
        return cos[None, self.start : self.end : rate], sin[None, self.start : self.end : rate]


class TokenRing:
    """Ring buffer of the last tokens of each sequence."""

    def __init__(self, span: int, width: int, build: RunnerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.size = span + build.tokens - 1
        self.data = torch.zeros(build.max_batch, self.size, width, device=device, dtype=dtype)

    def part(self, rows: slice) -> "TokenRing":
        """Return the ring of a slice of batch entries, over the same memory."""
        found = copy(self)
        found.data = self.data[rows]
        return found

    def before(self, now: Stretch, count: int) -> Tensor:
        """Return the `count` tokens (B, count, D) before a prefill chunk. Before the first token, values are undefined."""
        slots = mod(torch.arange(now.start - count, now.start, device=self.data.device), self.size)
        return self.data[: len(now.lengths)].index_select(1, slots)

    def prompt(self, now: Stretch, new_BTD: Tensor) -> None:
        """Write a prefill chunk to the ring: the last tokens of each sequence, up to its length."""
        rows = len(new_BTD)
        slots = torch.arange(self.size, device=self.data.device)
        held = now.last - mod(now.last - slots, self.size)  # (B, R)
        from_piece = held - now.start
        index = from_piece.clamp(0, new_BTD.shape[1] - 1)[..., None].expand(-1, -1, new_BTD.shape[2])
        kept = torch.where(from_piece[..., None] >= 0, new_BTD.gather(1, index), self.data[:rows])
        self.data[:rows] = kept


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
        found = copy(self)
        found.store, found.kv, found.gate = self.store[rows], self.kv.part(rows), self.gate.part(rows)
        return found

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
        behind = now.start + count * w.rate - now.end  # positions of the last entry after the chunk's end
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
    """Pool kv and gate (..., span, C) to entries (..., D): per channel, a mean of kv weighted by the softmax of the gates.

    Only tokens with `there` set count; the others may be NaN. The products of an overlapping entry have two halves: an entry
    pools the first half from the preceding window, and the second half from its window.
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
    """Return the RMSNorm of x in fp32."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight.float(), norm.eps)
