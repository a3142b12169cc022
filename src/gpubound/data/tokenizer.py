"""Tokenizers: train a byte-level BPE or load a Hugging Face one, and encode texts and chats into ids and loss masks.

chat.py writes chats with a template.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import DataError
from ..files import check_replaceable, make_folder, read_json, read_text, regular, write_atomic
from ..trace import notice
from .chat import NAMED, read_template, render, write_chats
from .formats import Completion, Conversation, Messages, strings
from .gguf_file import GgufFile, gguf_in, tokenizer_of
from .texts import Progress, Texts

END_OF_TEXT = "<|endoftext|>"
SPECIALS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
MASK = "<|mask|>"
LARGEST = 1 << 31  # ids fit an int32
LONGEST_WORD = 1024  # characters; training takes the square of it
_ENDLESS = re.compile(rf"\w{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}|[^\w\s]{{{LONGEST_WORD}}}")
CURE = "copy the tokenizer again"
REPLACED = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")  # `load` would read them after `save`
SPECIAL_NAMES = ("eos_token", "bos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@runtime_checkable
class Encoder(Protocol):
    """The tokenizer interface of `Corpus.build`. `eos` is appended to each document unless it is None."""

    vocab_size: int
    eos: int | None
    fingerprint: str

    def encode_batch(self, texts: list[str]) -> Sequence[Sequence[int]]: ...


class Tokenizer:
    """A tokenizer of the `tokenizers` library with its end-of-text token, chat template and other special tokens by name
    (bos_token, pad_token, unk_token and others), which tokenizer.json does not hold."""

    def __init__(self, inner: Any, eos_token: str | None, chat_template: Any = None, **special: str | None):
        if inner.truncation or inner.padding:  # set for a model's inputs; here it would truncate documents
            inner = type(inner).from_str(inner.to_str())
            inner.no_truncation()
            inner.no_padding()
        self.inner, self.eos_token = inner, eos_token
        self.chat_template = chat_template if isinstance(chat_template, str) else None  # transformers allows several
        self.special = {name: token for name, token in special.items() if token is not None}
        self.eos = inner.token_to_id(eos_token) if eos_token is not None else None
        if eos_token is not None and self.eos is None:
            raise ValueError(f"tokenizer: the end-of-text token {eos_token!r} is not in its vocabulary; name one that is.")
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size <= LARGEST:
            raise ValueError(f"tokenizer: its ids end at {self.vocab_size - 1:,}, wanted 1 to {LARGEST:,} tokens; use another.")
        content = json.dumps([inner.to_str(), eos_token, self.chat_template])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def mask(self) -> int | None:
        """The id of the mask token, or None."""
        return None if "mask_token" not in self.special else self.inner.token_to_id(self.special["mask_token"])

    def with_mask(self, token: int | None = None) -> "Tokenizer":
        """Return this tokenizer if it has a mask token, else a copy whose mask token has the id `token`; None appends a new
        token to the vocabulary, so that every other id stays."""
        if self.mask is not None and token in (None, self.mask):
            return self
        inner, text = type(self.inner).from_str(self.inner.to_str()), MASK if token is None else self.inner.id_to_token(token)
        if token is None:
            inner.add_special_tokens([MASK])
        if text is None or inner.token_to_id(text) != (self.vocab_size if token is None else token):
            raise ValueError(
                f"tokenizer: mask_token: {'no token has' if text is None else f'{text!r} is not after the vocabulary at'} "
                f"the id {self.vocab_size if token is None else token}; name one that has."
            )
        return Tokenizer(inner, self.eos_token, self.chat_template, **self.special | {"mask_token": text})

    def encode(self, text: str) -> list[int]:
        return self._begun_once(self.inner.encode(text).ids)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text. The library's threads use all cores."""
        return [self._begun_once(encoding.ids) for encoding in self.inner.encode_batch_fast(texts)]

    @cached_property
    def _prepended(self) -> list[int]:
        """The special token that the library writes before each text, if it writes any."""
        return self.inner.encode("").ids[:1]

    def _begun_once(self, ids: list[int]) -> list[int]:
        """Return ids without their first where a chat template has already written the token that the library prepends."""
        return ids[1:] if self._prepended and ids[:2] == self._prepended * 2 else ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def decode_batch(self, many: Sequence[Sequence[int]], skip_special: bool = False) -> list[str]:
        """Decode several at once, on all cores: 512 tokens take 0.7 ms of one."""
        return self.inner.decode_batch([list(map(int, ids)) for ids in many], skip_special_tokens=skip_special)

    def difference(self, other: "Tokenizer") -> tuple[int, str, str] | None:
        """Return (id, our token, their token) of the first id with different tokens, or None."""
        mine, theirs = (
            {number: token for token, number in t.inner.get_vocab(with_added_tokens=True).items()} for t in (self, other)
        )
        return next(((i, mine[i], theirs[i]) for i in sorted(mine.keys() & theirs.keys()) if mine[i] != theirs[i]), None)

    def encode_chats(
        self, chats: Sequence[Messages | Conversation], train_on: str = "assistant"
    ) -> list[tuple[list[int], np.ndarray]]:
        """Return (ids, mask) of each chat. The mask is 1 on the tokens that the model learns, else 0: the assistant's, those of
        its "last" answer, or "all"."""
        conversations = [chat if isinstance(chat, Conversation) else Conversation(chat) for chat in chats]
        rendered = write_chats(self._template(), conversations, train_on, **self._names())
        encodings = self.inner.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        result = []
        for encoding, (_, spans) in zip(encodings, rendered):
            begins = np.array([begin for begin, _ in encoding.offsets], dtype=np.int64)
            edges = np.array(spans, dtype=np.int64).reshape(-1)  # sorted: a token in a span has an odd number before it
            result.append((encoding.ids, (np.searchsorted(edges, begins, side="right") % 2).astype(np.uint8)))
        return result

    def encode_completions(
        self, documents: Sequence[Completion], train_on: str = "assistant"
    ) -> list[tuple[list[int], np.ndarray]]:
        """Return (ids, mask) of each prompt and completion, tokenised as one text. Tokens that hold a character of the
        completion are learnt; "all" learns the prompt, too."""
        encodings = self.inner.encode_batch([document.prompt + document.completion for document in documents])
        result = []
        for encoding, document in zip(encodings, documents):
            begin = 0 if train_on == "all" else len(document.prompt)
            mask = np.array([end > begin for _, end in encoding.offsets], np.uint8)
            ids = self._begun_once(encoding.ids)
            mask = mask[len(mask) - len(ids) :]
            if ids and ids[-1] == self.eos:  # added by the tokenizer
                mask[-1] = 1
            result.append((ids, mask))
        return result

    @cached_property
    def specials(self) -> frozenset[int]:
        """The ids of the special tokens."""
        return frozenset(i for i, token in self.inner.get_added_tokens_decoder().items() if token.special)

    def with_template(self, template: str | Path) -> "Tokenizer":
        """Return a copy with another chat template: a file, the text of a template, or the name of one in templates/."""
        text = read_template(template)
        if str(template) in NAMED:
            marks = [mark for mark in NAMED[str(template)] if self.inner.token_to_id(mark) is None]
            if marks:
                notice(
                    f"tokenizer: has no token {marks[0]!r}, which the chat template {template} writes, so that it becomes "
                    f"{len(self.encode(marks[0]))} tokens; the template alpaca needs none but the end of a text."
                )
        return Tokenizer(self.inner, self.eos_token, text, **self.special)

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """Return the chat as text; with `prompt` up to the beginning of the assistant's answer."""
        return render(self._template(), messages, prompt, **self._names())

    def _template(self) -> str:
        if self.chat_template is None:
            raise ValueError(
                f"tokenizer: has no chat template, wanted one to write chats with; pass chat_template= (--chat-template): a "
                f"file, or one of {', '.join(NAMED)}."
            )
        return self.chat_template

    def _names(self) -> dict[str, str]:
        """Return the variables of a template besides the chat."""
        return {"eos_token": self.eos_token or "", "bos_token": ""} | self.special

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write a folder that `Tokenizer.load` and `transformers.AutoTokenizer.from_pretrained` both read. Replace an existing
        tokenizer only with `overwrite`."""
        folder = Path(folder)
        check_replaceable(folder, "tokenizer.save", ("tokenizer.json", "tokenizer_config.json", *REPLACED), overwrite=overwrite)
        make_folder(folder)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos_token}
        config |= {"chat_template": self.chat_template} | self.special
        for name in REPLACED:
            (folder / name).unlink(missing_ok=True)
        write_atomic(folder / "tokenizer_config.json", json.dumps(config))
        write_atomic(folder / "tokenizer.json", self.inner.to_str())  # last: its presence means a complete folder

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """Load a tokenizer.json, or a folder with one, as every Hugging Face model with a fast tokenizer has, or with a GGUF
        file."""
        import tokenizers

        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        file = folder / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.exists() and (gguf := gguf_in(folder)) is not None:
            inner, eos, chat, special = tokenizer_of(GgufFile(gguf))
            return Tokenizer(inner, eos, chat, **special)
        if not file.exists():
            raise ValueError(f"tokenizer: {file} does not exist, wanted a tokenizer.json or a folder with one.")
        regular(file)
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise DataError(f"{file}: is not a tokenizer that the tokenizers library reads: {error}; {CURE}.") from error
        config: dict[str, Any] = {}
        for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
            config |= read_json(file, CURE) if file.exists() else {}
        special = {name: _content(name, config.get(name), file) for name in SPECIAL_NAMES}
        if special["mask_token"] is None and (folder / "config.json").exists():  # LLaDA: only the model's config names it
            mask = read_json(folder / "config.json", CURE).get("mask_token_id")
            special["mask_token"] = inner.id_to_token(mask) if type(mask) is int and mask >= 0 else None
        template = folder / "chat_template.jinja"
        chat = read_text(template, CURE) if template.exists() else config.get("chat_template")
        if isinstance(chat, list):  # several, by name
            chat = next((t.get("template") for t in chat if isinstance(t, dict) and t.get("name") == "default"), None)
        return Tokenizer(inner, special.pop("eos_token"), chat, **special)


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer that `Tokenizer.load` reads."""
    return (folder / "tokenizer.json").exists() or gguf_in(folder) is not None


