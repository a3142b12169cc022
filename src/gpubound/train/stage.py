"""One phase of a run: its recipe, its data, its optimizer step. Every phase is checked before the first one trains."""

from dataclasses import dataclass
from typing import Any

import torch

from ..corpus import Corpus
from ..errors import DataError
from ..models import Decoder
from .objectives import Objective
from .recipe import Recipe
from .recompute import parse as parse_recompute
from .step import TrainStep


@dataclass
class Stage:
    """One phase: its recipe and its data."""

    name: str
    recipe: Recipe
    training: Corpus
    held_out: Corpus

    def feed(self, device: torch.device, recipe: Recipe | None = None) -> Any:
        recipe = recipe or self.recipe
        return self.training.batches(recipe.seq, recipe.micro_batch, device, seed=recipe.seed)

    def held_out_feed(self, device: torch.device) -> Any:
        return self.held_out.batches(self.recipe.seq, self._held_out_rows(), device, shuffle=False)

    def _held_out_rows(self) -> int:
        return min(self.recipe.micro_batch, (self.held_out.tokens - 1) // self.recipe.seq)

    def check(self) -> None:
        """DataError when there is too little text for this phase's rows."""
        where, recipe = f"phase {self.name}: " if self.name else "", self.recipe
        rows = (self.training.tokens - 1) // recipe.seq
        if rows < recipe.micro_batch:
            raise DataError(
                f"{where}data: the training documents have {self.training.tokens:,} tokens, {max(rows, 0):,} rows of seq "
                f"{recipe.seq:,}, wanted at least micro_batch = {recipe.micro_batch:,} rows; give more text, a shorter --seq "
                f"or a smaller --micro-batch."
            )
        if self._held_out_rows() < 1:
            raise DataError(
                f"{where}validation: the held-out documents have {self.held_out.tokens} tokens, wanted at least one row of "
                f"{recipe.seq}; give more text, a larger --validation or a shorter --seq."
            )
        for corpus, what in ((self.training, "training"), (self.held_out, "held-out")):
            if corpus.masked and not any(mask.any() for mask in corpus.masks()):
                raise DataError(f"{where}data: the {what} documents hold no token to learn; give chats with assistants' turns.")


def make_step(model: Decoder, objective: Objective, recipe: Recipe, device: torch.device) -> TrainStep:
    """The optimizer step that `recipe` describes; with a byte budget for recomputing, without any yet."""
    budget = parse_recompute(recipe.recompute)[0] == "budget"
    return TrainStep(
        model,
        objective,
        recipe.numbers,
        accumulate=recipe.accumulate,
        clip=recipe.clip,
        precision=recipe.precision if recipe.precision != "auto" else "bf16" if device.type == "cuda" else "fp32",
        graph=recipe.graph,
        schedule=recipe.rates,
        recompute="cheap" if budget else recipe.recompute,
        overlap=recipe.overlap,
        seed=recipe.seed,
    )
