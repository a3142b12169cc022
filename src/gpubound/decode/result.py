"""What a generation gives back."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sequence:
    """One generated sequence; the prompt is not part of it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # empty unless asked for
    finish: str = ""  # 'stop token', 'stop string' or 'length'
    text: str | None = None  # None without a tokenizer


@dataclass
class Generation:
    sequences: list[Sequence]
    seconds: float  # from the call to the last token on the host
    first_token_s: float  # to the first
    launches: int
    steps: int  # as launched
    row_steps: int  # of them, those that brought a row something, over all rows
    bytes_read: int  # that the wanted steps cannot do without: the roofline's numerator
    wanted: int | None = None  # of the steps, those that a row might need when they were launched; None: all

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
        """Of a row that was alive: 1 unless steps are speculative, then 1 + the drafted tokens that turned out right."""
        return self.count / self.row_steps if self.row_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of all rows together, prompt and first token included in the time."""
        return self.count / self.seconds if self.seconds else 0.0

    def roofline(self, read_bytes_per_s: float) -> float:
        """The share of the time that reading the weights and the live cache once a step would take on this machine."""
        return self.bytes_read / read_bytes_per_s / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "sequences": [vars(sequence) for sequence in self.sequences],
            "tokens": self.count,
            "seconds": self.seconds,
            "first_token_s": self.first_token_s,
            "tokens_per_s": self.tokens_per_s,
            "launches": self.launches,
            "steps": self.steps,
            "tokens_a_step": self.tokens_a_step,
            "bytes_read": self.bytes_read,
        }
