"""From scored answers to micro-batches: advantages, and packed rows of one shape for every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.rows import IGNORED, MOST, AnswerInRow, pack_answers
from .rewards import AnswerGroup

OF_PACKED = ("position_ids", "segment_ids", "cu_seqlens")  # fields of rows with several answers
ROW, MICRO = 2048, 8192  # tokens of a row and of a micro-batch, at most, where the recipe names none and answers are shorter
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
        """Return the shape for up to `answers` answers of up to `seq` tokens with their prompts.

        By default a row holds a whole number of the longest answers: rows of 1,024 tokens for 640 would be empty by a third.
        """
        tokens = max(seq, min(row_tokens or ROW // seq * seq, answers * seq)) if pack else seq
        worst = -(-answers // min(MOST, tokens // seq))  # rows, where each answer has all of its tokens
        rows = min(micro_batch or max(1, MICRO // tokens), worst)
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
        AnswerInRow(
            group.prompt.ids, answer.tokens, np.where(answer.learnt, answer.tokens, IGNORED),
            {"advantages": score, "sampler_logprobs": answer.logprobs},
        )
        for group, own in zip(groups, scores)
        for answer, score in zip(group.answers, own)
        if answer.tokens
    ]  # fmt: skip
    packed, _ = pack_answers(answers, shape.rows, shape.tokens, ("advantages", "sampler_logprobs"), most=MOST if pack else 1)
    return [{name: _on(values, device) for name, values in batch.items() if pack or name not in OF_PACKED} for batch in packed]


def _on(values: np.ndarray, device: torch.device) -> Any:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
