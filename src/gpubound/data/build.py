"""Build a corpus: tokenise texts once, on all cores, into shards.

An interrupted build continues after its last complete shard. Every shard records how many texts had been read when it was
closed, and their checksum, so that changed texts are detected. A build writes only to an empty folder, or to that of an
interrupted build with the same settings.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError
from ..files import flock, make_folder, read_json, write_atomic
from ..trace import notice
from .chat import TRAIN_ON
from .formats import (
    MATCHES,
    Completion,
    Conversation,
    Document,
    Pooled,
    PreferencePair,
    kind_of,
    parts,
    serialized,
    strings,
)
from .shards import CLAIM, CURE, DTYPES, MANIFEST, SUFFIX, read_shard, tokenizer_checksums, write_shard
from .texts import Progress, Texts
from .tokenizer import Encoder, Tokenizer, adapt

BATCH_TEXTS = 1024
BATCH_CHARACTERS = 4_000_000  # limits the memory of a batch of long texts
Encoded = tuple[np.ndarray, np.ndarray | None]  # ids, and their loss mask unless all of them are learnt


class OtherCorpus(DataError):
    """The folder holds a corpus, complete or not, of other texts or settings."""

    def __init__(self, path: Path, what: str):
        super().__init__(f"{path}: {what}; build to another path, or delete that one.")
        self.what = what


class Position(NamedTuple):
    """Number of texts read, and the CRC-32 of all of them."""

    texts: int = 0
    crc: int = 0

    def after(self, text: Document) -> "Position":
        return Position(self.texts + 1, zlib.crc32(serialized(text).encode("utf-8", "surrogatepass"), self.crc))


def build(
    texts: Any,
    tokenizer: Any,
    path: Path,
    *,
    shard_tokens: int = 100_000_000,
    progress: bool = True,
    separator: str | None = None,
    text_key: str | None = None,
    hub_bytes: int | None = None,
    format: str | None = None,
    chat_template: str | Path | None = None,
    train_on: str = "assistant",
    classes: Sequence[str] | None = None,
) -> bool:
    """Write the corpus of `texts` to the folder `path`, or finish the build that was interrupted there. Return False if the
    folder holds this corpus already.

    texts         see gpubound.data.texts.Texts, as for separator, text_key, hub_bytes and format
    tokenizer     see gpubound.data.tokenizer.adapt; it is saved with the corpus
    shard_tokens  a shard closes at the end of the document that reaches this
    progress      show the progress on stderr: a live bar on a terminal, else a line every ten seconds
    chat_template a file, a template's text, or a name of gpubound.data.chat.NAMED, instead of the tokenizer's template
    train_on      what of a chat is learnt: what the "assistant" wrote and the ends of its turns, its "last" answer, or "all";
                  of prompts with completions, the completions or "all"; of texts and preferences always the same
    classes       the names that labels of the format classification may have, in the order of their numbers
    """
    if train_on not in TRAIN_ON:
        raise ValueError(f"Corpus.build: train_on: got {train_on!r}, wanted one of {', '.join(map(repr, TRAIN_ON))}.")
    if shard_tokens < 1:
        raise ValueError(f"Corpus.build: got shard_tokens={shard_tokens}, wanted 1 or more.")
    encoder, source = adapt(tokenizer), Texts(texts, separator, text_key, format, hub_bytes)
    if chat_template is not None:
        if not isinstance(encoder, Tokenizer):
            raise ValueError(
                f"Corpus.build: chat_template: has no effect on a {type(encoder).__name__}, which writes no chats."
            )
        encoder = encoder.with_template(chat_template)
    settings = {
        "dtype": _dtype(encoder.vocab_size),
        "vocab_size": encoder.vocab_size,
        "tokenizer": encoder.fingerprint,
        "shard_tokens": shard_tokens,
        "separator": separator,
        "text_key": text_key,
        "format": format,
        "train_on": train_on,
        "classes": list(classes) if classes else None,
        # By name: a path may be written otherwise, and texts of others have another checksum.
        "sources": None if source.weights is None else [Path(name).name for name in source.weights],
    }
    with building_alone(path):
        # Before they are read, so that later changes are detected. Files with equal states need not be read again.
        files: Any = source.files and [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in source.files]
        if _is_built(path, settings, source, files, progress):
            return False
        kinds = set[str]()
        writer, remaining = _resume(path, settings, encoder), _checked(source, kinds, encoder, classes or ())
        if not _skip(remaining, writer.position, source, progress):
            raise OtherCorpus(path, "the texts have changed since the interrupted build")
        before = writer.tokens
        with Progress(f"tokenising into {path}", progress, source.size) as report:
            for number, documents in groupby(remaining, lambda _: source.source):
                writer.source = number
                for batch in _batches(documents):
                    for text, encoded in zip(batch, encode(encoder, batch, train_on, classes)):
                        writer.add(text, encoded)
                        speed = f"{(writer.tokens - before) / report.seconds / 1e6:.2f} M a second"
                        counts = f"{writer.position.texts:,} texts", f"{writer.tokens / 1e6:,.2f} M tokens"
                        report.show(source.read, *counts, speed)
                writer.close_shard()  # a shard holds documents of one source
            if not writer.names:
                names = ", ".join(dict.fromkeys(str(file) for file in (source.files or ())[:3])) or "the texts"
                raise ValueError(f"Corpus.build: {path}: no tokens in {names}, wanted at least one document; give others.")
        manifest = {
            "settings": settings,
            "sources": files,
            "texts": list(writer.position),
            "shards": writer.names,
            "tokens": writer.tokens,
            "kind": min(kinds, default="texts"),
            "weights": source.weights,
            "tokenizer_files": tokenizer_checksums(path),
        }
        write_atomic(path / MANIFEST, json.dumps(manifest))
        (path / CLAIM).unlink()
        return True


@contextmanager
def building_alone(path: Path) -> Iterator[None]:
    """Lock the folder `path` for one building process; wait for another one that holds the lock.

    The lock is flock's, on the folder itself: it leaves no file, and ends with its process, also after kill -9.
    """
    make_folder(path)
    handle = os.open(path, os.O_RDONLY)
    try:
        if not flock(handle, f"Corpus.build: {path}", "let one process build there"):
            notice(f"Corpus.build: another process is building {path}; waiting until it has ended.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _dtype(vocab_size: int) -> str:
    if vocab_size > 1 << 31:
        raise ValueError(f"Corpus.build: a vocabulary of {vocab_size} is beyond 2³¹ ids.")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _is_built(path: Path, settings: dict[str, Any], source: Texts, files: Any, progress: bool) -> bool:
    """Return True if `path` holds this corpus, False if none. Raise OtherCorpus if it holds another."""
    listing = path / MANIFEST
    if not listing.exists():
        return False
    manifest = read_json(listing, CURE)
    _check_settings(path, manifest.get("settings"), settings)
    if files is None or manifest.get("sources") != files:
        end, texts = manifest.get("texts"), iter(source)
        if not isinstance(end, list) or len(end) != 2 or not all(type(n) is int and 0 <= n < 1 << 62 for n in end):
            raise DataError(f"{listing}: texts: got {end!r}, wanted how many were read and their checksum; {CURE}.")
        if not _skip(texts, Position(*end), source, progress) or next(texts, None) is not None:
            raise OtherCorpus(path, "holds a corpus of other texts; nothing was overwritten")
    if manifest.get("weights") != source.weights:  # they change no token
        write_atomic(listing, json.dumps(manifest | {"weights": source.weights}))
    notice(f"Corpus.build: {path} holds this corpus already; nothing was tokenised.")
    return True


def _checked(source: Texts, kinds: set[str], encoder: Encoder, classes: Sequence[str]) -> Iterator[Document]:
    """Yield the documents, and add to `kinds` what they are. DataError for one of another kind, or of an unknown class."""
    for document in source:
        kinds.add(kind := kind_of(document))
        if len(kinds) > 1:
            (before,) = kinds - {kind}
            equal = "give all rows as many negatives, or " if kind.startswith(MATCHES) and before.startswith(MATCHES) else ""
            raise DataError(
                f"{source.where}: is of the kind {kind!r}, the rows before it of {before!r}; {equal}build two corpora."
            )
        label = document.label if isinstance(document, Pooled) else None
        if isinstance(label, str) and label not in classes:
            wanted = f"one of {', '.join(classes)}" if classes else "a number, or classes with the names (objective_options)"
            raise DataError(f"{source.where}['label']: got {label!r}, wanted {wanted}.")
        if isinstance(label, int) and label >= encoder.vocab_size:
            raise DataError(
                f"{source.where}['label']: got {label:,}, wanted a number below that of the tokens, {encoder.vocab_size:,}."
            )
        yield document


def _check_settings(path: Path, recorded: Any, settings: dict[str, Any]) -> None:
    if not isinstance(recorded, dict):
        raise DataError(f"{path / MANIFEST}: settings: got {recorded!r}, wanted those of the build; {CURE}.")
    for key, wanted in settings.items():
        if recorded.get(key) != wanted:
            raise OtherCorpus(path, f"holds a corpus with {key} {recorded.get(key)!r}, wanted {wanted!r}")


def _resume(path: Path, settings: dict[str, Any], encoder: Encoder) -> "Writer":
    """Claim the folder if it is empty, and return a writer after the complete shards of an interrupted build."""
    for rest in path.glob(f"{CLAIM}.*.partial"):  # of a process that was killed while it claimed the folder
        rest.unlink()
    claim = path / CLAIM
    if not claim.exists():
        if any(path.iterdir()):
            raise DataError(
                f"{path}: is not empty and not a corpus of gpubound; nothing was overwritten; build to another path."
            )
        write_atomic(claim, json.dumps(settings))
    _check_settings(path, read_json(claim, CURE), settings)
    for rest in path.glob("*.partial"):
        rest.unlink()
    if isinstance(encoder, Tokenizer):
        encoder.save(path, overwrite=True)
    writer = Writer(path, settings)
    for file in sorted(path.glob(f"*{SUFFIX}")):
        if file.name != (wanted := writer.next_name()):
            raise DataError(f"{path}: holds {file.name}, wanted {wanted} there; delete the folder and build anew.")
        header = read_shard(file).header
        writer.names.append(file.name)
        writer.tokens += header.tokens
        writer.position = Position(header.texts_read, header.texts_crc)
    if writer.names:
        notice(f"Corpus.build: going on in {path} after {len(writer.names)} whole shards and {writer.position.texts} texts.")
    return writer


def _skip(texts: Iterator[Document], end: Position, source: Texts, progress: bool) -> bool:
    """Read `texts` up to `end`; return False if they are not the texts of `end`."""
    position = Position()
    if end.texts:
        with Progress("reading again what was tokenised before", progress, source.size) as report:
            for text in islice(texts, end.texts):
                position = position.after(text)
                report.show(source.read, f"{position.texts:,} of {end.texts:,} texts")
    return position == end


class Writer:
    """Writer of a corpus's shards, each as soon as it has shard_tokens."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.settings = path, settings
        self.names: list[str] = []
        self.tokens = 0
        self.position = Position()
        self.source = 0  # of the documents that are added
        self._buffer: list[Encoded] = []
        self._buffered = 0  # tokens

    def next_name(self) -> str:
        return f"shard-{len(self.names):05d}{SUFFIX}"

    def add(self, text: Document, encoded: list[Encoded]) -> None:
        """Add the documents that a text has become: one, or two for a preference."""
        self.position = self.position.after(text)
        if not all(len(ids) for ids, _ in encoded):
            return
        self._buffer += encoded
        for ids, _ in encoded:
            self._buffered += len(ids)
            self.tokens += len(ids)
        if self._buffered >= self.settings["shard_tokens"]:
            self.close_shard()

    def close_shard(self) -> None:
        """Write the buffered documents as a shard, if there are any."""
        if not self._buffer:
            return
        mask = None
        if any(mask is not None for _, mask in self._buffer):
            mask = np.concatenate([mask if mask is not None else np.ones(len(ids), np.uint8) for ids, mask in self._buffer])
        tokens: np.ndarray = np.concatenate([ids for ids, _ in self._buffer])
        name = self.next_name()
        write_shard(
            self.path / name,
            tokens.astype(DTYPES[str(self.settings["dtype"])]),
            np.cumsum([0, *(len(ids) for ids, _ in self._buffer)]),
            mask,
            vocab_size=self.settings["vocab_size"],
            tokenizer=self.settings["tokenizer"],
            texts_read=self.position.texts,
            texts_crc=self.position.crc,
            source=self.source,
        )
        self.names.append(name)
        self._buffer, self._buffered = [], 0


