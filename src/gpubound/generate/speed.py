"""Speed of a generation: tokens per second, and the fraction of the rate at which this machine can read weights and cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import measure
from ..decode.request import Generation
from ..errors import MeasureError
from ..formatting import quantity
from ..trace import notice
from ..watch.ledger import SENSORS, watch

# The only sensor that does not slow a loop of a few small launches: a dispatch mode costs 20 µs an op.
WITHOUT = tuple(name for name in SENSORS if name != "gputrace")

FIGURES = (
    "tokens", "seconds", "tokens_per_s", "first_token_s", "steps", "bytes_a_step", "read_bytes_per_s", "roofline", "syncs",
)  # fmt: skip


class Speed:
    """Totals of one or several generations."""

    def __init__(self, device: torch.device):
        self.device = device
        self.tokens = self.steps = self.bytes_read = 0
        self.seconds = self.device_bytes = 0.0  # bytes that one device read, where several read at once
        self.concurrent = 1  # maximum number of devices that read at once
        self.first_token_s: float | None = None  # of the first generation
        self.syncs: int | None = None
        self.uncounted = "no GPU" if device.type == "cpu" else "nothing was generated"
        self._rate: float | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the host syncs inside, where there is a GPU to wait for."""
        if self.device.type == "cpu":
            yield
            return
        with watch(gputrace=True, without=WITHOUT) as ledger:
            yield
        if "syncs" in ledger.totals:
            self.syncs = (self.syncs or 0) + int(ledger.totals["syncs"])
        else:
            self.uncounted = ledger.absent.get("gputrace", "no sensor ran")

    def add(self, result: Generation) -> None:
        self.tokens += result.count
        # Launches go on after the last token; these reads have no use.
        longest = max((len(sequence.tokens) for sequence in result.sequences), default=0)
        wanted = result.steps if result.wanted is None else result.wanted  # the steps that `bytes_read` counts
        needed = min(round(longest / max(result.tokens_a_step, 1)), wanted)
        self.steps += needed
        self.seconds += result.seconds
        read = result.bytes_read * needed // max(wanted, 1)
        self.bytes_read += read
        self.device_bytes += read / result.at_once
        self.concurrent = max(self.concurrent, result.at_once)
        if self.first_token_s is None and result.first_token_s:
            self.first_token_s = result.first_token_s

    def merge(self, other: "Speed") -> None:
        """Add the totals of another one."""
        for name in ("tokens", "steps", "seconds", "bytes_read", "device_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.concurrent = max(self.concurrent, other.concurrent)
        if self.first_token_s is None:
            self.first_token_s = other.first_token_s
        if other.syncs is not None:
            self.syncs = (self.syncs or 0) + other.syncs
        self.uncounted = other.uncounted

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def bytes_a_step(self) -> float | None:
        """Return the bytes that a step must read; None if unknown."""
        return self.bytes_read / self.steps if self.steps and self.bytes_read else None

    @property
    def read_bytes_per_s(self) -> float | None:
        """Return the read rate of one device, measured once, times the devices that read at once. None, with a notice, if it
        cannot be measured."""
        if self._rate is None:
            try:
                self._rate = measure.ceilings(self.device, quick=True).read_bytes_per_s
            except MeasureError as error:
                notice(f"the share of the roofline is left out: {error}")
        if self._rate is None or not self.device_bytes:
            return self._rate
        return self._rate * self.bytes_read / self.device_bytes

    @property
    def roofline(self) -> float | None:
        """Return the shortest time for reading the weights and the live cache once per token, over the time that it took."""
        if not self.bytes_read or not (rate := self.read_bytes_per_s) or not self.seconds:
            return None
        if (read := self.bytes_read / self.seconds) <= rate:
            return read / rate
        share = measure.share(self.device_bytes / self.seconds, "read_bytes_per_s", self.device)
        self._rate = None  # it was measured again
        return share

    def line(self) -> str:
        """Return all figures in one line."""
        parts = [f"{self.tokens:,} tokens", f"{self.tokens_per_s:,.1f} tokens/s"]
        share = self.roofline
        if (read := self.bytes_a_step) is not None and (rate := self.read_bytes_per_s):
            by = f" by {self.concurrent} GPUs at once" if self.concurrent > 1 else ""
            of = "faster than" if share is None else f"{share:.1%} of"
            parts.append(f"{of} the roofline ({quantity(read, 'B')} a step / {quantity(rate, 'B/s')} read here{by})")
        if self.first_token_s is not None:
            parts.append(f"first token after {measure.in_words(self.first_token_s)}")
        parts.append(f"host syncs: {f'not counted ({self.uncounted})' if self.syncs is None else self.syncs}")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIGURES}
