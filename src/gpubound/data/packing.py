"""Packing: which tokens of a corpus are in which row, decided once before training, for all epochs.

Token t is predicted from the tokens before it, so a document of n tokens fills n − 1 positions of a row: token i is the input,
token i + 1 its label. A label never comes from another document, and a document's last token is only a label.

"stream"      consecutive tokens, across documents
"examples"    several whole documents a row
"documents"   the same, but documents longer than a row are split
"none"        one document a row
"pairs"       one document a row; two consecutive ones, a chosen and a rejected answer, are in consecutive rows
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .corpus import Corpus  # which calls `pack_corpus`, through `batches`

PACKS = ("stream", "examples", "none", "documents", "pairs")
OVERLONG = ("truncate", "truncate_left", "drop")  # what happens to an example that is longer than a row
PADDING = -(1 << 48)  # in `shift`: the piece is padding. Any index plus this is negative
BEYOND = 1 << 48  # in `begins`, after a row's last piece: beyond every position of a batch

Tables = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Packing:
    """Rows of `seq` positions. A stream needs no tables: row r begins at token r·seq.

    Otherwise the tables are first (rows + 1), begins and shift (pieces): the pieces of row r are number `first[r]` to
    `first[r + 1]`; piece p begins at position `begins[p]` of its row, and position t in it holds token t + `shift[p]`. A row
    that is not full ends with a piece of padding.
    """

    seq: int
    rows: int
    tables: Tables | tuple[()] = ()
    max_pieces: int = 1  # in the fullest row
    group: int = 1  # rows that stay together in every order: 2 for pairs
    numbers: np.ndarray | None = None  # of the document, or pair, in each row that holds one
    examples: int = 0  # documents or pairs in the rows
    tokens: int = 0  # positions that hold one
    labels: int = 0  # positions whose label counts
    truncated: int = 0  # examples
    too_long: int = 0  # examples that were dropped for their length
    unlearnable: int = 0  # examples that were dropped because no label of theirs counts

    @property
    def size(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in self.tables) + (0 if self.numbers is None else self.numbers.nbytes)

    @property
    def efficiency(self) -> float:
        """Fraction of the positions that hold a token."""
        return self.tokens / max(1, self.rows * self.seq)

    @property
    def learnt(self) -> float:
        """Fraction of the positions whose label counts."""
        return self.labels / max(1, self.rows * self.seq)

    def __str__(self) -> str:
        one = "pair" if self.group == 2 else "example"
        facts = [f"{self.examples:,} {one}s in {self.rows:,} rows of {self.seq:,}: {self.efficiency:.1%} of the positions hold "
                 f"tokens, {self.learnt:.1%} have a label that counts"]  # fmt: skip
        for count, fate in (
            (self.truncated, "longer than a row and truncated"),
            (self.too_long, "longer than a row and dropped"),
            (self.unlearnable, "dropped, as no label of theirs counts"),
        ):
            if count:
                facts.append(f"{count:,} {one}s {fate}")
        return "; ".join(facts)


def pack_corpus(
    corpus: "Corpus", pack: str, seq: int, overlong: str = "truncate", max_documents: int | None = None, label_offset: int = 1
) -> Packing:
    """Return the rows of `corpus`. `label_offset`: the label of token t is token t + label_offset; for streams also 0."""
    if pack == "stream":
        rows = max(0, corpus.tokens - 1) // seq
        first, end = np.array([label_offset]), np.array([label_offset + rows * seq])
        labels = int(corpus.learnt(first, end)[0]) if rows else 0
        return Packing(seq, rows, tokens=rows * seq, labels=labels)
    offsets, group = corpus.offsets(), 2 if pack == "pairs" else 1
    if pack == "documents":
        pieces, counts = split_documents(offsets, seq), dict[str, int]()
        learnt = corpus.learnt(pieces.starts + 1, pieces.starts + 1 + pieces.lengths)
    else:
        pieces, learnt, counts = _whole_examples(corpus, offsets, seq, overlong, group)
    if pack in ("none", "pairs"):
        tables = one_a_row(pieces, seq)
    else:
        tables = best_fit(pieces, seq, max_documents or seq)
    numbers = pieces.numbers // group if pack in ("none", "pairs") else None
    return Packing(
        seq, len(tables[0]) - 1, tables, int(np.diff(tables[0]).max(initial=1)), group, numbers,
        len(np.unique(pieces.numbers)) // group, int(pieces.lengths.sum()), int(learnt.sum()), **counts,
    )  # fmt: skip


class Pieces(NamedTuple):
    """Ranges of tokens in the corpus's order, each for one row: the inputs are `lengths` tokens from `starts`."""

    starts: np.ndarray
    lengths: np.ndarray
    numbers: np.ndarray  # of the document


