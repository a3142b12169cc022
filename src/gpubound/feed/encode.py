"""Documents into ids, in order: in this process, where the tokenizers library uses every core by itself, or in several."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import Any

import numpy as np

from ..errors import DataError
from .document import Document
from .tokenizer import Encoder, Tokenizer

Encoded = tuple[np.ndarray, np.ndarray | None]


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
