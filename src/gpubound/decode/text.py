"""From tokens to text while they arrive: a piece is shown once no later token can change it."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that do not end a character yet
WINDOW = 16  # tokens decoded again behind the last piece, so that spaces between words come out as in the whole


class Texts:
    """The texts of several rows, without what stopped them: `stops` are strings, `ends` tokens. No tokenizer, no texts."""

    def __init__(self, tokenizer: Any, rows: int, stops: Sequence[str] = (), ends: Sequence[int] = ()) -> None:
        self.tokenizer, self.stops, self.ends = tokenizer, stops, frozenset(ends)
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._shown = [""] * rows  # given out already
        self._end: list[int | None] = [None] * rows  # where a stop string begins
        self._done: list[tuple[int, str]] = [(0, "")] * rows  # (tokens, their text) that nothing changes any more

    def add(self, row: int, tokens: list[int]) -> str | None:
        """The text that these tokens complete."""
        if self.tokenizer is None:
            return None
        self._tokens[row] += [token for token in tokens if token not in self.ends]
        return self._show(row, self._text(row).rstrip(UNFINISHED))

    def stopped(self, row: int) -> bool:
        return self._end[row] is not None

    def rest(self, row: int) -> str:
        """What was held back, at the end of a row."""
        return self._show(row, self._text(row), held=False) if self.tokenizer is not None else ""

    def whole(self, row: int) -> str | None:
        if self.tokenizer is None:
            return None
        return self._text(row)[: self._end[row]]

    def kept_tokens(self, row: int) -> int:
        """How many tokens it takes to write the text before the stop string."""
        tokens = self._tokens[row]

        def written(count: int) -> int:
            return len(self._decode(tokens[:count]).rstrip(UNFINISHED))

        return bisect_left(range(len(tokens)), self._end[row] or 0, key=written)

    def _show(self, row: int, text: str, held: bool = True) -> str:
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self._end[row] = min(found)
            text = text[: min(found)]
        elif held:  # the beginning of a stop string is not shown before it is known to be none
            text = text[: len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)]
        new = text[len(self._shown[row]) :]
        self._shown[row] += new
        return new

    def _text(self, row: int) -> str:
        """All of a row's text. Decoded in stretches: a whole decode for every token would cost the square of the length."""
        tokens = self._tokens[row]
        count, text = self._done[row]
        begin = max(0, count - WINDOW)
        before, after = self._decode(tokens[begin:count]), self._decode(tokens[begin:])
        whole = text + after[len(before) :] if after.startswith(before) else self._decode(tokens)
        if len(tokens) - count >= 4 * WINDOW and not whole.endswith(UNFINISHED):
            self._done[row] = len(tokens), whole
        return whole

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