def _content(name: str, token: Any, file: Path) -> str | None:
    """Return the text of a special token in a configuration: plain, or {"content": ..., "lstrip": ...}."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise DataError(f"{file}: {name}: got {token!r}, wanted a token's text or null.")
    return text


def adapt(tokenizer: Any) -> Encoder:
    """Return an Encoder for a Tokenizer, a `tokenizers.Tokenizer`, a fast one of transformers, a path, or an Encoder."""
    if isinstance(tokenizer, str | Path):
        return Tokenizer.load(tokenizer)
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None:
        chat = getattr(tokenizer, "chat_template", None)
        return Tokenizer(inner, tokenizer.eos_token, chat, bos_token=tokenizer.bos_token)
    if hasattr(tokenizer, "encode_batch_fast"):
        return Tokenizer(tokenizer, END_OF_TEXT if tokenizer.token_to_id(END_OF_TEXT) is not None else None)
    if isinstance(tokenizer, Encoder):
        return tokenizer
    raise ValueError(
        f"tokenizer: got a {type(tokenizer).__name__}, wanted a gpubound, tokenizers or fast transformers tokenizer, the "
        f"path of one, or an object with encode_batch(texts), vocab_size, eos and fingerprint."
    )


def train_tokenizer(texts: Any, vocab_size: int, progress: bool = False) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens on `texts` (see gpubound.data.texts.Texts): 256 bytes, a few
    special tokens, and the most frequent merges. `progress` shows the progress on stderr.

    >>> tokenizer = train_tokenizer(["low lower lowest"] * 10, vocab_size=270)
    >>> tokenizer.decode(tokenizer.encode("lowest low"))
    'lowest low'
    """
    smallest = 256 + len(SPECIALS)
    if vocab_size < smallest:
        raise ValueError(
            f"train_tokenizer: vocab_size: got {vocab_size}, wanted at least {smallest}: 256 bytes and {len(SPECIALS)} "
            "special tokens."
        )
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,  # its bars would overwrite those of Progress
    )
    source = texts if isinstance(texts, Texts) else Texts(texts)
    with Progress("training a tokenizer", progress, source.size) as report:
        inner.train_from_iterator(_plain(source, report, vocab_size), trainer)
        report.say(f"{inner.get_vocab_size():,} tokens, after {report.seconds:.1f} s")
    return Tokenizer(inner, END_OF_TEXT, CHAT)


