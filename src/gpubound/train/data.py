"""The data of a run: texts to a corpus for each phase, the tokenizer that fits it, what of it is held out, and its feeds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..corpus import Corpus, CorpusFeed, Tokenizer, python_stdlib_texts, torch_source_texts, train_tokenizer
from ..corpus.build import OtherCorpus, building_alone
from ..corpus.corpus import split_tail
from ..corpus.shards import CLAIM, MANIFEST
from ..corpus.texts import Texts
from ..errors import DataError
from ..models.registry import is_named
from ..parallel import ALONE, Ranks
from ..trace import notice
from .recipe import SOURCES, STDLIB, TORCH, Recipe

WANTED = "text files or folders, a built corpus, 'stdlib' or 'torch-source'"


def check_data(recipe: Recipe) -> None:
    """Refuse what needs no reading to be seen."""
    for _, own in recipe.stages():
        if not own.data:
            raise ValueError(f"data: got nothing, wanted {WANTED}.")
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
    """A corpus for each phase, all of one tokenizer: opened where `data` is one, else built into the run's folder, once.

    The first rank builds. The others wait for it and open what it has built.
    """
    corpora = _built(recipe, folder, progress) if ranks.first else []
    ranks.wait()
    return corpora or [Corpus.open(_place(name, own, folder)) for name, own in recipe.stages()]


def _place(name: str, recipe: Recipe, folder: Path) -> Path:
    """Where the corpus of a phase is, or is to be."""
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
                    opened[name] = _build(own, tokenizer, _place(name, own, folder), progress)
    return [opened[name] for name, _ in stages]


def _build(recipe: Recipe, tokenizer: Tokenizer, path: Path, progress: bool) -> Corpus:
    try:
        return Corpus.build(_texts(recipe), tokenizer, path, progress=progress, text_key=_key(recipe))
    except OtherCorpus as error:
        way = "Put back the data that this run began with to go on with it, or give another --out to begin anew."
        if not any(Path(recipe.out, "checkpoints").glob("step-*")):
            way = "No checkpoint needs it yet: delete that folder, or give another --out."
        raise DataError(f"data: {path}: {error.what}. {way}") from error


def known_tokenizer(recipe: Recipe, corpora: list[Corpus]) -> Tokenizer | None:
    """The one that these corpora were built with, that was named, or that is the model's own. None: one is to be trained.

    A model that was trained before knows its own tokenizer's ids: others would be other words to it.
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
    """The one of an earlier start of this run, or a new one."""
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
    """`text_key`, where there may be rows: a run's phases may differ in that."""
    return None if _has_no_rows(recipe) else recipe.text_key


def hold_out(corpus: Corpus, validation: float) -> tuple[Corpus, Corpus]:
    """(training, held out): documents from all over the corpus, the same ones for every seed of a run, so that the held-out
    losses of two runs can be compared. Where even one document would be too many, the last tokens."""
    return corpus.split(validation) if round(corpus.documents * validation) >= 1 else split_tail(corpus, validation)


@dataclass
class Stage:
    """One phase: its recipe and its data."""

    name: str
    recipe: Recipe
    training: Corpus
    held_out: Corpus

    def feed(self, device: torch.device, ranks: Ranks = ALONE) -> CorpusFeed:
        """The training batches, of which the ranks take turns."""
        recipe, turns = self.recipe, {"rank": ranks.rank, "world": ranks.world}
        return self.training.batches(recipe.seq, recipe.micro_batch, device, seed=recipe.seed, labels=self._labels(), **turns)

    def held_out_feed(self, device: torch.device) -> CorpusFeed:
        """The held-out batches, the same on every rank."""
        rows = self._held_out_rows()
        return self.held_out.batches(self.recipe.seq, rows, device, shuffle=False, labels=self._labels())

    def _labels(self) -> str:
        return self.recipe.new_objective().labels

    def _held_out_rows(self) -> int:
        return min(self.recipe.micro_batch, (self.held_out.tokens - 1) // self.recipe.seq)

    def check_rows(self) -> None:
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
                f"{where}validation: the held-out documents have {self.held_out.tokens:,} tokens, wanted at least "
                f"{recipe.seq + 1:,}, a row of {recipe.seq:,} and what follows it; give more text, a larger --validation or a "
                f"shorter --seq."
            )
        for corpus, what in ((self.training, "training"), (self.held_out, "held-out")):
            if corpus.masked and not any(mask.any() for mask in corpus.masks()):
                raise DataError(f"{where}data: the {what} documents hold no token to learn; give chats with assistants' turns.")
