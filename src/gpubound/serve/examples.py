"""Examples of a request, packed into rows of one length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.rows import IGNORED, AnswerInRow, AnswerPlace, pack_answers
from ..formatting import hint, shown

LARGEST = float(np.finfo(np.float32).max)
LOGPROBS = ("logprobs", "old_logprobs", "reference_logprobs")
FIELDS = {"logprobs": "sampler_logprobs", "old_logprobs": "old_logprobs", "reference_logprobs": "reference_logprobs"}


@dataclass(frozen=True, eq=False)
class Example:
    """A prompt and its answer.

    advantages  the weight of each of the answer's tokens
    learnt      which of them count: those of a tool or of an environment do not
    logprobs    log-probabilities of the answer's tokens, by the name of their field
    """

    prompt: list[int]
    answer: list[int]
    advantages: list[float]
    learnt: list[bool]
    logprobs: dict[str, list[float]]

    def in_row(self) -> AnswerInRow:
        labels = np.where(self.learnt, self.answer, IGNORED)
        return AnswerInRow(self.prompt, self.answer, labels, {"advantages": self.advantages, **self.logprobs})


def read_examples(examples: Any, encode: Any, longest: int, vocab: int) -> list[Example]:
    """Check the examples of a request, and return them. encode: (text or ids, the example's place in an error) -> ids"""
    if not isinstance(examples, Sequence) or isinstance(examples, str) or not examples:
        raise ValueError(f"examples: got {shown(examples)}, wanted a list of at least one {{'prompt': ..., 'answer': ...}}.")
    return [_read(one, encode, longest, vocab, f"examples[{number}]") for number, one in enumerate(examples)]


def _read(one: Any, encode: Any, longest: int, vocab: int, where: str) -> Example:
    known = ("prompt", "answer", "advantage", "learnt", *LOGPROBS)
    if not isinstance(one, Mapping) or not {"prompt", "answer"} <= one.keys():
        raise ValueError(f"{where}: got {shown(one)}, wanted a dict with prompt and answer.")
    if unknown := [key for key in one if key not in known]:
        raise ValueError(f"{where}: {unknown[0]!r} is unknown; {hint(str(unknown[0]), known, 'the keys are')}")
    prompt, answer = (encode(one[name], f"{where}: {name}") for name in ("prompt", "answer"))
    if not prompt or not answer:
        raise ValueError(f"{where}: got {len(prompt)} tokens of prompt and {len(answer)} of answer, wanted at least one each.")
    if len(prompt) + len(answer) > longest:
        raise ValueError(
            f"{where}: got {len(prompt):,} tokens of prompt and {len(answer):,} of answer, wanted at most {longest:,} "
            f"together; shorten it, or serve with a larger max_length."
        )
    if wrong := [token for token in prompt + answer if not 0 <= token < vocab]:
        raise ValueError(f"{where}: got the token {wrong[0]}, wanted 0 to {vocab - 1}, the model's vocabulary.")

    def each(name: str, value: Any) -> list[float]:
        values = [value] * len(answer) if isinstance(value, int | float) else value
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(answer):
            got = f"{len(values)} numbers" if isinstance(values, Sequence) else shown(value)
            raise ValueError(f"{where}: {name}: got {got}, wanted a number for each of the answer's {len(answer)} tokens.")
        if wrong := [v for v in values if not isinstance(v, int | float) or not abs(v) <= LARGEST]:
            raise ValueError(f"{where}: {name}: got {shown(wrong[0])}, wanted numbers that are finite in fp32.")
        return [float(v) for v in values]

    logprobs = {FIELDS[name]: each(name, one[name]) for name in LOGPROBS if one.get(name) is not None}
    counts = each("learnt", one.get("learnt", 1))
    if wrong := [value for value in counts if value not in (0, 1)]:
        raise ValueError(f"{where}: learnt: got {wrong[0]:g}, wanted 1 for a token that counts, else 0; advantage weighs it.")
    learnt = [value == 1 for value in counts]
    return Example(prompt, answer, each("advantage", one.get("advantage", 1.0)), learnt, logprobs)


def pack(
    examples: Sequence[Example], tokens: int, rows: int, device: torch.device
) -> tuple[list[dict[str, Tensor]], list[AnswerPlace]]:
    """Return batches for the objective `policy`, and the place of each example in them."""
    names = ("advantages", *sorted({name for example in examples for name in example.logprobs}))
    batches, positions = pack_answers([example.in_row() for example in examples], rows, tokens, names, few=True)
    return [{name: torch.from_numpy(values).to(device) for name, values in batch.items()} for batch in batches], positions
