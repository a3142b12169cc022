"""Data of a run: a corpus for each phase, their tokenizer, the held-out documents, and the feeds."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data import Corpus, CorpusFeed, Tokenizer, python_stdlib_texts, torch_source_texts, train_tokenizer
from ..data.build import OtherCorpus, building_alone
from ..data.corpus import split_tail
from ..data.shards import CLAIM, MANIFEST
from ..data.texts import Texts
from ..distributed import ALONE, Ranks
from ..errors import DataError
from ..models.registry import is_named
from ..trace import notice
from .recipe import SOURCES, STDLIB, TORCH, Recipe

EVALUATION_TOKENS = 65_536  # enough that the choice of rows changes the held-out loss by less than 1 %
MOST_HELD_OUT = 0.2  # of a small set
SHORTEST = 64  # tokens of a row, when a small set has too few for the default
WANTED = "text files or folders, a built corpus, 'stdlib' or 'torch-source'"


def check_data(recipe: Recipe) -> None:
    """Raise ValueError for data that does not exist or cannot be combined, without reading it."""
    for _, own in recipe.stages():
        if not own.data:
            raise ValueError(f"data: got nothing to train {own.model} on, wanted {WANTED}.")
        for name in own.data:
            if name not in SOURCES and not Path(name).exists():
                raise ValueError(f"data: {name} does not exist; give {WANTED}.")
            if name in SOURCES and own.data.count(name) > 1:
                raise ValueError(f"data: {name} stands twice; give it once, so that no text is both held out and trained on.")
            if len(own.data) > 1 and name not in SOURCES and _is_corpus(name):
                raise ValueError(f"data: {name} is a built corpus, got {len(own.data) - 1} more beside it; give it alone.")
    if recipe.text_key is not None and all(_has_no_rows(own) for _, own in recipe.stages()):
        raise ValueError(f"text_key: {recipe.text_key!r} has no effect on {', '.join(recipe.data)}; leave it out.")


def _is_corpus(name: str) -> bool:
    return any((Path(name) / file).exists() for file in (MANIFEST, CLAIM))


def _has_no_rows(recipe: Recipe) -> bool:
    return all(name in SOURCES or _is_corpus(name) for name in recipe.data)


def open_data(recipe: Recipe, folder: Path, progress: bool, ranks: Ranks = ALONE) -> list[Corpus]:
    """Return a corpus for each phase, all of one tokenizer: opened if `data` is a corpus, else built in the run's folder.

    The first rank builds; the others wait and open the result.
    """
    corpora = _built(recipe, folder, progress) if ranks.first else []
    ranks.wait()
    return corpora or [Corpus.open(_corpus_path(name, own, folder)) for name, own in recipe.stages()]


def _corpus_path(name: str, recipe: Recipe, folder: Path) -> Path:
    """Return the path of a phase's corpus."""
    return Path(recipe.data[0]) if _is_corpus(recipe.data[0]) else folder / "corpus" / name


def _built(recipe: Recipe, folder: Path, progress: bool) -> list[Corpus]:
    stages = recipe.stages()
    opened = {name: Corpus.open(own.data[0]) for name, own in stages if _is_corpus(own.data[0])}
    tokenizer = known_tokenizer(recipe, list(opened.values()))
    if len(opened) < len(stages):
        with building_alone(folder):  # before a tokenizer is trained, not after
            tokenizer = tokenizer or _own_tokenizer(recipe, folder / "corpus", progress)
            for name, own in stages:
                if name not in opened:
                    opened[name] = _build(own, tokenizer, _corpus_path(name, own, folder), progress)
    return [opened[name] for name, _ in stages]


def _build(recipe: Recipe, tokenizer: Tokenizer, path: Path, progress: bool) -> Corpus:
    try:
        return Corpus.build(_texts(recipe), tokenizer, path, progress=progress, text_key=_key(recipe))
    except OtherCorpus as error:
        advice = "Put back the data that this run began with to go on with it, or give another --out to begin anew."
        if not any(Path(recipe.out, "checkpoints").glob("step-*")):
            advice = "No checkpoint needs it yet: delete that folder, or give another --out."
        raise DataError(f"data: {path}: {error.what}. {advice}") from error


def known_tokenizer(recipe: Recipe, corpora: list[Corpus]) -> Tokenizer | None:
    """Return the tokenizer of these corpora, of the recipe, or of the model's folder; None if one has to be trained.

    A pretrained model must get the ids of its tokenizer.
    """
    named = Tokenizer.load(recipe.tokenizer) if recipe.tokenizer else None
    tokenizer, origin = named, recipe.tokenizer
    if corpora:
        first, *others = corpora
        tokenizer, origin = first.tokenizer(), str(first.path)
        for later in others:
            if later.tokenizer().fingerprint != tokenizer.fingerprint:
                raise DataError(f"data: {origin} and {later.path} were built with different tokenizers; build them with one.")
        if named is not None and named.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"tokenizer: {recipe.tokenizer} is not the one that {origin} was built with; leave --tokenizer out, or build "
                f"the corpus anew with it."
            )
    if is_named(recipe.model) or not (Path(recipe.model) / "tokenizer.json").exists():
        return tokenizer
    models = Tokenizer.load(recipe.model)
    if tokenizer is not None and (difference := models.difference(tokenizer)) is not None:
        number, own, other = difference
        raise DataError(
            f"model: {recipe.model} has another tokenizer than {origin}: token {number} is {own!r} in the model's and "
            f"{other!r} in the other; build the corpus with the model's own tokenizer (--tokenizer {recipe.model})."
        )
    return tokenizer or models


