"""Packing: which tokens of a corpus are in which row, decided once before training, for all epochs.

Token t is predicted from the tokens before it, so a document of n tokens fills n − 1 positions of a row: token i is the input,
token i + 1 its label. A label never comes from another document, and a document's last token is only a label.

"stream"      consecutive tokens, across documents
"examples"    several whole documents a row
"documents"   the same, but documents longer than a row are split
"none"        one document a row
"pairs"       one document a row; those of a pair, a chosen and a rejected answer, or of a match are in consecutive rows
"packed_pairs"  several whole pairs a row, each document of at most half a row, the two of a pair next to each other

Rows are gathered into batches on the device; prompts with answers are packed into rows for `policy`. `BatchCutter` works from a
step counter, with fixed shapes and no host read, so the same code runs on the CPU (for corpora streamed from disk, and as the
reference of tests) and inside a captured CUDA graph, and gives the same batch bit for bit.

`BucketCutter` has rows of several lengths: short examples in short rows, so that less of the batches is padding.

B rows a batch, T positions a row, M pieces in the fullest row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..formatting import counted
from .source import Scatter, order as permutation

if TYPE_CHECKING:
    from .corpus import Corpus  # which calls `pack_corpus`, through `batches`


PACKS = ("stream", "examples", "none", "documents", "pairs", "packed_pairs")
PAIRED = ("pairs", "packed_pairs")
OVERLONG = ("truncate", "truncate_left", "drop")  # what happens to an example that is longer than a row
PADDING = -(1 << 48)  # in `shift`: the piece is padding. Any index plus this is negative
BEYOND = 1 << 48  # in `begins`, after a row's last piece: beyond every position of a batch

Tables = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Packing:
    """Rows of `seq` positions. A stream needs no tables: row r begins at token r·seq.

    Otherwise the tables are first (rows + 1), begins and shift (pieces): the pieces of row r are number `first[r]` to
    `first[r + 1]`; piece p begins at position `begins[p]` of its row, and position t in it holds token t + `shift[p]`. A row
    that is not full ends with a piece of padding. With rows of several lengths, `parts` has a packing for each.
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
    unlearnable: int = 0  # examples that were dropped because none of their labels counts
    parts: tuple["Packing", ...] = ()
    batches_a_step: int = 1  # consecutive batches of an epoch that have one length

    @property
    def size(self) -> int:
        """Bytes of the tables."""
        own = sum(table.nbytes for table in self.tables) + (0 if self.numbers is None else self.numbers.nbytes)
        return own + sum(part.size for part in self.parts)

    @property
    def positions(self) -> int:
        return sum(part.positions for part in self.parts) if self.parts else self.rows * self.seq

    def batches(self, micro_batch: int) -> int:
        """Return the batches of an epoch: rows that do not fill one, or a step's of their length, are left out of it."""
        return sum(self.steps(part, micro_batch) for part in self.parts or (self,)) * self.batches_a_step

    def steps(self, part: "Packing", micro_batch: int) -> int:
        """Return the steps of an epoch whose batches are of `part`."""
        return part.rows // (micro_batch * self.batches_a_step)

    @property
    def dropped(self) -> int:
        """The number of examples in no row: a longer row might hold them, or the label that was cut off."""
        return self.too_long + self.unlearnable

    @property
    def efficiency(self) -> float:
        """Fraction of the positions that hold a token."""
        return self.tokens / max(1, self.positions)

    @property
    def learnt(self) -> float:
        """Fraction of the positions whose label counts."""
        return self.labels / max(1, self.positions)

    def __str__(self) -> str:
        one = {1: "example", 2: "pair"}.get(self.group, "match")
        rows = " and ".join(f"{counted(part.rows, 'row')} of {part.seq:,}" for part in self.parts or (self,))
        facts = [f"{counted(self.examples, one)} in {rows}: {self.efficiency:.1%} of the positions hold tokens, "
                 f"{self.learnt:.1%} have a label that counts"]  # fmt: skip
        for count, fate in (
            (self.truncated, "longer than a row and truncated"),
            (self.too_long, "longer than a row and dropped"),
            (self.unlearnable, "dropped without a label that counts"),
        ):
            if count:
                facts.append(f"{counted(count, one)} {fate}")
        return "; ".join(facts)


