"""Cross-entropy of a language model's tokens, without materialising all logits if possible, and checks of its batches.

If the model returns its last hidden states, the head's product and the loss are one op that never holds all logits
(kernels.linear_cross_entropy): at a vocabulary of 32k and 16k tokens they would be 1 GB, and their gradient another. One row
of the first batch verifies that this gives the same logits as the model's forward.

`AnswerLoss` is a loss of the log-probabilities of answers, with sums over the examples of a batch. An example is a row, or a
part of a packed row. The log-probabilities are needed before a loss of them and its gradient are known, and the logits are
never whole. So the head's product runs twice: without a gradient for log π, then in linear_cross_entropy with each token's
−∂loss/∂log π as its weight, which gives the gradient exactly.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ... import lora
from ...data import Tokenizer
from ...kernels import cross_entropy, linear_cross_entropy
from ...kernels.cross_entropy import loss_shape
from ...kernels.dispatch import INTEGERS, Call
from ...layers.embedding_and_head import head_of, shift, within
from ...lora.adapter import KEY, is_routed
from ...models.language_model import (
    FIELDS,
    UNPACKED,
    LanguageModel,
    first_row,
    hidden_of,
    logits_and_added_loss,
    logits_of,
    why_not_head,
    why_not_isolated,
)
from ...models.registry import mode
from ...trace import fallback
from . import Objective
from .chunked_head import CHUNK, IGNORE, head_token_losses, token_losses

ID_DTYPES = (torch.int32, torch.int64)  # that an embedding takes


@dataclass(eq=False)
class WordLoss(Objective):
    """A cross-entropy over tokens. A subclass chooses the targets and the model's inputs."""

    name: ClassVar[str]
    weighted: ClassVar[bool] = False  # whether targets have weights
    _tried: nn.Module | None = field(init=False, default=None)
    _isolates: nn.Module | None = field(init=False, default=None)  # the model whose packed rows were tried
    _why_all_logits: str | None = field(init=False, default=None)  # the reason why this model needs all logits
    _classes: int | None = field(init=False, default=None)  # number of classes of the logits

    def check_model(self, model: nn.Module) -> None:
        check_arguments(self.name, model, ["input_ids"], complete=False)

    def calls(self, model: nn.Module) -> Iterable[Call]:
        head = head_of(model)
        if not isinstance(head, nn.Linear):
            return ()
        return [("linear_cross_entropy", (*loss_shape(head.out_features), True, self.weighted))]

    def prepare(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Check the first batch, and the first of packed rows, and decide whether all logits are needed. Reads the device once;
        the step never does."""
        if self._isolates is not model and isinstance(batch, Mapping) and FIELDS & batch.keys():
            inputs, _ = self.split(batch)
            check_arguments(self.name, model, inputs)
            if why := why_not_isolated(model, inputs):
                raise ValueError(
                    f"{self.name}: {type(model).__name__} cannot train on packed rows (segment_ids), whose examples "
                    f"must not see each other: {why}. Take unpacked batches ({UNPACKED})."
                )
            self._isolates = model
        if self._tried is not model:
            inputs, labels = self.split(batch)
            check_arguments(self.name, model, inputs)
            self._classes = None
            self.check_values(model, inputs["input_ids"], labels)
            self.check(model, inputs, labels)
            self._why_all_logits = self.why_all_logits(model, inputs)
            if self._why_all_logits:
                fallback(f"{self.name} without whole logits", self._why_all_logits)
                with torch.no_grad(), mode(model, training=False):
                    self._classes = logits_of(model, first_row(inputs)).shape[-1]
            self._tried = model

    def check_batch(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        self.prepare(model, batch)
        inputs, labels = self.split(batch)
        check_arguments(self.name, model, inputs)
        self.check_values(model, inputs["input_ids"], labels)

    def why_all_logits(self, model: nn.Module, inputs: dict[str, Any]) -> str | None:
        """Return why the loss needs this model's whole logits, None if its head and last hidden states are enough."""
        return why_not_head(model, inputs)

    def check_shape(self, labels: Tensor, ids: Tensor) -> None:
        if labels.shape != ids.shape:
            raise ValueError(
                f"{self.name}: labels must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(labels.shape)}; give "
                f"one label a token, -100 where there is nothing to learn."
            )

    def check_values(self, model: nn.Module, ids: Tensor, labels: Tensor) -> None:
        """Raise ValueError for ids or labels out of range. Waits for the device."""
        check_tokens(self.name, model, ids, labels, self._classes)

    def check(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> None:
        """Raise ValueError if the loss would be wrong for a model or batch. Called once for each model; may read the device."""

    def split(self, batch: Any) -> tuple[dict[str, Any], Tensor]:
        """Return (the model's arguments, the labels)."""
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
        self.check_shape(labels, batch["input_ids"])
        return inputs, labels

    def total(
        self, model: Any, inputs: dict[str, Any], targets: Tensor, scale: Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """Return the sum over all targets but -100, each times its weight, plus the model's extra loss, a part of the mean,
        times the number of tokens that count; all times `scale`. With `scale` the head's gradient is computed in forward, for
        a backward that begins with 1."""
        if self._why_all_logits is None:
            head = model.get_output_embeddings()
            loss = linear_cross_entropy(
                hidden_of(model, inputs), head.weight, targets, head.bias,
                ignore_index=IGNORE, reduction="sum", chunk=CHUNK, grad_scale=scale, weights=weights,
            )  # fmt: skip
        else:
            logits, added = logits_and_added_loss(model, inputs)
            self._check_positions(model, logits, targets)
            reduction = "sum" if weights is None else "none"
            loss = cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction=reduction)
            if weights is not None:
                loss = (loss * weights.flatten()).sum()
            if added is not None:
                loss = loss + added * (targets != IGNORE).sum()
            loss = loss if scale is None else loss * scale
        extra = model.extra_loss() if isinstance(model, LanguageModel) else None
        if extra is None:
            return loss
        extra = extra * (targets != IGNORE).sum()
        return loss + (extra if scale is None else extra * scale)

    def _check_positions(self, model: Any, logits: Tensor, labels: Tensor) -> None:
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"{self.name}: {type(model).__name__} gives logits for {tuple(logits.shape[:-1])} (rows, tokens), wanted "
                f"{tuple(labels.shape)} as there are labels; where the model adds its own tokens, as PEFT's prompts do, "
                f"pass a loss that knows them: (model, batch) -> (sum, count)."
            )


@dataclass(eq=False)
class CausalLM(WordLoss):
    """The cross-entropy of all labels that count.

    A batch is a dict as Hugging Face models take it: input_ids, labels (-100 does not count), and other arguments of the model.
    Labels are shifted by one here, as Hugging Face does: the token at t is predicted from those before it. In packed rows
    (segment_ids), an example's first token is not predicted.
    """

    name: ClassVar[str] = "causal_lm"
    of_corpus: ClassVar[bool] = False
    shifted: ClassVar[bool] = False  # whether the labels have been shifted already

    def check(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> None:
        if getattr(getattr(model, "config", None), "causal", True) is False:
            raise ValueError(
                f"{self.name}: {type(model).__name__} lets every token see the next ones (causal=False), so there is nothing "
                f"to predict; take a causal model, or the objective masked_diffusion."
            )

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.prepare(model, batch)
        inputs, labels = self.split(batch)
        targets = labels if self.shifted else shift(within(labels, inputs.get("segment_ids"), IGNORE), IGNORE)
        return self.total(model, inputs, targets, scale), (targets != IGNORE).sum()

    @torch.no_grad()
    def sample(self, model: Any, tokenizer: Tokenizer, prompt: str, tokens: int, context: int, temperature: float) -> str:
        """Return `prompt` continued. The whole text is processed for each token: simple, without a KV cache."""
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(0)
        ids = torch.tensor([tokenizer.encode(prompt)], device=device)
        with mode(model, training=False):
            for _ in range(tokens):
                logits = logits_of(model, {"input_ids": ids[:, -context:]})[:, -1, : tokenizer.vocab_size].float()
                ids = torch.cat([ids, torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)], 1)
        return tokenizer.decode(ids[0].tolist())


@dataclass(eq=False)
class NextToken(CausalLM):
    """CausalLM for labels that are the next tokens already, as in batches of a Corpus."""

    of_corpus: ClassVar[bool] = True
    shifted: ClassVar[bool] = True


def check_arguments(who: str, model: nn.Module, names: Iterable[str], complete: bool = True) -> None:
    """Raise ValueError unless model.forward takes arguments of these names; if `complete`, it must need no others."""
    try:
        parameters = signature(model.forward).parameters
    except (TypeError, ValueError):  # compiled code may have no signature
        return
    accepted = {name: p for name, p in parameters.items() if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    names, kind = [name for name in names if name != KEY or not is_routed(model)], type(model).__name__
    if all(p.kind is not Parameter.VAR_KEYWORD for p in parameters.values()):
        unknown = [name for name in names if name not in accepted or accepted[name].kind is Parameter.POSITIONAL_ONLY]
        if "input_ids" in unknown:
            raise ValueError(
                f"{who} calls model(input_ids=...), and {kind}.forward takes ({', '.join(accepted)}); pass a loss function "
                f"(model, batch) -> (loss.sum(), count) instead."
            )
        if unknown:
            raise ValueError(
                f"{who}: batch[{unknown[0]!r}]: {kind}.forward takes ({', '.join(accepted)}); leave {unknown[0]} out of the "
                f"batch, or pass a loss function that uses it."
            )
    needed = [name for name, p in accepted.items() if p.default is p.empty and name not in names]
    if complete and needed and not any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values()):
        raise ValueError(
            f"{who}: {kind}.forward needs {needed[0]}, which the batch does not have; add it, or pass a loss function."
        )


@torch.no_grad()
def check_tokens(who: str, model: nn.Module, ids: Tensor, labels: Tensor, classes: int | None = None) -> None:
    """Raise ValueError unless ids and labels are integers in the model's vocabulary, or labels of -100. Waits for the device.

    classes  the number of classes that labels may name; None: as many as the head has
    """
    if ids.dtype not in ID_DTYPES:
        raise ValueError(f"{who}: input_ids are {ids.dtype}, wanted token ids in torch.int64.")
    if labels.dtype not in INTEGERS:
        raise ValueError(f"{who}: labels are {labels.dtype}, wanted token ids in torch.int64.")
    if ids.dim() != 2:
        raise ValueError(f"{who}: input_ids have the shape {tuple(ids.shape)}, wanted (rows, tokens); one text is ids[None].")
    if not ids.numel():
        raise ValueError(f"{who}: input_ids are empty, of shape {tuple(ids.shape)}; wanted at least one token.")
    rows, head = embedding_rows(model), getattr(head_of(model), "out_features", None)
    classes = classes or head
    counted = labels.long().masked_fill(labels == IGNORE, 0)
    extremes = torch.stack([*torch.aminmax(ids.long()), *torch.aminmax(counted)]).tolist()
    for name, (least, most), size in (("input_ids", extremes[:2], rows or head), ("labels", extremes[2:], classes)):
        if least < 0 or (size is not None and most >= size):
            worst = least if least < 0 else most
            also = " and not -100" if name == "labels" else ""
            vocabulary = "the model's vocabulary" if size is None else f"the model's vocabulary of {size}"
            raise ValueError(
                f"{who}: {name} hold the token {worst}, outside {vocabulary}{also}; is the tokenizer this model's own?"
            )


def trained_besides_adapters(model: nn.Module) -> list[str]:
    """Return the names of trained parameters that are not adapters', all of them where there are no adapters."""
    adapters = {id(p) for p in lora.parameters(model)}
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in adapters]
    return names or ([] if adapters else ["no parameter"])


def embedding_rows(model: Any) -> int | None:
    """The number of rows of the model's input embedding, where the model names it as transformers' models do."""
    if isinstance(model, LanguageModel):
        return model.config.vocabulary
    try:
        return model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return None


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
