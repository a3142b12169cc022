"""Prompts with answers, packed into the rows of micro-batches: what the objective `policy` learns."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .packing import fit_rows
from .rows import IGNORED

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
