"""Stores: where a feed's batches come from: directly, resident on the device, or copied ahead through a ring of pinned buffers.

Resident batches are uploaded once and served every epoch without a clone, which would cost a copy a step. A write into one is
detected instead: torch's version counters are compared before and after each use (about 0.1 µs a leaf), and the error names the
leaf. Containers are rebuilt each time, so removing a key from a batch changes nothing. The counters do not see writes through
`.data`, `numpy()`, or a custom kernel that does not tell autograd.

The ring: a thread reads the source ahead and copies its batches to the device, so that the training loop never waits for a
copy. It fills one of `slots` pinned buffers, starts its copy on a separate stream, and passes the batch on with the copy's
event; the consumer's *stream* waits for that event, its host does not. A buffer is written again only after its copy. Two
limits bound the memory. At most `slots` batches are read and not yet taken. At most AHEAD x `slots` are taken and not yet
finished by the device: a loop that replays graphs launches in microseconds and would otherwise fill the memory with batches.
"""

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..device import PRETENDED
from ..errors import DataError, GraphError
from ..trace import count, notice
from .leaves import Padding, Parcel, flatten, name, pack
from .source import BatchList, Items, Source


class _End:
    """The end of an epoch, in place of a batch. Compared by identity: tensors would compare their elements."""

    def __eq__(self, other: object) -> bool:
        return self is other


END = _End()


@dataclass(frozen=True)
class Served:
    """A batch with the counts of its leaves: resident in the store, on the device before, or copied."""

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
    mode: str
    length: int | None  # batches in an epoch

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        """Yield the batches of an epoch from number `start` on."""
        raise NotImplementedError

    def check_available(self) -> None:
        """Raise if no batch can be served now."""


class Direct(Store):
    """A source whose batches need no copy, as on a CPU. Single leaves on another device are moved."""

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


