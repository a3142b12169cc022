"""Tokenizers: train a byte-level BPE, load a Hugging Face one, turn texts and chats into ids and the mask of what to learn."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import DataError
from ..files import check_replaceable, make_folder, read_json, read_text, regular, write_whole
from .chat import render_spans, write_chat
from .texts import Progress, Texts, in_parts

END_OF_TEXT = "<|endoftext|>"
SPECIALS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
MASK = "<|mask|>"
LARGEST = 1 << 31  # ids fit an int32
CURE = "copy the tokenizer again"
REPLACED = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")  # would be read beside the files of `save`
SPECIAL_NAMES = ("eos_token", "bos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@runtime_checkable
class Encoder(Protocol):
    """What `Corpus.build` needs of a tokenizer. `eos` is put after each document; None puts nothing."""

    vocab_size: int
    eos: int | None
    fingerprint: str

    def encode_batch(self, texts: list[str]) -> Sequence[Sequence[int]]: ...


class Tokenizer:
    """A tokenizer of the `tokenizers` library, and what its tokenizer.json lacks: end of text, chat template, and other special
    tokens by their names (bos_token, pad_token, unk_token and the like)."""

    def __init__(self, inner: Any, eos_token: str | None, chat_template: Any = None, **special: str | None):
        if inner.truncation or inner.padding:  # set for a model's inputs; here it would cut documents short in silence
            inner = type(inner).from_str(inner.to_str())
            inner.no_truncation()
            inner.no_padding()
        self.inner, self.eos_token = inner, eos_token
        self.chat_template = chat_template if isinstance(chat_template, str) else None  # elsewhere it may be several
        self.special = {name: token for name, token in special.items() if token is not None}
        self.eos = inner.token_to_id(eos_token) if eos_token is not None else None
        if eos_token is not None and self.eos is None:
            raise ValueError(f"tokenizer: the end-of-text token {eos_token!r} is not in its vocabulary; name one that is.")
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size <= LARGEST:
            raise ValueError(f"tokenizer: its ids end at {self.vocab_size - 1:,}, wanted 1 to {LARGEST:,} tokens; use another.")
        said = json.dumps([inner.to_str(), eos_token, self.chat_template])
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()[:16]

    @property
    def mask(self) -> int | None:
        """The id of the token that hides another; None where there is none."""
        return None if "mask_token" not in self.special else self.inner.token_to_id(self.special["mask_token"])

    def with_mask(self, token: int | None = None) -> "Tokenizer":
        """This one where it has a mask token, else a copy in which `token` is it. None: a new one behind the vocabulary, so
        that every other id stays."""
        if self.mask is not None and token in (None, self.mask):
            return self
        inner, text = type(self.inner).from_str(self.inner.to_str()), MASK if token is None else self.inner.id_to_token(token)
        if token is None:
            inner.add_special_tokens([MASK])
        if text is None or inner.token_to_id(text) != (self.vocab_size if token is None else token):
            raise ValueError(
                f"tokenizer: mask_token: {'no token has' if text is None else f'{text!r} is not behind the vocabulary at'} "
                f"the id {self.vocab_size if token is None else token}; name one that has."
            )
        return Tokenizer(inner, self.eos_token, self.chat_template, **self.special | {"mask_token": text})

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text. The library's own threads use all cores."""
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts)]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def difference(self, other: "Tokenizer") -> tuple[int, str, str] | None:
        """(id, our token, their token) for the first id that stands for different tokens; None if there is none."""
        mine, theirs = (
            {number: token for token, number in t.inner.get_vocab(with_added_tokens=True).items()} for t in (self, other)
        )
        return next(((i, mine[i], theirs[i]) for i in sorted(mine.keys() & theirs.keys()) if mine[i] != theirs[i]), None)

    def encode_chats(self, chats: list[list[dict[str, Any]]]) -> list[tuple[list[int], np.ndarray]]:
        """(ids, mask) of each chat. The mask is 1 on the assistant's tokens, which the model learns, and 0 on the prompts."""
        written = [write_chat(self.render_spans, chat) for chat in chats]
        encodings = self.inner.encode_batch([text for text, _ in written], add_special_tokens=False)
        return [(encoding.ids, _mask(encoding.offsets, spans)) for encoding, (_, spans) in zip(encodings, written)]

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """Return the chat as text. With `prompt` it ends where the assistant's answer begins."""
        return self.render_spans(messages, prompt)[0]

    def render_spans(self, messages: list[dict[str, Any]], prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Return the chat as text, and the spans of the template's {% generation %} blocks."""
        if self.chat_template is None:
            raise ValueError(
                "tokenizer: has no chat template, wanted one to write chats with; put a chat_template.jinja into its folder, "
                "or set tokenizer.chat_template."
            )
        names = {"eos_token": self.eos_token or "", "bos_token": ""} | self.special
        return render_spans(self.chat_template, messages, prompt, **names)

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write a folder that `Tokenizer.load` and `transformers.AutoTokenizer.from_pretrained` both read. A tokenizer that
        is there is replaced only with `overwrite`."""
        folder = Path(folder)
        check_replaceable(folder, "tokenizer.save", ("tokenizer.json", "tokenizer_config.json", *REPLACED), overwrite=overwrite)
        make_folder(folder)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos_token}
        config |= {"chat_template": self.chat_template} | self.special
        for name in REPLACED:
            (folder / name).unlink(missing_ok=True)
        write_whole(folder / "tokenizer_config.json", json.dumps(config))
        write_whole(folder / "tokenizer.json", self.inner.to_str())  # last: where it is, the other is, too

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """From a tokenizer.json, or a folder that holds one (as every Hugging Face model with a fast tokenizer does)."""
        import tokenizers

        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        file = folder / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.exists():
            raise ValueError(f"tokenizer: {file} does not exist, wanted a tokenizer.json or a folder with one.")
        regular(file)
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise DataError(f"{file}: is not a tokenizer that the tokenizers library reads: {error}") from error
        config: dict[str, Any] = {}
        for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
            config |= read_json(file, CURE) if file.exists() else {}
        special = {name: _content(name, config.get(name), file) for name in SPECIAL_NAMES}
        template = folder / "chat_template.jinja"
        chat = read_text(template, CURE) if template.exists() else config.get("chat_template")
        if isinstance(chat, list):  # several by their names
            chat = next((t.get("template") for t in chat if isinstance(t, dict) and t.get("name") == "default"), None)
        return Tokenizer(inner, special.pop("eos_token"), chat, **special)


def _content(name: str, token: Any, file: Path) -> str | None:
    """A special token as configurations write it: plain, or {"content": ..., "lstrip": ...}."""
    found = token.get("content") if isinstance(token, dict) else token
    if found is not None and not isinstance(found, str):
        raise DataError(f"{file}: {name}: got {token!r}, wanted a token's text or null.")
    return found


def _mask(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> np.ndarray:
    """1 for each token that begins inside one of `spans`, which are in order."""
    begins = np.array([begin for begin, _ in offsets], dtype=np.int64)
    edges = np.array(spans, dtype=np.int64).reshape(-1)
    return (np.searchsorted(edges, begins, side="right") % 2).astype(np.uint8)


def adapt(tokenizer: Any) -> Encoder:
    """An Encoder: from ours, a `tokenizers.Tokenizer`, a fast one of transformers, a path to one, or what is one already."""
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
    """Train a byte-level BPE of `vocab_size` tokens on `texts` (see gpubound.data.texts.Texts). It has 256 bytes, a few
    special tokens, and the merges that save most. `progress` prints its progress on stderr.

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
        show_progress=False,  # its bars and ours would write over each other
    )
    source = texts if isinstance(texts, Texts) else Texts(texts)
    with Progress("training a tokenizer", progress, source.size) as report:
        inner.train_from_iterator(_plain(source, report, vocab_size), trainer)
        report.say(f"{inner.get_vocab_size():,} tokens, after {report.seconds:.1f} s")
    return Tokenizer(inner, END_OF_TEXT, CHAT)


