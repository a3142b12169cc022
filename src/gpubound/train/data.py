"""Data of a run: a corpus for each phase, their tokenizer, and the corpora of eval_data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data import Corpus, Tokenizer, python_stdlib_texts, torch_source_texts, train_tokenizer
from ..data.build import OtherCorpus, building_alone
from ..data.chat import read_template
from ..data.shards import CLAIM, MANIFEST
from ..data.texts import Texts, is_hub_id
from ..data.tokenizer import has_tokenizer
from ..distributed import ALONE, Ranks
from ..errors import DataError
from ..models.registry import is_named
from ..trace import notice
from .recipe import SOURCES, STDLIB, TORCH, Recipe

WANTED = "text files or folders, a built corpus, a dataset of the hub as owner/name, 'stdlib' or 'torch-source'"


def check_data(recipe: Recipe) -> None:
    """Raise ValueError for data that does not exist or cannot be combined, without reading it."""
    for _, own in recipe.stages():
        if not own.data:
            raise ValueError(f"data: got nothing to train {own.model} on, wanted {WANTED}.")
        for name in own.data:
            if name not in SOURCES and not Path(name).exists() and not is_hub_id(name):
                raise ValueError(f"data: {name} does not exist; give {WANTED}.")
            if name in SOURCES and own.data.count(name) > 1:
                raise ValueError(f"data: {name} stands twice; give it once, so that no text is both held out and trained on.")
            if own.data_weights and (name in SOURCES or _is_corpus(name) or own.data.count(name) > 1):
                raise ValueError(
                    f"data_weights: {name} cannot have one; give files, folders and datasets of the hub, each once."
                )
            if len(own.data) > 1 and name not in SOURCES and _is_corpus(name):
                raise ValueError(f"data: {name} is a built corpus, got {len(own.data) - 1} more with it; give it alone.")
        for name in own.eval_data:
            if not Path(name).exists() and not is_hub_id(name):
                raise ValueError(f"eval_data: {name} does not exist; give text files or folders, or a built corpus.")
            if name in own.data:
                raise ValueError(f"eval_data: {name} is data, too; held-out losses are of texts that are not trained on.")
        if len({Path(name).resolve() for name in own.eval_data}) < len(own.eval_data):
            raise ValueError(f"eval_data: got {', '.join(own.eval_data)}, wanted each path once.")
        if own.chat_template is not None:
            read_template(own.chat_template)
    for key in ("text_key", "format", "chat_template"):
        value = getattr(recipe, key)
        if value is not None and all(_has_no_rows(own) for _, own in recipe.stages()):
            raise ValueError(f"{key}: {value!r} has no effect on {', '.join(recipe.data)}; leave it out.")


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


def source_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each path: its last part, or as many as make the names differ."""
    real = [Path(path).resolve() for path in paths]
    names, count = [path.stem for path in real], 1
    while len(set(names)) < len(set(real)):
        count += 1
        names = ["-".join(path.parts[1:][-count:]) for path in real]
    return names


def open_eval_data(
    recipe: Recipe, corpora: list[Corpus], folder: Path, progress: bool, ranks: Ranks = ALONE
) -> list[dict[str, Corpus]]:
    """Return the corpora of each phase's eval_data by name, of the tokenizer of `corpora`; {} where data is held out."""
    if not any(own.eval_data for _, own in recipe.stages()):
        return [{} for _ in corpora]

    def each(make: Callable[[Recipe, str, Path], Corpus]) -> list[dict[str, Corpus]]:
        return [
            {
                name: make(own, path, folder / "eval" / phase / name)
                for name, path in zip(source_names(own.eval_data), own.eval_data)
            }
            for phase, own in recipe.stages()
        ]

    def build(own: Recipe, path: str, built: Path) -> Corpus:
        if not _is_corpus(path):
            return _build(replace(own, data=(path,), data_weights=(), eval_data=()), corpora[0].tokenizer(), built, progress)
        corpus = Corpus.open(path)
        if corpus.fingerprint != corpora[0].fingerprint:
            raise DataError(f"eval_data: {path} was built with another tokenizer than the data; build it with that one.")
        return corpus

    if ranks.first:
        with building_alone(folder):
            found = each(build)
    ranks.wait()
    return found if ranks.first else each(lambda own, path, built: Corpus.open(path if _is_corpus(path) else built))


def _corpus_path(name: str, recipe: Recipe, folder: Path) -> Path:
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
        return Corpus.build(
            _texts(recipe),
            tokenizer,
            path,
            progress=progress,
            **_row_options(recipe),
            chat_template=None if _has_no_rows(recipe) else recipe.chat_template,
            train_on=recipe.train_on,
            classes=recipe.new_objective().class_names(),
        )
    except OtherCorpus as error:
        advice = "Restore the data that this run began with to go on with it, or give another --out to begin anew."
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
    if is_named(recipe.model):
        return tokenizer
    if not has_tokenizer(Path(recipe.model)):
        if tokenizer is None:
            raise DataError(
                f"model: {recipe.model} has no tokenizer.json, and its weights know the tokens of one; give a folder with "
                f"it by --tokenizer."
            )
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
    every = [Texts(_texts(own), **_row_options(own)) for _, own in recipe.stages()]
    return train_tokenizer(every, recipe.vocabulary, progress)


def _texts(recipe: Recipe) -> Any:
    if recipe.data_weights:
        return dict(zip(recipe.data, recipe.data_weights))
    texts, sources = list[Any](), {STDLIB: python_stdlib_texts, TORCH: torch_source_texts}
    for name in recipe.data:
        texts += sources[name](recipe.data_bytes) if name in sources else [Path(name)]
    return texts


def _row_options(recipe: Recipe) -> dict[str, Any]:
    """Return how rows are read. Data without rows, which a phase may have, takes no key and no format."""
    options: dict[str, Any] = {"hub_bytes": recipe.data_bytes}
    if not _has_no_rows(recipe):
        options |= {"text_key": recipe.text_key, "format": recipe.format or recipe.new_objective().format}
    return options