def split_documents(offsets: np.ndarray, seq: int) -> Pieces:
    """Return the documents, those with more than `seq` positions in several pieces, and those of one token not at all."""
    lengths = np.diff(offsets) - 1
    counts = -(-lengths // seq)
    document = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Pieces(offsets[document] + nth * seq, np.minimum(lengths[document] - nth * seq, seq), document)


def _whole_examples(
    corpus: "Corpus", offsets: np.ndarray, seq: int, overlong: str, group: int
) -> tuple[Pieces, np.ndarray, dict[str, int]]:
    """Return the documents that are used, of at most `seq` positions, the number of their labels that count, and how many
    were truncated or dropped. Documents of a pair have the same fate."""
    starts, lengths = offsets[:-1], np.diff(offsets) - 1
    is_long = lengths > seq
    if overlong == "truncate_left":
        starts = starts + np.maximum(lengths - seq, 0)
    lengths = np.minimum(lengths, seq)
    learnt = corpus.learnt(starts + 1, starts + 1 + lengths)
    any_long, all_learn = is_long.reshape(-1, group).any(1), (learnt > 0).reshape(-1, group).all(1)
    kept = all_learn & ~any_long if overlong == "drop" else all_learn
    counts = {
        "truncated": int((any_long & kept).sum()),
        "too_long": int(any_long.sum()) if overlong == "drop" else 0,
        "unlearnable": int((~all_learn & ~any_long if overlong == "drop" else ~all_learn).sum()),
    }
    (used,) = np.nonzero(np.repeat(kept, group))
    return Pieces(starts[used], lengths[used], used), learnt[used], counts


def one_a_row(pieces: Pieces, seq: int) -> Tables:
    """Return the tables of rows that hold one piece and padding, in the corpus's order."""
    starts, lengths, _ = pieces
    begins = np.stack([np.zeros_like(lengths), np.where(lengths < seq, lengths, BEYOND)], 1).reshape(-1)
    shift = np.stack([starts, np.full_like(starts, PADDING)], 1).reshape(-1)
    return 2 * np.arange(len(starts) + 1), begins, shift


def best_fit(pieces: Pieces, seq: int, max_pieces: int) -> Tables:
    """Return the tables of rows that hold up to `max_pieces` pieces and padding.

    Best fit, longest first, over a histogram of lengths: the work depends on the number of lengths, not of pieces, so ten
    million take as long as ten thousand. Rows are in the order of their longest piece in the corpus, so that the first rows are
    neither the longest documents nor the fullest.
    """
    starts, lengths, _ = pieces
    counts = np.bincount(lengths, minlength=seq + 1)
    by_length = np.argsort(lengths, kind="stable")
    next_piece = np.concatenate([[0], np.cumsum(counts)])  # in by_length, the next unused piece of each length
    row_pieces, begins, shifts, leading = ([np.zeros(0, np.int64)] for _ in range(4))
    for rows, pattern in _patterns(counts, seq, max_pieces):
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
        leading.append(shift[:, 0])
    counts, order = np.concatenate(row_pieces), np.argsort(np.concatenate(leading), kind="stable")
    first = np.concatenate([[0], np.cumsum(counts[order])])
    moved = np.repeat((np.cumsum(counts) - counts)[order] - first[:-1], counts[order]) + np.arange(first[-1])
    return first, np.concatenate(begins)[moved], np.concatenate(shifts)[moved]


def _patterns(counts: np.ndarray, seq: int, max_pieces: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return [(number of rows, lengths in each)] that use every length `counts[length]` times."""
    open_rows: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # by free positions
    full: list[tuple[int, tuple[int, ...]]] = []
    open_sizes = 0  # bit r is set if rows with r free positions are open; the lowest bit from `length` up is the best fit

    def add(rows: int, pattern: tuple[int, ...], free: int) -> None:
        nonlocal open_sizes
        if free and len(pattern) < max_pieces:
            open_rows[free].append((rows, pattern))
            open_sizes |= 1 << free
        elif rows:
            full.append((rows, pattern))

    for length in range(seq, 0, -1):
        remaining = int(counts[length])
        while remaining:
            fitting = open_sizes >> length
            if not fitting:
                each = min(seq // length, max_pieces)
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
            copies = max(1, min(free // length, remaining // used, max_pieces - len(pattern)))
            add(used, pattern + (length,) * copies, free - length * copies)
            remaining -= used * copies
    return full + [entry for entries in open_rows.values() for entry in entries]
