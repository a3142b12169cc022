"""The interface between a decoder and the code that runs its model, and checks that every runner makes."""

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
from ..formatting import readable
from .kv_cache import PLAIN, CacheLayout
from .stages.plan import lanes
from .weights import weight_format

MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # of a container that may use less than its machine has


@dataclass(frozen=True)
class RunnerConfig:
    """The sizes and formats that a runner is built for."""

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
        """Fill the cache with ids (B, T), right-padded. Positions after a row's length may hold any value afterwards."""

    @abstractmethod
    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the logits (B, V), fp32, after `token` (B,) at `position` (B,), both int32.

        A body that takes several tokens of a row at once takes them as (B, T), and gives (B T, V).
        """

    @abstractmethod
    def report(self) -> list[tuple[str, str, str]]:
        """Return (part, implementation, reason) for the rows of the decoder's table."""

    @abstractmethod
    def moved(self) -> str | None:
        """Return the name of a weight that was replaced or moved; None if there is none."""

    @abstractmethod
    def rebind(self) -> None:
        """Read the weights again."""

    def numbers(self) -> Any:
        """Return the scalars that a step reads from the model (model_watch.py). None: its graphs hold the model's own
        forward, which may read any."""
        return None

    @abstractmethod
    def bytes_a_step(self, live: list[int]) -> int:
        """Return the bytes that a step of these rows has to read: the weights, and keys and values of these lengths."""

    def lanes(self, rows: int) -> list[range]:
        """Return the groups of rows that go through the model together. A step reads the weights once for each."""
        return lanes(rows, 1 if self.peers or not self.spans else len(self.spans))

    def readers(self, rows: int) -> int:
        """Return the number of devices that read at the same time, each its part of the weights."""
        count = len({one.device for one in self.peers or self.spans})  # a CPU may stand for several
        return max(1, count if self.peers else min(count, len(self.lanes(rows))))

    @abstractmethod
    def locate(self, ids: Tensor) -> str:
        """Return the name of the module that first computes a NaN or infinity for the sequence ids (T,)."""

    @abstractmethod
    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the logits (N, V) after the tokens of the sequence ids (T,), N at a time. Overwrites the first row's cache."""

    @torch.no_grad()
    def score(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities (T - 1,) of ids[1:], each given the tokens before it."""
        self.reserve(torch.full((1,), len(ids) - 1, device=ids.device))
        self.choose(None)
        found, following = [], ids[1:, None].long()
        for logits in self.logits_after(ids[:-1]):
            some, following = following[: len(logits)], following[len(logits) :]
            found.append(logits.float().log_softmax(-1).gather(-1, some)[:, 0])
        return torch.cat(found)

    def reserve(self, limits: Tensor) -> None:  # noqa: B027 (most bodies have nothing to do)
        """Reserve cache for rows of up to `limits` tokens, (B,) int32 on the device. Called before each prefill."""

    def check_request(self, limits: list[int]) -> None:  # noqa: B027 (most bodies have nothing to do)
        """Raise a ValueError where rows of up to these lengths do not fit together."""

    @property
    def adapters(self) -> list[str] | None:
        """The names of the adapters that a row may select. None: all rows have the same."""
        return None

    def choose(self, names: Sequence[str | None] | None) -> None:  # noqa: B027 (most bodies have nothing to choose)
        """Select the adapter of each row by name, None for no adapter. No list: every row has all adapters that are on."""

    def begin(self, token: Tensor) -> None:  # noqa: B027 (most bodies have nothing to do)
        """Prepare the first step of a batch."""

    def chained(self, rows: int) -> bool:
        """Return whether the step's last kernel triggers its successor early (programmatic dependent launch)."""
        return False

    def same_kernels(self, rows: int) -> bool:
        """Return whether this number of rows uses the kernels of one row, so that logits do not depend on the batch."""
        return False

    def ways(self) -> set[int]:
        """Return one number of rows for each path that computes a step."""
        return {1}

    def finds_best(self, rows: int) -> bool:
        """Return whether a step leaves partial maxima in `best` and `arg`."""
        return False

    def exact(self) -> Any:
        """Return the model as reference.py reads it; None where the certificate compares no logits with fp32."""
        return None

    def carried(self) -> list[Tensor]:
        """Return the tensors that a step changes permanently, besides its position in the cache."""
        return []

    def poison(self) -> None:  # noqa: B027 (most bodies have nothing to do)
        """Fill the cache with NaN, where a runner never reads beyond a row's live length."""


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
    """Raise a ValueError where the `needed` bytes of keys, values and logits are not free.

    Asked before anything is allocated: a host that has too little swaps, or kills.
    """
    free = usable_bytes(device) if device.type == "cuda" else host_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"decoder: max_batch and max_length: got {build.max_batch} and {build.max_length}, whose keys, values and logits "
            f"take {readable(needed)}, but {readable(free)} are free on {label(device)}; ask for fewer or shorter sequences."
        )


def host_bytes() -> int | None:
    """Return the bytes of host memory that this process may still allocate; None where the system does not report them."""
    told = [line.split() for line in MEMORY.read_text().splitlines()] if MEMORY.exists() else []
    free = [int(words[1]) * 1024 for words in told if words[0] == "MemAvailable:"]
    most, used = (_number(GROUP / f"memory.{name}") for name in ("max", "current"))
    if most is not None and used is not None:
        free.append(max(0, most - used))
    return min(free, default=None)


def _number(file: Path) -> int | None:
    """Return the number in a file; None where there is no such file or no limit ("max")."""
    text = file.read_text().strip() if file.exists() else ""
    return int(text) if text.isdecimal() else None