def pack_corpus(corpus: "Corpus", pack: str, seq: int, overlong: str = "truncate", label_offset: int = 1) -> Packing:
    """Return the rows of `corpus`. `label_offset`: the label of token t is token t + label_offset; for streams also 0."""
    if pack == "stream":
        rows = max(0, corpus.tokens - 1) // seq
        first, end = np.array([label_offset]), np.array([label_offset + rows * seq])
        labels = int(corpus.learnt(first, end)[0]) if rows else 0
        return Packing(seq, rows, tokens=rows * seq, labels=labels)
    offsets, group = corpus.offsets(), corpus.group if pack in PAIRED else 1
    if pack == "documents":
        pieces, counts = split_documents(offsets, seq), dict[str, Any]()
        learnt = corpus.learnt(pieces.starts + 1, pieces.starts + 1 + pieces.lengths)
    else:
        longest = seq // 2 if pack == "packed_pairs" else seq
        pieces, learnt, counts = _whole_examples(corpus, offsets, longest, overlong, group)
    if pack in ("none", "pairs"):
        return _rows_of_one(pieces, learnt, seq, group, counts)
    fit = best_fit if group == 1 else best_fit_of_pairs
    tables = fit(pieces, seq)
    return Packing(
        seq, len(tables[0]) - 1, tables, int(np.diff(tables[0]).max(initial=1)), examples=len(np.unique(pieces.numbers)),
        tokens=int(pieces.lengths.sum()), labels=int(learnt.sum()), **counts,
    )  # fmt: skip


def _rows_of_one(pieces: "Pieces", learnt: np.ndarray, seq: int, group: int, counts: dict[str, Any]) -> Packing:
    return Packing(
        seq, len(pieces.starts), one_a_row(pieces, seq), 2, group, pieces.numbers // group, len(pieces.starts) // group,
        int(pieces.lengths.sum()), int(learnt.sum()), **counts,
    )  # fmt: skip


def pack_buckets(
    corpus: "Corpus",
    pack: str,
    seq: int,
    overlong: str,
    buckets: int | Sequence[int],
    micro_batch: int,
    batches_a_step: int = 1,
) -> Packing:
    """Return the rows of pack "none" or "pairs" in parts of several lengths: as many as `buckets`, those that leave the least
    padding, or the lengths in `buckets`. Examples that do not fill the batches of a step are in rows of the next length."""
    group = corpus.group if pack == "pairs" else 1
    pieces, learnt, counts = _whole_examples(corpus, corpus.offsets(), seq, overlong, group)
    longest = pieces.lengths.reshape(-1, group).max(1)
    lengths = row_lengths(longest, seq, buckets) if isinstance(buckets, int) else tuple(buckets)
    each, rest, parts = micro_batch * batches_a_step // group, np.zeros(0, np.int64), list[tuple[int, np.ndarray]]()
    fits = np.searchsorted(lengths, longest)
    for number, length in enumerate(lengths):
        bucket = np.concatenate([rest, np.flatnonzero(fits == number)])
        whole = len(bucket) if length == lengths[-1] else len(bucket) // each * each
        rest = bucket[whole:]
        parts.append((length, bucket[:whole]))
    while len(parts) > 1 and len(parts[-1][1]) < each:  # such a part would have no batch
        parts[-2:] = [(parts[-1][0], np.concatenate([parts[-2][1], parts[-1][1]]))]
    packings = []
    for length, bucket in parts:
        if len(bucket):
            rows = (np.sort(bucket)[:, None] * group + np.arange(group)).reshape(-1)
            packings.append(_rows_of_one(Pieces(*(column[rows] for column in pieces)), learnt[rows], length, group, {}))
    total: dict[str, Any] = {
        name: sum(getattr(part, name) for part in packings) for name in ("rows", "examples", "tokens", "labels")
    }
    return Packing(seq, group=group, parts=tuple(packings), batches_a_step=batches_a_step, **total, **counts)