def _plain(source: Texts, report: Progress, vocab_size: int) -> Iterator[str]:
    """Every text as the tokenizer is to learn it, and then the word that it is learning."""
    number = 0
    for number, text in enumerate(source, 1):
        report.show(source.read, f"{number:,} texts")
        for plain in [text] if isinstance(text, str) else [message["content"] for message in text]:
            yield from in_parts(plain)
    report.say(f"{number:,} texts read, learning up to {vocab_size:,} tokens")


def ends_of_turn(tokenizer: Tokenizer) -> list[int]:
    """The special token that the chat template writes behind an answer: often another one than the end of a text."""
    if tokenizer.chat_template is None:
        return []
    asked = [{"role": "user", "content": "a"}]
    try:
        prompt = tokenizer.render(asked, prompt=True)
        whole = tokenizer.render([*asked, {"role": "assistant", "content": "b"}])
    except DataError as error:
        raise DataError(f"the chat template cannot write a question and its answer: {error}") from error
    tail = whole[len(prompt) :].partition("b")[2] if whole.startswith(prompt) else whole.rpartition("b")[2]
    special = {i for i, token in tokenizer.inner.get_added_tokens_decoder().items() if token.special}
    return [i for i in tokenizer.inner.encode(tail, add_special_tokens=False).ids if i in special][:1]
