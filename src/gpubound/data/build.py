"""Building a corpus: texts are tokenised once, in parallel, into shards that are each written whole.

A build that was interrupted goes on after its last whole shard: every shard says how many texts had been read when it was
closed, and their checksum, so that other texts are noticed. Only a corpus of the same settings is ever written over.
"""

import fcntl
import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..files import flock, make_folder, read_json, write_whole
from ..trace import notice
from .documents import Document, weight
from .shards import CLAIM, CURE, DTYPES, MANIFEST, Encoded, Position, Shards, tokenizer_checksums
from .texts import Progress, Texts
from .tokenizer import Encoder, Tokenizer, adapt

BATCH_TEXTS = 1024
BATCH_LETTERS = 4_000_000  # a batch of long texts closes here, so that memory stays bounded


class OtherCorpus(DataError):
    """The folder holds, whole or begun, the corpus of other texts or settings."""

    def __init__(self, path: Path, what: str):
        super().__init__(f"{path}: {what}; build to another path, or delete that one.")
        self.what = what


def build(
    texts: Any,
    tokenizer: Any,
    path: Path,
    *,
    dtype: str = "auto",
    shard_tokens: int = 100_000_000,
    workers: int = 0,
    progress: bool = True,
    separator: str | None = None,
    text_key: str | None = None,
) -> bool:
    """Write the corpus of `texts` to the folder `path`, or finish the build that was interrupted there. Return False if the
    folder holds this corpus already.

    texts         see gpubound.data.texts.Texts, as for separator and text_key
    tokenizer     see gpubound.data.tokenizer.adapt; it is saved with the corpus
    dtype         "uint16" or "uint32"; "auto" is the smaller that holds the vocabulary
    shard_tokens  a shard closes at the end of the document that reaches this
    workers       0 tokenises in this process, where the tokenizers library uses every core by itself; n starts n processes,
                  which helps a tokenizer written in Python
    progress      show how far it is on stderr: a live bar on a terminal, else a line every ten seconds
    """
    if shard_tokens < 1 or workers < 0:
        raise ValueError(f"Corpus.build: got shard_tokens={shard_tokens}, workers={workers}, wanted 1 or more and 0 or more.")
    encoder, source = adapt(tokenizer), Texts(texts, separator, text_key)
    settings = {
        "dtype": _dtype(dtype, encoder.vocab_size),
        "vocab_size": encoder.vocab_size,
        "tokenizer": encoder.fingerprint,
        "shard_tokens": shard_tokens,
        "separator": separator,
        "text_key": text_key,
    }
    with building_alone(path):
        return _build(path, source, encoder, settings, workers, progress)


def _build(path: Path, source: Texts, encoder: Encoder, settings: dict[str, Any], workers: int, progress: bool) -> bool:
    # Before they are read: what changes later must not look the same. The same files need not be read again to be known.
    sources: Any = source.files and [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in source.files]
    if _finished(path, settings, source, sources, progress):
        return False
    state, texts = _resume(path, settings, encoder), iter(source)
    if not _begin_with(texts, state.at, source, progress):
        raise OtherCorpus(path, "the texts have changed since the interrupted build")
    before = state.tokens
    with Progress(f"tokenising into {path}", progress, source.size) as report:
        for text, encoded in encode_all(_batches(texts), encoder, workers):
            state.add(text, encoded)
            speed = f"{(state.tokens - before) / report.seconds / 1e6:.2f} M a second"
            report.show(source.read, f"{state.at.texts:,} texts", f"{state.tokens / 1e6:,.2f} M tokens", speed)
        state.close()
    manifest = {
        "settings": settings,
        "sources": sources,
        "texts": [state.at.texts, state.at.crc],
        "shards": state.names,
        "tokens": state.tokens,
        "tokenizer_files": tokenizer_checksums(path),
    }
    write_whole(path / MANIFEST, json.dumps(manifest))
    (path / CLAIM).unlink()
    return True


