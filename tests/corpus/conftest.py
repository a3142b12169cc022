"""A tokenizer that anyone can follow, and a corpus in a folder."""

import pytest

from gpubound.corpus import Corpus


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
