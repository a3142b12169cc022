"""Documents into ids, in order: in this process, where the tokenizers library uses every core by itself, or in several."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import DataError
from .documents import Document
from .tokenizer import END_OF_TEXT, Tokenizer

Encoded = tuple[np.ndarray, np.ndarray | None]


@runtime_checkable
class Encoder(Protocol):
    """What `Corpus.build` needs of a tokenizer. `eos` is put after each document; None puts nothing."""

    vocab_size: int
    eos: int | None
    fingerprint: str

    def encode_batch(self, texts: list[str]) -> Sequence[Sequence[int]]: ...


def adapt(tokenizer: Any) -> Encoder:
    """`tokenizer` as an Encoder: ours, a `tokenizers.Tokenizer`, a fast one of transformers, a path to one, or anything that
    is one already."""
    if isinstance(tokenizer, str | Path):
        return Tokenizer.load(tokenizer)
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None:
        chat = getattr(tokenizer, "chat_template", None)
        return Tokenizer(inner, tokenizer.eos_token, chat if isinstance(chat, str) else None, tokenizer.bos_token)
    if hasattr(tokenizer, "encode_batch_fast"):
        return Tokenizer(tokenizer, END_OF_TEXT if tokenizer.token_to_id(END_OF_TEXT) is not None else None)
    if isinstance(tokenizer, Encoder):
        return tokenizer
    raise ValueError(
        f"tokenizer: got a {type(tokenizer).__name__}, wanted a gpubound, tokenizers or fast transformers tokenizer, the "
        f"path of one, or an object with encode_batch(texts), vocab_size, eos and fingerprint."
    )


def encode_all(batches: Iterator[list[tuple[Document, Any]]], encoder: Encoder, workers: int) -> Iterator[tuple[Encoded, Any]]:
    """Each document encoded, with what came along with it, in order; here or by `workers` processes."""
    if workers == 0:
        for batch in batches:
            yield from zip(encode(encoder, [text for text, _ in batch]), [note for _, note in batch])
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _become_worker, (encoder,))
    under_way: deque[tuple[Future, list[Any]]] = deque()
    try:
        while True:
            for batch in islice(batches, 2 * workers - len(under_way)):
                under_way.append((pool.submit(_work, [text for text, _ in batch]), [note for _, note in batch]))
            if not under_way:
                return
            future, notes = under_way.popleft()
            yield from zip(future.result(), notes)
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


def _ended(ids: Any, mask: np.ndarray | None, encoder: Encoder) -> Encoded:
    found = np.asarray(ids, dtype=np.int64)
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < encoder.vocab_size:
        raise DataError(f"tokenizer: gave ids from {found.min()} to {found.max()}, wanted 0 to {encoder.vocab_size - 1}.")
    if encoder.eos is not None and (not found.size or found[-1] != encoder.eos):
        found = np.append(found, encoder.eos)
        mask = None if mask is None else np.append(mask, np.uint8(0))
    return found.astype(np.uint32), mask
