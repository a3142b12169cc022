"""Token corpora: texts made into shards of tokens once, and cut into batches by the device ever after.

Texts       one document after another from whatever the user has                 texts.py, documents.py
Tokenizer   trained here or loaded; writes chats with their template               tokenizer.py
build       texts to a folder of shards; goes on where it was interrupted          build.py, shards.py
Corpus      the shards, mapped into memory; what is held out of them               corpus.py, contents.py
CorpusFeed  rows planned on the host, batches cut on the device                    rows.py, batches.py
"""

from .batches import CorpusFeed
from .corpus import Corpus
from .texts import python_stdlib_texts, torch_source_texts
from .tokenizer import Tokenizer, train_tokenizer

__all__ = ["Corpus", "CorpusFeed", "Tokenizer", "python_stdlib_texts", "torch_source_texts", "train_tokenizer"]