def _plain(source: Texts, report: Progress, vocab_size: int) -> Iterator[str]:
    """Yield the plain texts of `source`, and report the reading and then the training."""
    number = 0
    for number, text in enumerate(source, 1):
        report.show(source.read, f"{number:,} texts")
        for plain in strings(text):
            yield from split_endless_words(plain)
    report.say(f"{number:,} texts read, learning up to {vocab_size:,} tokens")


def split_endless_words(text: str) -> Iterator[str]:
    """Split `text` inside a word without end, such as a genome or a row of blanks: training takes time in the square of a
    word's length, minutes for one of a million characters."""
    begin = 0
    for at in range(0, len(text), LONGEST_WORD):
        if _ENDLESS.fullmatch(text, at, at + LONGEST_WORD):
            yield text[begin:at]
            begin = at
    yield text[begin:]


CHANNEL, ENDS_OF_CHANNELS = "<|channel|>", ("<|return|>", "<|call|>")


def ends_of_turn(tokenizer: Tokenizer) -> list[int]:
    """Return the special token that the chat template writes after an answer, often another than the end of a text.

    A turn of gpt-oss has several messages: what a template writes after each, <|end|>, also follows its analysis.
    """
    if tokenizer.chat_template is None:
        return []
    ends = [tokenizer.inner.token_to_id(name) for name in ENDS_OF_CHANNELS if CHANNEL in tokenizer.chat_template]
    if named := [end for end in ends if end is not None and end in tokenizer.specials]:
        return named
    question = [{"role": "user", "content": "a"}]
    try:
        prompt = tokenizer.render(question, prompt=True)
        chat = tokenizer.render([*question, {"role": "assistant", "content": "b"}])
    except DataError as error:
        raise DataError(f"the chat template cannot write a question and its answer: {error}") from error
    tail = chat[len(prompt) :].partition("b")[2] if chat.startswith(prompt) else chat.rpartition("b")[2]
    return [i for i in tokenizer.inner.encode(tail, add_special_tokens=False).ids if i in tokenizer.specials][:1]