def _own_tokenizer(recipe: Recipe, built: Path, progress: bool) -> Tokenizer:
    """Return the tokenizer of an earlier start of this run, or train one."""
    for name, _ in recipe.stages():
        if (built / name / "tokenizer.json").exists():
            notice(f"tokenizer: {built / name} holds the one that this run began with; it is used again.")
            return Tokenizer.load(built / name)
    every = [Texts(_texts(own), text_key=_key(own)) for _, own in recipe.stages()]
    return train_tokenizer(every, recipe.vocabulary, progress)


def _texts(recipe: Recipe) -> list[Any]:
    texts, sources = list[Any](), {STDLIB: python_stdlib_texts, TORCH: torch_source_texts}
    for name in recipe.data:
        texts += sources[name](recipe.data_bytes) if name in sources else [Path(name)]
    return texts


def _key(recipe: Recipe) -> str | None:
    """Return `text_key`, or None for data without rows: phases may differ in that."""
    return None if _has_no_rows(recipe) else recipe.text_key


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


def stage_of(name: str, recipe: Recipe, corpus: Corpus) -> "Stage":
    """Return the phase of this recipe on this corpus; default values of seq and micro_batch are reduced for a small corpus."""
    seq, micro_batch = recipe.seq, recipe.micro_batch
    defaults = {field.name: field.default for field in fields(Recipe)}
    training, held_out = hold_out(corpus, recipe.validation, seq)
    while seq > SHORTEST and recipe.seq == defaults["seq"] and (training.tokens - 1) // seq < micro_batch:
        seq //= 2
        training, held_out = hold_out(corpus, recipe.validation, seq)
    if micro_batch == defaults["micro_batch"]:
        micro_batch = max(1, min(micro_batch, (training.tokens - 1) // seq))
    where = f"phase {name}: " if name else ""
    if (seq, micro_batch) != (recipe.seq, recipe.micro_batch):
        notice(
            f"{where}data: {training.tokens:,} tokens are fewer than {recipe.micro_batch} rows of {recipe.seq}; seq is {seq} "
            f"and micro_batch {micro_batch}. Give --seq and --micro-batch to choose."
        )
    if held_out.tokens > 2 * recipe.validation * corpus.tokens:
        notice(
            f"{where}validation: {recipe.validation:.2%} of the data may be less than a row of {seq}; {held_out.tokens:,} "
            f"tokens are held out, {held_out.tokens / corpus.tokens:.0%} of the data."
        )
    return Stage(name, replace(recipe, seq=seq, micro_batch=micro_batch), training, held_out)


@dataclass
class Stage:
    """One phase: its recipe and its data."""

    name: str
    recipe: Recipe
    training: Corpus
    held_out: Corpus

    @property
    def held_out_seq(self) -> int:
        """The length of a held-out row: `seq`, or that of a smaller held-out set."""
        return min(self.recipe.seq, self.held_out.tokens - 1)

    @property
    def held_out_batches(self) -> int:
        """The number of held-out batches of an evaluation: EVALUATION_TOKENS, at least one batch, at most all there are."""
        rows = (self.held_out.tokens - 1) // self.held_out_seq
        size = self._held_out_rows()
        return min(rows // size, -(-EVALUATION_TOKENS // (size * self.held_out_seq)))

    def feed(self, device: torch.device, ranks: Ranks = ALONE) -> CorpusFeed:
        """Return the training batches, split over the ranks."""
        recipe, split = self.recipe, {"rank": ranks.rank, "world": ranks.world}
        return self.training.batches(recipe.seq, recipe.micro_batch, device, seed=recipe.seed, labels=self._labels(), **split)

    def held_out_feed(self, device: torch.device) -> CorpusFeed:
        """Return the held-out batches, equal on every rank."""
        rows = self._held_out_rows()
        return self.held_out.batches(self.held_out_seq, rows, device, shuffle=False, labels=self._labels())

    def _labels(self) -> str:
        return self.recipe.new_objective().labels

    def _held_out_rows(self) -> int:
        return min(self.recipe.micro_batch, (self.held_out.tokens - 1) // self.held_out_seq)

    def check_rows(self) -> None:
        """Raise DataError if there is too little text for this phase's rows."""
        where, recipe = f"phase {self.name}: " if self.name else "", self.recipe
        rows = (self.training.tokens - 1) // recipe.seq
        if rows < recipe.micro_batch:
            raise DataError(
                f"{where}data: the training documents have {self.training.tokens:,} tokens, {max(rows, 0):,} rows of seq "
                f"{recipe.seq:,}, wanted at least micro_batch = {recipe.micro_batch:,} rows; give more text, a shorter --seq "
                f"or a smaller --micro-batch."
            )
        if self.held_out.tokens < 2:
            raise DataError(
                f"{where}validation: the held-out documents have {self.held_out.tokens:,} tokens, wanted 2 or more; give more "
                f"text, or a larger --validation."
            )
        if self.held_out_seq < recipe.seq:
            notice(
                f"{where}validation: the held-out documents have {self.held_out.tokens:,} tokens; the held-out loss is that of "
                f"one row of {self.held_out_seq:,}."
            )
        for corpus, what in ((self.training, "training"), (self.held_out, "held-out")):
            if corpus.masked and not any(mask.any() for mask in corpus.masks()):
                raise DataError(f"{where}data: the {what} documents hold no token to learn; give chats with assistants' turns.")
        evaluated = self.held_out_batches * self._held_out_rows() * self.held_out_seq
        labels = np.arange(evaluated) + (self._labels() == "next")
        if self.held_out.masked and not self.held_out.read_mask(labels).any():  # the held-out loss would be nan
            raise DataError(
                f"{where}validation: the {evaluated:,} held-out tokens of an evaluation hold none to learn; give chats with "
                f"longer answers, or a larger --validation."
            )
