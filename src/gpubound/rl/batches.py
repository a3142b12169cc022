"""From scored answers to micro-batches: advantages, and packed rows of one shape for every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.packing import PADDING, Pieces, best_fit
from ..data.rows import IGNORED
from .rewards import AnswerGroup

MOST = 64  # answers in a row
OF_PACKED = ("position_ids", "segment_ids", "cu_seqlens")  # fields of rows with several answers
TINY = 1e-4  # added to the standard deviation, as usual


def advantages(groups: Sequence[AnswerGroup], scaled: bool) -> list[list[float]]:
    """Return each answer's reward less the mean of its group, with `scaled` divided by the group's standard deviation.

    A single answer is compared with those to the other prompts.
    """
    rewards = [np.array(group.rewards) for group in groups]
    if all(len(own) == 1 for own in rewards):
        every = _centred(np.concatenate(rewards), scaled)
        return [[value] for value in every.tolist()]
    return [_centred(own, scaled).tolist() for own in rewards]


def _centred(rewards: np.ndarray, scaled: bool) -> np.ndarray:
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + TINY) if scaled and len(rewards) > 1 else centred


@dataclass(frozen=True)
class RowShape:
    """Shape of the micro-batches: `rows` rows of `tokens` tokens. All steps have it, so that one graph serves them."""

    rows: int
    tokens: int
    most: int  # micro-batches in a step

    @classmethod
    def of(
        cls, answers: int, seq: int, row_tokens: int | None = None, micro_batch: int | None = None, pack: bool = True
    ) -> "RowShape":
        """Return the shape for up to `answers` answers of up to `seq` tokens with their prompts."""
        tokens = max(seq, min(row_tokens or 1024, answers * seq)) if pack else seq
        worst = -(-answers // min(MOST, tokens // seq))  # rows, where each answer has all of its tokens
        rows = min(micro_batch or max(1, 8192 // tokens), worst)
        return cls(rows, tokens, -(-worst // rows))


def micro_batches(
    groups: Sequence[AnswerGroup],
    scores: Sequence[Sequence[float]],
    shape: RowShape,
    device: torch.device,
    pack: bool = True,
) -> list[dict[str, Tensor]]:
    """Return the batches of a step for the objective `policy`: several answers a row, each after its prompt.

    pack  False: one a row, without the fields that keep several apart
    """
    answers = [
        (group.prompt.ids, answer, score)
        for group, own in zip(groups, scores)
        for answer, score in zip(group.answers, own)
        if answer.tokens
    ]
    lengths = np.array([len(prompt) + len(answer.tokens) - 1 for prompt, answer, _ in answers])
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    first, begins, shift = best_fit(Pieces(starts, lengths, np.arange(len(answers))), shape.tokens, MOST if pack else 1)
    rows = len(first) - 1
    count = -(-rows // shape.rows) * shape.rows
    fields: dict[str, np.ndarray] = {
        name: np.full((count, shape.tokens), fill, kind)
        for name, fill, kind in (
            ("input_ids", 0, np.int64), ("labels", IGNORED, np.int64), ("position_ids", 0, np.int64),
            ("segment_ids", -1, np.int64), ("advantages", 0, np.float32), ("sampler_logprobs", 0, np.float32),
        )
    }  # fmt: skip
    bounds = np.full((count, MOST + 1), shape.tokens, np.int32)  # where each answer of a row begins, then its padding
    bounds[rows:, 0] = 0
    for row in range(rows):
        pieces = [p for p in range(first[row], first[row + 1]) if shift[p] > PADDING // 2]
        end = 0
        for segment, piece in enumerate(pieces):
            prompt, answer, score = answers[int(np.searchsorted(starts, begins[piece] + shift[piece]))]
            begin, ids = int(begins[piece]), [*prompt, *answer.tokens]
            end, learnt = begin + len(ids) - 1, begin + len(prompt) - 1
            fields["input_ids"][row, begin:end] = ids[:-1]
            fields["labels"][row, learnt:end] = answer.tokens
            fields["position_ids"][row, begin:end] = np.arange(end - begin)
            fields["segment_ids"][row, begin:end] = segment
            fields["advantages"][row, learnt:end] = score
            fields["sampler_logprobs"][row, learnt:end] = answer.logprobs
            bounds[row, segment] = begin
        bounds[row, len(pieces)] = end
    bounds += (np.arange(count, dtype=np.int32) % shape.rows * shape.tokens)[:, None]
    batches = []
    for at in range(0, count, shape.rows):
        part = slice(at, at + shape.rows)
        ends = np.append(bounds[part].flatten(), np.int32(shape.rows * shape.tokens))
        batch = {name: values[part] for name, values in fields.items()} | {"cu_seqlens": ends}
        batches.append({name: _on(values, device) for name, values in batch.items() if pack or name not in OF_PACKED})
    return batches


def _on(values: np.ndarray, device: torch.device) -> Any:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
