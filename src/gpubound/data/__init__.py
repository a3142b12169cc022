"""Data on the device: token corpora, and feeds of batches from any iterable.

Texts       one document after another from whatever the user has                 texts.py, documents.py
Tokenizer   trained here or loaded; writes chats with their template               tokenizer.py
build       texts to a folder of shards; goes on where it was interrupted          build.py, shards.py
Corpus      the shards, mapped into memory; what is held out of them               corpus.py, contents.py
CorpusFeed  rows planned on the host, batches cut on the device                    rows.py, batches.py
feed        looks at the source, the device and the memory, and chooses             choose.py
Feed        batches, epoch after epoch, from a position that can be saved            epochs.py
Source      what is read: a list, single items, a DataLoader, any iterable           source.py
Resident    batches kept on the device, guarded against writes                       resident.py
Ring        batches read and copied ahead by a thread                                ring.py
Tree        a batch's leaves, padded and packed into one run of bytes                leaves.py
"""

from .batches import CorpusFeed
from .choose import feed
from .corpus import Corpus
from .epochs import Feed, Stats
from .texts import python_stdlib_texts, torch_source_texts
from .tokenizer import Tokenizer, train_tokenizer

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