def row_lengths(longest: np.ndarray, seq: int, count: int) -> tuple[int, ...]:
    """Return up to `count` lengths of rows for examples of these lengths, with the least padding in all.

    The lengths are multiples of seq / 64, at least of 8. Dynamic programming over them: rows of length j, after those of length
    i, hold the examples between the two.
    """
    step = max(8, -(-seq // 64))
    lengths = np.minimum(np.arange(step, seq + step, step), seq)
    lengths = lengths[: 1 + np.searchsorted(lengths, longest.max(initial=1))]
    fitting = np.searchsorted(np.sort(longest), lengths, side="right")  # examples
    positions, chosen = fitting * lengths, [(int(length),) for length in lengths]
    added = (fitting - fitting[:, None]) * lengths  # [i, j]
    added[np.tril_indices(len(lengths))] = np.iinfo(np.int64).max // 2
    for _ in range(count - 1):
        through = positions[:, None] + added
        before = through.argmin(0)
        better = through.min(0) < positions
        chosen = [(*chosen[i], chosen[j][-1]) if better[j] else chosen[j] for j, i in enumerate(before)]
        positions = np.minimum(positions, through.min(0))
    return chosen[-1]


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
) -> tuple[Pieces, np.ndarray, dict[str, Any]]:
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


def best_fit(pieces: Pieces, seq: int, max_pieces: int | None = None) -> Tables:
    """Return the tables of rows that hold pieces, up to `max_pieces` where that is given, and padding.

    Each piece goes where it leaves the least room, in a random order: a million take 5 s. Longest first would fill the last
    rows with short pieces alone, and attention costs by the fullest row: of 50,000 chats of 400 tokens (log-normal, in rows of
    4,096) that one holds 208, here 25. Both leave 0.1 % of the positions empty.

    Rows are in the order of their first piece in the corpus, and so are the pieces of a row.
    """
    starts, lengths, _ = pieces
    row_of, rooms = fit_rows(lengths, seq, max_pieces or seq)
    _, leading = np.unique(row_of, return_index=True)  # the first piece of each row
    rank = np.empty_like(leading)
    rank[np.argsort(leading)] = np.arange(len(leading))
    by_row = np.argsort(rank[row_of], kind="stable")
    row, length = rank[row_of][by_row], lengths[by_row]
    begin = np.cumsum(length) - length
    in_row = np.bincount(row, minlength=len(leading))
    begin -= np.repeat(begin[np.cumsum(in_row) - in_row], in_row)
    room = np.empty_like(rooms)
    room[rank] = rooms
    ends = np.cumsum(in_row)[room > 0]  # where a piece of padding follows
    begins, shift = np.insert(begin, ends, seq - room[room > 0]), np.insert(starts[by_row] - begin, ends, PADDING)
    return np.concatenate([[0], np.cumsum(in_row + (room > 0))]), begins, shift


def best_fit_of_pairs(pieces: Pieces, seq: int) -> Tables:
    """Return the tables of rows that hold whole pairs: pieces 2k and 2k + 1 follow each other."""
    starts, lengths, numbers = pieces
    pairs = Pieces(starts[0::2], lengths[0::2] + lengths[1::2], numbers[0::2])
    first, begins, shift = best_fit(pairs, seq)
    (paired,) = np.nonzero(shift > PADDING // 2)
    pair = np.searchsorted(pairs.starts, begins[paired] + shift[paired])
    second = begins[paired] + lengths[0::2][pair]  # where the second piece of each pair begins in its row
    before = np.concatenate([[0], np.cumsum(shift > PADDING // 2)])
    begins, shift = np.insert(begins, paired + 1, second), np.insert(shift, paired + 1, starts[1::2][pair] - second)
    return first + before[first], begins, shift


def fit_rows(lengths: np.ndarray, seq: int, max_pieces: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of each piece, where it leaves the least room, and the free positions of each row."""
    of_length, row_of, capacities, counts = lengths.tolist(), [0] * len(lengths), list[int](), list[int]()
    open_rows: list[list[int]] = [[] for _ in range(seq + 1)]  # by free positions
    open_capacities = 0  # bit r is set if rows with r free positions are open; the lowest bit from `length` up is the best fit
    for piece in np.random.default_rng(0).permutation(len(lengths)).tolist():
        length = of_length[piece]
        fitting = open_capacities >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                open_capacities ^= 1 << room
        else:
            room, row = seq, len(capacities)
            capacities.append(seq)
            counts.append(0)
        row_of[piece] = row
        counts[row] += 1
        capacities[row] = room = room - length
        if room and counts[row] < max_pieces:
            open_rows[room].append(row)
            open_capacities |= 1 << room
    return np.array(row_of, np.int64), np.array(capacities, np.int64)


Read = Callable[[Tensor], Tensor]  # index -> stored values
AHEAD = 64  # batches whose rows are computed together: about 40 launches then cost less than one a batch
IGNORED = -100  # the label that losses ignore
STREAM_FIELDS = ("input_ids", "labels")
PACKED_FIELDS = (*STREAM_FIELDS, "position_ids", "segment_ids", "cu_seqlens")
FIELDS = (*PACKED_FIELDS, "example")


@dataclass(frozen=True)
class Order:
    """The order of rows in the batches, which are numbered from the beginning of training across all epochs. Each epoch has its
    own permutation of the rows, or of the groups that stay together; rows that do not fill a last batch are left out of it.

    All ranks share one sequence of batches: of every `world` consecutive ones, each rank takes one. So the rows of a batch do
    not depend on the number of ranks.
    """

    micro_batch: int
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    world: int = 1


@dataclass(eq=False)
class BatchCutter:
    """Batches by counter: `cut(rows(counter))` is this rank's batch after `counter` batches of all ranks. `read` returns the
    stored tokens at an index, `read_mask` their loss mask."""

    packing: Packing
    order: Order
    fields: tuple[str, ...]
    device: torch.device
    read: Read
    read_mask: Read | None
    own_labels: bool = False  # the label is the token itself instead of the next one
    row_values: Mapping[str, Tensor] = field(default_factory=dict)  # name of a field -> its value for each row of an epoch

    def __post_init__(self) -> None:
        packing, order, device = self.packing, self.order, self.device
        self.batches = packing.batches(order.micro_batch)
        size, seq, group = order.micro_batch, packing.seq, packing.group
        self.scatter = Scatter(packing.rows // group, order.seed, device) if order.shuffle else None
        self.groups, self.member = torch.arange(size // group, device=device), torch.arange(group, device=device)
        self.position = torch.arange(seq, device=device).expand(size, seq).contiguous()  # BT
        self.offsets = torch.tensor([0, 0 if self.own_labels else 1], device=device).view(2, 1, 1)  # of input and label
        if packing.tables:
            tables = (torch.from_numpy(np.ascontiguousarray(table, np.int64)).to(device) for table in packing.tables)
            self.first, self.begins, self.shift = tables
            self.piece = torch.arange(packing.max_pieces, device=device)  # M
            self.row_start = (torch.arange(size, device=device) * seq).view(size, 1)
            self.total = torch.full((1,), size * seq, device=device)
        if packing.numbers is not None:
            self.numbers = torch.from_numpy(packing.numbers).to(device)
        self.row_values = {name: values.to(device) for name, values in self.row_values.items()}
        self._steps = torch.arange(AHEAD, device=device) * order.world
        self._ahead: Tensor | None = None  # rows of AHEAD batches of this rank, from number `_ahead_from`
        self._ahead_from = 0

    def batch(self, number: int) -> dict[str, Tensor]:
        """Return this rank's batch after `number` batches of all ranks."""
        nth, between = divmod(number - self._ahead_from, self.order.world)
        if self._ahead is None or between or not 0 <= nth < AHEAD:
            self._ahead, self._ahead_from, nth = self.rows(self._steps + number), number, 0
        return self.cut(self._ahead[nth])

    def rows(self, counter: Tensor) -> Tensor:
        """Return the rows (..., B) of this rank's batch after `counter` (...) batches of all ranks since training began."""
        number = counter + self.order.rank
        epoch = torch.div(number, self.batches, rounding_mode="floor")
        nth = torch.sub(number, epoch, alpha=self.batches)
        group = self.packing.group
        index = torch.add(self.groups, nth.unsqueeze(-1), alpha=self.order.micro_batch // group)
        groups = self.scatter(index, epoch) if self.scatter is not None else index
        return torch.add(self.member, groups.unsqueeze(-1), alpha=group).flatten(-2)

    def cut(self, rows_B: Tensor) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        return self._cut(rows_B) | {name: values[rows_B] for name, values in self.row_values.items()}

    def _cut(self, rows_B: Tensor) -> dict[str, Tensor]:
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
        if "example" in self.fields:
            more["example"] = self.numbers[rows_B]
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
            ids.masked_fill_(padded_BT, 0)
            labels.masked_fill_(padded_BT, IGNORED)
        batch = {"input_ids": ids, "labels": labels, **more}
        return {name: batch[name] for name in self.fields}


def as_stored(tokens: np.ndarray) -> np.ndarray:
    """Return tokens as signed integers of the same bits: torch gathers int16 and int32 on every device, uint16 on few."""
    return tokens.view(np.int16 if tokens.dtype.itemsize == 2 else np.int32)


def token_ids(stored: Tensor) -> Tensor:
    """Return token ids in int64. Ids from 32,768 are negative as int16, so the sign bits are cleared; no id reaches 2³¹."""
    ids = stored.to(torch.int64)
    return ids.bitwise_and_(0xFFFF) if stored.dtype is torch.int16 else ids


class BucketCutter:
    """Batches of rows of one length each, by their number, with a BatchCutter for each length.

    An epoch has all batches of all lengths, in an order of (seed, epoch); without shuffling in one that mixes the lengths, too.
    The batches of a step have one length, whatever number of ranks share them: no rank waits for another's longer rows. The
    host knows the length of the next batch, and no batch depends on the device's counter.
    """

    def __init__(self, packing: Packing, order: Order, row_values: Mapping[str, Tensor] | None = None, **options: Any):
        self.packing, self.order, self.fields = packing, order, options["fields"]
        own = replace(order, rank=0, world=1)
        # row_values are in the order of the corpus, and each part has some of the rows.
        numbers = [part.numbers for part in packing.parts if part.numbers is not None]
        place = np.empty(packing.rows, np.int64)
        place[np.argsort(np.concatenate(numbers), kind="stable")] = np.arange(packing.rows)
        rows = [torch.from_numpy(own) for own in np.split(place, np.cumsum([part.rows for part in packing.parts])[:-1])]
        self.cutters = [
            BatchCutter(part, own, row_values={name: values[index] for name, values in (row_values or {}).items()}, **options)
            for part, index in zip(packing.parts, rows)
        ]
        self.batches = packing.batches(order.micro_batch)
        self._steps = [packing.steps(part, order.micro_batch) for part in packing.parts]
        self._epoch = -1
        self._bucket = self._before = np.zeros(0, np.int64)  # of each step of the epoch: its length, and steps of it before

    def batch(self, number: int) -> dict[str, Tensor]:
        """Return this rank's batch after `number` batches of all ranks."""
        epoch, nth = divmod(number + self.order.rank, self.batches)
        if epoch != self._epoch:
            self._epoch = epoch
            mixed = permutation(sum(self._steps), self.order.seed, epoch if self.order.shuffle else 0).numpy()
            self._bucket = np.repeat(np.arange(len(self.cutters)), self._steps)[mixed]
            self._before = np.empty_like(self._bucket)
            for bucket, steps in enumerate(self._steps):
                self._before[self._bucket == bucket] = np.arange(steps)
        step, member = divmod(nth, self.packing.batches_a_step)
        cutter = self.cutters[self._bucket[step]]
        return cutter.batch(epoch * cutter.batches + int(self._before[step]) * self.packing.batches_a_step + member)


MOST = 64  # answers in a row
# Answers in a row that cu_seqlens have room for: the least that is enough, each a shape for which a step is captured. Flash
# attention has programs for empty ones, too: four rows of three 640 tokens had 260 bounds, with which dO · O, 16 us of reads,
# took 109 us on an H200, and three kernels of each layer wait so.
ROOMS = 4, 16, MOST


class AnswerInRow(NamedTuple):
    """A prompt and its answer. The last token is only a label."""

    prompt: Sequence[int] | np.ndarray
    answer: Sequence[int] | np.ndarray
    labels: Any  # of the answer's tokens
    fields: Mapping[str, Any]  # other fields' values: one for each of the answer's tokens, or one for all

    @property
    def length(self) -> int:
        """Positions that it takes in a row."""
        return len(self.prompt) + len(self.answer) - 1


class AnswerPlace(NamedTuple):
    """The positions of an answer: batch, row in it, first position, and the one after the last."""

    batch: int
    row: int
    begin: int
    end: int


def pack_answers(
    answers: Sequence[AnswerInRow], rows: int, tokens: int, names: Iterable[str], most: int = MOST, few: bool = False
) -> tuple[list[dict[str, np.ndarray]], list[AnswerPlace]]:
    """Return batches of `rows` rows of `tokens` positions that hold the answers, and the place of each in them.

    names  of the fields in fp32, besides those of all rows
    most   answers in a row
    few    the last batch has only as many rows as it needs, a power of two: a step is captured for few shapes
    """
    names = tuple(names)
    row_of, capacities = fit_rows(np.array([one.length for one in answers]), tokens, most)
    packed: list[list[int]] = [[] for _ in capacities]  # numbers of the answers in each row
    for number, row in enumerate(row_of.tolist()):
        packed[row].append(number)
    room = next(size for size in ROOMS if size >= max(map(len, packed), default=0))
    batches, positions = list[dict[str, np.ndarray]](), dict[int, AnswerPlace]()
    for at in range(0, len(packed), rows):
        part = packed[at : at + rows]
        for row, numbers in enumerate(part):
            ends = np.cumsum([answers[number].length for number in numbers]).tolist()
            for number, end in zip(numbers, ends):
                positions[number] = AnswerPlace(len(batches), row, end - len(answers[number].answer), end)
        count = 1 << (len(part) - 1).bit_length() if few else rows
        parts = [[answers[number] for number in numbers] for numbers in part]
        batches.append(answer_rows(parts, count, tokens, names, room))
    return batches, [positions[number] for number in range(len(answers))]


def answer_rows(
    rows: Sequence[Sequence[AnswerInRow]], count: int, tokens: int, names: Iterable[str], most: int = MOST
) -> dict[str, np.ndarray]:
    """Return the fields of `count` rows that hold answers, up to `most` each, one after another, then padding."""
    batch: dict[str, np.ndarray] = {
        name: np.full((count, tokens), fill, kind)
        for name, fill, kind in (
            ("input_ids", 0, np.int64), ("labels", IGNORED, np.int64), ("position_ids", 0, np.int64),
            ("segment_ids", -1, np.int64), *((name, 0, np.float32) for name in names),
        )
    }  # fmt: skip
    bounds = np.full((count, most + 1), tokens, np.int32)  # where each answer of a row begins, then its padding
    bounds[len(rows) :, 0] = 0
    for row, answers in enumerate(rows):
        begin = 0
        for segment, one in enumerate(answers):
            first = begin + len(one.prompt) - 1
            end = begin + one.length
            batch["input_ids"][row, begin : first + 1], batch["input_ids"][row, first + 1 : end] = one.prompt, one.answer[:-1]
            batch["labels"][row, first:end] = one.labels
            batch["position_ids"][row, begin:end] = np.arange(end - begin)
            batch["segment_ids"][row, begin:end] = segment
            for name, values in one.fields.items():
                batch[name][row, first:end] = values
            bounds[row, segment] = begin
            begin = end
        bounds[row, len(answers)] = begin
    bounds += np.arange(count, dtype=np.int32)[:, None] * tokens
    return batch | {"cu_seqlens": np.append(bounds.flatten(), np.int32(count * tokens))}
