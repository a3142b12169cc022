"""What runs a model for the decoder: `prefill` fills the cache, `step` gives the logits after one more token of every row."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Body(ABC):
    """A step may not wait for the device, may not allocate what outlives it, and uses the same addresses each time."""

    vocab: int
    max_batch: int
    max_length: int
    device: torch.device
    embed: Tensor | None = None  # a weight whose rows the sampler writes into x, so that the next step finds its input there
    x: Tensor | None = None
    best: Tensor | None = None  # partial maxima of the logits, and where they lie: see `finds_best`
    arg: Tensor | None = None
    captures_prefill = False  # whether `prefill` may lie in a graph

    @abstractmethod
    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        """Fill the cache with ids (B, T), right-padded. What lies behind a row's length may be anything afterwards."""

    @abstractmethod
    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """The logits (B, V), fp32, after `token` (B,) at `position` (B,), both int32.

        A body that takes several tokens of a row at once takes them as (B, T), and gives (B T, V).
        """

    @abstractmethod
    def report(self) -> list[tuple[str, str, str]]:
        """(part, what computes it, why) for the decoder's table."""

    @abstractmethod
    def moved(self) -> str | None:
        """The name of a weight that is no longer what or where it was."""

    @abstractmethod
    def rebind(self) -> None:
        """Take the weights as they are now."""

    @abstractmethod
    def bytes_a_step(self, live: list[int]) -> int:
        """What a step cannot do without reading: the weights once, and the keys and values of rows with these lengths."""

    @abstractmethod
    def locate(self, ids: Tensor) -> str:
        """The part that first computes a NaN or infinity for the sequence ids (T,)."""

    @abstractmethod
    def score(self, ids: Tensor) -> Tensor:
        """Log-probabilities (T - 1,) of ids[1:], each after what stands before it."""

    def reserve(self, limits: Tensor) -> None:  # noqa: B027 (most bodies have nothing to do)
        """Called before a request's prefill: how many tokens each of its rows may grow to, (B,) int32 on the device."""

    def begin(self, token: Tensor) -> None:  # noqa: B027 (most bodies have nothing to do)
        """Called once before the first step of a batch."""

    def chained(self, rows: int) -> bool:
        """Whether the step's last kernel lets its successor start early, so that the sampler may."""
        return False

    def same_kernels(self, rows: int) -> bool:
        """Whether so many rows are computed as one row is: then each gets the same logits beside any others."""
        return False

    def finds_best(self, rows: int) -> bool:
        """Whether a step leaves partial maxima in `best` and `arg`."""
        return False
