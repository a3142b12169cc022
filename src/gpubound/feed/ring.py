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
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..trace import notice, span
from .leaves import Padding
from .source import Source
from .transfer import Lane, Parcel, Served, count_copied, lane_to, pack

AHEAD = 4
CLOSING_SECONDS = 5.0

_END = object()


@dataclass
class Slot:
    staged: Tensor | None = None
    event: Any = None  # ends the last copy out of `staged`
    sent: bool = False


@dataclass
class Delivery:
    parcel: Parcel
    sent: Tensor | None  # the flat run on the device; None when every leaf passed through
    event: Any

    def batch(self) -> Any:
        return self.parcel.unpack(self.sent) if self.sent is not None else self.parcel.tree.rebuild(self.parcel.tree.leaves)


@dataclass
class _Shared:
    """All that thread and consumer both touch. The thread knows nothing of Ring, so a forgotten Ring can be collected."""

    tickets: threading.Semaphore
    ready: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    used: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)  # an event for each batch whose successor was taken
    stop: bool = False
    held_back: bool = False  # the thread waits for the device to catch up, not for the source


class Ring:
    def __init__(self, batches: Iterator[Any], lane: Lane, slots: int, padding: Padding, always: bool = False):
        self._lane = lane
        self._shared = _Shared(threading.Semaphore(slots))
        self._marks: list[Any] = [None] * (AHEAD * slots)
        self._taken = 0
        self._over = False
        work = (batches, lane, [Slot() for _ in range(slots)], padding, always, self._shared, _consumer_stream(lane.device))
        self._thread = threading.Thread(target=_read_ahead, args=work, name="gpubound-feed", daemon=True)
        self._thread.start()
        self._finish = weakref.finalize(self, _stop, self._shared, self._thread)

    def take(self) -> tuple[Delivery, float, float]:
        """(the next batch, seconds waited for the source, seconds waited for the device). Raises StopIteration, or what the
        source raised."""
        if self._over:
            raise StopIteration
        if self._taken:
            self._mark_last_used()
        held_back, start = self._shared.held_back, time.perf_counter()
        item = self._shared.ready.get()
        waited = time.perf_counter() - start
        if isinstance(item, Delivery):
            if item.sent is not None:
                self._lane.receive(item.sent, item.event)
            self._shared.tickets.release()  # after receive: the slot's event may be recorded anew from here on
            self._taken += 1
            return (item, 0.0, waited) if held_back else (item, waited, 0.0)
        self._over = True
        if item is _END:
            raise StopIteration
        raise item  # with the traceback it had in the thread, so that the user's line is in it

    def _mark_last_used(self) -> None:
        turn = (self._taken - 1) % len(self._marks)
        self._marks[turn] = self._lane.mark(self._marks[turn])
        self._shared.used.put(self._marks[turn])

    def close(self) -> None:
        """End the thread. It returns from the source's current batch first."""
        self._over = True
        self._finish()


def _stop(shared: _Shared, thread: threading.Thread) -> None:
    shared.stop = True
    shared.tickets.release()
    if thread is threading.current_thread():
        return
    thread.join(CLOSING_SECONDS)
    if thread.is_alive():
        notice("feed: the source is still making a batch; its thread ends when the source returns.")


def _consumer_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _read_ahead(
    batches: Iterator[Any], lane: Lane, slots: list[Slot], padding: Padding, always: bool, shared: _Shared, stream: Any
) -> None:
    try:
        # A source that computes on the GPU must do so on the consumer's stream, which it would have used without this thread.
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            _fill(batches, lane, slots, padding, always, shared)
        shared.ready.put(_END)
    except BaseException as error:  # whatever the source raised belongs to the consumer
        shared.ready.put(error)


def _fill(batches: Iterator[Any], lane: Lane, slots: list[Slot], padding: Padding, always: bool, shared: _Shared) -> None:
    number = 0
    while True:
        shared.tickets.acquire()
        if shared.stop:
            return
        batch = next(batches, _END)
        if batch is _END:
            return
        if number >= AHEAD * len(slots):
            shared.held_back = True
            lane.wait(shared.used.get())
            shared.held_back = False
        shared.ready.put(_deliver(pack(batch, lane.device, padding, always), lane, slots[number % len(slots)]))
        number += 1


def _deliver(parcel: Parcel, lane: Lane, slot: Slot) -> Delivery:
    if not parcel.copied:
        return Delivery(parcel, None, None)
    if slot.sent:
        lane.wait(slot.event)
    if slot.staged is None or slot.staged.numel() < parcel.size:
        slot.staged = lane.staging(parcel.size)
    staged = slot.staged[: parcel.size]
    parcel.stage(staged)
    sent, slot.event = lane.send(staged, slot.event)
    slot.sent = True
    return Delivery(parcel, sent, slot.event)


class Ringed:
    """A source behind the ring."""

    mode = "ring"

    def __init__(self, source: Source, device: torch.device, slots: int, padding: Padding, always: bool):
        self.source, self.slots, self.padding, self.always = source, slots, padding, always
        self.length = source.length
        self.lane = lane_to(device)

    def admit(self) -> None:
        self.lane.admit()

    def serve(self, epoch: int, start: int) -> Iterator[Served]:
        ring = Ring(self.source.read(epoch, start), self.lane, self.slots, self.padding, self.always)
        try:
            while True:
                with span("feed.wait"):
                    try:
                        delivery, waited, held_back = ring.take()
                    except StopIteration:
                        return
                parcel = delivery.parcel
                count_copied(parcel.payload)
                yield Served(delivery.batch(), 0, parcel.passed, len(parcel.copied), parcel.payload, waited, held_back)
        finally:
            ring.close()