@contextmanager
def building_alone(path: Path) -> Iterator[None]:
    """One process builds in `path`; another one that wants the same waits for it, and then finds it there.

    The lock is flock's, on the folder itself: nothing is left behind, and it ends with its process, also after kill -9.
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


def _dtype(wanted: str, vocab_size: int) -> str:
    if wanted not in ("auto", *DTYPES):
        raise ValueError(f"Corpus.build: dtype: got {wanted!r}, wanted 'auto', 'uint16' or 'uint32'.")
    if vocab_size > 1 << 31:
        raise ValueError(f"Corpus.build: a vocabulary of {vocab_size} is beyond 2³¹ ids.")
    if wanted == "uint16" and vocab_size > 1 << 16:
        raise ValueError(f"Corpus.build: dtype: uint16 holds 65536 ids, the vocabulary has {vocab_size}; pass dtype='uint32'.")
    return ("uint16" if vocab_size <= 1 << 16 else "uint32") if wanted == "auto" else wanted


def _finished(path: Path, settings: dict[str, Any], source: Texts, sources: Any, progress: bool) -> bool:
    """True when `path` holds this very corpus already. DataError when it holds another."""
    manifest = path / MANIFEST
    if not manifest.exists():
        return False
    there = read_json(manifest, CURE)
    _check_settings(path, there.get("settings"), settings)
    if sources is None or there.get("sources") != sources:
        texts, done = iter(source), _position(manifest, there.get("texts"))
        if not _begin_with(texts, done, source, progress) or next(texts, None) is not None:
            raise OtherCorpus(path, "holds a corpus of other texts; nothing was overwritten")
    notice(f"Corpus.build: {path} holds this corpus already; nothing was tokenised.")
    return True


def _position(manifest: Path, texts: Any) -> Position:
    if not isinstance(texts, list) or len(texts) != 2 or not all(type(n) is int and 0 <= n < 1 << 62 for n in texts):
        raise DataError(f"{manifest}: texts: got {texts!r}, wanted how many were read and their checksum; {CURE}.")
    return Position(*texts)


def _check_settings(path: Path, there: Any, settings: dict[str, Any]) -> None:
    if not isinstance(there, dict):
        raise DataError(f"{path / MANIFEST}: settings: got {there!r}, wanted those of the build; {CURE}.")
    for key, wanted in settings.items():
        if there.get(key) != wanted:
            raise OtherCorpus(path, f"holds a corpus with {key} {there.get(key)!r}, wanted {wanted!r}")


def _resume(path: Path, settings: dict[str, Any], encoder: Encoder) -> Shards:
    """Claim an empty folder, or go on in one that this build had claimed."""
    for rest in path.glob(f"{CLAIM}.*.partial"):  # of a process that was killed while it claimed the folder
        rest.unlink()
    claim = path / CLAIM
    if not claim.exists():
        if any(path.iterdir()):
            raise DataError(
                f"{path}: is not empty and not a corpus of gpubound; nothing was overwritten; build to another path."
            )
        write_whole(claim, json.dumps(settings))
    _check_settings(path, read_json(claim, CURE), settings)
    for rest in path.glob("*.partial"):
        rest.unlink()
    if isinstance(encoder, Tokenizer):
        encoder.save(path, overwrite=True)
    state = Shards.found(path, settings)
    if state.names:
        notice(f"Corpus.build: going on in {path} after {len(state.names)} whole shards and {state.at.texts} texts.")
    return state


def _begin_with(texts: Iterator[Document], done: Position, source: Texts, progress: bool) -> bool:
    """Read up to `done`; False when the texts up to there are other ones."""
    at = Position()
    if done.texts:
        with Progress("reading again what was tokenised before", progress, source.size) as report:
            for text in islice(texts, done.texts):
                at = at.after(text)
                report.show(source.read, f"{at.texts:,} of {done.texts:,} texts")
    return at == done


def _batches(texts: Iterator[Document]) -> Iterator[list[Document]]:
    batch, letters = [], 0
    for text in texts:
        batch.append(text)
        letters += weight(text)
        if len(batch) >= BATCH_TEXTS or letters >= BATCH_LETTERS:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


def encode_all(batches: Iterator[list[Document]], encoder: Encoder, workers: int) -> Iterator[tuple[Document, Encoded]]:
    """Each document and its tokens, in order; encoded here or by `workers` processes."""
    if workers == 0:
        for batch in batches:
            yield from zip(batch, encode(encoder, batch))
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _become_worker, (encoder,))
    under_way: deque[tuple[list[Document], Future]] = deque()
    try:
        while True:
            under_way += [(batch, pool.submit(_work, batch)) for batch in islice(batches, 2 * workers - len(under_way))]
            if not under_way:
                return
            batch, future = under_way.popleft()
            yield from zip(batch, future.result())
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"Corpus.build: a worker of {workers} ended before it had tokenised its texts; whole shards stay. A worker imports "
            f"your script, so call build under `if __name__ == '__main__':`; if its memory was too little, pass fewer workers."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_workers_encoder: Encoder


def _become_worker(encoder: Encoder) -> None:
    global _workers_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _workers_encoder = encoder


def _work(texts: list[Document]) -> list[Encoded]:
    return encode(_workers_encoder, texts)


def encode(encoder: Encoder, texts: list[Document]) -> list[Encoded]:
    """(ids, loss mask) of each document, with the end-of-text token after it; no mask where everything may be learnt."""
    plain = iter(encoder.encode_batch([text for text in texts if isinstance(text, str)]))
    chats = [text for text in texts if not isinstance(text, str)]
    if chats and not isinstance(encoder, Tokenizer):
        raise ValueError("Corpus.build: chats need a tokenizer with a chat template, got one that only encodes texts.")
    masked = iter(encoder.encode_chats(chats) if isinstance(encoder, Tokenizer) and chats else ())
    return [_ended(next(plain), None, encoder) if isinstance(text, str) else _ended(*next(masked), encoder) for text in texts]


def _has_end(ids: np.ndarray, encoder: Encoder) -> bool:
    """Return whether a document ends with the end of a text. A chat template may write a line break after it."""
    ends = np.flatnonzero(ids == encoder.eos)
    if not ends.size:
        return False
    after = ids[ends[-1] + 1 :]
    return not after.size or (isinstance(encoder, Tokenizer) and not encoder.decode(after).strip())


def _ended(ids: Any, mask: np.ndarray | None, encoder: Encoder) -> Encoded:
    found = np.asarray(ids, dtype=np.int64)
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < encoder.vocab_size:
        raise DataError(f"tokenizer: gave ids from {found.min()} to {found.max()}, wanted 0 to {encoder.vocab_size - 1}.")
    if encoder.eos is not None and not _has_end(found, encoder):
        found = np.append(found, encoder.eos)
        mask = None if mask is None else np.append(mask, np.uint8(0))
    return found.astype(np.uint32), mask
