"""Corpus: tokens on the disk, mapped into memory, with where each document begins and which tokens may be learnt."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .batches import CorpusFeed, batches
from .build import build
from .contents import contents
from .shards import CURE, DocumentRun, Shard, listed_shards, read_shard, saved_files_are_intact
from .source import mix, order
from .tokenizer import Tokenizer

RUNS = 256  # a large corpus gives up runs of neighbouring documents, so that it falls into a few hundred pieces, not millions


class Corpus:
    """A token corpus on disk. `Corpus.build(texts, tokenizer, path)` writes it once, `Corpus.open(path)` opens it, and
    `corpus.batches(seq, micro_batch)` gives batches for training."""

    def __init__(
        self, parts: Sequence[DocumentRun], vocab_size: int, tokenizer: str, path: Path | None, contents: int | None = None
    ):
        self.parts, self.vocab_size, self.fingerprint, self.path = list(parts), vocab_size, tokenizer, path
        self.contents = contents  # of the whole corpus that these are parts of; None: not known
        self.starts = np.concatenate([[0], np.cumsum([len(part.tokens) for part in self.parts])]).astype(np.int64)
        self.masked = any(part.mask is not None for part in self.parts)

    @staticmethod
    def open(path: str | Path | Sequence[str | Path], verify: bool = True) -> "Corpus":
        """Open the corpus in the folder `path`, or one made of the listed shards. `verify` reads every byte and compares
        checksums (about 2 GB/s per core). Without it only headers and sizes are checked."""
        folder = Path(path) if isinstance(path, str | Path) and Path(path).is_dir() else None
        names = listed_shards(folder) if folder else [Path(name) for name in ([path] if isinstance(path, str | Path) else path)]
        if not names:
            raise ValueError("Corpus.open: got no shards, wanted the folder of a corpus or a list of its shards.")
        with ThreadPoolExecutor() as pool:
            shards = list(pool.map(lambda name: read_shard(name, verify), names))
        _check_alike(shards)
        header = shards[0].header
        return Corpus(shards, header.vocab_size, header.tokenizer, folder, contents(shards))

    @staticmethod
    def build(texts: Any, tokenizer: Any, path: str | Path, **options: Any) -> "Corpus":
        """Tokenise `texts` into shards in the folder `path`; see `gpubound.data.build.build` for the options. A corpus that
        is there already is verified as by `open`."""
        built = build(texts, tokenizer, Path(path), **options)
        return Corpus.open(path, verify=not built)

    def batches(self, seq: int, micro_batch: int, device: Any = None, **options: Any) -> CorpusFeed:
        """A CorpusFeed of `micro_batch` rows of `seq` tokens; see `gpubound.data.batches.batches` for the options."""
        return batches(self, seq, micro_batch, device, **options)

    def make_feed(
        self, device: Any, *, seq: int | None, batch_size: int | None, seed: int | None, mode: str, **options: Any
    ) -> CorpusFeed:
        """What `gpubound.feed` calls."""
        if seq is None or batch_size is None:
            raise ValueError(
                "feed: a Corpus must be cut into rows, wanted seq= and batch_size=, or call corpus.batches(seq, micro_batch)."
            )
        if any(options.pop(name) for name in ("drop_last", "collate", "pad", "bucket", "rows")) or mode == "direct":
            raise ValueError(
                "feed: drop_last, collate, pad, bucket, rows and mode='direct' have no effect on a Corpus; leave them out."
            )
        return self.batches(seq, batch_size, device, seed=seed or 0, mode=mode, **options)

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].tokens.dtype

    def offsets(self) -> np.ndarray:
        """Where each document begins in the whole corpus, and at last where the corpus ends."""
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

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that was saved with the corpus. DataError if its files have been replaced since."""
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
        """(training, validation): two corpora. The fraction `validation` of the documents, from all over, goes to the second.

        The same corpus and seed give the same documents on every machine. In a corpus of more than 256 / `validation`
        documents, runs of neighbours are taken instead of single documents. Both corpora keep the order.
        """
        if not 0 < validation < 1:
            raise ValueError(f"Corpus.split: validation: got {validation!r}, wanted a fraction between 0 and 1.")
        count = round(self.documents * validation)
        if not 0 < count < self.documents:
            raise ValueError(
                f"Corpus.split: {validation} of {self.documents} documents is {count}, wanted at least one on either side."
            )
        held_out = choose(self.documents, count, seed)
        return self._only(~held_out), self._only(held_out)

    def _only(self, chosen: np.ndarray) -> "Corpus":
        parts, seen = [], 0
        for part in self.parts:
            count = len(part.documents) - 1
            edges = np.flatnonzero(np.diff(chosen[seen : seen + count], prepend=False, append=False))
            parts += [part.slice(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
            seen += count
        return self.of(parts)

    def of(self, parts: Sequence[DocumentRun]) -> "Corpus":
        """A corpus of these parts of this one."""
        return Corpus(parts, self.vocab_size, self.fingerprint, self.path, self.contents)

    def read(self, index: np.ndarray) -> np.ndarray:
        """The tokens at `index`, read from the disk."""
        return self._gather(index, [part.tokens for part in self.parts])

    def read_mask(self, index: np.ndarray) -> np.ndarray:
        return self._gather(index, self.masks())

    def masks(self) -> list[np.ndarray]:
        """The loss mask of each part. Where none was stored, the loss counts every token."""
        every = np.ones(1, np.uint8)
        return [part.mask if part.mask is not None else np.broadcast_to(every, len(part.tokens)) for part in self.parts]

    def _gather(self, index: np.ndarray, runs: list[np.ndarray]) -> np.ndarray:
        if len(runs) == 1:
            return runs[0][index]
        flat = index.reshape(-1)
        owner = np.searchsorted(self.starts, flat, side="right") - 1
        grouped = np.argsort(owner, kind="stable")  # so that each part is read once, however many there are
        owners, first = np.unique(owner[grouped], return_index=True)
        found = np.empty(flat.shape, runs[0].dtype)
        for number, here in zip(owners, np.split(grouped, first[1:])):
            found[here] = runs[number][flat[here] - self.starts[number]]
        return found.reshape(index.shape)

    def identity(self) -> int:
        """A number that changes with the corpus's size and documents. With `contents`, a saved position belongs to it alone."""
        return mix(self.tokens, self.documents, *(int(n) for n in self.offsets()[:: max(1, self.documents // 64)]))

    def __repr__(self) -> str:
        return f"Corpus({self.tokens:,} tokens, {self.documents:,} documents, {self.dtype}, vocabulary {self.vocab_size:,})"


def _check_alike(shards: Sequence[Shard]) -> None:
    first = shards[0]
    for shard in shards[1:]:
        for what in ("dtype", "vocab_size", "tokenizer"):
            value, wanted = getattr(shard.header, what), getattr(first.header, what)
            if value != wanted:
                raise DataError(
                    f"{shard.path}: foreign: its {what} is {value!r}, that of {first.path.name} is {wanted!r}; open only "
                    f"shards of one corpus together."
                )


def choose(documents: int, count: int, seed: int) -> np.ndarray:
    """Which `count` of the documents are held out: a mask. A document's place in the draw hangs on its number and `seed`."""
    length = -(-count // RUNS)
    chosen, left = np.zeros(documents, bool), count
    for run in order(-(-documents // length), seed, 0).tolist():
        end = min(run * length + min(length, left), documents)
        chosen[run * length : end] = True
        left -= end - run * length
        if left == 0:
            break
    return chosen


def split_tail(corpus: Corpus, validation: float) -> tuple[Corpus, Corpus]:
    """(training, held out) of a corpus with too few documents to hold one out: its last tokens are held out."""
    *whole, last = corpus.parts
    at = max(len(last.tokens) - int(corpus.tokens * validation), 1)
    before, behind = last.cut(at)
    return corpus.of([*whole, before]), corpus.of([behind])
