"""The training loop. The host launches a step, then reads the result of the step before, so it never waits for the device.

Everything in a record is measured (monitor/tape.py lists the names). The pace comes from the ends of two steps on the device's
own clock. `host_lead_ms` is how long the host waited for a result. `gpu_busy` comes from events around each captured step: they
do not see the gaps between the launches of an eager one. One early step, and one in a thousand after it, runs under the ledger,
which counts host syncs and copies, and names their lines as `stalls`. Of several ranks each tells the others how long it waited
for them: `waited_ms`, by rank, and what follows from it are of the step before, so that nobody waits to hear it.
"""

import math
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ..distributed import ALONE, Ranks
from ..distributed.ranks import Poll
from ..watch import Ledger, watch
from .device_step import StepResult
from .step import TrainStep

Record = dict[str, Any]
WATCHED = 6  # the first step that the ledger watches: after compiling and capture, early enough for a short run
WATCHED_EVERY = 1000  # steps between two that it watches: counting slows the host down
UNTOLD = (
    "launch",
    "cpu_op",
    "clone",
)  # hundreds of lines a step, none of which keeps the device waiting


class Stop:
    """`with Stop() as stop:` turns Ctrl-C and SIGTERM into `stop.asked`, so that a run ends between two steps and saves itself.

    A second Ctrl-C interrupts at once. Outside the main thread signals cannot be caught; `stop.asked` may then be set by hand.
    What one rank is asked, all of them do, at the same step: between two steps each calls `agreed`. On a busy machine a rank
    may hear from the others before its own Ctrl-C comes: that one is still its first.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.asked: str | None = None
        self._signalled = False
        self._poll = Poll(ranks)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def agreed(self) -> bool:
        """Whether the run ends here. Other ranks hear what this one was asked a step later, so that nobody waits for it."""
        here = 0 if self.asked is None else signal.Signals.__members__.get(self.asked, 1)
        number = int(max(self._poll.ask(here), default=0))
        if number and self.asked is None:
            self.asked = signal.Signals(number).name
        return number > 0

    def _ask(self, number: int, frame: Any) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
        self.asked = self.asked or signal.Signals(number).name

    def __exit__(self, *_: object) -> None:
        awaited = self.asked is not None and not self._signalled and not self._poll.ranks.alone
        for number, handler in self._before.items():
            signal.signal(number, self._late if awaited else handler)

    def _late(self, number: int, frame: Any) -> None:
        """What the others were told, and have told this rank: done already."""
        for taken, handler in self._before.items():
            signal.signal(taken, handler)


class Instant:
    """An instant: on a GPU, when the device comes to it; on a CPU, now."""

    def __init__(self, device: torch.device):
        self.clock, self.event = time.perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def since(self, earlier: "Instant") -> float:
        """Seconds. On a GPU the device must have come to both."""
        if self.event is None or earlier.event is None:
            return self.clock - earlier.clock
        return earlier.event.elapsed_time(self.event) / 1e3


@dataclass
class _Launched:
    number: int
    result: StepResult
    before: Instant | None  # the end of the step before; None: this step's pace would say nothing
    begin: Instant
    end: Instant
    ledger: Ledger | None
    noted: Record = field(default_factory=dict)


class Loop:
    """Launches steps; each one's record goes to `on_record` when the next is launched, the last one's at `finish()`."""

    def __init__(self, step: TrainStep, on_record: Callable[[Record], None], ranks: Ranks = ALONE):
        self.step, self.on_record, self.ranks = step, on_record, ranks
        self._launches = 0
        self._poll = Poll(ranks)
        self._lasted: float | None = None  # seconds of the step before
        self._newest: _Launched | None = None
        self._before: Instant | None = None  # the first step holds compiling and capture

    def launch(self, number: int, batches: Any) -> None:
        """Step `number` with micro-batches drawn from `batches`."""
        self._launches += 1
        device = self.step.device
        counted = device.type == "cuda" and self._launches % WATCHED_EVERY == WATCHED  # a CPU has nothing to wait for
        with watch() if counted else nullcontext() as ledger:
            begin = Instant(device)
            result = self.step(batches)
            end = Instant(device)
        assert result is not None, "a feed does not end"
        launched = _Launched(number, result, self._before, begin, end, ledger)
        self.finish()
        self._newest, self._before = launched, end

    def note(self, **measured: Any) -> None:
        """Add to the newest step's record. What measured it kept the device busy: no time of the next step's."""
        assert self._newest is not None
        self._newest.noted |= measured
        self._before = Instant(self.step.device)

    def finish(self) -> None:
        """Hand out the newest step's record."""
        done, self._newest = self._newest, None
        if done is not None:
            self.on_record(self._record(done) | done.noted)

    def _record(self, done: _Launched) -> Record:
        asked = time.perf_counter()
        values = done.result.read()
        waited = time.perf_counter() - asked
        names = ("loss", "grad_norm", "lr", "tokens", "skipped")
        record: Record = {"step": done.number} | {name: getattr(values, name) for name in names}
        if not values.tokens:  # no item counted, as where all labels are -100: there is no loss
            del record["loss"], record["grad_norm"]
        if done.end.event is not None:
            done.end.event.synchronize()  # behind the report that has just been read, by a microsecond
            record["host_lead_ms"] = 1e3 * waited
        if done.before is not None:
            seconds = done.end.since(done.before)
            record |= {"seconds": seconds, "tokens_per_s": values.tokens / seconds}
            if done.end.event is not None and self.step.captured:
                record["gpu_busy"] = done.end.since(done.begin) / seconds
        if not self.ranks.alone:
            record |= among_ranks(self._poll.ask(math.nan if values.waited_s is None else values.waited_s), self._lasted)
            self._lasted = record.get("seconds")
        if done.ledger is not None:
            record |= {name: n for name, n in done.ledger.totals.items() if name in ("syncs", "h2d_bytes")}
            if stalls := [row.record() for row in done.ledger.rows if row.kind not in UNTOLD]:
                record["stalls"] = stalls
        return record


def among_ranks(waited: list[float], seconds: float | None) -> Record:
    """What follows from how many seconds each rank waited in a step of so many; nothing where one does not know.

    The slowest rank waits least, and for the collectives alone. Whatever another waits longer, it waits for the slowest.
    """
    if not waited or any(map(math.isnan, waited)):
        return {}
    least, most = min(waited), max(waited)
    found: Record = {"waited_ms": [round(1e3 * one, 3) for one in waited], "slowest_rank": waited.index(least)}
    found["held_up_ms"] = 1e3 * (most - least)
    return found if seconds is None else found | {"sums_share": least / seconds}
