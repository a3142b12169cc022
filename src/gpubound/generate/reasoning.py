"""A reply's reasoning, apart from its answer, while the reply arrives.

    gpt-oss   <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    Gemma 4   <|channel>thought, a line's end, ...<channel|>...
    others    <think>...</think>...

A decoder that drops special tokens would leave the channels' names, joined with their texts.
"""

import re
from collections.abc import Iterator

from ..data import Tokenizer

MARKS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|channel>", "<channel|>",
    "<think>", "</think>",
)  # fmt: skip
OPENING = ("<|channel|>", "<|channel>", "<think>", "</think>")
REASONING = ("analysis", "commentary")  # channels of gpt-oss


def opening(tokenizer: Tokenizer) -> list[str]:
    """Return the marks with which replies in the tokenizer's chat template begin their reasoning, or end it."""
    return [mark for mark in OPENING if mark in (tokenizer.chat_template or "")]


def keeps_special(tokenizer: Tokenizer) -> bool:
    """Return whether a decoder must keep special tokens, because one of them begins the reasoning."""
    return any(tokenizer.inner.token_to_id(mark) in tokenizer.specials for mark in opening(tokenizer))


class Parts:
    """Splits the text of a reply to `prompt`, and drops special tokens. Without a tokenizer all of the text is the answer."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: str):
        self.marks = set[str]()
        if tokenizer is not None and opening(tokenizer):
            special = tokenizer.specials if keeps_special(tokenizer) else ()
            self.marks = {*MARKS, *map(tokenizer.inner.id_to_token, special)}
        longest = sorted(map(re.escape, self.marks), key=len, reverse=True)
        self.mark = re.compile(f"({'|'.join(longest)})" if longest else "($.)")  # which matches nothing
        self.reasoning = bool(self.marks) and prompt.rstrip().endswith("<think>")
        self.name: str | None = None  # of a channel, while it arrives
        self.partial, self.begins, self.gemma = "", False, False

    def add(self, piece: str, last: bool = False) -> Iterator[tuple[bool, str]]:
        """Yield (whether it is reasoning, text) of what the piece completes."""
        *parts, rest = self.mark.split(self.partial + piece)
        at = rest.rfind("<")  # a mark that has arrived in part
        self.partial = rest[at:] if not last and at >= 0 and any(mark.startswith(rest[at:]) for mark in self.marks) else ""
        for part in [*parts, rest.removesuffix(self.partial)]:
            if part in self.marks:
                self._meet(part)
                continue
            if self.name is not None:
                self.name += part
                if not self.gemma or "\n" not in self.name:
                    continue
                part, self.name = self.name.partition("\n")[2], None
            text = part.lstrip("\n") if self.begins else part
            if text:
                self.begins = False
                yield self.reasoning, text

    def _meet(self, mark: str) -> None:
        if mark in ("<|start|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|channel>"):
            self.name, self.gemma = "", mark == "<|channel>"
            self.reasoning, self.begins = self.reasoning or self.gemma, True
        elif mark == "<|message|>":
            self.reasoning, self.name, self.begins = (self.name or "").strip().startswith(REASONING), None, True
        elif mark in ("<think>", "</think>", "<channel|>"):
            self.reasoning, self.name, self.begins = mark == "<think>", None, True
