"""The loss of a policy's requests: each batch names its own, and leaves the log-probability of every label."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ..formatting import hint
from ..kernels.dispatch import Call
from ..train.objectives import Objective
from ..train.objectives.policy import VARIANTS, Policy

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
