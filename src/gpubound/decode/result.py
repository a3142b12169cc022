"""What a generation gives back: sequences, figures, and texts while their tokens arrive."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that do not end a character yet
WINDOW = 16  # tokens decoded again behind the last piece, so that spaces between words come out as in the whole


@dataclass
class Generated:
    """One generated sequence; the prompt is not part of it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # empty unless asked for
    finish: str = ""  # 'stop token', 'stop string' or 'length'
    text: str | None = None  # None without a tokenizer


@dataclass
class Generation:
    """What `generate` returns: the sequences, in the order of the prompts, and how fast they came."""

    sequences: list[Generated]
    seconds: float = 0.0  # from the call to the last token on the host
    first_token_s: float = 0.0  # to the first
    launches: int = 0
    steps: int = 0  # as launched
    row_steps: int = 0  # of them, those that brought a row something, over all rows
    bytes_read: int = 0  # that the wanted steps cannot do without: the roofline's numerator
    wanted: int | None = None  # of the steps, those that a row might need when they were launched; None: all
    at_once: int = 1  # devices that read at the same time, each a part of these bytes

    @property
    def tokens(self) -> list[list[int]]:
        return [sequence.tokens for sequence in self.sequences]

    @property
    def texts(self) -> list[str]:
        return [sequence.text or "" for sequence in self.sequences]

    @property
    def count(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def tokens_a_step(self) -> float:
        """Tokens per step of a row that was alive: 1, or with speculation 1 + the drafted tokens that proved right."""
        return self.count / self.row_steps if self.row_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all rows together. The time includes the prompt and the first token."""
        return self.count / self.seconds if self.seconds else 0.0

    def roofline(self, read_bytes_per_s: float) -> float:
        """The fraction of the time that this machine needs just to read the weights and the live cache once per step.

        The rate is that of one device. Where several share the model, those that read at once are counted.
        """
        return self.bytes_read / (self.at_once * read_bytes_per_s) / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        figures = "seconds", "first_token_s", "tokens_per_s", "launches", "steps", "tokens_a_step", "bytes_read"
        sequences = [vars(sequence) for sequence in self.sequences]
        return {"sequences": sequences, "tokens": self.count} | {name: getattr(self, name) for name in figures}


class RowText:
    """The text of a row while its tokens arrive: a piece is shown once no later token can change it.

    What stopped the row is not part of its text: `stops` are strings, `ends` tokens. No tokenizer, no text.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), ends: Sequence[int] = ()) -> None:
        self.tokenizer, self.stops, self.ends = tokenizer, stops, frozenset(ends)
        self._tokens: list[int] = []
        self._shown = ""  # given out already
        self._end: int | None = None  # where a stop string begins
        self._done = 0, ""  # tokens, and their text, that nothing changes any more

    def add(self, tokens: list[int]) -> str | None:
        """The text that these tokens complete."""
        if self.tokenizer is None:
            return None
        self._tokens += [token for token in tokens if token not in self.ends]
        return self._show(self._text().rstrip(UNFINISHED))

    @property
    def stopped(self) -> bool:
        return self._end is not None

    def rest(self) -> str:
        """What was held back, at the end of the row."""
        return self._show(self._text(), held=False) if self.tokenizer is not None else ""

    def whole(self) -> str | None:
        return self._text()[: self._end] if self.tokenizer is not None else None

    def kept_tokens(self) -> int:
        """How many tokens it takes to write the text before the stop string."""

        def written(count: int) -> int:
            return len(self._decode(0, count).rstrip(UNFINISHED))

        return bisect_left(range(len(self._tokens)), self._end or 0, key=written)

    def _show(self, text: str, held: bool = True) -> str:
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self._end = min(found)
            text = text[: self._end]
        elif held:  # the beginning of a stop string is not shown before it is known to be none
            text = text[: len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)]
        new = text[len(self._shown) :]
        self._shown += new
        return new

    def _text(self) -> str:
        """All of the text. Decoded in stretches: a whole decode for every token would cost the square of the length."""
        (count, text), every = self._done, len(self._tokens)
        begin = max(0, count - WINDOW)
        before, after = self._decode(begin, count), self._decode(begin, every)
        whole = text + after[len(before) :] if after.startswith(before) else self._decode(0, every)
        if every - count >= 4 * WINDOW and not whole.endswith(UNFINISHED):
            self._done = every, whole
        return whole

    def _decode(self, begin: int, end: int) -> str:
        return self.tokenizer.decode(self._tokens[begin:end])


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
