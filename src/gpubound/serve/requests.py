"""Examples of a request, packed into rows of one length, and its loss: each batch names its own, and leaves the log-probability
of every label.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.packing import IGNORED, AnswerInRow, AnswerPlace, pack_answers
from ..formatting import hint, shown
from ..kernels.dispatch import Call
from ..train.objectives import Objective
from ..train.objectives.policy import VARIANTS, Policy

LARGEST = float(np.finfo(np.float32).max)
ROUNDING = 0.01  # by which a log-probability that was computed in 16 bits may be above 0
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
    """Check the examples of a request, and return them.

    encode  (text or ids, the example's place in an error, rest=whether it goes on from a prompt) -> ids
    """
    if not isinstance(examples, Sequence) or isinstance(examples, str) or not examples:
        raise ValueError(f"examples: got {shown(examples)}, wanted a list of at least one {{'prompt': ..., 'answer': ...}}.")
    read = [_read(one, encode, longest, vocab, f"examples[{number}]") for number, one in enumerate(examples)]
    for name, field in FIELDS.items():
        without = [number for number, one in enumerate(read) if field not in one.logprobs]
        if 0 < len(without) < len(read):  # one loss measures all ratios alike
            raise ValueError(f"examples[{without[0]}]: has no {name}, and others have; give them to all examples or to none.")
    return read


def _read(one: Any, encode: Any, longest: int, vocab: int, where: str) -> Example:
    known = ("prompt", "answer", "advantage", "learnt", *LOGPROBS)
    if not isinstance(one, Mapping) or not {"prompt", "answer"} <= one.keys():
        raise ValueError(f"{where}: got {shown(one)}, wanted a dict with prompt and answer.")
    if unknown := [key for key in one if key not in known]:
        raise ValueError(f"{where}: {unknown[0]!r} is unknown; {hint(str(unknown[0]), known, 'the keys are')}")
    prompt, answer = encode(one["prompt"], f"{where}: prompt"), encode(one["answer"], f"{where}: answer", rest=True)
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
        listed = isinstance(values, Sequence) and not isinstance(values, str)
        if not listed or len(values) != len(answer):
            got = f"{len(values)} numbers" if listed else shown(value)
            raise ValueError(f"{where}: {name}: got {got}, wanted a number for each of the answer's {len(answer)} tokens.")
        if wrong := [v for v in values if not isinstance(v, int | float) or not abs(v) <= LARGEST]:
            raise ValueError(f"{where}: {name}: got {shown(wrong[0])}, wanted numbers that are finite in fp32.")
        return [float(v) for v in values]

    logprobs = {FIELDS[name]: each(name, one[name]) for name in LOGPROBS if one.get(name) is not None}
    for name, field in FIELDS.items():
        if wrong := [value for value in logprobs.get(field, ()) if value > ROUNDING]:
            raise ValueError(f"{where}: {name}: got {wrong[0]:g}, wanted logarithms of probabilities, at most 0.")
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


CROSS_ENTROPY = "cross_entropy"
LOSSES = (CROSS_ENTROPY, *VARIANTS)
LOSS = "loss"  # the key in a batch, of a constant: a step is captured for each


def loss_named(name: str, options: Mapping[str, Any]) -> str:
    """Return the constant in a batch that names a loss and its options; raise ValueError for one that there is not.

    cross_entropy  -advantage · log π, averaged over the tokens: the usual loss where no advantage is given
    """
    if name not in LOSSES:
        raise ValueError(f"objective: got {name!r}, wanted one of {', '.join(LOSSES)}.")
    known = [] if name == CROSS_ENTROPY else [f.name for f in fields(Policy) if f.init and f.name != "variant"]
    if unknown := [key for key in options if key not in known]:
        why = hint(unknown[0], known, "its options are") if known else "it has no options."
        raise ValueError(f"objective: {unknown[0]!r} is no option of {name}; {why}")
    settings = {"variant": "reinforce", "truncate": None} if name == CROSS_ENTROPY else {"variant": name, **options}
    RecordingPolicy(**settings)  # refuses values
    return json.dumps(settings, sort_keys=True)


class RecordingPolicy(Policy):
    """The policy-gradient loss. It keeps the log-probabilities of the last batch of each shape."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def prepare(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        super().prepare(model, batch)
        labels = batch["labels"]
        self.kept.setdefault(tuple(labels.shape), torch.zeros(labels.shape, device=labels.device, dtype=torch.float32))

    def written(self) -> list[Tensor]:
        return [*super().written(), *self.kept.values()]

    def _measure(self, logprob: Tensor, *rest: Any) -> None:
        super()._measure(logprob, *rest)
        self.kept[tuple(logprob.shape)].copy_(logprob)


class RequestedLoss(Objective):
    """The loss that a batch names under "loss"."""

    of_corpus = False

    def __init__(self) -> None:
        self.by_options: dict[str, RecordingPolicy] = {}
        self.sums: Tensor | None = None  # the losses since `begin`, and their number of items

    def of(self, batch: Mapping[str, Any]) -> tuple[RecordingPolicy, dict[str, Any]]:
        text = batch[LOSS]
        if text not in self.by_options:
            self.by_options[text] = RecordingPolicy(**json.loads(text))
        return self.by_options[text], {key: value for key, value in batch.items() if key != LOSS}

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        objective, rest = self.of(batch)
        total, items = objective(model, rest, scale)
        assert self.sums is not None, "check_batch was called"
        own = total.detach() if scale is None else total.detach() / scale
        self.sums.add_(torch.stack([own.double(), torch.as_tensor(items, device=own.device).double()]))
        return total, items

    def check_model(self, model: Any) -> None:
        Policy().check_model(model)

    def check_batch(self, model: Any, batch: Mapping[str, Any]) -> None:
        objective, rest = self.of(batch)
        if self.sums is None:
            self.sums = torch.zeros(2, dtype=torch.float64, device=rest["labels"].device)
        objective.check_batch(model, rest)

    def prepare(self, model: Any, batch: Mapping[str, Any]) -> None:
        objective, rest = self.of(batch)
        objective.prepare(model, rest)

    def calls(self, model: Any) -> Iterable[Call]:
        return Policy().calls(model)

    def written(self) -> list[Tensor]:
        sums = [] if self.sums is None else [self.sums]
        return sums + [tensor for objective in self.by_options.values() for tensor in objective.written()]

    def begin(self) -> None:
        """Forget what calls have added since the last call of this: one of them may have failed."""
        if self.sums is not None:
            self.sums.zero_()
        for objective in self.by_options.values():
            if objective.figures is not None:
                objective.figures.zero_()

    def take(self, text: str) -> dict[str, float]:
        """Return the mean loss since `begin`, and the figures of the loss. Waits for the device."""
        assert self.sums is not None, "a batch was computed"
        total, items = self.sums.tolist()
        return {"loss": total / max(items, 1), "items": items} | self.by_options[text].take_figures()
