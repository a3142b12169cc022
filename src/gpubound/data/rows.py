"""Rows of tokens: packed once on the host, then gathered into batches on the corpus's device.

A packing assigns tokens to rows before training, for all rows and epochs. Token t is predicted from the tokens before it, so a
document of n tokens fills n − 1 positions of a row: token i is the input, token i + 1 its label. A label never comes from
another document, and a document's last token is only a label.

`BatchCutter` works from a step counter, with fixed shapes and no host read, so the same code runs on the CPU (for corpora
streamed from disk, and as the reference of tests) and inside a captured CUDA graph, and gives the same batch bit for bit.

B rows a batch, T positions a row, M pieces in the fullest row.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .source import Scatter

Read = Callable[[Tensor], Tensor]  # index -> stored values
IGNORED = -100  # the label that losses ignore
STREAM_FIELDS = ("input_ids", "labels")
FIELDS = ("input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens", "valid")

PADDING = -(1 << 48)  # in `shift`: the piece is padding. Any index plus this is negative
BEYOND = 1 << 48  # in `begins`, after a row's last piece: beyond every position of a batch


@dataclass(frozen=True)
class Packing:
    """Rows of `seq` positions. A stream needs no tables: row r begins at token r·seq.

    With documents the tables are first (rows + 1), begins and shift (pieces): the pieces of row r are number `first[r]` to
    `first[r + 1]`; piece p begins at position `begins[p]` of its row, and position t in it holds token t + `shift[p]`. A row
    that is not full ends with a piece of padding.
    """

    seq: int
    rows: int
    tables: tuple[np.ndarray, ...] = ()
    max_pieces: int = 1  # in the fullest row

    @property
    def size(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in self.tables)


def pack_stream(tokens: int, seq: int) -> Packing:
    """Split the corpus into rows as one stream, across documents. The tail shorter than a row is left out."""
    return Packing(seq, max(0, tokens - 1) // seq)


def pack_documents(offsets: np.ndarray, seq: int, max_documents: int) -> Packing:
    """Pack documents into rows of `seq` positions, at most `max_documents` a row. Longer documents are split into pieces first.

    Best fit, longest first, over a histogram of lengths: the work depends on the number of lengths, not of documents, so ten
    million take as long as ten thousand. Documents of one token have no label and are left out.
    """
    starts, lengths = _pieces(offsets.astype(np.int64), seq)
    if len(starts) == 0:
        return Packing(seq, 0)
    counts = np.bincount(lengths, minlength=seq + 1)
    by_length = np.argsort(lengths, kind="stable")
    next_piece = np.concatenate([[0], np.cumsum(counts)])  # in by_length, the next unused piece of each length
    row_pieces, begins, shifts = [np.zeros(1, np.int64)], [], []
    for rows, pattern in _patterns(counts, seq, max_documents):
        edges = np.concatenate([[0], np.cumsum(pattern)])
        padded = edges[-1] < seq
        begin = np.broadcast_to(edges[: len(pattern) + padded], (rows, len(pattern) + padded))
        shift = np.full(begin.shape, PADDING)
        for j, length in enumerate(pattern):
            chosen = by_length[next_piece[length] : next_piece[length] + rows]
            next_piece[length] += rows
            shift[:, j] = starts[chosen] - edges[j]
        row_pieces.append(np.full(rows, begin.shape[1]))
        begins.append(begin.reshape(-1))
        shifts.append(shift.reshape(-1))
    pieces = np.concatenate(row_pieces)
    tables = (np.cumsum(pieces), np.concatenate(begins), np.concatenate(shifts))
    return Packing(seq, len(pieces) - 1, tables, int(pieces.max()))


def _pieces(offsets: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (first token, length) of every piece of at most `seq` positions, in the corpus's order."""
    lengths = np.diff(offsets) - 1
    counts = -(-lengths // seq)
    document = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    return offsets[document] + nth * seq, np.minimum(lengths[document] - nth * seq, seq)


def _patterns(counts: np.ndarray, seq: int, max_documents: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return [(number of rows, lengths in each)] that use every length `counts[length]` times."""
    open_rows: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # by free positions
    full: list[tuple[int, tuple[int, ...]]] = []
    open_sizes = 0  # bit r is set if rows with r free positions are open; the lowest bit from `length` up is the best fit

    def add(rows: int, pattern: tuple[int, ...], free: int) -> None:
        nonlocal open_sizes
        if free and len(pattern) < max_documents:
            open_rows[free].append((rows, pattern))
            open_sizes |= 1 << free
        elif rows:
            full.append((rows, pattern))

    for length in range(seq, 0, -1):
        remaining = int(counts[length])
        while remaining:
            fitting = open_sizes >> length
            if not fitting:
                each = min(seq // length, max_documents)
                for rows, copies in ((remaining // each, each), (1, remaining % each)):
                    if rows and copies:
                        add(rows, (length,) * copies, seq - length * copies)
                break
            free = length + (fitting & -fitting).bit_length() - 1
            rows, pattern = open_rows[free].pop()
            if not open_rows[free]:
                open_sizes ^= 1 << free
            used = min(rows, remaining)
            if rows > used:
                add(rows - used, pattern, free)
            copies = max(1, min(free // length, remaining // used, max_documents - len(pattern)))
            add(used, pattern + (length,) * copies, free - length * copies)
            remaining -= used * copies
    return full + [entry for entries in open_rows.values() for entry in entries]


@dataclass(frozen=True)
class Order:
    """The order of rows in the batches, which are numbered from the beginning of training across all epochs.

    All ranks share one sequence of batches: of every `world` consecutive ones, each rank takes one. So the rows of a batch do
    not depend on the number of ranks.
    """

    micro_batch: int
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    world: int = 1

    def batches(self, rows: int) -> int:
        """Return the batches of an epoch, for all ranks together."""
        return rows // self.micro_batch


@dataclass(eq=False)
class BatchCutter:
    """Batches by counter: `cut(rows(counter))` is this rank's batch after `counter` batches of all ranks. `read` returns the
    stored tokens at an index, `read_mask` their loss mask."""

    packing: Packing
    order: Order
    fields: tuple[str, ...]
    pad_id: int
    device: torch.device
    read: Read
    read_mask: Read | None
    own_labels: bool = False  # the label is the token itself instead of the next one

    def __post_init__(self) -> None:
        packing, order, device = self.packing, self.order, self.device
        self.batches = order.batches(packing.rows)
        size, seq = order.micro_batch, packing.seq
        self.scatter = Scatter(packing.rows, order.seed, device) if order.shuffle else None
        self.row = torch.arange(size, device=device)  # B
        self.position = torch.arange(seq, device=device).expand(size, seq).contiguous()  # BT
        self.offsets = torch.tensor([0, 0 if self.own_labels else 1], device=device).view(2, 1, 1)  # of input and label
        if packing.tables:
            tables = (torch.from_numpy(np.ascontiguousarray(table, np.int64)).to(device) for table in packing.tables)
            self.first, self.begins, self.shift = tables
            self.piece = torch.arange(packing.max_pieces, device=device)  # M
            self.row_start = (torch.arange(size, device=device) * seq).view(size, 1)
            self.total = torch.full((1,), size * seq, device=device)

    def rows(self, counter: Tensor) -> Tensor:
        """Return the rows (..., B) of this rank's batch after `counter` (...) batches of all ranks since training began."""
        number = counter + self.order.rank
        epoch = torch.div(number, self.batches, rounding_mode="floor")
        nth = torch.sub(number, epoch, alpha=self.batches)
        index = torch.add(self.row, nth.unsqueeze(-1), alpha=self.order.micro_batch)
        return self.scatter(index, epoch) if self.scatter is not None else index

    def cut(self, rows_B: Tensor) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        if not self.packing.tables:
            return self._gather(torch.add(self.position, rows_B.unsqueeze(-1), alpha=self.packing.seq), None, {})
        first_B1, end_B1 = self.first[rows_B].unsqueeze(-1), self.first[rows_B + 1].unsqueeze(-1)
        number_BM = first_B1 + self.piece
        clamped_BM = torch.minimum(number_BM, end_B1 - 1)
        begins_BM = self.begins[clamped_BM].masked_fill(number_BM >= end_B1, BEYOND)
        piece_BT = torch.searchsorted(begins_BM, self.position, right=True) - 1
        token_BT = self.shift[clamped_BM].gather(1, piece_BT) + self.position
        padded_BT = token_BT < 0
        more = {}
        if "position_ids" in self.fields:
            more["position_ids"] = self.position - begins_BM.gather(1, piece_BT)
        if "segment_ids" in self.fields:
            more["segment_ids"] = piece_BT.masked_fill(padded_BT, -1)
        if "cu_seqlens" in self.fields:  # always B·M + 1 values: the begin of each piece, then the total, repeated
            starts = (begins_BM + self.row_start).clamp_max(self.total).flatten().sort().values
            more["cu_seqlens"] = torch.cat([starts, self.total]).to(torch.int32)
        return self._gather(token_BT.clamp_min(0), padded_BT, more)

    def _gather(self, token_BT: Tensor, padded_BT: Tensor | None, more: dict[str, Tensor]) -> dict[str, Tensor]:
        token_2BT = token_BT + self.offsets
        ids, labels = token_ids(self.read(token_2BT)).unbind(0)
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
    """Return tokens as signed integers of the same bits: torch gathers int16 and int32 on every device, uint16 on few."""
    return tokens.view(np.int16 if tokens.dtype.itemsize == 2 else np.int32)


def token_ids(stored: Tensor) -> Tensor:
    """Return token ids in int64. Ids from 32,768 are negative as int16, so the sign bits are cleared; no id reaches 2³¹."""
    ids = stored.to(torch.int64)
    return ids.bitwise_and_(0xFFFF) if stored.dtype is torch.int16 else ids