class _GuardedBatch:
    """A resident batch with the version counters of its leaves."""

    def __init__(self, parcel: Parcel):
        self.tree, self.resident, self.passed = parcel.tree, len(parcel.copied), parcel.passed
        # Inference tensors have no version counter.
        self.watched = [(i, leaf) for i, leaf in self.tree.tensors() if not leaf.is_inference()]
        self.versions = self._versions()
        self.last_use = "before its first use"

    def _versions(self) -> list[tuple[int, bool]]:
        return [(leaf._version, leaf.requires_grad) for _, leaf in self.watched]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose tensors start new version counters."""
        vars(self).update(state)
        self.versions = self._versions()

    def serve(self, epoch: int, number: int) -> Served:
        self.check_unwritten()
        self.last_use = f"in epoch {epoch}, batch {number}"
        return Served(self.tree.rebuild(self.tree.leaves), self.resident, self.passed)

    def check_unwritten(self) -> None:
        versions = self._versions()
        if versions == self.versions:
            return
        for (i, _), before, after in zip(self.watched, self.versions, versions):
            if before != after:
                change = "was written to in place" if before[0] != after[0] else "had requires_grad set"
                raise DataError(
                    f"feed: {name(self.tree.paths[i])} {change} {self.last_use}; a resident batch is served again every epoch "
                    f"and must not change: write to a clone of it, or pass mode='ring'."
                )


class Resident(Store):
    """A list of batches on the device."""

    mode = "resident"

    def __init__(self, source: BatchList, device: torch.device, padding: Padding):
        self.source, self.length = source, source.length
        unique = {id(batch): batch for batch in source.batches}  # a batch that is listed several times is stored once
        stored = {key: _GuardedBatch(_uploaded(batch, device, padding)) for key, batch in unique.items()}
        self.batches = [stored[id(batch)] for batch in source.batches]

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        for number, i in enumerate(self.source.order(epoch).tolist()[start:], start):
            yield self.batches[i].serve(epoch, number)
            self.batches[i].check_unwritten()


def _uploaded(batch: Any, device: torch.device, padding: Padding) -> Parcel:
    """Return the batch with every leaf on the device."""
    parcel = pack(batch, device, padding)
    with torch.inference_mode(False):  # a tensor made inside inference_mode would have no version counter
        for i, _ in parcel.copied:
            parcel.tree.leaves[i] = parcel.tree.leaves[i].detach().to(device)
    count_copied(parcel.payload)
    return parcel


class ResidentItems(Store):
    """Single items stacked on the device; a batch is one gather a leaf, in an order that the device computes."""

    mode = "resident"

    def __init__(self, source: Items, device: torch.device, padding: Padding):
        self.source, self.device, self.padding = source, device, padding
        self.length = source.length
        self.tree = _uploaded(_stacked(source), device, Padding()).tree

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        size, order = self.source.batch_size, self.source.order(epoch, self.device)
        for number in range(start, self.source.length):
            rows = order[number * size : (number + 1) * size]
            tree = replace(self.tree, leaves=[leaf.index_select(0, rows) for leaf in self.tree.leaves])
            self.padding.apply(tree)
            yield Served(tree.rebuild(tree.leaves), resident=len(tree.leaves))


class CannotStay(Exception):
    """The reason why a source cannot be resident."""


def _stacked(source: Items) -> Any:
    """Return all items as one batch, or raise CannotStay."""
    if isinstance(source.items, TensorDataset):
        return list(source.items.tensors)  # as default_collate returns them
    try:
        batch = source.collate([source.items[i] for i in range(len(source.items))])
    except (RuntimeError, TypeError) as error:
        raise CannotStay(f"its items cannot be stacked ({str(error).splitlines()[0]})") from error
    if any(not isinstance(leaf, Tensor) or leaf.dim() == 0 for leaf in flatten(batch).leaves):
        raise CannotStay("its items hold more than tensors and numbers")
    return batch


def bytes_needed(batches: Sequence[Any], device: torch.device, padding: Padding) -> int:
    """Return the bytes of an upload of `batches`, each counted once."""
    return sum(pack(batch, device, padding).payload for batch in {id(batch): batch for batch in batches}.values())


def item_bytes_needed(source: Items, device: torch.device) -> int:
    """Return the bytes of an upload of the items, all of the size of the first: others cannot be stacked."""
    if isinstance(source.items, TensorDataset):
        return pack(list(source.items.tensors), device, Padding()).payload
    return pack(source.collate([source.items[0]]), device, Padding()).payload * len(source.items)


AHEAD = 4
CLOSING_SECONDS = 5.0

# Interval of the thread's queries of an event. synchronize() would be counted by ledgers as a wait of the host, in any thread.
# The delay costs nothing, since the batches of the other slots are being copied.
POLL_SECONDS = 2e-4


class Lane:
    """Transfer from host to device: staging memory, copies, and the events that end a copy or a use.

    This class is for devices without streams and pinned memory: the CPU, or a backend other than CUDA. Its copies are
    synchronous. The ring uses only these methods, so tests can run it on the CPU with late events.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def staging(self, size: int) -> Tensor:
        """Return host memory to copy from."""
        memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")
        return memory.pin_memory() if self.device.type == PRETENDED else memory

    def send(self, staged: Tensor) -> tuple[Tensor, Any]:
        """Start copying `staged` to new memory on the device; return it with the event of the copy's end."""
        there = staged.clone() if self.device.type == "cpu" else staged.to(self.device, non_blocking=staged.is_pinned())
        return there, None

    def wait(self, event: Any) -> None:
        """Block this host thread until `event`."""

    def receive(self, sent: Tensor, event: Any) -> None:
        """Make the consumer's stream, not its host, wait for the copy."""

    def record(self) -> Any:
        """Return an event after everything that the consumer has launched so far."""


