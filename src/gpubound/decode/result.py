"""What a generation gives back: sequences, figures, and texts while their tokens arrive."""

from dataclasses import dataclass, field
from typing import Any


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
