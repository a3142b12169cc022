"""Corpus: tokens on disk, mapped into memory, with document offsets and loss masks."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..files import read_json
from ..formatting import suggest_keywords
from .batches import CorpusFeed, batches
from .build import build
from .formats import group_of
from .shards import CURE, MANIFEST, DocumentRun, contents, manifest_shards, read_shard, tokenizer_is_unchanged
from .source import mix, order
from .tokenizer import Tokenizer

MAX_RUNS = 256  # `split` holds out runs of consecutive documents of a large corpus, which stays in a few hundred parts


class Corpus:
    """A token corpus on disk. `Corpus.build(texts, tokenizer, path)` writes it once, `Corpus.open(path)` opens it, and
    `corpus.batches(seq, micro_batch)` gives batches for training."""

    def __init__(
        self,
        parts: Sequence[DocumentRun],
        vocab_size: int,
        tokenizer: str,
        path: Path | None,
        contents: int | None = None,
        kind: str = "texts",
        weights: Mapping[str, float] | None = None,
    ):
        self.parts, self.vocab_size, self.fingerprint, self.path = list(parts), vocab_size, tokenizer, path
        self.kind = kind  # of the documents, see formats.kind_of
        self.group = group_of(kind)  # consecutive documents that belong together: 2 for pairs
        self.weights = dict(weights or {})  # of the sources, in the order of their numbers; empty without weights
        self.contents = contents  # hash of the corpus that these are parts of; None: not known
        self.starts = np.concatenate([[0], np.cumsum([len(part.tokens) for part in self.parts])]).astype(np.int64)
        self.masked = any(part.mask is not None for part in self.parts)

    @staticmethod
    def open(path: str | Path, verify: bool = True) -> "Corpus":
        """Open the corpus in the folder `path`. `verify` reads every byte and compares checksums (about 2 GB/s per core).
        Without it only headers and sizes are checked."""
        names = manifest_shards(folder := Path(path))
        with ThreadPoolExecutor() as pool:
            shards = list(pool.map(lambda name: read_shard(name, verify), names))
        first = shards[0].header
        for shard in shards[1:]:
            for name in ("dtype", "vocab_size", "tokenizer"):
                value, wanted = getattr(shard.header, name), getattr(first, name)
                if value != wanted:
                    raise DataError(
                        f"{shard.path}: foreign: its {name} is {value!r}, that of {shards[0].path.name} is {wanted!r}; open "
                        f"only shards of one corpus together."
                    )
        about = read_json(folder / MANIFEST, CURE)
        kind, weights = about.get("kind", "texts"), about.get("weights")
        return Corpus(shards, first.vocab_size, first.tokenizer, folder, contents(shards), kind, weights)

    @staticmethod
    def build(texts: Any, tokenizer: Any, path: str | Path, **options: Any) -> "Corpus":
        """Tokenise `texts` into shards in the folder `path`; see `gpubound.data.build.build` for the options. An existing
        corpus is verified as by `open`."""
        built = suggest_keywords(build, "Corpus.build")(texts, tokenizer, Path(path), **options)
        return Corpus.open(path, verify=not built)

    @property
    def pairs(self) -> bool:
        """Return whether documents belong together, as preferences and matches do."""
        return self.group > 1

    def batches(self, seq: int, micro_batch: int, device: Any = None, **options: Any) -> CorpusFeed:
        """Return a CorpusFeed of `micro_batch` rows of `seq` tokens; see `gpubound.data.batches.batches` for the options."""
        return suggest_keywords(batches, "corpus.batches")(self, seq, micro_batch, device, **options)

    def make_feed(
        self, device: Any, *, seq: int | None, batch_size: int | None, seed: int | None, mode: str, **options: Any
    ) -> CorpusFeed:
        """Return the feed of `gpubound.feed(corpus, ...)`."""
        if seq is None or batch_size is None:
            raise ValueError(
                "feed: a Corpus needs rows, wanted seq= and batch_size=, or call corpus.batches(seq, micro_batch)."
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
        """Return the first token of each document, and the end of the corpus."""
        runs = [part.documents[:-1] + start for part, start in zip(self.parts, self.starts)]
        return np.concatenate([*runs, self.starts[-1:]])

    @property
    def documents(self) -> int:
        return sum(len(part.documents) - 1 for part in self.parts)

    def document(self, number: int) -> np.ndarray:
        """Return the ids of one document."""
        if not 0 <= number < self.documents:
            raise IndexError(f"Corpus: document: got {number}, there are {self.documents}, counted from 0.")
        for part in self.parts:
            if number < len(part.documents) - 1:
                return np.asarray(part.tokens[part.documents[number] : part.documents[number + 1]])
            number -= len(part.documents) - 1
        raise AssertionError("the parts hold fewer documents than they count")

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that was saved with the corpus. DataError if its files have been replaced since."""
        if self.path is None or not (self.path / "tokenizer.json").exists():
            raise DataError(f"{self.path or 'Corpus'}: no tokenizer was saved with it; load the one it was built with.")
        tokenizer = Tokenizer.load(self.path)
        # Another version of the tokenizers library may serialise the same tokenizer differently.
        if tokenizer.fingerprint != self.fingerprint and not tokenizer_is_unchanged(self.path):
            raise DataError(
                f"{self.path}: its tokenizer.json is not the tokenizer that its tokens were made with (fingerprints "
                f"{tokenizer.fingerprint} and {self.fingerprint}); {CURE}."
            )
        return tokenizer

    def split(self, validation: float, seed: int = 0) -> tuple["Corpus", "Corpus"]:
        """Return (training, validation), two corpora. A random fraction `validation` of the documents goes to the second.

        The same corpus and seed give the same documents on every machine. In a corpus of more than 256 / `validation`
        documents, runs of consecutive documents are drawn instead of single ones. Both corpora keep the order. Pairs of
        preferences, and matches, count as one document.
        """
        if not 0 < validation < 1:
            raise ValueError(f"Corpus.split: validation: got {validation!r}, wanted a fraction between 0 and 1.")
        units = self.documents // self.group
        count = round(units * validation)
        if not 0 < count < units:
            raise ValueError(f"Corpus.split: {validation} of {units} documents is {count}, wanted at least one on either side.")
        held_out = np.repeat(choose(units, count, seed), self.group)
        return self._select(~held_out), self._select(held_out)

    def of_source(self, number: int) -> "Corpus":
        """Return the documents of one source of {path: weight}, by its number."""
        return self.with_parts([part for part in self.parts if part.source == number])

    def weighted(self, seed: int = 0) -> "Corpus":
        """Return a corpus whose documents repeat by the weight of their source: with weight 2.25 each is there twice, and a
        quarter of them, drawn from `seed`, once more. The tokens on disk stay the same."""
        parts = list[DocumentRun]()
        for number, weight in enumerate(self.weights.values()):
            source = self.of_source(number)
            units = source.documents // self.group
            parts += source.parts * int(weight)
            if drawn := round(units * (weight % 1)):
                parts += source._select(np.repeat(choose(units, drawn, seed), self.group)).parts
        return Corpus(parts, self.vocab_size, self.fingerprint, self.path, self.contents, self.kind) if self.weights else self

    def _select(self, mask: np.ndarray) -> "Corpus":
        parts, first = [], 0
        for part in self.parts:
            count = len(part.documents) - 1
            edges = np.flatnonzero(np.diff(mask[first : first + count], prepend=False, append=False))
            parts += [part.slice(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]
            first += count
        return self.with_parts(parts)

    def with_parts(self, parts: Sequence[DocumentRun]) -> "Corpus":
        return Corpus(parts, self.vocab_size, self.fingerprint, self.path, self.contents, self.kind, self.weights)

    def read(self, index: np.ndarray) -> np.ndarray:
        """Read the tokens at `index` from the disk."""
        return self._gather(index, [part.tokens for part in self.parts])

    def read_mask(self, index: np.ndarray) -> np.ndarray:
        return self._gather(index, self.masks())

    def masks(self) -> list[np.ndarray]:
        """Return the loss mask of each part; without a stored mask every token counts."""
        one = np.ones(1, np.uint8)
        return [part.mask if part.mask is not None else np.broadcast_to(one, len(part.tokens)) for part in self.parts]

    def learnt(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return how many tokens the loss counts in each range of tokens. The ranges are in order and do not overlap."""
        if not self.masked:
            return ends - begins
        counts = np.zeros(len(begins), np.int64)
        for part, start in zip(self.parts, self.starts):
            length = len(part.tokens)
            ranges = slice(np.searchsorted(ends, start, side="right"), np.searchsorted(begins, start + length))
            edges = np.stack([begins[ranges], ends[ranges]], 1).clip(start, start + length) - start
            filled = edges[:, 0] < edges[:, 1]
            edges = edges[filled].reshape(-1)
            if part.mask is None:
                counts[ranges][filled] += np.diff(edges)[::2]
            elif len(edges):
                inside = edges[:-1] if edges[-1] == length else edges  # the last sum goes to the end
                counts[ranges][filled] += np.add.reduceat(part.mask, inside, dtype=np.int64)[::2]
        return counts

    def _gather(self, index: np.ndarray, runs: list[np.ndarray]) -> np.ndarray:
        if len(runs) == 1:
            return runs[0][index]
        flat = index.reshape(-1)
        owner = np.searchsorted(self.starts, flat, side="right") - 1
        grouped = np.argsort(owner, kind="stable")  # so that each part is read once
        owners, first = np.unique(owner[grouped], return_index=True)
        result = np.empty(flat.shape, runs[0].dtype)
        for number, positions in zip(owners, np.split(grouped, first[1:])):
            result[positions] = runs[number][flat[positions] - self.starts[number]]
        return result.reshape(index.shape)

    def identity(self) -> int:
        """Return a hash of the corpus's size and document offsets, which a saved position records together with `contents`."""
        return mix(self.tokens, self.documents, *(int(n) for n in self.offsets()[:: max(1, self.documents // 64)]))

    def __repr__(self) -> str:
        return f"Corpus({self.tokens:,} tokens, {self.documents:,} documents, {self.dtype}, vocabulary {self.vocab_size:,})"


def choose(documents: int, count: int, seed: int) -> np.ndarray:
    """Return the mask of `count` documents to hold out, drawn from `seed` and the documents' numbers."""
    length = -(-count // MAX_RUNS)
    mask, remaining = np.zeros(documents, bool), count
    for run in order(-(-documents // length), seed, 0).tolist():
        end = min(run * length + min(length, remaining), documents)
        mask[run * length : end] = True
        remaining -= end - run * length
        if remaining == 0:
            break
    return mask


def split_tail(corpus: Corpus, validation: float) -> tuple[Corpus, Corpus]:
    """Return (training, held out) of a corpus with too few documents to hold one out: its last tokens are held out."""
    *parts, last = corpus.parts
    before, after = last.split(max(len(last.tokens) - int(corpus.tokens * validation), 1))
    return corpus.with_parts([*parts, before]), corpus.with_parts([after])
