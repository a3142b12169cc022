"""Corpus: tokens on the disk, mapped into memory, with where each document begins and which tokens may be learnt."""

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..files import beside, read_json, regular
from .shards import CURE, SUFFIX, Shard, facts, read_shard
from .shuffle import mix

MANIFEST = "corpus.json"  # written when a build is complete
CLAIM = "building.json"  # written when it begins: this folder is a corpus's own


@dataclass(frozen=True)
class Part:
    """A run of whole documents of one shard."""

    tokens: np.ndarray
    documents: np.ndarray  # where each begins in `tokens`, and the end
    mask: np.ndarray | None

    def slice(self, first: int, last: int) -> "Part":
        start, end = int(self.documents[first]), int(self.documents[last])
        mask = None if self.mask is None else self.mask[start:end]
        return Part(self.tokens[start:end], self.documents[first : last + 1] - self.documents[first], mask)

    def cut(self, at: int) -> tuple["Part", "Part"]:
        """What lies before the token `at`, and the rest; the document that holds it falls into two."""
        before, behind = self.documents[self.documents < at], self.documents[self.documents > at]
        masks = (None, None) if self.mask is None else (self.mask[:at], self.mask[at:])
        return (
            Part(self.tokens[:at], np.append(before, at), masks[0]),
            Part(self.tokens[at:], np.insert(behind - at, 0, 0), masks[1]),
        )


