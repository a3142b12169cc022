"""Masked diffusion (LLaDA, Nie et al. 2025): tokens are hidden at random, and the model says what stood in their places.

A row gets a rate t, uniform in (0, 1]. Each of its L tokens that count is replaced by the mask token with probability t, on its
own. The loss is the cross-entropy of the masked tokens, each times 1 / t, over L. Its mean bounds the negative log-likelihood
of a token from above:

    -log p(row) <= E over t and masks of (1 / t) · Σ over masked i of -log p(token i | the row with its masks)

Nothing is shifted: the label of a place is its own token, and the model must see both sides of it. Tokens whose label is -100,
the prompts of chats, are never masked: they are what the answer hangs on.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...data import Tokenizer
from ...layers.diffusion_schedule import spread_times
from ...layers.embedding_and_head import head_of
from ...models.language_model import is_causal, told_time
from .word_loss import IGNORE, WordLoss

SEED = 0x5EED  # of the masks that validation draws: the same for every run and every evaluation


@dataclass(eq=False)
class MaskedDiffusion(WordLoss):
    """A batch is a dict: input_ids, labels (each token's own id, or -100 where it is given and never masked), and what else the
    model wants. A model that is told the time (config.time) gets t of each row."""

    mask_token: int | None = None  # its id; a run takes its tokenizer's, which gets one if it has none
    least: float = 1e-3  # t is drawn from (least, 1): near 0 the weight 1 / t of a token seldom masked has no finite variance
    levels: int = 8  # how many masks validation draws for each row

    name: ClassVar[str] = "masked_diffusion"
    labels: ClassVar[str] = "own"
    weighted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.least < 1:
            raise ValueError(f"masked_diffusion: least: got {self.least!r}, wanted a rate from 0 up to, not including, 1.")
        if not isinstance(self.levels, int) or self.levels < 1:
            raise ValueError(f"masked_diffusion: levels: got {self.levels!r}, wanted a whole number of at least 1.")

    def extended(self, tokenizer: Tokenizer) -> Tokenizer:
        masking = tokenizer.with_mask(self.mask_token)
        self.mask_token = masking.mask
        return masking

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.prepare(model, batch)
        inputs, labels = self.split(batch)
        rate_B = spread_times(len(labels), self.least, labels.device)
        masked = (labels != IGNORE) & (torch.rand(labels.shape, device=labels.device, dtype=torch.float32) < rate_B[:, None])
        return self._masked_loss(model, inputs, labels, masked, rate_B, scale), (labels != IGNORE).sum()

    @torch.no_grad()
    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """The bound in nats a token, and as a perplexity. Each row is masked `levels` times, exactly k of its L tokens that
        count, k spread evenly over 1 to L, with the weight L / k: the same bound, with less variance and no least rate."""
        totals, counts, generator = [], [], None
        for batch in batches:
            self.prepare(model, batch)
            inputs, labels = self.split(batch)
            generator = generator or torch.Generator(labels.device).manual_seed(SEED)
            for level in range(self.levels):
                masked, share_B = spread_masks(labels != IGNORE, level, self.levels, generator)
                totals.append(self._masked_loss(model, inputs, labels, masked, share_B, None))
                counts.append((labels != IGNORE).sum())
        bound = (torch.stack(totals).double().sum() / torch.stack(counts).sum()).item()
        return {"held_out": bound, "perplexity": math.exp(min(bound, 700.0))}

    def _masked_loss(
        self, model: Any, inputs: dict[str, Any], labels: Tensor, masked: Tensor, rate_B: Tensor, scale: Tensor | None
    ) -> Tensor:
        """Σ of the masked tokens' losses, each over its row's rate."""
        assert self.mask_token is not None  # `check` has seen to it
        ids = inputs["input_ids"].masked_fill(masked, self.mask_token)
        weights = rate_B.reciprocal()[:, None].expand(labels.shape)
        inputs = inputs | told_time(model, rate_B) | {"input_ids": ids}
        return self.total(model, inputs, labels.masked_fill(~masked, IGNORE), scale, weights)

    def trial(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        ids = inputs["input_ids"]
        return inputs | told_time(model, torch.full(ids.shape[:1], 0.5, device=ids.device, dtype=torch.float32))

    def check(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> None:
        ids, head = inputs["input_ids"], head_of(model)
        if self.mask_token is None:
            raise ValueError(
                "masked_diffusion: mask_token: got None, wanted the id of the token that hides another; give it, as in "
                "MaskedDiffusion(mask_token=tokenizer.with_mask().mask)."
            )
        words = getattr(head, "out_features", None)
        if self.mask_token < 0 or (words is not None and self.mask_token >= words):
            raise ValueError(
                f"masked_diffusion: mask_token: got {self.mask_token}, but {type(model).__name__} knows the ids 0 to "
                f"{(words or 0) - 1}; make the model one token larger, or name a token that no text holds."
            )
        if ((labels != IGNORE) & (labels != ids)).any():
            raise ValueError(
                "masked_diffusion: labels must be the tokens in their own places, or -100, got others; give input_ids as the "
                "labels, unshifted (of a Corpus: labels='own')."
            )
        if is_causal(model, inputs, self.mask_token):
            raise ValueError(
                f"masked_diffusion: {type(model).__name__} is causal, but a masked token must see those behind it, too; train "
                f"one with causal=False, such as diffusion-tiny."
            )


def spread_masks(counts: Tensor, level: int, levels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(the masked of the tokens `counts` (B, T), their share of each row (B,)), for one of `levels` parts of the range."""
    rows = torch.arange(len(counts), device=counts.device)
    share = (level + (rows + 0.5) / len(counts)) / levels
    number = counts.sum(1)
    k = (share * number).ceil().clamp(min=1)
    place = torch.rand(counts.shape, device=counts.device, generator=generator, dtype=torch.float32).masked_fill(~counts, 2.0)
    rank = place.argsort(1).argsort(1)
    return (rank < k[:, None]) & counts, k / number.clamp(min=1)
