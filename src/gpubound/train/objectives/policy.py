"""Policy gradients: sampled answers get likelier by their advantages. REINFORCE, GRPO, Dr. GRPO, DAPO and GSPO.

Of each token that counts, with its log-probability log π now, log μ when it was sampled, log π_old under the model that the
batch's first step began with, log π₀ under the reference, and its advantage A:

    reinforce              −A log π
    the others             −min(ρ A, clip(ρ, 1 − clip, 1 + clip_high) A)
                           ρ = π / π_old;  gspo: of its answer, exp(mean of log π − log π_old over the answer's tokens)

times min(π_old / μ, truncate), the truncated importance of what another program sampled than the one that trains;
plus kl · (exp(d) − d − 1) with d = log π₀ − log π, an estimate of KL(π ‖ π₀) that is never negative (k3);
minus entropy · H(π). The loss is the mean over tokens, or of each answer's mean, or of each answer's sum over `max_tokens`:

    variant     mean over            clip     clip_high
    reinforce   tokens
    grpo        answers' tokens      0.2      0.2         Shao et al. 2024
    dr_grpo     constant             0.2      0.2         Liu et al. 2025
    dapo        tokens               0.2      0.28        Yu et al. 2025
    gspo        answers' tokens      3e-4     4e-4        Zheng et al. 2025

In a batch's first step π_old is π itself, so ρ is 1, and only its gradient counts. The logits are never
whole: see word_loss.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.dispatch import Call
from ...layers.embedding_and_head import head_of
from ...models.language_model import LanguageModel, hidden_of, logits_of
from ..schedule import is_rate
from .chunked_head import IGNORE, Head, head_loss, head_token_losses, losses_into_gradient, token_losses
from .word_loss import AnswerLoss, Examples, through_head, trained_besides_adapters

LOGPROBS = ("sampler_logprobs", "old_logprobs", "reference_logprobs")
FIELDS = ("advantages", *LOGPROBS)  # of a batch, besides the model's
AVERAGES = ("token", "answer", "constant")


class PolicyVariant(NamedTuple):
    average: str
    clip: float | None = 0.2
    clip_high: float | None = 0.2
    by_answer: bool = False  # whether the ratio is that of the whole answer


VARIANTS = {
    "reinforce": PolicyVariant("token", None, None),
    "grpo": PolicyVariant("answer"),
    "dr_grpo": PolicyVariant("constant"),
    "dapo": PolicyVariant("token", 0.2, 0.28),
    "gspo": PolicyVariant("answer", 3e-4, 4e-4, by_answer=True),
}

FIGURES = ("tokens", "entropy", "gap", "kl", "clipped", "truncated", "largest_gap")
"""What a training step adds up over its tokens: their number, −log π (its mean estimates the entropy), |log π_old − log μ|, the
estimate of KL, whether the clip cut the gradient off, and whether the importance was truncated; last, the largest |…| of all"""


@dataclass(eq=False)
class Policy(AnswerLoss):
    """Policy-gradient loss of sampled answers.

    variant     see above; `average`, `clip` and `clip_high` are the variant's where they are left out
    average     the mean over what: "token", "answer" or "constant"
    max_tokens  what "constant" divides an answer's sum by: the most tokens that were sampled
    kl          coefficient of the divergence from the reference; 0 needs no reference
    entropy     coefficient of the entropy, which the loss rewards
    truncate    the largest importance π_old / μ, where the batch has sampler_logprobs; None: no such weight
    temperature that the answers were sampled at: π is softmax(logits / temperature)

    A batch is a dict: input_ids and labels (B, T), labels that are the next tokens and -100 outside the answers; `advantages`
    (B,) or (B, T); and where known, log-probabilities of the labels (B, T): `sampler_logprobs`, `old_logprobs` for every step
    but the first on the same batch, and `reference_logprobs`. Without the latter the reference is the model without its
    adapters. Rows may be packed (segment_ids), then advantages are (B, T).
    """

    variant: str = "grpo"
    average: str | None = None
    clip: float | None = None
    clip_high: float | None = None
    max_tokens: int | None = None
    kl: float = 0.0
    entropy: float = 0.0
    truncate: float | None = 2.0
    temperature: float = 1.0

    name: ClassVar[str] = "policy"
    of_corpus: ClassVar[bool] = False
    figures: Tensor | None = field(init=False, default=None)  # float64, one for each of FIGURES

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"policy: variant: got {self.variant!r}, wanted one of {', '.join(VARIANTS)}.")
        preset = VARIANTS[self.variant]
        for name in ("average", "clip", "clip_high"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(preset, name))
        self.counts_tokens = self.average == "token"  # type: ignore[misc]  # of this objective
        if self.average not in AVERAGES:
            raise ValueError(f"policy: average: got {self.average!r}, wanted one of {', '.join(AVERAGES)}.")
        if self.average == "constant" and not (type(self.max_tokens) is int and self.max_tokens > 0):
            raise ValueError(
                f"policy: max_tokens: got {self.max_tokens!r} with the average 'constant', which divides by it; give the most "
                f"tokens that an answer may have."
            )
        for name in ("clip", "clip_high", "kl", "entropy", "truncate"):
            value = getattr(self, name)
            if value is not None and (not is_rate(value)):
                raise ValueError(f"policy: {name}: got {value!r}, wanted a number of at least 0.")
        if not is_rate(self.temperature) or self.temperature == 0:
            raise ValueError(f"policy: temperature: got {self.temperature!r}, wanted a number above 0, such as 1.")

    def calls(self, model: nn.Module) -> Iterable[Call]:
        return [call for call in super().calls(model) if not self.entropy or call[0] == "cross_entropy"]

    def written(self) -> list[Tensor]:
        return [] if self.figures is None else [self.figures]

    def split(self, batch: Any) -> tuple[dict[str, Any], Tensor]:
        inputs, labels = super().split(batch)
        shape, advantages = tuple(labels.shape), inputs.get("advantages")
        packed = "segment_ids" in inputs
        if not isinstance(advantages, Tensor) or tuple(advantages.shape) not in (shape, *(() if packed else (shape[:1],))):
            got = "nothing" if advantages is None else f"the shape {tuple(getattr(advantages, 'shape', ()))}"
            raise ValueError(
                f"policy: batch['advantages']: got {got}, wanted {shape}, one a token{'' if packed else ', or one a row'}."
            )
        for name in LOGPROBS:
            if (values := inputs.get(name)) is not None and tuple(values.shape) != shape:
                raise ValueError(
                    f"policy: batch[{name!r}]: got the shape {tuple(values.shape)}, wanted that of labels, {shape}."
                )
        return {key: value for key, value in inputs.items() if key not in FIELDS}, labels

    def prepare(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        if self.figures is None:
            if self.kl and batch.get("reference_logprobs") is None and (others := trained_besides_adapters(model)):
                raise ValueError(
                    f"policy: kl: got {self.kl}, and {others[0]} trains, so the reference is not the model without its "
                    f"adapters; train adapters alone (gb.lora.add), give batch['reference_logprobs'], or leave kl out."
                )
            self.figures = torch.zeros(len(FIGURES), dtype=torch.float64, device=batch["labels"].device)
        super().prepare(model, batch)

    def why_all_logits(self, model: nn.Module, inputs: dict[str, Any]) -> str | None:
        if self.temperature != 1 and getattr(head_of(model), "bias", None) is not None:
            return "the head has a bias, which the temperature divides, too"
        return super().why_all_logits(model, inputs)

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.prepare(model, batch)
        inputs, labels = self.split(batch)
        answers, counted = Examples(inputs, labels), labels != IGNORE
        share, items = self._shares(answers, counted)
        reference = batch.get("reference_logprobs") if self.kl else None
        if self.kl and reference is None:
            reference = self.logprobs_without_adapters(model, batch)
        factor = 1.0 if scale is None else scale

        def losses(logprob: Tensor) -> Tensor:
            return self._losses(logprob, batch, reference, answers, counted) * share

        if self._why_all_logits is not None:
            logits = self.tempered(logits_of(model, inputs))
            logprob = -token_losses(logits, labels)
            loss = losses(logprob).sum()
            if self.entropy:
                loss = loss - self.entropy * (entropies(logits).masked_fill(~counted, 0) * share).sum()
            loss = loss * factor
        else:
            hidden, head = self.tempered(hidden_of(model, inputs)), head_of(model)
            logprob = -head_token_losses(hidden.detach(), head, labels)
            with torch.enable_grad():
                leaf = logprob.detach().requires_grad_()
                value = losses(leaf).sum()
                (slope,) = torch.autograd.grad(value, leaf)
            loss = value.detach() * factor
            if self.entropy:
                carrier = self._with_entropy(Head.of(hidden, head, labels), labels, slope, share, scale)
                loss = loss - (slope * logprob).sum() * factor + carrier  # which holds the slopes' part, for its gradient
            elif torch.is_grad_enabled():
                loss = loss + through_head(hidden, head, labels, slope, scale)
        if torch.is_grad_enabled():
            self._measure(logprob.detach(), batch, reference, answers, counted)
        extra = model.extra_loss() if isinstance(model, LanguageModel) else None
        return loss if extra is None else loss + extra * items * factor, items

    def tempered(self, values: Tensor) -> Tensor:
        return values if self.temperature == 1 else values * (1 / self.temperature)  # as a rollout does

    def _shares(self, answers: Examples, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's share of the sum of losses (B, T), and the number by which the step divides it."""
        if self.average == "token":
            return counted.float(), counted.sum()
        lengths = answers.sums(counted)
        if self.average == "answer":
            share = answers.at_tokens(lengths.clamp_min(1).reciprocal()).float()
        else:
            share = torch.full_like(counted, 1 / (self.max_tokens or 1), dtype=torch.float32)
        return share.masked_fill(~counted, 0), (lengths > 0).sum()

    def _losses(
        self, logprob: Tensor, batch: Mapping[str, Any], reference: Tensor | None, answers: Examples, counted: Tensor
    ) -> Tensor:
        """Return the loss of each token (B, T), 0 where it does not count, without the entropy."""
        advantage = _by_token(batch["advantages"], logprob).masked_fill(~counted, 0)  # what is there may be NaN
        old = _batch_logprobs(batch, "old_logprobs", logprob, counted)
        if self.variant == "reinforce":
            loss = -advantage * logprob
        else:
            ratio = self._ratio(logprob, old, answers, counted)
            loss = -torch.minimum(ratio * advantage, self._clip(ratio) * advantage)
        if self.truncate is not None and batch.get("sampler_logprobs") is not None:  # min(π_old / μ, truncate), a constant
            log_importance = old - _batch_logprobs(batch, "sampler_logprobs", old, counted)
            loss = loss * log_importance.exp().clamp(max=self.truncate)
        if reference is not None:
            loss = loss + self.kl * k3(torch.where(counted, reference.to(logprob.dtype), logprob.detach()), logprob)
        return loss.masked_fill(~counted, 0)

    def _ratio(self, logprob: Tensor, old: Tensor, answers: Examples, counted: Tensor) -> Tensor:
        log_ratio = (logprob - old).masked_fill(~counted, 0)
        if VARIANTS[self.variant].by_answer:
            mean = answers.sums(log_ratio) / answers.sums(counted).clamp_min(1)
            log_ratio = answers.at_tokens(mean).to(logprob.dtype)
        return log_ratio.exp()

    def _clip(self, ratio: Tensor) -> Tensor:
        least, most = (None if d is None else 1 + sign * d for sign, d in ((-1, self.clip), (1, self.clip_high)))
        return ratio if least is None and most is None else ratio.clamp(least, most)

    def _with_entropy(self, head: Head, labels: Tensor, slope: Tensor, share: Tensor, scale: Tensor | None) -> Tensor:
        """Return the sum of slope · log π − entropy · share · H over all tokens, times `scale`."""
        flat, slopes, bonus = labels.flatten(), slope.flatten(), self.entropy * share.flatten()

        def into_gradient(z: Tensor, first: int, last: int, scale: Tensor | None, wanted: bool) -> Tensor:
            def losses(z: Tensor, i: int, j: int) -> Tensor:
                part = slice(first + i, first + j)
                logs, label = z.to(slopes.dtype).log_softmax(-1), flat[part].clamp_min(0).unsqueeze(-1)
                return slopes[part] * logs.gather(-1, label).squeeze(-1) + bonus[part] * (logs.exp() * logs).sum(-1)

            return losses_into_gradient(z, losses, scale, wanted)

        return head_loss(head, into_gradient, scale)

    @torch.no_grad()
    def _measure(
        self, logprob: Tensor, batch: Mapping[str, Any], reference: Tensor | None, answers: Examples, counted: Tensor
    ) -> None:
        """Add this batch's figures to those of the step."""
        assert self.figures is not None
        nothing = torch.zeros_like(logprob)
        old = _batch_logprobs(batch, "old_logprobs", logprob, counted)
        gap = clipped = truncated = nothing
        if batch.get("sampler_logprobs") is not None:
            log_importance = old - _batch_logprobs(batch, "sampler_logprobs", old, counted)
            gap = log_importance.abs()
            truncated = nothing if self.truncate is None else (log_importance.exp() > self.truncate).float()
        if self.variant != "reinforce":
            ratio, advantage = self._ratio(logprob, old, answers, counted), _by_token(batch["advantages"], logprob)
            clipped = (self._clip(ratio) * advantage < ratio * advantage).float()
        divergence = nothing if reference is None else k3(reference, logprob)
        parts = torch.stack([counted.to(logprob.dtype), -logprob, gap, divergence, clipped, truncated])
        self.figures[:-1].add_(parts.masked_fill(~counted, 0).flatten(1).sum(1, dtype=torch.float64))
        self.figures[-1:].copy_(torch.maximum(self.figures[-1], gap.masked_fill(~counted, 0).amax().double()))

    def take_figures(self) -> dict[str, float]:
        """Return the means over the tokens of the steps since the last call, and set them back. Waits for the device."""
        assert self.figures is not None, "no step has been taken"
        tokens, *sums, largest = self.figures.tolist()
        self.figures.zero_()
        return dict(zip(FIGURES, (tokens, *(total / max(tokens, 1) for total in sums), largest), strict=True))


def k3(reference: Tensor, logprob: Tensor) -> Tensor:
    """Return Schulman's estimate of KL(π ‖ π₀) from the log-probabilities of what π sampled."""
    d = reference - logprob
    return d.exp() - d - 1


def entropies(logits: Tensor) -> Tensor:
    """Return the entropy of each position's distribution."""
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def _by_token(advantages: Tensor, like: Tensor) -> Tensor:
    return (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages).to(like.dtype)


def _batch_logprobs(batch: Mapping[str, Any], name: str, logprob: Tensor, counted: Tensor) -> Tensor:
    """Return log-probabilities of the batch, those of the model itself where it has none, and those where nothing counts."""
    values = batch.get(name)
    return logprob.detach() if values is None else torch.where(counted, values.to(logprob.dtype), logprob.detach())
