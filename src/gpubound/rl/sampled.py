"""The scored answers of a step, and how a checkpoint keeps those that were sampled before its weights' last update."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .episodes import Episode
from .prompts import RLPrompt
from .rewards import AnswerGroup


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
