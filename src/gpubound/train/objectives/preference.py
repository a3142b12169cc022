"""Direct preference optimisation (Rafailov et al. 2023) and related losses: the chosen answer of each pair gets likelier.

A batch holds pairs: row 2k is a prompt with the chosen answer, row 2k + 1 the same prompt with the rejected one. Or rows hold
several pairs (segment_ids), and these are examples 2k and 2k + 1 of a row. With
log π(y | x) the sum of an answer's token log-probabilities under the policy, log π₀ under the reference, and their ratio
r = log π − log π₀ of each answer, the loss of a pair by `loss` is

    sigmoid   −log σ(h) · (1 − ε) − log σ(−h) · ε        h = β (r_chosen − r_rejected), ε = label_smoothing
    hinge     max(0, 1 − h)                              (SLiC)
    ipo       (r_chosen − r_rejected − 1 / (2 β))²       with means over an answer's tokens instead of sums
    kto       (1 − σ(β (r_chosen − z)) + 1 − σ(β (z − r_rejected))) / 2
                                                         z: the mean of r over the micro-batch's answers, at least 0, a constant

The reference is the model without its adapters where adapters train, else `reference` of the batch: log π₀ of each row.

The logits are never whole: see word_loss.py.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.embedding_and_head import head_of
from ...models.language_model import LanguageModel, hidden_of, logits_of
from .chunked_head import IGNORE, head_token_losses, token_losses
from .word_loss import AnswerLoss, Examples, through_head, trained_besides_adapters

EXTRA = ("reference", "example")  # fields of a batch that are not the model's


def sigmoid_loss(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, counts: Tensor) -> Tensor:
    h = beta * (chosen - rejected)
    return -F.logsigmoid(h) * (1 - smoothing) - F.logsigmoid(-h) * smoothing


def hinge_loss(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, counts: Tensor) -> Tensor:
    return (1 - beta * (chosen - rejected)).clamp_min(0)


def ipo_loss(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, counts: Tensor) -> Tensor:
    return (chosen - rejected - 1 / (2 * beta)).square()


def kto_loss(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, counts: Tensor) -> Tensor:
    z = (((chosen + rejected).detach() * counts).sum() / (2 * counts.sum()).clamp_min(1)).clamp_min(0)
    return 1 - (torch.sigmoid(beta * (chosen - z)) + torch.sigmoid(beta * (z - rejected))) / 2


LOSSES: dict[str, Callable[[Tensor, Tensor, float, float, Tensor], Tensor]] = {
    "sigmoid": sigmoid_loss, "hinge": hinge_loss, "ipo": ipo_loss, "kto": kto_loss,
}  # fmt: skip
"""(log-ratios of the chosen answers (P,), of the rejected ones (P,), beta, label_smoothing, whether each pair counts (P,)) ->
losses (P,)"""


class Answers(Examples):
    """The answers of a batch, in order: chosen and rejected of each pair. Each is a row, or an example of a packed row.

    counts  (P,), whether there is such a pair: a packed row has room for as many as the fullest one holds
    """

    def __init__(self, inputs: Mapping[str, Any], labels: Tensor):
        super().__init__(inputs, labels, group=2)
        self.counts = self.present.view(-1, 2).all(1)


@dataclass(eq=False)
class Preference(AnswerLoss):
    """Loss of pairs of answers.

    A batch is a dict: input_ids and labels (2 P, T), rows as above, labels that are the next tokens already and -100 outside
    the answers; `reference`, a value for each answer, where no adapters train; and other arguments of the model.
    """

    beta: float = 0.1
    loss: str = "sigmoid"
    label_smoothing: float = 0.0  # of "sigmoid": the share of pairs that are assumed to be labelled the wrong way round

    name: ClassVar[str] = "dpo"
    pack: ClassVar[str | None] = "pairs"
    packs: ClassVar[tuple[str, ...]] = ("packed_pairs",)
    kind: ClassVar[str] = "preferences"
    counts_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"dpo: loss: got {self.loss!r}, wanted one of {', '.join(LOSSES)}.")
        if not self.beta > 0:
            raise ValueError(f"dpo: beta: got {self.beta!r}, wanted a number above 0, such as 0.1.")
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.loss != "sigmoid"):
            raise ValueError(
                f"dpo: label_smoothing: got {self.label_smoothing!r} with loss {self.loss!r}, wanted 0 up to, not including, "
                f"0.5, and 0 except with loss 'sigmoid'."
            )

    def split(self, batch: Any) -> tuple[dict[str, Any], Tensor]:
        inputs, labels = super().split(batch)
        if labels.dim() != 2 or (len(labels) % 2 and "segment_ids" not in inputs):
            raise ValueError(
                f"dpo: labels have the shape {tuple(labels.shape)}, wanted an even number of rows: each chosen answer and "
                f"then the rejected one."
            )
        return {key: value for key, value in inputs.items() if key not in EXTRA}, labels

    def needs_reference(self, model: nn.Module) -> bool:
        return bool(trained_besides_adapters(model))

    def prepare(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        if self._tried is not model and batch.get("reference") is None and (others := trained_besides_adapters(model)):
            raise ValueError(
                f"dpo: {others[0]} trains, so the reference is not the model without its adapters; train adapters alone "
                f"(gb.lora.add), or give batch['reference'], the sums of log-probabilities that `reference_values` computes "
                f"before training."
            )
        super().prepare(model, batch)

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.prepare(model, batch)
        inputs, labels = self.split(batch)
        answers = Answers(inputs, labels)
        reference = self._reference(model, batch, answers)
        factor, pairs = 1.0 if scale is None else scale, answers.counts.sum()
        if self._why_all_logits is not None:
            policy = -answers.sums(token_losses(logits_of(model, inputs), labels))
            loss = self._losses(policy, reference, answers).sum() * factor
        else:
            hidden, head = hidden_of(model, inputs), head_of(model)
            policy = -answers.sums(head_token_losses(hidden.detach(), head, labels))
            with torch.enable_grad():
                leaf = policy.detach().requires_grad_()
                value = self._losses(leaf, reference, answers).sum()
                (slope,) = torch.autograd.grad(value, leaf)
            loss = value.detach() * factor
            if torch.is_grad_enabled():
                loss = loss + through_head(hidden, head, labels, answers.at_tokens(slope.float()), scale)
        extra = model.extra_loss() if isinstance(model, LanguageModel) else None
        return loss if extra is None else loss + extra * pairs * factor, pairs

    @torch.no_grad()
    def reference_values(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """Return the sum of the log-probabilities of each answer's labels, (2 P,)."""
        return Answers(*self.split(batch)).sums(self.logprobs(model, batch))

    def _reference(self, model: Any, batch: Mapping[str, Any], answers: Answers) -> Tensor:
        given = batch.get("reference")
        return answers.sums(self.logprobs_without_adapters(model, batch)) if given is None else given.double().flatten()

    def _losses(self, policy: Tensor, reference: Tensor, answers: Answers) -> Tensor:
        chosen, rejected = self._ratios(policy, reference, answers)
        losses = LOSSES[self.loss](chosen, rejected, self.beta, self.label_smoothing, answers.counts)
        return losses.masked_fill(~answers.counts, 0)

    def _ratios(self, policy: Tensor, reference: Tensor, answers: Answers) -> tuple[Tensor, Tensor]:
        ratio = policy - reference
        if self.loss == "ipo":
            ratio = ratio / answers.sums(answers.labels != IGNORE).clamp_min(1)
        return ratio[0::2], ratio[1::2]

    @torch.no_grad()
    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss, the share of pairs whose chosen answer has the larger ratio, and the mean margin of β r."""
        losses, margins = [], []
        for batch in batches:
            self.prepare(model, batch)
            answers = Answers(*self.split(batch))
            policy, reference = answers.sums(self.logprobs(model, batch)), self._reference(model, batch, answers)
            chosen, rejected = self._ratios(policy, reference, answers)
            losses.append(self._losses(policy, reference, answers)[answers.counts])
            margins.append((self.beta * (chosen - rejected))[answers.counts])
        margin = torch.cat(margins).double()
        held_out = torch.cat(losses).double().mean()
        figures = torch.stack([held_out, (margin > 0).double().mean(), margin.mean()]).tolist()
        return dict(zip(("held_out", "accuracy", "margin"), figures, strict=True))
