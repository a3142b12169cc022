"""A tokenizer of bytes, a corpus in a folder, numbered batches, and a count of what the library does."""

from collections import Counter

import pytest
import torch

from gpubound.data import Corpus


class Bytes:
    """A token is a byte; 256 ends a text."""

    vocab_size, eos, fingerprint = 257, 256, "bytes"

    def encode_batch(self, texts):
        return [list(text.encode()) for text in texts]


TEXTS = [chr(97 + i % 26) * (1 + i * 7 % 40) for i in range(60)]  # 1 to 40 letters each


@pytest.fixture
def corpus(tmp_path):
    """1,226 tokens in 60 documents and several shards."""
    return Corpus.build(TEXTS, Bytes(), tmp_path / "corpus", shard_tokens=300, progress=False)


def batches(count=7, rows=2):
    return [{"x": torch.full((rows, 3), float(i)), "y": (torch.tensor([i]), f"name {i}")} for i in range(count)]


def seen(served):
    return [int(batch["x"][0, 0]) for batch in served]


class Counts(Counter):
    def __call__(self, name, amount):
        self[name] += amount