class CudaLane(Lane):
    """Transfer through pinned memory, on a separate stream."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)

    def send(self, staged: Tensor) -> tuple[Tensor, Any]:
        with torch.cuda.stream(self.stream):
            sent = torch.empty(staged.numel(), dtype=torch.uint8, device=self.device)
            sent.copy_(staged, non_blocking=True)
            return sent, self.stream.record_event()

    def wait(self, event: Any) -> None:
        while not event.query():
            time.sleep(POLL_SECONDS)

    def receive(self, sent: Tensor, event: Any) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        sent.record_stream(stream)

    def record(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()


@dataclass
class Slot:
    staged: Tensor | None = None
    event: Any = None  # ends the last copy out of `staged`


@dataclass
class Delivery:
    parcel: Parcel
    sent: Any = None  # the bytes on the device; None if no leaf needed a copy
    event: Any = None


@dataclass
class _Reader:
    """The thread's function, and the state that it shares with the consumer. It has no reference to Ring, so an unused Ring can
    be collected. Only the thread refers to the source, which is closed when the thread ends."""

    lane: Lane
    slots: list[Slot]
    padding: Padding
    tickets: threading.Semaphore
    ready: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    used: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)  # an event for each batch that the consumer has left
    stop: bool = False
    held_back: bool = False  # the thread waits for the device, not for the source

    def run(self, batches: Iterator[Any], stream: Any) -> None:
        """Read ahead on the consumer's `stream`, which a source that computes on the GPU would use without the thread."""
        try:
            with torch.cuda.stream(stream):
                self._read_ahead(batches)
            self.ready.put(END)
        except BaseException as error:  # raised again in the consumer
            self.ready.put(error)

    def _read_ahead(self, batches: Iterator[Any]) -> None:
        for number in itertools.count():
            self.tickets.acquire()
            if self.stop:
                return
            batch = next(batches, END)
            if batch is END:
                return
            if number >= AHEAD * len(self.slots):
                self.held_back = True
                self.lane.wait(self.used.get())
                self.held_back = False
            on_cpu = self.lane.device.type == "cpu"  # only with mode="ring", which asks for copies
            parcel = pack(batch, self.lane.device, self.padding, always=on_cpu)
            slot = self.slots[number % len(self.slots)]
            self.ready.put(self._send(parcel, slot) if parcel.copied else Delivery(parcel))

    def _send(self, parcel: Parcel, slot: Slot) -> Delivery:
        if slot.staged is not None:
            self.lane.wait(slot.event)
        if slot.staged is None or slot.staged.numel() < parcel.size:
            slot.staged = self.lane.staging(parcel.size)
        staged = slot.staged[: parcel.size]
        parcel.stage(staged)
        sent, slot.event = self.lane.send(staged)
        return Delivery(parcel, sent, slot.event)

    def end(self, thread: threading.Thread) -> None:
        self.stop = True
        self.tickets.release()
        if thread is threading.current_thread():
            return
        thread.join(CLOSING_SECONDS)
        if thread.is_alive():
            notice("feed: the source is still making a batch; its thread ends when the source returns.")


class Ring:
    def __init__(self, batches: Iterator[Any], lane: Lane, slots: int, padding: Padding):
        self._lane = lane
        self._reader = _Reader(lane, [Slot() for _ in range(slots)], padding, threading.Semaphore(slots))
        self._taken = self._over = False
        stream = torch.cuda.current_stream(lane.device) if lane.device.type == "cuda" else None
        thread = threading.Thread(target=self._reader.run, args=(batches, stream), name="gpubound-feed", daemon=True)
        thread.start()
        self._finish = weakref.finalize(self, self._reader.end, thread)

    def take(self) -> Served | None:
        """Return the next batch, or None at the end of the source. Raise the source's error."""
        if self._over:
            return None
        if self._taken:  # the launches so far used the previous batch
            self._reader.used.put(self._lane.record())
        held_back, start = self._reader.held_back, time.perf_counter()
        item = self._reader.ready.get()
        waited = time.perf_counter() - start
        if isinstance(item, Delivery):
            if item.sent is not None:
                self._lane.receive(item.sent, item.event)
            self._reader.tickets.release()
            self._taken = True
            parcel, seconds = item.parcel, (0.0, waited) if held_back else (waited, 0.0)
            return Served(parcel.unpack(item.sent), 0, parcel.passed, len(parcel.copied), parcel.payload, *seconds)
        self._over = True
        if item is END:
            return None
        raise item  # with the traceback of the thread, which shows the user's line

    def close(self) -> None:
        """End the thread, after the source's current batch."""
        self._over = True
        self._finish()


class Ringed(Store):
    """Store of a source that is read ahead by a Ring."""

    mode = "ring"

    def __init__(self, source: Source, device: torch.device, slots: int, padding: Padding):
        self.source, self.slots, self.padding = source, slots, padding
        self.length = source.length
        self.lane = CudaLane(device) if device.type == "cuda" else Lane(device)

    def check_available(self) -> None:
        if self.lane.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise GraphError(
                "feed: a batch was requested from the ring inside a graph capture, which cannot hold a copy made outside it; "
                "take the batch before the capture and copy it into the graph's inputs, or keep a corpus resident and call its "
                "fetch()."
            )

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        ring = Ring(self.source.read(epoch, start), self.lane, self.slots, self.padding)
        try:
            yield from iter(ring.take, None)
        finally:
            ring.close()
