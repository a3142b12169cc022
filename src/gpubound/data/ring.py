"""The ring: a thread reads the source ahead and copies its batches to the device, so that the training loop never waits for a
copy.

`slots` pieces of pinned memory go round. The thread fills one, starts its copy on a stream of the lane's own, and hands the
batch over with the copy's event; the consumer's *stream* waits for that event, its host does not. A slot's memory is written
again only when its copy is over.

Two limits bound what is under way. At most `slots` batches are read and not yet taken. At most AHEAD x `slots` are taken and
not yet worked off by the device: a loop that replays graphs launches in microseconds and would otherwise fill the memory with
batches.
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

from ..errors import GraphError
from ..trace import notice
from .epochs import END, Served, Store
from .leaves import Padding, Parcel, pack
from .source import Source

AHEAD = 4
CLOSING_SECONDS = 5.0

# How often the ring's thread asks for an event. It asks instead of calling synchronize(), which ledgers count as a wait of the
# host, in any thread: the training loop does not wait here. Being late by this much holds nothing up, since the batches of the
# other slots are on their way.
POLL_SECONDS = 2e-4


class Lane:
    """The road from host to device: staging memory, copies, and the events that say when a copy or a use is over.

    This one leads to a device without streams and pinned memory: the CPU, or a backend other than CUDA. A copy is over when it
    returns. The ring knows these methods alone, so that its order of events is tested on the CPU with events that come late.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def staging(self, size: int) -> Tensor:
        """Host memory to copy from."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")

    def send(self, staged: Tensor) -> tuple[Tensor, Any]:
        """Start copying `staged` to fresh memory on the device; the event ends the copy."""
        return (staged.clone() if self.device.type == "cpu" else staged.to(self.device)), None

    def wait(self, event: Any) -> None:
        """Hold this host thread until `event` is over."""

    def receive(self, sent: Tensor, event: Any) -> None:
        """Let the consumer's stream, not its host, wait for the copy."""

    def mark(self) -> Any:
        """An event that is over when the device has done what the consumer launched so far."""


class CudaLane(Lane):
    """Pinned memory and a copy stream of its own."""

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

    def mark(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()


@dataclass
class Slot:
    staged: Tensor | None = None
    event: Any = None  # ends the last copy out of `staged`


@dataclass
class Delivery:
    parcel: Parcel
    sent: Any = None  # the flat run on the device; None when every leaf passed through
    event: Any = None


@dataclass
class _Reader:
    """What the thread runs, and all that thread and consumer both touch. It knows nothing of Ring, so a forgotten Ring can be
    collected. The thread alone holds the source, so that it is closed where the thread ends."""

    lane: Lane
    slots: list[Slot]
    padding: Padding
    tickets: threading.Semaphore
    ready: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    used: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)  # an event for each batch whose successor was taken
    stop: bool = False
    held_back: bool = False  # the thread waits for the device to catch up, not for the source

    def run(self, batches: Iterator[Any], stream: Any) -> None:
        """Read ahead, on the consumer's `stream`: a source that computes on the GPU would have used it without this thread."""
        try:
            with torch.cuda.stream(stream):
                self._read_ahead(batches)
            self.ready.put(END)
        except BaseException as error:  # whatever the source raised belongs to the consumer
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
            here = self.lane.device.type == "cpu"  # where nothing needs a copy, a ring is made only when it is asked for
            parcel = pack(batch, self.lane.device, self.padding, always=here)
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
        """The next batch, or None where the source has ended. Raises what the source raised."""
        if self._over:
            return None
        if self._taken:  # what the consumer launched so far worked on the batch before
            self._reader.used.put(self._lane.mark())
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
        raise item  # with the traceback it had in the thread, so that the user's line is in it

    def close(self) -> None:
        """End the thread. It returns from the source's current batch first."""
        self._over = True
        self._finish()


class Ringed(Store):
    """A source behind the ring."""

    mode = "ring"

    def __init__(self, source: Source, device: torch.device, slots: int, padding: Padding):
        self.source, self.slots, self.padding = source, slots, padding
        self.length = source.length
        self.lane = CudaLane(device) if device.type == "cuda" else Lane(device)

    def admit(self) -> None:
        if self.lane.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise GraphError(
                "feed: a batch was asked of the ring inside a graph capture, which cannot hold a copy made outside it; take "
                "the batch before and copy it into the graph's inputs, or keep a corpus resident and call its fetch()."
            )

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        ring = Ring(self.source.read(epoch, start), self.lane, self.slots, self.padding)
        try:
            yield from iter(ring.take, None)
        finally:
            ring.close()
