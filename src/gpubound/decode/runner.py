"""What a decoder asks of the body that runs its model, and what every body needs: memory enough, weights that stay in place."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..device import label, usable_bytes
from ..errors import GpuboundError
from ..words import readable
from .kv_cache import PLAIN, CacheLayout
from .stages.plan import lanes
from .weights import weight_format

MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # of a container that may use less than its machine has


@dataclass(frozen=True)
class RunnerConfig:
    """What a body is built for."""

    max_batch: int  # sequences at once
    max_length: int  # the most tokens of one, prompt included
    tokens: int = 1  # of a row that a step may take
    weights: str | None = None  # their format, by name
    cache: CacheLayout = PLAIN

    def __post_init__(self) -> None:
        for what, value in (("max_batch", self.max_batch), ("max_length", self.max_length)):
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise ValueError(f"decoder: {what}: got {value!r}, wanted a whole number.")
        if self.max_batch < 1 or self.max_length < 2:
            raise ValueError(
                f"decoder: max_batch and max_length: got {self.max_batch} and {self.max_length}, wanted at least 1 and 2."
            )
        self.cache.check(self.max_batch, self.max_length)
        weight_format(self.weights)  # a wrong name is told before a model is bound


class ModelRunner(ABC):
    """`prefill` fills the cache, `step` gives the logits after one more token of every row.

    A step may not wait for the device, may not allocate what outlives it, and uses the same addresses each time.
    """

    vocab: int
    max_batch: int
    max_length: int
    device: torch.device
    embed: Tensor | None = None  # a weight whose rows the sampler writes into x, so that the next step finds its input there
    x: Tensor | None = None
    best: Tensor | None = None  # partial maxima of the logits, and where they lie: see `finds_best`
    arg: Tensor | None = None
    captures_prefill = False  # whether `prefill` may lie in a graph
    kernels: str  # what computes a step, in a few words
    reads = ""  # which weights, in a few words, where it is not the model's own forward that reads them
    path = ""  # why it is not the fused kernels
    calls = False  # whether it calls the model itself, and so its hooks
    rounds = ""  # what is rounded to less than the model's dtype: weights, cache, both, or nothing
    spans: Sequence[Any] = ()  # its parts on devices of their own, where there are several
    taken = 0  # how often it has taken weights: graphs hold the addresses of what it made of them last
    peers: Sequence[Any] = ()  # those devices, where all of them work on each token

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

    def numbers(self) -> Any:
        """What a step takes from the model beside tensors, as it is now (numbers.py). None: its graphs hold the model's own
        forward, which may read anything."""
        return None

    @abstractmethod
    def bytes_a_step(self, live: list[int]) -> int:
        """What a step of rows that go through together cannot do without reading: the weights once, and the keys and values
        of rows with these lengths."""

    def lanes(self, rows: int) -> list[range]:
        """The rows that go through the model together: so often a step reads the weights. Over stages there are several."""
        return lanes(rows, 1 if self.peers or not self.spans else len(self.spans))

    def readers(self, rows: int) -> int:
        """How many devices read at the same time, each a part of what is read."""
        count = len({one.device for one in self.peers or self.spans})  # a CPU may stand for several
        return max(1, count if self.peers else min(count, len(self.lanes(rows))))

    @abstractmethod
    def locate(self, ids: Tensor) -> str:
        """The part that first computes a NaN or infinity for the sequence ids (T,)."""

    @abstractmethod
    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        """Logits (N, V) after the tokens of the sequence ids (T,), some at a time. It takes the place of the first row."""

    @torch.no_grad()
    def score(self, ids: Tensor) -> Tensor:
        """Log-probabilities (T - 1,) of ids[1:], each after what stands before it."""
        self.reserve(torch.full((1,), len(ids) - 1, device=ids.device))
        self.choose(None)
        found, following = [], ids[1:, None].long()
        for logits in self.logits_after(ids[:-1]):
            some, following = following[: len(logits)], following[len(logits) :]
            found.append(logits.float().log_softmax(-1).gather(-1, some)[:, 0])
        return torch.cat(found)

    def reserve(self, limits: Tensor) -> None:  # noqa: B027 (most bodies have nothing to do)
        """Called before a request's prefill: how many tokens each of its rows may grow to, (B,) int32 on the device."""

    def check_request(self, limits: list[int]) -> None:  # noqa: B027 (most bodies have nothing to do)
        """That rows which may grow to so many tokens fit together."""

    @property
    def adapters(self) -> list[str] | None:
        """The names by which a row may have an adapter of its own. None: all rows are computed alike."""
        return None

    def choose(self, names: Sequence[str | None] | None) -> None:  # noqa: B027 (most bodies have nothing to choose)
        """The adapter of each of the first rows, None for none of them. No list: all rows have all that are on."""

    def begin(self, token: Tensor) -> None:  # noqa: B027 (most bodies have nothing to do)
        """Called once before the first step of a batch."""

    def chained(self, rows: int) -> bool:
        """Whether the step's last kernel lets its successor start early, so that the sampler may."""
        return False

    def same_kernels(self, rows: int) -> bool:
        """Whether so many rows are computed as one row is: then each gets the same logits beside any others."""
        return False

    def ways(self) -> set[int]:
        """A number of rows for each way in which steps are computed."""
        return {1}

    def finds_best(self, rows: int) -> bool:
        """Whether a step leaves partial maxima in `best` and `arg`."""
        return False

    def exact(self) -> Any:
        """Return the model as reference.py reads it; None where the certificate compares no logits with fp32."""
        return None

    def carried(self) -> list[Tensor]:
        """What a step changes for good, beside its place in a cache, which the next step at that position writes again."""
        return []

    def poison(self) -> None:  # noqa: B027 (most bodies have nothing to do)
        """Fill the cache with NaN, where a body never reads beyond a row's live length."""


