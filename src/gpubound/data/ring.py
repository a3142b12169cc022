"""The ring: a thread reads the source ahead and copies its batches to the device, so that the training loop never waits for a
copy.

The thread fills one of `slots` pinned buffers, starts its copy on a separate stream, and passes the batch on with the copy's
event; the consumer's *stream* waits for that event, its host does not. A buffer is written again only after its copy.

Two limits bound the memory. At most `slots` batches are read and not yet taken. At most AHEAD x `slots` are taken and not yet
finished by the device: a loop that replays graphs launches in microseconds and would otherwise fill the memory with batches.
"""

import queue
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..device import PRETENDED
from ..errors import GraphError
from ..trace import notice
from .leaves import Padding, Parcel, pack
from .source import Source
from .stores import END, Served, Store

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
        for number in count():
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
