"""Losses of the log-probabilities of answers, and sums over the examples of a batch. An example is a row, or a part of a packed
row.

The log-probabilities are needed before a loss of them and its gradient are known, and the logits are never whole. So the head's
product runs twice: without a gradient for log π, then in linear_cross_entropy with each token's −∂loss/∂log π as its weight,
which gives the gradient exactly.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ... import lora
from ...kernels import linear_cross_entropy
from ...kernels.cross_entropy import loss_shape
from ...kernels.dispatch import Call
from ...layers.embedding_and_head import head_of
from ...models.language_model import LanguageModel, hidden_of, logits_of
from ...models.registry import mode
from .chunked_head import CHUNK, IGNORE, head_token_losses, token_losses
from .word_loss import WordLoss


class Examples:
    """The examples of a batch, S in all. A packed row has room for as many as the fullest one holds, a multiple of `group`.

    present  (S,), whether there is such an example
    """

    def __init__(self, inputs: Mapping[str, Any], labels: Tensor, group: int = 1):
        self.labels, self.member, self.present = labels, None, labels.new_ones(len(labels), dtype=torch.bool)
        if "segment_ids" in inputs:
            rows, segments = len(labels), inputs["segment_ids"]
            most = (len(inputs["cu_seqlens"]) - 1) // rows if "cu_seqlens" in inputs else labels.shape[1]
            numbers = torch.arange(most + -most % group, device=labels.device)
            self.member = segments.unsqueeze(1) == numbers.unsqueeze(1)  # (rows, examples of a row, tokens)
            self.segments = segments.clamp_min(0)
            self.present = self.member.any(-1).flatten()

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of values (B, T) over each example (S,). Ratios are small differences of large sums."""
        if self.member is None:
            return values.sum(1, dtype=torch.float64)
        return torch.where(self.member, values.unsqueeze(1), 0).sum(-1, dtype=torch.float64).flatten()

    def at_tokens(self, values: Tensor) -> Tensor:
        """Return the value of each token's example (B, T)."""
        if self.member is None:
            return values.unsqueeze(1).expand(self.labels.shape).contiguous()
        return values.view(len(self.labels), -1).gather(1, self.segments)


@dataclass(eq=False)
class AnswerLoss(WordLoss):
    """A loss of the log-probabilities of answers, beside those of a reference: the model without its adapters, where a batch
    does not have them."""

    weighted: ClassVar[bool] = True

    def calls(self, model: nn.Module) -> Iterable[Call]:
        head = head_of(model)
        return [*super().calls(model), ("cross_entropy", loss_shape(head.out_features))] if isinstance(head, nn.Linear) else []

    def tempered(self, values: Tensor) -> Tensor:
        """Return hidden states or logits at the temperature of the distribution."""
        return values

    @torch.no_grad()
    def logprobs(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """Return the log-probability of each label (B, T), 0 for -100."""
        WordLoss.prepare(self, model, batch)
        inputs, labels = self.split(batch)
        with mode(model, training=False):
            if self._why_all_logits is not None:
                return -token_losses(self.tempered(logits_of(model, inputs)), labels)
            return -head_token_losses(self.tempered(hidden_of(model, inputs)), head_of(model), labels)

    def logprobs_without_adapters(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        with lora.disable(model):
            logprob = self.logprobs(model, batch)
        if isinstance(model, LanguageModel):
            model.extra_loss()  # of this forward: it is not trained
        return logprob


def through_head(hidden: Tensor, head: Any, labels: Tensor, slope: Tensor, scale: Tensor | None) -> Tensor:
    """Return a zero with the gradient of Σ slope · log π of the labels, times `scale`. slope: of each token (B, T)"""
    carrier = linear_cross_entropy(
        hidden, head.weight, labels, head.bias, ignore_index=IGNORE, reduction="sum", chunk=CHUNK, grad_scale=scale,
        weights=-slope.float(),
    )  # fmt: skip
    return carrier - carrier.detach()