def config_value(config: Any, name: str) -> Any:
    """Return a value of a model's config; None where it has none, or another for each layer, for which transformers raises."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError
        return None


@contextmanager
def own_forward(model: nn.Module, how: str = "") -> Iterator[None]:
    """Raise a ValueError where the model's own forward fails: a decoder cannot repair it."""
    try:
        yield
    except (GpuboundError, torch.OutOfMemoryError):
        raise
    except Exception as failure:
        raise ValueError(
            f"decoder: model: got {type(model).__name__}, whose own forward fails{how} ({summary(failure)}); check its config "
            f"and weights."
        ) from failure


def summary(failure: Exception) -> str:
    """Return the class of an exception and the first line of its message."""
    return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0]}"


def check_room(needed: int, device: torch.device, build: RunnerConfig) -> None:
    """A ValueError where the `needed` bytes for so many sequences of such a length are not free.

    Asked before anything is allocated: a host that has too little swaps, or kills.
    """
    free = usable_bytes(device) if device.type == "cuda" else host_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"decoder: max_batch and max_length: got {build.max_batch} and {build.max_length}, whose keys, values and logits "
            f"take {readable(needed)}, but {readable(free)} are free on {label(device)}; ask for fewer or shorter sequences."
        )


def host_bytes() -> int | None:
    """What this process may still take of the host's memory; None where the system does not say."""
    told = [line.split() for line in MEMORY.read_text().splitlines()] if MEMORY.exists() else []
    free = [int(words[1]) * 1024 for words in told if words[0] == "MemAvailable:"]
    most, used = (_number(GROUP / f"memory.{name}") for name in ("max", "current"))
    if most is not None and used is not None:
        free.append(max(0, most - used))
    return min(free, default=None)


def _number(file: Path) -> int | None:
    """None where there is no such file or no limit ("max")."""
    text = file.read_text().strip() if file.exists() else ""
    return int(text) if text.isdecimal() else None
