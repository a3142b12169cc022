"""From scored answers to micro-batches: advantages, and packed rows of one shape for every step.

`Sampled` has the scored answers of a step; a checkpoint keeps those that were sampled before its weights' last update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data.packing import IGNORED, MOST, AnswerInRow, pack_answers
from .episodes import Episode
from .rewards import AnswerGroup, RLPrompt

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
    """Shape of the micro-batches: `rows` rows of `tokens` tokens. All steps have it, so that few graphs serve them."""

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
    answers = []
    for group, own in zip(groups, scores):
        prompt = np.array(group.prompt.ids)
        for answer, score in zip(group.answers, own):
            if answer.tokens:
                tokens, logprobs = np.array(answer.tokens), np.array(answer.logprobs, np.float32)
                labels = tokens if all(answer.learnt) else np.where(answer.learnt, tokens, IGNORED)
                fields = {"advantages": score, "sampler_logprobs": logprobs}
                answers.append(AnswerInRow(prompt, tokens, labels, fields))
    packed, _ = pack_answers(answers, shape.rows, shape.tokens, ("advantages", "sampler_logprobs"), most=MOST if pack else 1)
    names = [name for name in packed[0] if pack or name not in OF_PACKED] if packed else []
    columns = {name: _on([batch[name] for batch in packed], device) for name in names}
    return [{name: column[number] for name, column in columns.items()} for number in range(len(packed))]


def _on(values: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays of all micro-batches on the device, by one copy from the host instead of 43 a step."""
    like = torch.from_numpy(values[0])
    host = torch.empty((len(values), *like.shape), dtype=like.dtype, device="cpu", pin_memory=device.type == "cuda")
    np.stack(values, out=host.numpy())
    return [one.clone() for one in host.to(device, non_blocking=True)]  # which begin where kernels expect tensors to begin


class Sampled(NamedTuple):
    """The scored answers of a step: `groups`, which are learnt, and all that were sampled for them."""

    groups: list[AnswerGroup]
    every: list[AnswerGroup]
    seconds: float  # of sampling
    waited: float  # seconds for rewards, after the last answer


COLUMNS = {"tokens": torch.int64, "logprobs": torch.float64, "learnt": torch.uint8}


def as_state(sampled: Sampled, prompts: Sequence[RLPrompt]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the JSON of a checkpoint. What environments keep in `state` is not in it: it has been rewarded."""
    number = {id(prompt): index for index, prompt in enumerate(prompts)}
    answers = [answer for group in sampled.every for answer in group.answers]
    columns = {
        name: torch.tensor([value for answer in answers for value in getattr(answer, name)], dtype=dtype, device="cpu")
        for name, dtype in COLUMNS.items()
    }
    groups = [
        {
            "prompt": number[id(group.prompt)], "learnt": any(group is one for one in sampled.groups), "rewards": group.rewards,
            "parts": group.parts,
            "answers": [
                {"number": a.number, "sample": a.sample, "turns": a.turns, "finish": a.finish, "policy_turns": a.policy_turns,
                 "tokens": len(a.tokens)}
                for a in group.answers
            ],
        }
        for group in sampled.every
    ]  # fmt: skip
    return columns, {"groups": groups, "seconds": sampled.seconds}


def from_state(columns: Mapping[str, Tensor], facts: Mapping[str, Any], prompts: Sequence[RLPrompt]) -> Sampled:
    """Return what `as_state` was given."""
    values = {name: columns[name].tolist() for name in COLUMNS}
    every, groups, begin = list[AnswerGroup](), list[AnswerGroup](), 0
    for each in facts["groups"]:
        prompt = prompts[each["prompt"]]
        group = AnswerGroup(prompt, rewards=each["rewards"], parts=each["parts"])
        for answer in each["answers"]:
            end = begin + answer["tokens"]
            own = {name: column[begin:end] for name, column in values.items()}
            own["learnt"] = list(map(bool, own["learnt"]))
            group.answers.append(Episode(prompt, **answer | own))
            begin = end
        every.append(group)
        groups += [group] if each["learnt"] else []
    return Sampled(groups, every, facts["seconds"], 0.0)
