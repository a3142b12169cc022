"""Feed: batches on the device, epoch after epoch, from a position that can be saved."""

import operator
import time
import weakref
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import DataError
from ..formatting import shown
from ..trace import count
from .leaves import Padding, pack
from .source import Source


class _End:
    """Instead of a batch: the epoch is over. A batch is not compared with it: a tensor would compare its elements."""

    def __eq__(self, other: object) -> bool:
        return self is other


END = _End()


@dataclass(frozen=True)
class Served:
    """A batch and what it took: leaves that lay on the device because of the feed, were there already, or had to be copied."""

    batch: Any
    resident: int = 0
    passed: int = 0
    copied: int = 0
    bytes: int = 0
    waited: float = 0.0  # seconds for the source
    held_back: float = 0.0  # seconds for the device to catch up


def count_copied(size: int) -> None:
    if size:
        count("h2d_bytes", size)


class Store:
    """Where an epoch's batches come from."""

    mode: str
    length: int | None  # batches in an epoch

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        raise NotImplementedError

    def admit(self) -> None:
        """Raise if a batch cannot be had now."""


class Direct(Store):
    """A source whose batches need no copy: the CPU's case. No thread, no staging; a stray leaf is moved as it comes."""

    mode = "direct"

    def __init__(self, source: Source, device: torch.device, padding: Padding):
        self.source, self.device, self.padding = source, device, padding
        self.length = source.length

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        batches = self.source.read(epoch, start)
        while True:
            began = time.perf_counter()
            if (batch := next(batches, END)) is END:
                return
            waited = time.perf_counter() - began
            parcel = pack(batch, self.device, self.padding)
            for i, _ in parcel.copied:
                parcel.tree.leaves[i] = parcel.tree.leaves[i].to(self.device)
            batch = parcel.tree.rebuild(parcel.tree.leaves)
            yield Served(batch, 0, parcel.passed, len(parcel.copied), parcel.payload, waited)


@dataclass
class Stats:
    """What the feed has done since it was made. `str()` is a readable line."""

    mode: str
    batches: int = 0
    bytes_copied: int = 0  # host to device, in the steps; a resident upload is not in it
    resident: int = 0  # leaves served from where the feed had put them
    passed: int = 0  # leaves that lay on the device already
    copied: int = 0  # leaves copied for the step
    wait_ms: float = 0.0  # the loop waited for the source: the data is too slow
    held_back_ms: float = 0.0  # the loop waited for the device: it had run far ahead, which costs nothing

    def add_served(self, served: Served) -> None:
        self.batches += 1
        self.bytes_copied += served.bytes
        self.resident += served.resident
        self.passed += served.passed
        self.copied += served.copied
        self.wait_ms += 1e3 * served.waited
        self.held_back_ms += 1e3 * served.held_back

    @property
    def bytes_per_step(self) -> float:
        return self.bytes_copied / self.batches if self.batches else 0.0

    @property
    def wait_ms_per_step(self) -> float:
        return self.wait_ms / self.batches if self.batches else 0.0

    @property
    def hit_rate(self) -> float:
        """The fraction of tensors that needed no copy; 1.0 before the first batch."""
        total = self.resident + self.passed + self.copied
        return (self.resident + self.passed) / total if total else 1.0

    def __str__(self) -> str:
        return (
            f"{self.mode}: {self.batches} batches, {self.bytes_per_step:.0f} bytes copied a step, "
            f"{self.wait_ms_per_step:.3f} ms waited a step, {100 * self.hit_rate:.0f} % of leaves needed no copy"
        )