def _batches(texts: Iterator[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for text in texts:
        batch.append(text)
        characters += sum(map(len, strings(text)))
        if len(batch) >= BATCH_TEXTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode(
    encoder: Encoder, documents: list[Document], train_on: str = "assistant", classes: Sequence[str] | None = None
) -> list[list[Encoded]]:
    """Return [(ids, loss mask)] of each document, two for a pair, ended with the end-of-text token. The mask of a text is
    None."""
    if any(isinstance(document, PreferencePair) for document in documents):
        train_on = "assistant"
    every = [part for document in documents for part in parts(document)]
    chats = [part for part in every if isinstance(part, Conversation)]
    completions = [part for part in every if isinstance(part, Completion)]
    pooled = [part for part in every if isinstance(part, Pooled)]
    plain = encoder.encode_batch([part for part in every if isinstance(part, str)] + [part.text for part in pooled])
    texts = len(plain) - len(pooled)
    encoded: dict[type, Iterator[Encoded]] = {str: (_ended(encoder, ids, None) for ids in plain[:texts])}
    encoded[Pooled] = (_labelled(encoder, ids, part.label, classes) for ids, part in zip(plain[texts:], pooled))
    if chats or completions:
        if not isinstance(encoder, Tokenizer):
            raise ValueError(
                f"Corpus.build: chats, prompts and completions need a gpubound or Hugging Face tokenizer, got a "
                f"{type(encoder).__name__}, which only encodes texts."
            )
        if chats:  # which need a chat template
            encoded[Conversation] = (_ended(encoder, *each) for each in encoder.encode_chats(chats, train_on))
        encoded[Completion] = (_ended(encoder, *each) for each in encoder.encode_completions(completions, train_on))
    return [[next(encoded[type(part)]) for part in parts(document)] for document in documents]


def _labelled(encoder: Encoder, ids: Any, label: int | str | None, classes: Sequence[str] | None) -> Encoded:
    """Return the tokens of a text and the label of its last one; an embedding is that of the end-of-text token."""
    ids = np.asarray(ids, dtype=np.uint32)
    if label is None and encoder.eos is not None and not _has_end(ids, {encoder.eos}, encoder):
        ids = np.append(ids, np.uint32(encoder.eos))
    number = list(classes or ()).index(label) if isinstance(label, str) else label or 0
    mask = np.zeros(len(ids) + 1, np.uint8)
    mask[-1] = 1
    return np.append(ids, np.uint32(number)), mask


def _ended(encoder: Encoder, ids: Any, mask: np.ndarray | None) -> Encoded:
    """Return the document, with the end-of-text token if it does not end with it. The token is learnt after an answer, unless
    the template has ended the answer's turn with another special token: then it only separates documents."""
    ids = np.asarray(ids, dtype=np.int64)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < encoder.vocab_size:
        raise DataError(f"tokenizer: gave ids from {ids.min()} to {ids.max()}, wanted 0 to {encoder.vocab_size - 1}.")
    if encoder.eos is not None and not _has_end(ids, {encoder.eos}, encoder):
        ended = isinstance(encoder, Tokenizer) and _has_end(ids, encoder.specials, encoder)
        ids = np.append(ids, encoder.eos)
        mask = None if mask is None else np.append(mask, 0 * mask[-1:] if ended else mask[-1:])
    return ids.astype(np.uint32), mask


def _has_end(ids: np.ndarray, ends: Collection[int], encoder: Encoder) -> bool:
    """Return True if the document ends with one of these tokens, also if a chat template writes a line break after it."""
    at = np.flatnonzero(np.isin(ids, list(ends)))
    if not at.size:
        return False
    after = ids[at[-1] + 1 :]
    return not after.size or (isinstance(encoder, Tokenizer) and not encoder.decode(after).strip())
