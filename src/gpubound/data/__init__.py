"""Data on the device: token corpora, and feeds of batches from any iterable.

Texts        documents from files, folders, datasets or the program            texts.py
source_code  the source of Python's library and of torch, as texts             texts.py
RowParser    a row of any format to a text, a chat, a completion or a pair     formats.py
Tokenizer    trained here or loaded; writes chats, and knows what is learnt    tokenizer.py, chat.py, chat_process.py
build        texts to a folder of shards; resumes after an interruption        build.py, shards.py
Corpus       the shards, mapped into memory; its training and held-out parts   corpus.py
Packing      which tokens are in which row, decided on the host                packing.py
CorpusFeed   batches of rows, gathered on the device                           batches.py, packing.py
feed, Feed   batches of any source on the device, with a position to save      feeds.py
Source       a list, single items, a DataLoader, any iterable                  source.py
Store        batches that pass, stay on the device, or are copied ahead        stores.py
Tree         a batch's leaves, padded and packed into one buffer               leaves.py
"""

from .batches import CorpusFeed as CorpusFeed
from .corpus import Corpus as Corpus
from .feeds import Feed as Feed, Stats as Stats, feed as feed
from .texts import python_stdlib_texts as python_stdlib_texts, torch_source_texts as torch_source_texts
from .tokenizer import Tokenizer as Tokenizer, train_tokenizer as train_tokenizer
