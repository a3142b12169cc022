"""Text to tokens and back, by any tokenizer, and the text of a sequence while its tokens arrive."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

UNFINISHED = "\ufffd"  # a decoder's text for bytes that do not end a character yet
WINDOW = 16  # tokens decoded again before a new piece, so that spaces between words are those of the complete text
END_OF_TEXT = "<|endoftext|>"  # a tokenizer of the tokenizers package has no names for its special tokens


class TextCodec:
    """Adapt a tokenizer of gpubound, tokenizers or transformers, or any object with `encode` and `decode`.

    skip_special  True or False: whether `decode` omits special tokens. None: the tokenizer's default
    """

    def __init__(self, tokenizer: Any, who: str = "decoder", skip_special: bool | None = None) -> None:
        if not all(callable(getattr(tokenizer, method, None)) for method in ("encode", "decode")):
            raise ValueError(
                f"{who}: tokenizer: got a {type(tokenizer).__name__}, wanted one that encodes and decodes, of gpubound, "
                f"tokenizers or transformers."
            )
        self.tokenizer = tokenizer
        self.inner = getattr(tokenizer, "inner", tokenizer)  # gpubound's Tokenizer holds one of the tokenizers package
        self.is_transformers = hasattr(tokenizer, "convert_tokens_to_ids")
        self.has_special = self.is_transformers or hasattr(self.inner, "token_to_id")
        key = "skip_special_tokens" if self.has_special else "skip_special"
        self._decode_options = {} if skip_special is None else {key: skip_special}

    @staticmethod
    def of(tokenizer: Any, who: str = "decoder") -> "TextCodec | None":
        """Return a codec over `tokenizer`; None where that is None."""
        return tokenizer if tokenizer is None or isinstance(tokenizer, TextCodec) else TextCodec(tokenizer, who)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`.

        A chat template writes the special tokens itself. A text that begins with the token that the tokenizer would prepend
        is therefore encoded without adding special tokens; otherwise that token would appear twice.
        """
        if self._prepended:
            plain = self._ids(text, add_special_tokens=False)
            if plain[: len(self._prepended)] == self._prepended:
                return plain
        return self._ids(text)

    def encode_rest(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on from another one: no special token is added."""
        return self._ids(text, add_special_tokens=False) if self.has_special else self._ids(text)

    def decode(self, tokens: Sequence[int]) -> str:
        decoder = self.inner if self._decode_options and not self.is_transformers else self.tokenizer
        return decoder.decode(tokens, **self._decode_options)

    def _ids(self, text: str, **options: Any) -> list[int]:
        encoded = (self.inner if options else self.tokenizer).encode(text, **options)
        return list(getattr(encoded, "ids", encoded))  # the tokenizers package returns an Encoding

    @cached_property
    def _prepended(self) -> list[int]:
        """The first of the special tokens that `encode` adds to a text, if it adds any."""
        return self._ids("")[:1] if self.has_special else []

    @property
    def eos(self) -> int | None:
        """The id of the end-of-text token."""
        return self._special("eos_token_id", "eos", END_OF_TEXT)

    @property
    def mask(self) -> int | None:
        """The id of the mask token."""
        return self._special("mask_token_id", "mask", "<|mask|>")

    @property
    def pad(self) -> int | None:
        """The id of the padding token."""
        return getattr(self.tokenizer, "pad_token_id", None)

    def _special(self, theirs: str, ours: str, text: str) -> int | None:
        if self.is_transformers:
            return getattr(self.tokenizer, theirs, None)
        if hasattr(self.tokenizer, "token_to_id"):
            return self.tokenizer.token_to_id(text)
        return getattr(self.tokenizer, ours, None)

    def size(self, default: int) -> int:
        """Return one more than the largest id, added tokens included; `default` where the tokenizer does not have it."""
        if self.has_special:
            return max(self.inner.get_vocab().values(), default=-1) + 1
        return getattr(self.tokenizer, "vocab_size", default)


class TextStream:
    """The text of a sequence while its tokens arrive. A piece is returned once no later token can change it.

    The stop string or token that ended the sequence is not part of the text: `stops` are strings, `ends` tokens. Without a
    tokenizer there is no text.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), ends: Sequence[int] = ()) -> None:
        self.tokenizer, self.stops, self.ends = tokenizer, stops, frozenset(ends)
        self._tokens: list[int] = []
        self._returned = ""
        self._end: int | None = None  # the index in the text where a stop string begins
        self._final = 0, ""  # a number of tokens, and their text, which later tokens do not change

    def add(self, tokens: list[int]) -> str | None:
        """Return the text that these tokens complete."""
        if self.tokenizer is None:
            return None
        self._tokens += [token for token in tokens if token not in self.ends]
        return self._new_piece(self._text().rstrip(UNFINISHED))

    @property
    def stopped(self) -> bool:
        """True once a stop string was found."""
        return self._end is not None

    def rest(self) -> str:
        """Return the text that was withheld, once the sequence has ended."""
        return self._new_piece(self._text(), withhold=False) if self.tokenizer is not None else ""

    def complete(self) -> str | None:
        """Return all of the text, up to the stop string."""
        return self._text()[: self._end] if self.tokenizer is not None else None

    def tokens_before_stop(self) -> int:
        """Return the number of tokens that the text before the stop string takes."""

        def written(count: int) -> int:
            return len(self._decode(0, count).rstrip(UNFINISHED))

        return bisect_left(range(len(self._tokens)), self._end or 0, key=written)

    def _new_piece(self, text: str, withhold: bool = True) -> str:
        starts = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if starts:
            self._end = min(starts)
            text = text[: self._end]
        elif withhold:  # text that may be the beginning of a stop string
            text = text[: len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)]
        new = text[len(self._returned) :]
        self._returned += new
        return new

    def _text(self) -> str:
        """Return all of the text. Decoded window by window: a complete decode for every token would take quadratic time."""
        (count, text), every = self._final, len(self._tokens)
        begin = max(0, count - WINDOW)
        before, after = self._decode(begin, count), self._decode(begin, every)
        complete = text + after[len(before) :] if after.startswith(before) else self._decode(0, every)
        if every - count >= 4 * WINDOW and not complete.endswith(UNFINISHED):
            self._final = every, complete
        return complete

    def _decode(self, begin: int, end: int) -> str:
        return self.tokenizer.decode(self._tokens[begin:end])


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
