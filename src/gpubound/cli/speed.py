"""How fast a generation was: tokens a second beside what reading the weights and the cache allows on this very machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import measure
from ..decode.result import Generation
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
    """Sums over one or several generations."""

    def __init__(self, device: torch.device):
        self.device = device
        self.tokens = self.steps = self.bytes_read = 0
        self.seconds = self.bytes_of_one = 0.0  # of the bytes, what each of the devices read that did so at once
        self.at_once = 1  # so many at most
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

    def add(self, found: Generation) -> None:
        self.tokens += found.count
        # Launches reach beyond the last token; what they read there has no use.
        longest = max((len(sequence.tokens) for sequence in found.sequences), default=0)
        wanted = found.steps if found.wanted is None else found.wanted  # the steps of which `bytes_read` is
        needed = min(round(longest / max(found.tokens_a_step, 1)), wanted)
        self.steps += needed
        self.seconds += found.seconds
        read = found.bytes_read * needed // max(wanted, 1)
        self.bytes_read += read
        self.bytes_of_one += read / found.at_once
        self.at_once = max(self.at_once, found.at_once)
        if self.first_token_s is None and found.first_token_s:
            self.first_token_s = found.first_token_s

    def merge(self, other: "Speed") -> None:
        """Add what another one summed up."""
        for name in ("tokens", "steps", "seconds", "bytes_read", "bytes_of_one"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.at_once = max(self.at_once, other.at_once)
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
        """None where nothing says what a step must read."""
        return self.bytes_read / self.steps if self.steps and self.bytes_read else None

    @property
    def read_bytes_per_s(self) -> float | None:
        """A device's, measured once and kept, times those that read at once. None where it cannot be measured, which is
        said."""
        if self._rate is None:
            try:
                self._rate = measure.ceilings(self.device, quick=True).read_bytes_per_s
            except MeasureError as error:
                notice(f"the share of the roofline is left out: {error}")
        if self._rate is None or not self.bytes_of_one:
            return self._rate
        return self._rate * self.bytes_read / self.bytes_of_one

    @property
    def roofline(self) -> float | None:
        """The time that reading the weights and the live cache once a token takes at best, over the time it took."""
        if not self.bytes_read or not (rate := self.read_bytes_per_s) or not self.seconds:
            return None
        if (read := self.bytes_read / self.seconds) <= rate:
            return read / rate
        share = measure.share(self.bytes_of_one / self.seconds, "read_bytes_per_s", self.device)
        self._rate = None  # it was measured again
        return share

    def line(self) -> str:
        """All of it in one line."""
        parts = [f"{self.tokens:,} tokens", f"{self.tokens_per_s:,.1f} tokens/s"]
        share = self.roofline
        if (read := self.bytes_a_step) is not None and (rate := self.read_bytes_per_s):
            by = f" by {self.at_once} GPUs at once" if self.at_once > 1 else ""
            of = "faster than" if share is None else f"{share:.1%} of"
            parts.append(f"{of} the roofline ({quantity(read, 'B')} a step / {quantity(rate, 'B/s')} read here{by})")
        if self.first_token_s is not None:
            parts.append(f"first token after {measure.in_words(self.first_token_s)}")
        parts.append(f"host syncs: {f'not counted ({self.uncounted})' if self.syncs is None else self.syncs}")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIGURES}
