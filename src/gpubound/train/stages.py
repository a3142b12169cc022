"""The phases of a run: the recipe of each, its training rows, and the sets that it is evaluated on."""

import math
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from ..data import Corpus, CorpusFeed
from ..data.corpus import split_tail
from ..distributed import ALONE, Ranks
from ..errors import DataError
from ..trace import notice
from .recipe import Recipe

EVALUATION_TOKENS = 131_072  # of one evaluation, unless eval_batches says more: a smaller set is evaluated as a whole
MOST_HELD_OUT = 0.2  # of a small set
SHORTEST = 64  # tokens of a row, when a small set has too few for the default


@dataclass
class EvalSet:
    """Rows that a phase is evaluated on: documents that were held out of its data, or one of the paths in eval_data."""

    name: str  # of several; "" for the only one
    corpus: Corpus
    recipe: Recipe

    @property
    def seq(self) -> int:
        """The length of a row: the recipe's, or that of a smaller set."""
        return min(self.recipe.seq, self.corpus.tokens - 1)

    @property
    def rows(self) -> int:
        return (self.corpus.tokens - 1) // self.seq

    @property
    def micro_batch(self) -> int:
        """Rows of a batch: the recipe's, or up to half as many where those leave fewer rows out."""
        most = min(self.recipe.micro_batch, self.rows)
        return max(range((most + 1) // 2, most + 1), key=lambda size: (self.rows // size * size, size))

    @property
    def batches(self) -> int:
        """Batches of an evaluation: eval_batches, or as many as hold EVALUATION_TOKENS; at most all there are."""
        wanted = self.recipe.eval_batches or -(-EVALUATION_TOKENS // (self.micro_batch * self.seq))
        return min(self.rows // self.micro_batch, wanted)

    def feed(self, device: torch.device) -> CorpusFeed:
        """Return the batches, equal on every rank and in one order."""
        labels = self.recipe.new_objective().labels
        return self.corpus.batches(self.seq, self.micro_batch, device, shuffle=False, labels=labels)

    def check(self, where: str) -> None:
        """Raise DataError if there are too few tokens, or none to learn, for a held-out loss."""
        what = f"eval_data: {self.name}" if self.name else "validation: the held-out documents"
        more = "give more text" if self.name else "give more text, or a larger --validation"
        if self.corpus.tokens < 2:
            raise DataError(f"{where}{what}: {self.corpus.tokens:,} tokens, wanted 2 or more; {more}.")
        if self.seq < self.recipe.seq:
            notice(f"{where}{what}: {self.corpus.tokens:,} tokens; the held-out loss is that of one row of {self.seq:,}.")
        evaluated = self.batches * self.micro_batch * self.seq
        labels = np.arange(evaluated) + (self.recipe.new_objective().labels == "next")
        if self.corpus.masked and not self.corpus.read_mask(labels).any():  # the held-out loss would be nan
            raise DataError(
                f"{where}{what}: the {evaluated:,} tokens of an evaluation hold none to learn; give chats with longer answers, "
                f"or more of them."
            )


@dataclass
class Stage:
    """One phase: its recipe, in which `steps` is known, and its data."""

    name: str
    recipe: Recipe
    training: Corpus
    eval_sets: list[EvalSet] = field(default_factory=list)

    @property
    def steps(self) -> int:
        assert self.recipe.steps is not None, "epochs are turned into steps by stage_of"
        return self.recipe.steps

    def feed(self, device: torch.device, ranks: Ranks = ALONE) -> CorpusFeed:
        """Return the training batches, split over the ranks."""
        recipe, split = self.recipe, {"rank": ranks.rank, "world": ranks.world}
        labels = recipe.new_objective().labels
        return self.training.batches(recipe.seq, recipe.micro_batch, device, seed=recipe.seed, labels=labels, **split)

    def check_rows(self) -> None:
        """Raise DataError if there is too little text for this phase's rows."""
        where, recipe = f"phase {self.name}: " if self.name else "", self.recipe
        rows = rows_of(self.training, recipe.seq)
        if rows < recipe.micro_batch:
            raise DataError(
                f"{where}data: the training documents have {self.training.tokens:,} tokens, {max(rows, 0):,} rows of seq "
                f"{recipe.seq:,}, wanted at least micro_batch = {recipe.micro_batch:,} rows; give more text, a shorter --seq "
                f"or a smaller --micro-batch."
            )
        if self.training.masked and not any(mask.any() for mask in self.training.masks()):
            raise DataError(f"{where}data: the training documents hold no token to learn; give chats with assistants' turns.")
        for eval_set in self.eval_sets:
            eval_set.check(where)


def rows_of(corpus: Corpus, seq: int) -> int:
    """Return the number of training rows of an epoch."""
    return (corpus.tokens - 1) // seq


def stage_of(name: str, recipe: Recipe, corpus: Corpus, eval_corpora: dict[str, Corpus] | None = None) -> Stage:
    """Return the phase of this recipe on this corpus; default values of seq and micro_batch are reduced for a small corpus.

    Documents are held out of it unless there are `eval_corpora`, or validation is 0.
    """
    seq, micro_batch = recipe.seq, recipe.micro_batch
    defaults = {field.name: field.default for field in fields(Recipe)}
    holds_out = recipe.validation > 0 and not eval_corpora

    def split() -> tuple[Corpus, Corpus | None]:
        return hold_out(corpus, recipe.validation, seq) if holds_out else (corpus, None)

    training, held_out = split()
    while seq > SHORTEST and recipe.seq == defaults["seq"] and rows_of(training, seq) < micro_batch:
        seq //= 2
        training, held_out = split()
    if micro_batch == defaults["micro_batch"]:
        micro_batch = max(1, min(micro_batch, rows_of(training, seq)))
    where = f"phase {name}: " if name else ""
    if (seq, micro_batch) != (recipe.seq, recipe.micro_batch):
        notice(
            f"{where}data: {training.tokens:,} tokens are fewer than {recipe.micro_batch} rows of {recipe.seq}; seq is {seq} "
            f"and micro_batch {micro_batch}. Give --seq and --micro-batch to choose."
        )
    if held_out is not None and held_out.tokens > 2 * recipe.validation * corpus.tokens:
        notice(
            f"{where}validation: {recipe.validation:.2%} of the data may be less than a row of {seq}; {held_out.tokens:,} "
            f"tokens are held out, {held_out.tokens / corpus.tokens:.0%} of the data."
        )
    own = replace(recipe, seq=seq, micro_batch=micro_batch)
    if recipe.epochs is not None:
        own = with_steps(own, rows_of(training, seq), where)
    sources = {"": held_out} if held_out is not None else eval_corpora or {}
    several = len(sources) > 1
    return Stage(name, own, training, [EvalSet(source if several else "", each, own) for source, each in sources.items()])


def with_steps(recipe: Recipe, rows: int, where: str) -> Recipe:
    """Return the recipe with the steps of its epochs. What is left of an epoch when a batch is drawn begins the next one."""
    assert recipe.epochs is not None
    batches = rows // recipe.micro_batch
    steps = max(1, math.ceil(recipe.epochs * batches / recipe.accumulate - 1e-6))
    notice(
        f"{where}epochs: {recipe.epochs:g} of {batches:,} micro-batches each ({rows:,} rows of {recipe.seq:,}) are {steps:,} "
        f"steps."
    )
    return replace(recipe, steps=steps, epochs=None)


def hold_out(corpus: Corpus, validation: float, row: int = 1) -> tuple[Corpus, Corpus]:
    """Return (training, held out). Held-out documents are spread over the corpus and do not depend on the seed, so that the
    held-out losses of two runs can be compared. If one document is more than the fraction, the last tokens are held out.

    If the fraction has fewer tokens than a row and its next token, up to MOST_HELD_OUT of the corpus is held out.
    """
    fraction = validation
    while True:
        at_least_one = round(corpus.documents * fraction) >= 1
        training, held_out = corpus.split(fraction) if at_least_one else split_tail(corpus, fraction)
        if held_out.tokens > row or fraction >= MOST_HELD_OUT:
            return training, held_out
        fraction = min(1.25 * fraction, MOST_HELD_OUT)
