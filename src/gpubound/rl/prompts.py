"""Prompts of a run: read, tokenised, and drawn in another order each epoch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from ..files import reading
from ..formatting import counted, shown
from ..trace import notice

if TYPE_CHECKING:
    from ..data import Tokenizer  # with torch, which a process that computes rewards does not import

WANTED = "a text, messages such as [{'role': 'user', 'content': ...}], token ids, or a dict with one of these as 'prompt'"


@dataclass(frozen=True)
class RLPrompt:
    """A prompt, and what its row holds besides, which goes to the rewards."""

    text: Any  # a text, or messages; None for token ids
    ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)


def read_prompts(source: Any, tokenizer: "Tokenizer | None") -> list[RLPrompt]:
    """Return the prompts of a .jsonl file, or of an iterable."""
    where = "prompts"
    if isinstance(source, str | Path):
        source, where = _rows(Path(source)), str(source)
    if not isinstance(source, Iterable):
        raise ValueError(f"prompts: got a {type(source).__name__}, wanted a .jsonl file or a list of prompts.")
    prompts = [_prompt(row, tokenizer, f"{where}[{number}]") for number, row in enumerate(source)]
    if not prompts:
        raise ValueError(f"{where}: holds no prompt; give at least one.")
    return prompts


def _rows(path: Path) -> list[Any]:
    if not path.is_file():
        raise ValueError(f"prompts: {path} {'is a folder' if path.is_dir() else 'does not exist'}; give a .jsonl file.")
    rows = []
    with reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: is not JSON ({error}); every line must be one JSON object.") from error
    return rows


def _prompt(row: Any, tokenizer: "Tokenizer | None", where: str) -> RLPrompt:
    columns = {key: value for key, value in row.items() if key != "prompt"} if isinstance(row, Mapping) else {}
    text = row.get("prompt") if isinstance(row, Mapping) else row
    if isinstance(text, Sequence) and text and not isinstance(text, str) and all(type(token) is int for token in text):
        return RLPrompt(None, list(text), columns)
    messages = isinstance(text, Sequence) and text and all(isinstance(turn, Mapping) for turn in text)
    if not text or not (isinstance(text, str) or messages):
        raise ValueError(f"{where}: got {shown(row)}, wanted {WANTED}.")
    if tokenizer is None:
        raise ValueError(f"{where}: got a text, and there is no tokenizer; pass tokenizer=, or prompts of token ids.")
    if isinstance(text, str):
        return RLPrompt(text, tokenizer.encode(text), columns)
    ids = tokenizer.inner.encode(tokenizer.render(list(text), prompt=True), add_special_tokens=False).ids
    return RLPrompt(text, ids, columns)


def fitting(prompts: list[RLPrompt], seq: int, new: int, what: str) -> list[RLPrompt]:
    """Return the prompts that leave room for `new` tokens in `seq`; report how many do not."""
    fit = [prompt for prompt in prompts if len(prompt.ids) + new <= seq]
    longest = max(len(prompt.ids) for prompt in prompts)
    if not fit:
        raise ValueError(
            f"rl: {what}: the shortest has {min(len(prompt.ids) for prompt in prompts):,} tokens, and {new:,} new ones must "
            f"follow in seq, {seq:,}; give a larger seq, smaller max_new_tokens, or shorter prompts."
        )
    if len(fit) < len(prompts):
        left_out = counted(len(prompts) - len(fit), "prompt")
        notice(
            f"rl: {what}: {left_out} of {len(prompts):,} left out: up to {longest:,} tokens, with {new:,} new ones beyond seq."
        )
    return fit


@dataclass
class PromptOrder:
    """The order in which prompts are drawn: all of them in each epoch. `position` is all that a resumed run needs."""

    count: int
    seed: int
    position: int = 0

    def take(self, number: int) -> list[int]:
        """Return the next indices."""
        numbers = [self._at(self.position + i) for i in range(number)]
        self.position += number
        return numbers

    def _at(self, position: int) -> int:
        epoch, nth = divmod(position, self.count)
        if getattr(self, "_epoch", None) != epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return int(self._order[nth])
