"""Data on the device: resident when it fits, through a pinned ring when it does not, and token corpora cut into batches by
the GPU."""

from .choose import feed
from .core import Feed, Stats
from .corpus import Corpus
from .serve import CorpusFeed
from .tokenizer import Tokenizer, python_stdlib_texts, torch_source_texts, train_tokenizer

__all__ = [
    "Corpus",
    "CorpusFeed",
    "Feed",
    "Stats",
    "Tokenizer",
    "feed",
    "python_stdlib_texts",
    "torch_source_texts",
    "train_tokenizer",
]
