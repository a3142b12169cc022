"""Rows of tokens: planned once on the host, then cut into batches where the corpus lies.

The plan says which tokens go into which row, before training, for all rows and all epochs. Token t is learnt from the tokens
before it, so a document of n tokens gives n − 1 places in a row: token i goes in, token i + 1 is its label. A label never comes
from another document, and a document's last token is a label only.

The cutter works from a step counter, with fixed shapes and no host read. Every line of it is a torch operation on tensors whose
shapes are known beforehand, so the same code runs on the CPU (for corpora streamed from the disk, and as the oracle) and inside
a captured CUDA graph, and gives the same batch bit for bit.

B rows a batch, T places a row, M pieces in the fullest row.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .source import Scatter

Read = Callable[[Tensor], Tensor]  # what is stored, by index
IGNORED = -100  # the label that losses skip
STREAM_FIELDS = ("input_ids", "labels")
FIELDS = ("input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens", "valid")

PADDING = -(1 << 48)  # in `shift`: the place holds padding. Any index that this is added to stays negative
BEYOND = 1 << 48  # in `begins`, after a row's last piece: beyond every place of a batch


@dataclass(frozen=True)
class Packing:
    """Rows of `seq` places. A stream needs no tables: row r begins at token r·seq.

    With documents the tables are first (rows + 1), begins and shift (pieces): the pieces of row r are number `first[r]` to
    `first[r + 1]`; piece p begins at place `begins[p]` of its row, and place t in it holds token t + `shift[p]`. A row that is
    not full ends with a piece of padding.
    """

    seq: int
    rows: int
    tables: tuple[np.ndarray, ...] = ()
    most: int = 1  # pieces in the fullest row

    @property
    def size(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in self.tables)


def plan_stream(tokens: int, seq: int) -> Packing:
    """Rows cut from the whole corpus as one stream, across documents. The tail shorter than a row is left out."""
    return Packing(seq, max(0, tokens - 1) // seq)


def plan_documents(offsets: np.ndarray, seq: int, most: int) -> Packing:
    """Whole documents packed into rows of `seq` places, at most `most` a row; longer ones are cut into pieces first.

    Best fit, longest first, over a histogram of lengths: the work depends on how many lengths there are, not on how many
    documents, so ten million take as long as ten thousand. Documents of one token have nothing to learn and are left out.
    """
    starts, lengths = _pieces(offsets.astype(np.int64), seq)
    if len(starts) == 0:
        return Packing(seq, 0)
    counts = np.bincount(lengths, minlength=seq + 1)
    by_length = np.argsort(lengths, kind="stable")
    next_of = np.concatenate([[0], np.cumsum(counts)])  # where each length's pieces begin
    pieces, begins, shifts = [np.zeros(1, np.int64)], [], []
    for many, pattern in _patterns(counts, seq, most):
        places = np.concatenate([[0], np.cumsum(pattern)])
        padded = places[-1] < seq
        begin = np.broadcast_to(places[: len(pattern) + padded], (many, len(pattern) + padded))
        shift = np.full(begin.shape, PADDING)
        for j, length in enumerate(pattern):
            taken = by_length[next_of[length] : next_of[length] + many]
            next_of[length] += many
            shift[:, j] = starts[taken] - places[j]
        pieces.append(np.full(many, begin.shape[1]))
        begins.append(begin.reshape(-1))
        shifts.append(shift.reshape(-1))
    of_rows = np.concatenate(pieces)
    tables = (np.cumsum(of_rows), np.concatenate(begins), np.concatenate(shifts))
    return Packing(seq, len(of_rows) - 1, tables, int(of_rows.max()))


def _pieces(offsets: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """(first token, places) of every piece of at most `seq` places, in the corpus's order."""
    places = np.diff(offsets) - 1
    cuts = -(-places // seq)
    document = np.repeat(np.arange(len(places)), cuts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    return offsets[document] + nth * seq, np.minimum(places[document] - nth * seq, seq)


def _patterns(counts: np.ndarray, seq: int, most: int) -> list[tuple[int, tuple[int, ...]]]:
    """[(how many rows, the lengths of each)] that use every length as often as `counts` says."""
    open_rows: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # room left -> rows
    done: list[tuple[int, tuple[int, ...]]] = []
    rooms = 0  # bit r is set when rows with room r are open; the lowest bit from `length` up is the best fit

    def put(many: int, pattern: tuple[int, ...], room: int) -> None:
        nonlocal rooms
        if room and len(pattern) < most:
            open_rows[room].append((many, pattern))
            rooms |= 1 << room
        elif many:
            done.append((many, pattern))

    for length in range(seq, 0, -1):
        need = int(counts[length])
        while need:
            fitting = rooms >> length
            if not fitting:
                each = min(seq // length, most)
                for many, copies in ((need // each, each), (1, need % each)):
                    if many and copies:
                        put(many, (length,) * copies, seq - length * copies)
                break
            room = length + (fitting & -fitting).bit_length() - 1
            many, pattern = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
            used = min(many, need)
            if many > used:
                put(many - used, pattern, room)
            copies = max(1, min(room // length, need // used, most - len(pattern)))
            put(used, pattern + (length,) * copies, room - length * copies)
            need -= used * copies
    return done + [row for rows in open_rows.values() for row in rows]


@dataclass(frozen=True)
class Order:
    """Which rows make batch number n, counted from the beginning of training across all epochs.

    Several ranks share the one sequence of batches: of every `world` that follow each other, each rank takes one. So which rows
    a batch has, and where it stands, does not depend on how many ranks there are.
    """

    micro_batch: int
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    world: int = 1

    def batches(self, rows: int) -> int:
        """Of an epoch, for all ranks together."""
        return rows // self.micro_batch


@dataclass(eq=False)
class Cutter:
    """`cut(rows(counter))` is this rank's batch after `counter` of all ranks. `read` fetches stored tokens by index,
    `read_mask` their loss mask."""

    plan: Packing
    order: Order
    fields: tuple[str, ...]
    pad_id: int
    device: torch.device
    read: Read
    read_mask: Read | None
    own: bool = False  # whether a place's label is its own token, and not the next one

    def __post_init__(self) -> None:
        plan, order, device = self.plan, self.order, self.device
        self.batches = order.batches(plan.rows)
        size, seq = order.micro_batch, plan.seq
        self.scatter = Scatter(plan.rows, order.seed, device) if order.shuffle else None
        self.lane = torch.arange(size, device=device)  # B
        self.place = torch.arange(seq, device=device).expand(size, seq).contiguous()  # BT
        self.ends = torch.tensor([0, 0 if self.own else 1], device=device).view(2, 1, 1)  # what goes in, and its label
        if plan.tables:
            tables = (torch.from_numpy(np.ascontiguousarray(table, np.int64)).to(device) for table in plan.tables)
            self.first, self.begins, self.shift = tables
            self.piece = torch.arange(plan.most, device=device)  # M
            self.row_start = (torch.arange(size, device=device) * seq).view(size, 1)
            self.total = torch.full((1,), size * seq, device=device)

    def rows(self, counter: Tensor) -> Tensor:
        """The rows (..., B) of this rank's next batches where all ranks have drawn `counter` (...) since training began."""
        number = counter + self.order.rank
        epoch = torch.div(number, self.batches, rounding_mode="floor")
        nth = torch.sub(number, epoch, alpha=self.batches)
        place = torch.add(self.lane, nth.unsqueeze(-1), alpha=self.order.micro_batch)
        return self.scatter(place, epoch) if self.scatter is not None else place

    def cut(self, rows_B: Tensor) -> dict[str, Tensor]:
        if not self.plan.tables:
            token_BT = torch.add(self.place, rows_B.unsqueeze(-1), alpha=self.plan.seq)
            return self._fill(token_BT, None, {})
        begins_BM, shift_BM = self._pieces_of(rows_B)
        piece_BT = torch.searchsorted(begins_BM, self.place, right=True) - 1
        token_BT = shift_BM.gather(1, piece_BT) + self.place
        padded_BT = token_BT < 0
        more = {}
        if "position_ids" in self.fields:
            more["position_ids"] = self.place - begins_BM.gather(1, piece_BT)
        if "segment_ids" in self.fields:
            more["segment_ids"] = piece_BT.masked_fill(padded_BT, -1)
        if "cu_seqlens" in self.fields:
            more["cu_seqlens"] = self._boundaries(begins_BM)
        return self._fill(token_BT.clamp_min(0), padded_BT, more)

    def _pieces_of(self, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        """Where the pieces of each row begin, in order and then BEYOND, and what to add to a place to find its token."""
        first_B1 = self.first[rows_B].unsqueeze(-1)
        end_B1 = self.first[rows_B + 1].unsqueeze(-1)
        number_BM = first_B1 + self.piece
        there_BM = torch.minimum(number_BM, end_B1 - 1)
        begins_BM = self.begins[there_BM].masked_fill(number_BM >= end_B1, BEYOND)
        return begins_BM, self.shift[there_BM]

    def _boundaries(self, begins_BM: Tensor) -> Tensor:
        """cu_seqlens of the rows end to end: where each piece begins, then the total over and over, always B·M + 1 numbers."""
        starts = (begins_BM + self.row_start).clamp_max(self.total).flatten().sort().values
        return torch.cat([starts, self.total]).to(torch.int32)

    def _fill(self, token_BT: Tensor, padded_BT: Tensor | None, more: dict[str, Tensor]) -> dict[str, Tensor]:
        token_2BT = token_BT + self.ends
        ids, labels = widened(self.read(token_2BT)).unbind(0)
        if self.read_mask is not None:
            labels.masked_fill_(self.read_mask(token_2BT[1]) == 0, IGNORED)
        if padded_BT is not None:
            ids.masked_fill_(padded_BT, self.pad_id)
            labels.masked_fill_(padded_BT, IGNORED)
        batch = {"input_ids": ids, "labels": labels, **more}
        if "valid" in self.fields:
            batch["valid"] = (labels != IGNORED).sum()
        return {name: batch[name] for name in self.fields}


def as_stored(tokens: np.ndarray) -> np.ndarray:
    """Tokens as signed integers of the same bits: torch gathers int16 and int32 everywhere, uint16 hardly anywhere."""
    return tokens.view(np.int16 if tokens.dtype.itemsize == 2 else np.int32)


def widened(stored: Tensor) -> Tensor:
    """Token ids in int64. Ids from 32,768 up are negative as int16, so their sign is cut off; no vocabulary reaches 2³¹."""
    wide = stored.to(torch.int64)
    return wide.bitwise_and_(0xFFFF) if stored.dtype is torch.int16 else wide