class Feed:
    """An iterable of batches on one device; `gpubound.feed` makes it.

    `for batch in feed` is one epoch. The next loop is the next epoch, also after a `break`. `feed.take()` gives one batch at
    a time, across epochs. `state_dict()` holds the position. After `load_state_dict()` the next loop continues there.
    """

    def __init__(self, store: Store, device: torch.device, identity: Mapping[str, Any], world: int = 1):
        self.device, self._world = device, world  # so many ranks draw from the same epochs
        self.epoch, self.batch = 0, 0  # the epoch under way, and how many of its batches were handed out to all ranks
        self._store, self._length = store, store.length
        self._identity = dict(identity)  # what must be the same for a saved position to mean the same
        self._stats = Stats(store.mode)
        self._continue = True  # the next loop starts at the position, instead of at the next epoch
        self._running: weakref.ref[Generator[Served]] | None = None
        self._drawing: Generator[Served] | None = None  # what take() takes from

    def __getstate__(self) -> dict[str, Any]:
        """A copy goes on at the position. What is being drawn from now cannot be copied."""
        return vars(self) | {"_running": None, "_drawing": None, "_continue": self._continue or self._drawing is not None}

    @property
    def mode(self) -> str:
        """'resident', 'ring' or 'direct'."""
        return self._store.mode

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("feed: this source does not say how many batches it has.")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(partial(self.draw, self._begin()), END)  # unlike a generator, it survives an error

    def _begin(self) -> Generator[Served]:
        if not self._continue and self.batch > 0:
            self.epoch, self.batch = self.epoch + 1, 0
        self._continue = False
        self.close()
        served = self._store.serve(self.epoch, self.batch)
        self._running = weakref.ref(served)  # weak: a loop left by `break` must end its thread at once
        return served

    def take(self) -> Any:
        """The next batch, in this epoch or the next."""
        for _ in range(2):
            if self._drawing is None:
                self._drawing = self._begin()
            if (batch := self.draw(self._drawing)) is not END:
                return batch
            self._drawing = None
        raise DataError("feed: an epoch had no batches left and the next had none; wanted at least one.")

    def draw(self, running: Generator[Served]) -> Any:
        """The next batch of the running epoch, or END."""
        if self._running is None or self._running() is not running:
            raise DataError(
                "feed: this loop was ended by a newer one over the same feed, by an error or by close(); make one feed for "
                "each loop."
            )
        self._store.admit()  # here and not in the ring: an exception inside its generator would end that, and lose the place
        try:
            served = next(running, None)
        except BaseException:  # a generator that raised is over, and would look like the end of the epoch
            self._continue = running is self._drawing  # take() asks for this batch again; a new loop is a new epoch
            self.close()
            raise
        if served is None:
            if self.batch == 0:
                raise DataError(f"feed: source: epoch {self.epoch} had no batches, wanted at least one.")
            self.epoch, self.batch = self._next()
            self._continue = True  # also where the ranks have drawn the first batches of the next epoch
            return END
        self.batch += self._world
        count_copied(served.bytes)
        self._stats.add_served(served)
        return served.batch

    def _next(self) -> tuple[int, int]:
        """Where the next epoch begins: with several ranks, perhaps behind batches of it that the last round has drawn."""
        length = self._length or self.batch
        epochs, batch = divmod(max(0, self.batch - length), length)
        return self.epoch + 1 + epochs, batch

    def close(self) -> None:
        """End the current iteration and its thread. A later loop begins a new one."""
        running = self._running() if self._running is not None else None
        self._running = self._drawing = None
        if running is not None:
            running.close()

    def stats(self) -> Stats:
        return self._stats

    def state_dict(self) -> dict[str, Any]:
        """The position, and the identity of the source that it belongs to."""
        epoch, batch = self.epoch, self.batch
        if self._length is not None and batch >= self._length:
            epoch, batch = self._next()
        return {"epoch": epoch, "batch": batch, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved. The source must be the same one."""
        if not isinstance(state, Mapping) or not {"epoch", "batch"} <= state.keys():
            raise ValueError(f"feed: state: got {shown(state)}, wanted what state_dict() gave, with its epoch and batch.")
        for key, now in self._identity.items():
            if key not in state or state[key] != now:
                raise ValueError(
                    f"feed: state: {key} was {state.get(key, 'not recorded')!r} when it was saved and is {now!r} now; make "
                    f"the feed as it was made then."
                )
        self.seek(state["epoch"], state["batch"])

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Continue at batch `batch` of epoch `epoch`."""
        try:
            epoch, batch = operator.index(epoch), operator.index(batch)  # NumPy's whole numbers, too
        except TypeError:
            raise ValueError(f"feed: seek: got epoch {epoch!r}, batch {batch!r}, wanted whole numbers.") from None
        if epoch < 0 or batch < 0 or (self._length is not None and batch > self._length):
            limit = "" if self._length is None else f" of {self._length}"
            raise ValueError(f"feed: seek: got epoch {epoch}, batch {batch}{limit}, wanted a position inside the epoch.")
        self.close()
        self.epoch, self.batch, self._continue = epoch, batch, True
