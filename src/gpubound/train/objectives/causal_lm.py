"""The loss of a causal language model as a sum and a count, so that micro-batches of any fill add up to the right mean.

Where the model can give its last hidden states, the head's product and the loss are one op that never holds all logits
(kernels.linear_cross_entropy): at 32k vocabulary and 16k tokens they would be 1 GB, and their gradient another. Whether
skipping the model's own forward gives the same logits is not believed but tried, once, on one row of the first batch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...corpus import Tokenizer
from ...kernels import cross_entropy, linear_cross_entropy
from ...kernels.choose import Call
from ...kernels.cross_entropy import loss_shape
from ...layers.vocabulary import head_of, shift, why_whole
from ...models.placing import mode
from ...trace import fallback
from . import Objective

IGNORE = -100
CHUNK = 4096  # tokens of logits at a time. H200, 16384 tokens, 32768 words: 5.7 ms against 6.6 with 1024, for 0.2 GB more


@dataclass(eq=False)
class CausalLM(Objective):
    """The cross-entropy of all labels that count.

    A batch is a dict as Hugging Face models take it: input_ids, labels (-100 does not count), and what else the model wants.
    Labels are moved by one here, as Hugging Face does: the token at t is predicted from those before it.
    """

    of_corpus: ClassVar[bool] = False
    shifted: ClassVar[bool] = False  # whether the labels have been moved already
    _tried: nn.Module | None = field(init=False, default=None)
    _whole: str | None = field(init=False, default=None)  # why this model's logits are needed whole

    def calls(self, model: nn.Module) -> Iterable[Call]:
        head = head_of(model)
        return [("linear_cross_entropy", (*loss_shape(head.out_features), True, False))] if isinstance(head, nn.Linear) else ()

    def prepare(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Find out how this model is best asked. Reads the device once; the step itself never does."""
        if self._tried is not model:
            self._tried, self._whole = model, _why_whole(model, _split(batch)[0])
            if self._whole:
                fallback("causal_lm without whole logits", self._whole)

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`scale` multiplies the sum. With it the head's gradient is made in forward, for a backward that begins with 1."""
        self.prepare(model, batch)
        inputs, labels = _split(batch)
        targets = labels if self.shifted else shift(labels, IGNORE)
        count = (targets != IGNORE).sum()
        if self._whole is None:
            head = model.get_output_embeddings()
            total = linear_cross_entropy(
                _hidden(model, inputs), head.weight, targets, head.bias,
                ignore_index=IGNORE, reduction="sum", chunk=CHUNK, grad_scale=scale,
            )  # fmt: skip
            return total, count
        logits = _logits(model, inputs)
        _check_positions(model, logits, targets)
        total = cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return total if scale is None else total * scale, count

    @torch.no_grad()
    def sample(self, model: Any, tokenizer: Tokenizer, prompt: str, tokens: int, context: int, temperature: float) -> str:
        """`prompt` continued. The whole text is read anew for each token: short, and no cache to explain."""
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(0)
        ids = torch.tensor([tokenizer.encode(prompt)], device=device)
        with mode(model, training=False):
            for _ in range(tokens):
                logits = _logits(model, {"input_ids": ids[:, -context:]})[:, -1, : tokenizer.vocab_size].float()
                ids = torch.cat([ids, torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)], 1)
        return tokenizer.decode(ids[0].tolist())


@dataclass(eq=False)
class NextToken(CausalLM):
    """The same for labels that are the next tokens already, as a Corpus cuts them."""

    of_corpus: ClassVar[bool] = True
    shifted: ClassVar[bool] = True


def _split(batch: Any) -> tuple[dict[str, Any], Tensor]:
    if not isinstance(batch, Mapping) or "labels" not in batch or "input_ids" not in batch:
        got = f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ValueError(
            f"causal_lm: a batch must be a dict with input_ids and labels, got {got}; pass your own loss for other data."
        )
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    labels = batch["labels"]
    if labels.shape != batch["input_ids"].shape:
        raise ValueError(
            f"causal_lm: labels must have the shape of input_ids, {tuple(batch['input_ids'].shape)}, "
            f"got {tuple(labels.shape)}; give one label a token, -100 where there is nothing to learn."
        )
    return inputs, labels


def _check_positions(model: Any, logits: Tensor, labels: Tensor) -> None:
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"causal_lm: {type(model).__name__} gives logits for {tuple(logits.shape[:-1])} (rows, tokens), wanted "
            f"{tuple(labels.shape)} as there are labels; where the model adds tokens of its own, as PEFT's prompts do, pass a "
            f"loss that knows them: (model, batch) -> (sum, count)."
        )


def _arguments(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {**inputs}


def _trunk(model: Any) -> Any:
    """What computes the last hidden states: the base model, or, of a wrapper that still has the head inside (PEFT's), the base
    model within. None where there is none."""
    here, head = model, model.get_output_embeddings()
    while (below := getattr(here, "base_model", here)) is not here:
        here = below
        if not hasattr(here, "get_output_embeddings") or here.get_output_embeddings() is not head:
            return here
    return None


def _hidden(model: Any, inputs: dict[str, Any]) -> Tensor:
    arguments = _arguments(model, inputs)
    out = _trunk(model)(arguments.pop("input_ids"), **arguments)
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out


def _logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    out = model(**_arguments(model, inputs))
    return out.logits if hasattr(out, "logits") else out


def _why_whole(model: Any, inputs: dict[str, Any]) -> str | None:
    """None when the head applied to the hidden states below it gives the model's logits, else why not."""
    head = head_of(model)
    if head is None or _trunk(model) is None:
        return f"{type(model).__name__} does not offer a base model and a linear head (get_output_embeddings)"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return f"{type(model).__name__} adds a router loss of its own; pass a loss that includes it"
    row = {key: value[:1] if isinstance(value, Tensor) and value.dim() else value for key, value in inputs.items()}
    with mode(model, training=False):  # dropout would make the two differ
        return why_whole(head, lambda: _logits(model, row), lambda: _hidden(model, row))
