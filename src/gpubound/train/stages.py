"""The phases of a run: the recipe of each, its training rows, and the sets that it is evaluated on.

A phase may have reference values: what an objective compares with of the model that the phase begins with, such as the
log-probabilities of dpo's answers where all weights train. One number a row, or for each example that a row has room for,
computed before the phase's first step and kept in its checkpoints, since a resumed run has other weights.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import Corpus, CorpusFeed
from ..data.corpus import split_tail
from ..data.packing import PADDING, Packing, pack_buckets, pack_corpus
from ..data.texts import PROGRESS_SECONDS
from ..distributed import ALONE, Ranks
from ..errors import DataError
from ..models.language_model import UNPACKED
from ..models.registry import mode
from ..trace import fallback, notice, say
from .checkpoint.checkpoints import Checkpoint
from .data import source_names
from .objectives import Objective
from .recipe import Recipe
from .step import TrainStep

EVALUATION_TOKENS = 131_072  # of one evaluation, unless eval_batches says more: a smaller set is evaluated as a whole
MOST_HELD_OUT = 0.2  # of a small set
FEWEST_EXAMPLES = 8  # that are held out of whole examples, unless they are more than MOST_HELD_OUT
SHORTEST = 64  # tokens of a row, when a small set has too few for the default
LONGEST = 2048  # tokens of a row, when examples are longer than the default
WHOLE = ("examples", "none", "pairs", "packed_pairs")  # packings that keep examples whole


@dataclass
class EvalSet:
    """Rows that a phase is evaluated on, all of one length: documents that were held out of its data, all or those of one of
    its sources, or a path in eval_data."""

    name: str  # of several; "" for the only one
    corpus: Corpus
    recipe: Recipe

    @property
    def seq(self) -> int:
        """The length of a row: the recipe's, or that of a stream with fewer tokens."""
        return min(self.recipe.seq, self.corpus.tokens - 1) if self.recipe.pack == "stream" else self.recipe.seq

    @cached_property
    def rows(self) -> int:
        return rows_of(self.corpus, self.recipe, self.seq).rows

    @property
    def group(self) -> int:
        """Rows that stay together."""
        return self.corpus.group if self.recipe.pack == "pairs" else 1

    @property
    def micro_batch(self) -> int:
        """Rows of a batch: the recipe's, or up to half as many where those leave fewer rows out."""
        group = self.group
        most = min(self.recipe.micro_batch, self.rows) // group
        return group * max(range((most + 1) // 2, most + 1), key=lambda n: (self.rows // (group * n) * n, n))

    @property
    def batches(self) -> int:
        """Batches of an evaluation: eval_batches, or as many as hold EVALUATION_TOKENS; at most all there are."""
        wanted = self.recipe.eval_batches or -(-EVALUATION_TOKENS // (self.micro_batch * self.seq))
        return min(self.rows // self.micro_batch, wanted)

    def feed(self, device: torch.device, reference: Tensor | None = None) -> CorpusFeed:
        """Return the batches, equal on every rank and in one order. reference: a field with a value for each row"""
        options = rows_options(self.recipe, reference)
        return self.corpus.batches(self.seq, self.micro_batch, device, shuffle=False, **options)

    def check(self, where: str) -> None:
        """Raise DataError if there are too few tokens, or none to learn, for a held-out loss."""
        what = f"held_out/{self.name}" if self.name else "validation: the held-out documents"
        more = "give more text" if self.name else "give more text, or a larger --validation"
        if self.corpus.tokens < 2 or not self.rows:
            raise DataError(f"{where}{what}: {self.corpus.tokens:,} tokens make no row with a label that counts; {more}.")
        if self.seq < self.recipe.seq:
            notice(f"{where}{what}: {self.corpus.tokens:,} tokens; the held-out loss is that of one row of {self.seq:,}.")
        evaluated = self.batches * self.micro_batch * self.seq
        labels = np.arange(evaluated) + (self.recipe.new_objective().labels == "next")
        # Rows of whole examples have labels. The loss of a stream without any would be nan.
        if self.recipe.pack == "stream" and self.corpus.masked and not self.corpus.read_mask(labels).any():
            raise DataError(
                f"{where}{what}: the {evaluated:,} tokens of an evaluation hold none to learn; give chats with longer answers, "
                f"or more of them."
            )


@dataclass
class Stage:
    """One phase: its recipe, in which `steps` and `pack` are known, and its data, whose documents repeat by their weights."""

    name: str
    recipe: Recipe
    training: Corpus
    eval_sets: list[EvalSet] = field(default_factory=list)

    @property
    def steps(self) -> int:
        assert self.recipe.steps is not None, "epochs are turned into steps by stage_of"
        return self.recipe.steps

    @cached_property
    def packing(self) -> Packing:
        return rows_of(self.training, self.recipe, self.recipe.seq)

    @property
    def steps_per_epoch(self) -> float:
        return self.packing.batches(self.recipe.micro_batch) / self.recipe.accumulate

    @property
    def tokens_per_step(self) -> float:
        """The positions of a step that hold tokens, learnt or not, on average."""
        return self.recipe.micro_batch * self.recipe.accumulate * self.packing.tokens / self.packing.rows

    @property
    def attended(self) -> float:
        """The length of the example that a token is in, on average: a row's, where examples see each other."""
        lengths = lengths_of(self.packing)
        return float((lengths**2).sum() / lengths.sum())

    def feed(self, device: torch.device, ranks: Ranks = ALONE, reference: Tensor | None = None) -> CorpusFeed:
        """Return the training batches, split over the ranks. reference: a field with a value for each row"""
        recipe, split = self.recipe, {"rank": ranks.rank, "world": ranks.world}
        options = split | rows_options(recipe, reference)
        return self.training.batches(recipe.seq, recipe.micro_batch, device, seed=recipe.seed, **options)

    def check_rows(self) -> None:
        """Raise DataError if there is too little text for this phase's rows."""
        where, recipe = f"phase {self.name}: " if self.name else "", self.recipe
        packing = self.packing
        if self.training.masked and not any(mask.any() for mask in self.training.masks()):
            raise DataError(f"{where}data: the training documents hold no token to learn; give chats with assistants' turns.")
        if recipe.micro_batch % packing.group:
            raise ValueError(
                f"{where}micro_batch: got {recipe.micro_batch} rows, wanted a multiple of {packing.group}: so many belong "
                f"together."
            )
        if not packing.batches(recipe.micro_batch):
            facts = "" if recipe.pack == "stream" else f" ({packing})"
            step = f" · accumulate = {recipe.accumulate} (of one length)" if packing.batches_a_step > 1 else ""
            raise DataError(
                f"{where}data: the training documents have {self.training.tokens:,} tokens, {packing.rows:,} rows of seq "
                f"{recipe.seq:,}{facts}, wanted at least micro_batch = {recipe.micro_batch:,}{step} rows; give more text, a "
                f"{'longer' if packing.dropped else 'shorter'} --seq or a smaller --micro-batch."
            )
        for eval_set in self.eval_sets:
            eval_set.check(where)


def rows_options(recipe: Recipe, reference: Tensor | None = None) -> dict[str, Any]:
    """Return the options of Corpus.batches that decide how rows are made, and what they hold."""
    options: dict[str, Any] = {"pack": recipe.pack, "labels": recipe.new_objective().labels, "weighted": False}
    options |= {"overlong": recipe.overlong} if recipe.pack in WHOLE else {}
    options |= {"buckets": recipe.buckets, "accumulate": recipe.accumulate} if recipe.buckets else {}
    return options | ({} if reference is None else {"row_values": {"reference": reference}})


def rows_of(corpus: Corpus, recipe: Recipe, seq: int) -> Packing:
    """Return the rows of an epoch."""
    if recipe.buckets:
        sizes = recipe.buckets, recipe.micro_batch, recipe.accumulate
        return pack_buckets(corpus, recipe.pack, seq, recipe.overlong, *sizes)
    return pack_corpus(corpus, recipe.pack, seq, recipe.overlong)


def lengths_of(packing: Packing) -> np.ndarray:
    """Return the tokens of each piece in the rows; a stream is one piece a row."""
    if packing.parts:
        return np.concatenate([lengths_of(part) for part in packing.parts])
    if not packing.tables:
        return np.full(packing.rows, packing.seq)
    first, begins, shift = packing.tables
    ends = np.append(begins[1:], packing.seq)
    ends[first[1:] - 1] = packing.seq
    return (ends - begins).clip(0)[shift > PADDING // 2]


def packing_of(recipe: Recipe, corpus: Corpus, unpacked: Callable[[], str | None] = lambda: None) -> str:
    """Return the packing of this corpus: the one that the objective needs, the recipe's, or for auto, whole examples where
    documents have a loss mask and a stream where they have none. Raise ValueError for a packing that does not fit.

    unpacked  returns why the model would read other examples of its row; auto is then one example a row
    """
    objective = recipe.new_objective()
    wanted = objective.pack or ("stream" if objective.labels == "own" else None)
    if recipe.pack in objective.packs:
        wanted = recipe.pack
    elif recipe.pack == "auto" and objective.packs and not recipe.buckets:
        wanted = objective.packs[0]
    if wanted is not None and recipe.pack not in ("auto", wanted):
        raise ValueError(f"pack: got {recipe.pack!r}, and the objective {recipe.objective} needs {wanted!r}; leave pack out.")
    if why := objective.why_not_kind(corpus.kind):
        raise ValueError(f"objective: {corpus.path} holds {corpus.kind}, got {recipe.objective!r} {why}.")
    if recipe.pack == "pairs" and not corpus.pairs:
        raise ValueError(f"pack: got 'pairs', and {corpus.path} holds {corpus.kind}, which are no pairs; leave pack out.")
    pack = wanted or (recipe.pack if recipe.pack != "auto" else "examples" if corpus.masked else "stream")
    if pack in ("examples", "documents", "packed_pairs") and (why := unpacked()):
        if recipe.pack != "auto":
            raise ValueError(
                f"pack: got {pack!r}, and {recipe.model} cannot keep the examples of a row apart: {why}; {UNPACKED}."
            )
        fallback("packed rows", f"{recipe.model} cannot keep the examples of a row apart: {why}; each row has one, and padding")
        pack = objective.pack or "none"
    if recipe.buckets and pack not in ("none", "pairs"):
        raise ValueError(
            f"buckets: got {recipe.buckets}, and rows of pack {pack!r} have one length; leave it out, or take pack none."
        )
    return pack


def stage_of(
    name: str,
    recipe: Recipe,
    corpus: Corpus,
    eval_corpora: dict[str, Corpus] | None = None,
    unpacked: Callable[[], str | None] = lambda: None,
) -> Stage:
    """Return the phase of this recipe on this corpus; default values of seq and micro_batch are reduced for a small corpus.

    Documents are held out of it unless there are `eval_corpora`, or validation is 0. `unpacked` as in `packing_of`.
    """
    where = f"phase {name}: " if name else ""
    defaults = {field.name: field.default for field in fields(Recipe)}
    packing_chosen = packing_of(recipe, corpus, unpacked)
    if packing_chosen == "packed_pairs" and recipe.pack == "auto":
        recipe = with_two_answers(recipe, where)
    recipe = replace(recipe, pack=packing_chosen)
    for source, each in (eval_corpora or {}).items():
        if each.kind != corpus.kind:
            raise ValueError(f"{where}eval_data: {source} holds {each.kind}, wanted {corpus.kind}, which the data holds.")
    if corpus.kind not in ("texts", "preferences") and recipe.overlong == "truncate":  # the end is what is learnt
        recipe = replace(recipe, overlong="truncate_left")
    whole, of_one_length = recipe.pack in WHOLE, replace(recipe, buckets=0)

    def split(seq: int) -> tuple[Corpus, Corpus | None, Packing]:
        training, held_out = corpus, None
        if recipe.validation > 0 and not eval_corpora:
            training, held_out = hold_out_examples(corpus, recipe) if whole else hold_out(corpus, recipe.validation, seq)
        training = training.weighted()
        return training, held_out, rows_of(training, of_one_length, seq)

    seq, micro_batch = recipe.seq, recipe.micro_batch
    any_seq, any_micro_batch = seq == defaults["seq"], micro_batch == defaults["micro_batch"]
    every = (corpus, *(eval_corpora or {}).values())
    longest = max(int(np.diff(each.offsets()).max()) - 1 for each in every) if whole else 0  # tokens of an example in a row
    longest = 2 * longest if recipe.pack == "packed_pairs" else longest  # which holds two answers
    while any_seq and seq < min(longest, LONGEST):
        seq, micro_batch = 2 * seq, micro_batch // 2 if any_micro_batch else micro_batch  # as many tokens
    if any_seq and recipe.pack in ("none", "pairs"):  # what is longer than every example is padding alone
        seq = min(seq, -(-longest // SHORTEST) * SHORTEST)
    training, held_out, packing = split(seq)
    while any_seq and seq > max(SHORTEST, 2 * longest - 1) and packing.rows < micro_batch:
        seq //= 2
        training, held_out, packing = split(seq)
    if any_micro_batch:
        micro_batch = max(1, min(micro_batch, packing.rows) // packing.group) * packing.group
    if (seq, micro_batch) != (recipe.seq, recipe.micro_batch):
        why = f"{training.tokens:,} tokens are fewer than {recipe.micro_batch} rows of {recipe.seq}"
        why = f"examples are longer than {recipe.seq} tokens" if seq > recipe.seq else why
        why = f"the longest example has {longest:,} tokens" if recipe.pack in ("none", "pairs") else why
        notice(f"{where}data: {why}; seq is {seq} and micro_batch {micro_batch}. Give --seq and --micro-batch to choose.")
    if held_out is not None and held_out.tokens > 2 * recipe.validation * corpus.tokens:
        few = f"fewer than {FEWEST_EXAMPLES} examples" if whole else f"less than a row of {seq}"
        notice(
            f"{where}validation: {recipe.validation:.2%} of the data may be {few}; {held_out.documents:,} documents of "
            f"{held_out.tokens:,} tokens are held out, {held_out.tokens / corpus.tokens:.0%} of the data."
        )
    stage = Stage(name, replace(recipe, seq=seq, micro_batch=micro_batch), training)
    if not recipe.buckets:
        stage.packing = packing  # a million examples take 5 s to pack
    if recipe.epochs is not None:
        stage.recipe = with_steps(stage, where)
    sources = dict(eval_corpora or {}) if held_out is None else by_source(held_out, where)
    evaluated = replace(stage.recipe, buckets=0)
    stage.eval_sets = [EvalSet(source if len(sources) > 1 else "", each, evaluated) for source, each in sources.items()]
    return stage


def with_two_answers(recipe: Recipe, where: str) -> Recipe:
    """Return the recipe for rows of several pairs. seq and micro_batch, where given, are those of rows with one answer: a row
    then has room for two, and a micro-batch as many tokens."""
    default = {field.name: field.default for field in fields(Recipe)}
    if recipe.seq == default["seq"]:
        if recipe.micro_batch == default["micro_batch"]:
            return recipe
        return replace(recipe, micro_batch=max(1, recipe.micro_batch // 2))
    packed = replace(recipe, seq=2 * recipe.seq, micro_batch=max(1, recipe.micro_batch // 2))
    notice(
        f"{where}pack: several pairs a row of {packed.seq:,} tokens, twice seq, {packed.micro_batch:,} rows a micro-batch. For "
        f"an answer a row: --pack pairs."
    )
    return packed


def by_source(held_out: Corpus, where: str) -> dict[str, Corpus]:
    """Return the held-out documents of each source of {path: weight}, by its name; all of them together without weights."""
    sources = {name: held_out.of_source(number) for number, name in enumerate(source_names(list(held_out.weights)))}
    filled = {name: corpus for name, corpus in sources.items() if corpus.documents}
    if filled and (without := [name for name in sources if name not in filled]):
        notice(f"{where}validation: no document of {', '.join(without)} is held out; give more of them, or eval_data.")
    return filled or {"": held_out}


def with_steps(stage: Stage, where: str) -> Recipe:
    """Return a stage's recipe with the steps of its epochs. What is left of an epoch when a batch is drawn begins the next."""
    recipe, packing = stage.recipe, stage.packing
    assert recipe.epochs is not None
    batches = packing.batches(recipe.micro_batch)
    steps = max(1, math.ceil(recipe.epochs * stage.steps_per_epoch - 1e-6))
    left_out = packing.rows - batches * recipe.micro_batch
    rest = f", of which each epoch leaves out {left_out:,}, others each time" if left_out else ""
    rows = f"{packing.rows:,} rows of {'up to ' if recipe.buckets else ''}{recipe.seq:,}"
    notice(f"{where}epochs: {recipe.epochs:g} of {batches:,} micro-batches each ({rows}{rest}) are {steps:,} steps.")
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


def hold_out_examples(corpus: Corpus, recipe: Recipe) -> tuple[Corpus, Corpus]:
    """Return (training, held out) of whole examples, or pairs: the fraction `validation` of them, or FEWEST_EXAMPLES, but at
    most MOST_HELD_OUT."""
    examples = corpus.documents // corpus.group
    count = min(max(recipe.validation * examples, FEWEST_EXAMPLES), max(recipe.validation, MOST_HELD_OUT) * examples)
    if round(count) < 1 or examples < 2:
        raise DataError(
            f"validation: {examples:,} examples are too few to hold one out; give more, eval_data, or --validation 0 for no "
            f"held-out loss."
        )
    return corpus.split(min(round(count), examples - 1) / examples)


PART = "reference"  # of a checkpoint's tensors


def rows_with_values(stage: Stage) -> list[EvalSet]:
    """Return the rows that have reference values: the training data's, all of one length, then each eval set's."""
    return [EvalSet("training", stage.training, replace(stage.recipe, buckets=0)), *stage.eval_sets]


def stored_values(checkpoint: Checkpoint, stage: Stage, new_rows: bool) -> list[Tensor] | None:
    """Return the values in a checkpoint of this phase, None if they are of other rows. DataError if they can be had nowhere."""
    stored = checkpoint.tensors(begin=(f"{PART}.",))
    values, rows = [stored[name] for name in sorted(stored)], [each.rows for each in rows_with_values(stage)]
    if [len(value) for value in values] == rows and not new_rows:
        return values
    if checkpoint.facts["phase"]:
        raise DataError(
            f"{checkpoint.path}: has no reference values of the {sum(rows):,} rows that phase {stage.name} has now, and the "
            f"weights that they are computed with were those at its beginning; give the rows of then, or begin anew in another "
            f"--out."
        )
    return None


def reference_values(
    model: Any, objective: Objective, step: TrainStep, stage: Stage, device: torch.device, ranks: Ranks
) -> list[Tensor]:
    """Compute the value of each row of the training data, then of each eval set, with the present weights."""
    sets = rows_with_values(stage)
    rows = sum(each.rows for each in sets)
    notice(f"reference: computing a value for each of {rows:,} rows before the first step.")
    computed, done, shown = list[Tensor](), 0, time.monotonic()
    with mode(model, training=False):
        for each in sets:
            parts = list[Tensor]()
            for batch in _batches_of_all_rows(each, device):
                values = step.with_weights(partial(objective.reference_values, model, batch))
                parts.append(values.view(len(batch["labels"]), -1).squeeze(-1))
                done += len(parts[-1])
                if ranks.first and time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    say(f"reference: {done:,} of {rows:,} rows")
            computed.append(torch.cat(parts).cpu())
    return computed


def empty_values(packing: Packing) -> Tensor:
    """Return values of 0 for the rows of `packing`."""
    room = (packing.max_pieces + packing.max_pieces % 2,) if packing.group == 1 else ()  # of pairs of a packed row
    return torch.zeros(packing.rows, *room, device="cpu", dtype=torch.float64)


def _batches_of_all_rows(rows: EvalSet, device: torch.device) -> Iterator[Any]:
    """Yield batches of micro_batch rows in order, then those that remain, as few at a time as stay together."""
    whole = rows.rows // rows.micro_batch * rows.micro_batch
    for size, first, last in ((rows.micro_batch, 0, whole), (rows.group, whole, rows.rows)):
        if last > first:
            feed = rows.corpus.batches(rows.seq, size, device, shuffle=False, **rows_options(rows.recipe))
            feed.seek(0, first // size)
            for _ in range((last - first) // size):
                yield feed.take()
