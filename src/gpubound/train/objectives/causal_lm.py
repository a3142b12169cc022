"""Loss of a causal language model as a sum and a count, so that micro-batches of any fill add up to the right mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...data import Tokenizer
from ...layers.embedding_and_head import shift
from ...models.language_model import logits_of
from ...models.placing import mode
from .word_loss import IGNORE, WordLoss


@dataclass(eq=False)
class CausalLM(WordLoss):
    """The cross-entropy of all labels that count.

    A batch is a dict as Hugging Face models take it: input_ids, labels (-100 does not count), and other arguments of the model.
    Labels are shifted by one here, as Hugging Face does: the token at t is predicted from those before it.
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
        targets = labels if self.shifted else shift(labels, IGNORE)
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
