"""The data of a run: texts to a corpus for each phase, the tokenizer that fits it, and what of it is held out."""

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..feed.corpus import MANIFEST, Corpus, Part
from ..feed.text import documents
from ..feed.tokenizer import Tokenizer, python_stdlib_texts, train_tokenizer
from ..trace import notice
from .recipe import MODELS, STDLIB, Recipe


def check_data(recipe: Recipe) -> None:
    for _, own in recipe.stages():
        if not own.data:
            raise ValueError("data: got nothing, wanted text files or folders, a built corpus, or 'stdlib'.")
        for name in own.data:
            if name != STDLIB and not Path(name).exists():
                raise ValueError(f"data: {name} does not exist; give text files or folders, a built corpus, or 'stdlib'.")


def open_data(recipe: Recipe, folder: Path, progress: bool) -> list[Corpus]:
    """A corpus for each phase: opened where `data` is one, else built into the run's folder (once: it is found again)."""
    stages = recipe.stages()
    tokenizer = None
    corpora = []
    for name, own in stages:
        if len(own.data) == 1 and (Path(own.data[0]) / MANIFEST).exists():
            corpora.append(Corpus.open(own.data[0]))
        else:
            tokenizer = tokenizer or _tokenizer(recipe, folder / "corpus")
            corpora.append(Corpus.build(_texts(own), tokenizer, folder / "corpus" / name, progress=progress))
    if len({corpus.fingerprint for corpus in corpora}) > 1:
        raise DataError(
            f"data: the phases' corpora were built with different tokenizers "
            f"({', '.join(corpus.fingerprint for corpus in corpora)}); build them with one."
        )
    return corpora


def _tokenizer(recipe: Recipe, built: Path) -> Tokenizer:
    """The one that was named, or the model's own, or the one of an earlier start of this run, or a new one."""
    if recipe.tokenizer:
        return Tokenizer.load(recipe.tokenizer)
    if recipe.model not in MODELS and (Path(recipe.model) / "tokenizer.json").exists():
        return Tokenizer.load(recipe.model)
    for name, _ in recipe.stages():
        if (built / name / "tokenizer.json").exists():
            notice(f"tokenizer: {built / name} holds the one that this run began with; it is used again.")
            return Tokenizer.load(built / name)
    every = (document for _, own in recipe.stages() for document in documents(_texts(own)))
    return train_tokenizer(every, recipe.vocabulary)


def _texts(recipe: Recipe) -> list[Any]:
    texts: list[Any] = []
    for name in recipe.data:
        texts += list(python_stdlib_texts(recipe.data_bytes)) if name == STDLIB else [Path(name)]
    return texts


def hold_out(corpus: Corpus, validation: float) -> tuple[Corpus, Corpus]:
    """(training, held out): the last documents, or where those are too few, the last tokens of the last one."""
    if round(corpus.documents * validation) >= 1:
        return corpus.split(validation)
    *whole, last = corpus.parts
    at = max(len(last.tokens) - int(corpus.tokens * validation), 1)
    before, behind = last.documents[last.documents < at], last.documents[last.documents > at]
    masks = (None, None) if last.mask is None else (last.mask[:at], last.mask[at:])
    training = Part(last.tokens[:at], np.append(before, at), masks[0])
    rest = Part(last.tokens[at:], np.insert(behind - at, 0, 0), masks[1])
    return tuple(Corpus(p, corpus.vocab_size, corpus.fingerprint, corpus.path) for p in ([*whole, training], [rest]))  # type: ignore[return-value]