class Corpus:
    """`Corpus.build(texts, tokenizer, path)` once, `Corpus.open(path)` ever after; `corpus.batches(seq, micro_batch)` to
    train on it."""

    def __init__(self, parts: Sequence[Part], vocab_size: int, tokenizer: str, path: Path | None):
        self.parts, self.vocab_size, self.fingerprint, self.path = list(parts), vocab_size, tokenizer, path
        self.starts = np.concatenate([[0], np.cumsum([len(part.tokens) for part in self.parts])]).astype(np.int64)
        self.masked = any(part.mask is not None for part in self.parts)

    @staticmethod
    def open(path: str | Path | Sequence[str | Path], verify: bool = True) -> "Corpus":
        """The corpus in the folder `path`, or made of the shards listed. `verify` reads every byte once and compares
        checksums (about 2 GB/s a core); without it only headers and sizes are looked at."""
        folder = None if isinstance(path, list | tuple) else Path(path)  # type: ignore[arg-type]
        if folder is not None and folder.is_dir():
            names = _listed(folder)
        else:
            names = [Path(name) for name in ([folder] if folder is not None else path)]  # type: ignore[list-item, union-attr]
        if not names:
            raise ValueError("Corpus.open: got no shards, wanted the folder of a corpus or a list of its shards.")
        with ThreadPoolExecutor() as pool:
            shards = list(pool.map(lambda name: read_shard(name, verify), names))
        _check_alike(shards)
        parts = [Part(shard.tokens, shard.documents.astype(np.int64), shard.mask) for shard in shards]
        header = shards[0].header
        return Corpus(parts, header.vocab_size, header.tokenizer, folder if folder is not None and folder.is_dir() else None)

    @staticmethod
    def build(texts: Any, tokenizer: Any, path: str | Path, **options: Any) -> "Corpus":
        """Tokenise `texts` into shards in the folder `path`; see `gpubound.feed.build.build` for the options."""
        from .build import build  # build needs Corpus

        build(texts, tokenizer, Path(path), **options)
        return Corpus.open(path, verify=False)

    def batches(self, seq: int, micro_batch: int, device: Any = None, **options: Any) -> Any:
        """A CorpusFeed of `micro_batch` rows of `seq` tokens; see `gpubound.feed.serve.batches` for the options."""
        from .serve import batches  # serve needs Corpus

        return batches(self, seq, micro_batch, device, **options)

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].tokens.dtype

    def offsets(self) -> np.ndarray:
        """Where each document begins in the whole corpus, and the end."""
        runs = [part.documents[:-1] + start for part, start in zip(self.parts, self.starts)]
        return np.concatenate([*runs, self.starts[-1:]])

    @property
    def documents(self) -> int:
        return sum(len(part.documents) - 1 for part in self.parts)

    def document(self, number: int) -> np.ndarray:
        """The ids of one document."""
        if not 0 <= number < self.documents:
            raise IndexError(f"Corpus: document: got {number}, there are {self.documents}, counted from 0.")
        for part in self.parts:
            if number < len(part.documents) - 1:
                return np.asarray(part.tokens[part.documents[number] : part.documents[number + 1]])
            number -= len(part.documents) - 1
        raise AssertionError("the parts hold fewer documents than they count")

    def tokenizer(self) -> Any:
        """The tokenizer that was saved with the corpus. DataError when the files there are another one's by now."""
        from .tokenizer import Tokenizer

        if self.path is None or not (self.path / "tokenizer.json").exists():
            raise DataError(f"{self.path or 'Corpus'}: no tokenizer was saved with it; load the one it was built with.")
        found = Tokenizer.load(self.path)
        # Another version of the tokenizers library may write the same tokenizer differently, and the fingerprint with it.
        if found.fingerprint != self.fingerprint and not saved_files_are_intact(self.path):
            raise DataError(
                f"{self.path}: its tokenizer.json is not the tokenizer that its tokens were made with (fingerprints "
                f"{found.fingerprint} and {self.fingerprint}); {CURE}."
            )
        return found

    def split(self, validation: float, seed: int = 0) -> tuple["Corpus", "Corpus"]:
        """(training, validation): the fraction `validation` of the documents, drawn from all over the corpus.

        The same corpus and seed give the same documents on every machine. A corpus of more than 256 / `validation` documents
        gives up runs of neighbours instead of single ones.
        """
        from .split import split  # split needs Corpus

        return split(self, validation, seed)

    def of(self, parts: Sequence[Part]) -> "Corpus":
        """A corpus of some of this one's parts."""
        return Corpus(parts, self.vocab_size, self.fingerprint, self.path)

    def read(self, index: np.ndarray) -> np.ndarray:
        """The tokens at `index`, from wherever they lie on the disk."""
        return self._gather(index, [part.tokens for part in self.parts], self.dtype)

    def read_mask(self, index: np.ndarray) -> np.ndarray:
        return self._gather(index, self.masks(), np.dtype(np.uint8))

    def masks(self) -> list[np.ndarray]:
        """The loss mask of each part; where none was stored, every token may be learnt."""
        every = np.ones(1, np.uint8)
        return [part.mask if part.mask is not None else np.broadcast_to(every, len(part.tokens)) for part in self.parts]

    def _gather(self, index: np.ndarray, runs: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
        if len(runs) == 1:
            return runs[0][index]
        flat = index.reshape(-1)
        owner = np.searchsorted(self.starts, flat, side="right") - 1
        grouped = np.argsort(owner, kind="stable")  # so that each part is read once, however many there are
        owners, first = np.unique(owner[grouped], return_index=True)
        found = np.empty(flat.shape, dtype)
        for number, here in zip(owners, np.split(grouped, first[1:])):
            found[here] = runs[number][flat[here] - self.starts[number]]
        return found.reshape(index.shape)

    def identity(self) -> int:
        """A number that changes with the corpus's extent and its documents: a saved position is one in this corpus alone."""
        return mix(self.tokens, self.documents, *(int(n) for n in self.offsets()[:: max(1, self.documents // 64)]))

    def __repr__(self) -> str:
        return f"Corpus({self.tokens:,} tokens, {self.documents:,} documents, {self.dtype}, vocabulary {self.vocab_size:,})"


def _listed(folder: Path) -> list[Path]:
    """The shards of the corpus in `folder`, in order, as its manifest names them."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        if (folder / CLAIM).exists():
            whole = len(list(folder.glob(f"*{SUFFIX}")))
            raise DataError(
                f"{folder}: its build was interrupted after {whole} whole shards; call Corpus.build again with the same "
                "texts to finish it."
            )
        raise DataError(f"{folder}: not a corpus of gpubound: it has no {MANIFEST}; wanted a folder that Corpus.build wrote.")
    listed = read_json(manifest, CURE).get("shards")
    if not isinstance(listed, list) or not listed:
        raise DataError(f"{manifest}: shards: got {listed!r}, wanted the names of the corpus' shards; {CURE}.")
    names = [beside(manifest, name) for name in listed]
    if len(set(names)) < len(names):
        raise DataError(f"{manifest}: shards: a file is listed twice; {CURE}.")
    for name in names:
        if not name.exists():
            raise DataError(f"{name}: is missing, though {manifest} lists it; {CURE}.")
    return names


def tokenizer_checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of each file that a tokenizer is saved in; a file that is absent has none."""
    files = [
        folder / name for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    ]
    return {file.name: zlib.crc32(regular(file).read_bytes()) for file in files if file.exists()}


def saved_files_are_intact(folder: Path) -> bool:
    """Whether the tokenizer's files are those that the build wrote. False for a corpus that does not record them."""
    recorded = read_json(folder / MANIFEST, CURE).get("tokenizer_files")
    return bool(recorded) and recorded == tokenizer_checksums(folder)


def _check_alike(shards: Sequence[Shard]) -> None:
    first = facts(shards[0].header)
    for shard in shards[1:]:
        for what, value in facts(shard.header).items():
            if value != first[what]:
                raise DataError(
                    f"{shard.path}: foreign: its {what} is {value!r}, that of {shards[0].path.name} is {first[what]!r}; open "
                    f"only shards of one corpus together."
                )
