"""Objective of masked diffusion (LLaDA, Nie et al. 2025): tokens are masked at random, and the model predicts them.

A row gets a rate t, uniform in (0, 1]. Each of its L tokens with a label is replaced by the mask token with probability t,
independently. The loss is the cross-entropy of the masked tokens, times 1 / t, over L. Its mean is an upper bound of a token's
negative log-likelihood:

    -log p(row) <= E over t and masks of (1 / t) · Σ over masked i of -log p(token i | the row with its masks)

Labels are not shifted: the label of a position is its token, and the model must attend in both directions. Tokens with the
label -100, such as the prompts of chats, are never masked.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...data import Tokenizer
from ...layers.embedding_and_head import head_of
from ...train.objectives.chunked_head import IGNORE
from ...train.objectives.word_loss import WordLoss
from ..language_model import first_row, logits_of
from ..registry import mode


def spread_times(rows: int, least: float, device: torch.device) -> Tensor:
    """Return a time in (least, 1] for each row: evenly spaced, and rotated by one random number.

    Each time is uniform, and together they cover the range evenly, which lowers the variance of the batch's mean.
    """
    positions = torch.arange(rows, device=device, dtype=torch.float32) / rows
    return 1 - (1 - least) * ((positions + torch.rand(1, device=device, dtype=torch.float32)) % 1)


SEED = 0x5EED  # of the masks in validation, the same for every run and evaluation


@dataclass(eq=False)
class MaskedDiffusion(WordLoss):
    """Objective of a masked diffusion model.

    A batch is a dict: input_ids, labels (the token's id, or -100 for a token that is never masked), and other arguments of the
    model.
    """

    mask_token: int | None = None  # id; None: a run uses its tokenizer's, and adds one if it has none
    least: float = 1e-3  # lower bound of t: near 0 the weight 1 / t of a rarely masked token has no finite variance
    levels: int = 8  # masks per row in validation

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
        """Return the bound in nats per token, and as a perplexity.

        Each row is masked `levels` times: exactly k of its L tokens with a label, k spread evenly over 1 to L, with the weight
        L / k. It is the same bound, with less variance and without a lower bound of the rate.
        """
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
        """Return the sum of the masked tokens' losses, each divided by its row's rate."""
        assert self.mask_token is not None  # by `check`
        ids = inputs["input_ids"].masked_fill(masked, self.mask_token)
        weights = rate_B.reciprocal()[:, None].expand(labels.shape)
        return self.total(model, inputs | {"input_ids": ids}, labels.masked_fill(~masked, IGNORE), scale, weights)

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
                f"masked_diffusion: mask_token: got {self.mask_token}, but {type(model).__name__} has the ids 0 to "
                f"{(words or 0) - 1}; make the model one token larger, or name a token that no text holds."
            )
        if ((labels != IGNORE) & (labels != ids)).any():
            raise ValueError(
                "masked_diffusion: labels must be the tokens in their own places, or -100, got others; give input_ids as the "
                "labels, unshifted (of a Corpus: labels='own')."
            )
        if is_causal(model, inputs, self.mask_token):
            raise ValueError(
                f"masked_diffusion: {type(model).__name__} is causal, but a masked token must attend to later ones; train "
                f"one with causal=False, such as diffusion-tiny."
            )


def spread_masks(counts: Tensor, level: int, levels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a mask of some tokens of `counts` (B, T), and their share of each row (B,), in one of `levels` parts of (0, 1]."""
    rows = torch.arange(len(counts), device=counts.device)
    share = (level + (rows + 0.5) / len(counts)) / levels
    number = counts.sum(1)
    k = (share * number).ceil().clamp(min=1)
    place = torch.rand(counts.shape, device=counts.device, generator=generator, dtype=torch.float32).masked_fill(~counts, 2.0)
    rank = place.argsort(1).argsort(1)
    return (rank < k[:, None]) & counts, k / number.clamp(min=1)


@torch.no_grad()
def is_causal(model: Any, inputs: dict[str, Any], other: int) -> bool:
    """Return config.causal, or compute it: a causal model's first logits do not change with the later tokens.

    other  a token id to replace later tokens by. Synchronises with the device.
    """
    declared = getattr(getattr(model, "config", None), "causal", None)
    row = first_row(inputs)
    if isinstance(declared, bool) or row["input_ids"].shape[1] < 2:
        return declared is True
    changed = row["input_ids"].clone()
    changed[:, 1:] = torch.where(changed[:, 1:] == other, 0, other)
    with mode(model, training=False):
        one, two = logits_of(model, row), logits_of(model, row | {"input_ids": changed})
    return torch.equal(one[:, 0], two[:, 0])
