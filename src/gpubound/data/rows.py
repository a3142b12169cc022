"""Rows of tokens, gathered into batches on the device, and prompts with answers packed into rows: what `policy` learns.

`BatchCutter` works from a step counter, with fixed shapes and no host read, so the same code runs on the CPU (for corpora
streamed from disk, and as the reference of tests) and inside a captured CUDA graph, and gives the same batch bit for bit.

`BucketCutter` has rows of several lengths: short examples in short rows, so that less of the batches is padding.

B rows a batch, T positions a row, M pieces in the fullest row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .packing import BEYOND, Packing, fit_rows
from .source import Scatter, order as permutation

Read = Callable[[Tensor], Tensor]  # index -> stored values
AHEAD = 64  # batches whose rows are computed together: about 40 launches then cost less than one a batch
IGNORED = -100  # the label that losses ignore
STREAM_FIELDS = ("input_ids", "labels")
PACKED_FIELDS = (*STREAM_FIELDS, "position_ids", "segment_ids", "cu_seqlens")
FIELDS = (*PACKED_FIELDS, "example", "valid")


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
    pad_id: int
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


class AnswerInRow(NamedTuple):
    """A prompt and its answer. The last token is only a label."""

    prompt: list[int]
    answer: list[int]
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
    batches, positions = list[dict[str, np.ndarray]](), dict[int, AnswerPlace]()
    for at in range(0, len(packed), rows):
        part = packed[at : at + rows]
        for row, numbers in enumerate(part):
            ends = np.cumsum([answers[number].length for number in numbers]).tolist()
            for number, end in zip(numbers, ends):
                positions[number] = AnswerPlace(len(batches), row, end - len(answers[number].answer), end)
        count = 1 << (len(part) - 1).bit_length() if few else rows
        batches.append(answer_rows([[answers[number] for number in numbers] for numbers in part], count, tokens, names))
    return batches, [positions[number] for number in range(len(answers))]


def answer_rows(rows: Sequence[Sequence[AnswerInRow]], count: int, tokens: int, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the fields of `count` rows that hold answers, up to MOST each, one after another, then padding."""
    batch: dict[str, np.ndarray] = {
        name: np.full((count, tokens), fill, kind)
        for name, fill, kind in (
            ("input_ids", 0, np.int64), ("labels", IGNORED, np.int64), ("position_ids", 0, np.int64),
            ("segment_ids", -1, np.int64), *((name, 0, np.float32) for name in names),
        )
    }  # fmt: skip
    bounds = np.full((count, MOST + 1), tokens, np.int32)  # where each answer of a row begins, then its padding
    bounds[len(rows) :, 0] = 0
    for row, answers in enumerate(rows):
        begin = 0
        for segment, one in enumerate(answers):
            first = begin + len(one.prompt) - 1
            end = begin + one.length
            batch["input_ids"][row, begin:end] = [*one.prompt, *one.answer][:-1]
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
