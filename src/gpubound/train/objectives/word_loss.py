"""What the objectives of language models share: the cross-entropy of a model's words, without the whole logits where it can be.

Where the model can give its last hidden states, the head's product and the loss are one op that never holds all logits
(kernels.linear_cross_entropy): at 32k vocabulary and 16k tokens they would be 1 GB, and their gradient another. Whether
skipping the model's own forward gives the same logits is not believed but tried, once, on one row of the first batch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...kernels import cross_entropy, linear_cross_entropy
from ...kernels.cross_entropy import loss_shape
from ...kernels.dispatch import Call
from ...layers.embedding_and_head import head_of
from ...models.language_model import LanguageModel, first_row, hidden_of, logits_of, why_not_head
from ...models.placing import mode
from ...trace import fallback
from . import Objective
from .inputs import check_arguments, check_tokens

IGNORE = -100
CHUNK = 4096  # tokens of logits at a time. H200, 16384 tokens, 32768 words: 5.7 ms against 6.6 with 1024, for 0.2 GB more


@dataclass(eq=False)
class WordLoss(Objective):
    """A loss over words. A subclass says which words are the targets, and what the model sees."""

    name: ClassVar[str]
    weighted: ClassVar[bool] = False  # whether targets have weights
    _tried: nn.Module | None = field(init=False, default=None)
    _whole: str | None = field(init=False, default=None)  # why this model's logits are needed whole
    _classes: int | None = field(init=False, default=None)  # number of classes of the logits

    def check_model(self, model: nn.Module) -> None:
        check_arguments(self.name, model, ["input_ids"], complete=False)

    def calls(self, model: nn.Module) -> Iterable[Call]:
        head = head_of(model)
        if not isinstance(head, nn.Linear):
            return ()
        return [("linear_cross_entropy", (*loss_shape(head.out_features), True, self.weighted))]

    def prepare(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Find out how this model is best asked. Reads the device once; the step itself never does."""
        if self._tried is not model:
            given, labels = self.split(batch)
            inputs = self.trial(model, given)
            check_arguments(self.name, model, inputs)
            check_tokens(self.name, model, given["input_ids"], labels)
            self.check(model, inputs, labels)
            self._whole = why_not_head(model, inputs)
            if self._whole:
                fallback(f"{self.name} without whole logits", self._whole)
                with torch.no_grad(), mode(model, training=False):
                    self._classes = logits_of(model, first_row(inputs)).shape[-1]
            self._tried = model

    def check_batch(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        self.prepare(model, batch)
        inputs, labels = self.split(batch)
        check_arguments(self.name, model, self.trial(model, inputs))
        check_tokens(self.name, model, inputs["input_ids"], labels, self._classes)

    def trial(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model takes when it is tried: what it is told in training beside the batch."""
        return inputs

    def check(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> None:
        """Refuse a model or a batch that the loss would be wrong for. Called once for each model; may read the device."""

    def split(self, batch: Any) -> tuple[dict[str, Any], Tensor]:
        """(what the model takes, the labels)"""
        if not isinstance(batch, Mapping) or "labels" not in batch or "input_ids" not in batch:
            got = f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise ValueError(
                f"{self.name}: a batch must be a dict with input_ids and labels, got {got}; pass your own loss for other data."
            )
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        labels = batch["labels"]
        for key in ("input_ids", "labels"):
            if not isinstance(batch[key], Tensor):
                raise ValueError(f"{self.name}: batch[{key!r}] is a {type(batch[key]).__name__}, wanted a tensor of token ids.")
        if labels.shape != batch["input_ids"].shape:
            raise ValueError(
                f"{self.name}: labels must have the shape of input_ids, {tuple(batch['input_ids'].shape)}, "
                f"got {tuple(labels.shape)}; give one label a token, -100 where there is nothing to learn."
            )
        return inputs, labels

    def total(
        self, model: Any, inputs: dict[str, Any], targets: Tensor, scale: Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """`words_loss`, and what the model itself adds to the mean of a training step, times the words that count."""
        loss = self.words_loss(model, inputs, targets, scale, weights)
        extra = model.extra_loss() if isinstance(model, LanguageModel) else None
        if extra is None:
            return loss
        extra = extra * (targets != IGNORE).sum()
        return loss + (extra if scale is None else extra * scale)

    def words_loss(
        self, model: Any, inputs: dict[str, Any], targets: Tensor, scale: Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """The sum over all targets but -100, each times its own of `weights`, all times `scale`. With `scale` the head's
        gradient is made in forward, for a backward that begins with 1."""
        if self._whole is None:
            head = model.get_output_embeddings()
            return linear_cross_entropy(
                hidden_of(model, inputs), head.weight, targets, head.bias,
                ignore_index=IGNORE, reduction="sum", chunk=CHUNK, grad_scale=scale, weights=weights,
            )  # fmt: skip
        logits = logits_of(model, inputs)
        self._check_positions(model, logits, targets)
        reduction = "sum" if weights is None else "none"
        loss = cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction=reduction)
        if weights is not None:
            loss = (loss * weights.flatten()).sum()
        return loss if scale is None else loss * scale

    def _check_positions(self, model: Any, logits: Tensor, labels: Tensor) -> None:
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"{self.name}: {type(model).__name__} gives logits for {tuple(logits.shape[:-1])} (rows, tokens), wanted "
                f"{tuple(labels.shape)} as there are labels; where the model adds tokens of its own, as PEFT's prompts do, "
                f"pass a loss that knows them: (model, batch) -> (sum, count)."
            )
