"""Which tokens go into which row: decided once on the host, before training, for all rows and all epochs.

Token t is learnt from the tokens before it, so a document of n tokens gives n − 1 places in a row: token i goes in, token i +
1 is its label. A label never comes from another document, and a document's last token is a label only.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

# In `shift`: the place holds padding. Any index that this is added to stays negative.
PADDING = -(1 << 48)
# In `begins`, after a row's last piece: beyond every place of a batch.
BEYOND = 1 << 48


@dataclass(frozen=True)
class Plan:
    """Rows of `seq` places. A stream needs no tables: row r begins at token r·seq.

    With documents, the pieces of row r are number `first[r]` to `first[r + 1]`; piece p begins at place `begins[p]` of its
    row, and place t in it holds token t + `shift[p]`. A row that is not full ends with a piece of padding.
    """

    seq: int
    rows: int
    first: np.ndarray | None = None  # (rows + 1,)
    begins: np.ndarray | None = None  # (pieces,)
    shift: np.ndarray | None = None  # (pieces,)
    most: int = 1  # pieces in the fullest row
    padding: float = 0.0  # share of places that hold padding

    @property
    def size(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in (self.first, self.begins, self.shift) if table is not None)


def stream(tokens: int, seq: int) -> Plan:
    """Rows cut from the whole corpus as one stream, across documents. The tail shorter than a row is left out."""
    return Plan(seq, max(0, tokens - 1) // seq)


def documents(offsets: np.ndarray, seq: int, most: int) -> Plan:
    """Whole documents packed into rows of `seq` places, at most `most` a row; longer ones are cut into pieces first.

    Best fit, longest first, over a histogram of lengths: the work depends on how many lengths there are, not on how many
    documents, so ten million documents take as long as ten thousand. Documents of one token have nothing to learn and are
    left out.
    """
    starts, lengths = _pieces(offsets.astype(np.int64), seq)
    if len(starts) == 0:
        return Plan(seq, 0, np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    patterns = _patterns(np.bincount(lengths, minlength=seq + 1), seq, most)
    by_length = np.argsort(lengths, kind="stable")
    next_of = np.concatenate([[0], np.cumsum(np.bincount(lengths, minlength=seq + 1))])  # where each length's pieces begin
    firsts, begins, shifts = [np.zeros(1, np.int64)], [], []
    for many, pattern in patterns:
        places = np.concatenate([[0], np.cumsum(pattern)])
        padded = places[-1] < seq
        begin = np.broadcast_to(places[: len(pattern) + padded], (many, len(pattern) + padded))
        shift = np.full(begin.shape, PADDING)
        for j, length in enumerate(pattern):
            taken = by_length[next_of[length] : next_of[length] + many]
            next_of[length] += many
            shift[:, j] = starts[taken] - places[j]
        firsts.append(np.full(many, begin.shape[1]))
        begins.append(begin.reshape(-1))
        shifts.append(shift.reshape(-1))
    counts = np.concatenate(firsts)
    rows = len(counts) - 1
    return Plan(
        seq,
        rows,
        np.cumsum(counts),
        np.concatenate(begins),
        np.concatenate(shifts),
        int(counts.max()),
        1 - lengths.sum() / (rows * seq),
    )


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
