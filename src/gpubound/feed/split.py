"""What is held out of a corpus to be judged by: documents from all over it, always the same ones for the same seed.

The last documents would be of one kind: a corpus lies in the order of its files, by source, by name or by date.
"""

from typing import TYPE_CHECKING

import numpy as np

from .shuffle import order

if TYPE_CHECKING:
    from .corpus import Corpus

RUNS = 256  # a large corpus gives up runs of neighbouring documents, so that it falls into a few hundred pieces, not millions


def split(corpus: "Corpus", validation: float, seed: int) -> tuple["Corpus", "Corpus"]:
    """(training, held out): `validation` is a fraction of the documents. Both keep the corpus' order."""
    if not 0 < validation < 1:
        raise ValueError(f"Corpus.split: validation: got {validation!r}, wanted a fraction between 0 and 1.")
    count = round(corpus.documents * validation)
    if not 0 < count < corpus.documents:
        raise ValueError(
            f"Corpus.split: {validation} of {corpus.documents} documents is {count}, wanted at least one on either side."
        )
    held_out = choose(corpus.documents, count, seed)
    return _take(corpus, ~held_out), _take(corpus, held_out)


def choose(documents: int, count: int, seed: int) -> np.ndarray:
    """Which `count` of the documents are held out: a mask. A document's place in the draw hangs on its number and the seed
    alone."""
    length = -(-count // RUNS)
    chosen, left = np.zeros(documents, bool), count
    for run in order(-(-documents // length), seed, 0).tolist():
        end = min(run * length + min(length, left), documents)
        chosen[run * length : end] = True
        left -= end - run * length
        if left == 0:
            break
    return chosen


def _take(corpus: "Corpus", chosen: np.ndarray) -> "Corpus":
    parts, seen = [], 0
    for part in corpus.parts:
        count = len(part.documents) - 1
        edges = np.flatnonzero(np.diff(chosen[seen : seen + count], prepend=False, append=False))
        parts += [part.slice(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
        seen += count
    return corpus.of(parts)


def split_tail(corpus: "Corpus", validation: float) -> tuple["Corpus", "Corpus"]:
    """(training, held out) of a corpus with too few documents to hold one out: its last tokens are held out."""
    *whole, last = corpus.parts
    at = max(len(last.tokens) - int(corpus.tokens * validation), 1)
    before, behind = last.cut(at)
    return corpus.of([*whole, before]), corpus.of([behind])
