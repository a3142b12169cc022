"""A run whose ranks wait for each other for too long is ended, with a sentence that names the rank, its step and its line.

A thread of each rank writes to the store where the ranks met: the step, what the rank is doing, and the line where its main
thread is. It asks no device and no other rank's main thread, so that it works while both hang: in a collective of gloo or NCCL,
in a graph's replay, in a file system. A rank whose main thread has not moved on within the time-out looks at what all of them
wrote, says who is behind, and all end. NCCL's own watchdog would end the process with a C++ trace, knows no Python line, and
sees no collective inside a CUDA graph; its time-out is set longer, so that this one speaks first.
"""

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ..formatting import duration
from ..trace import fallback
from .failures import HUNG, Failure, meeting_place, started_by_us

LOOKS = 20  # within a time-out; every 5 s at most
FOR_GPU = "waiting for the GPU"
"""What a rank is doing that reads a result: its GPU may wait for another's, which no Python line shows."""
BETWEEN = "busy with something else"
FROZEN = 1.0  # seconds at least, and four looks, in which a thread that lives writes again
ANSWER = timedelta(seconds=10)  # from the store, which does nothing else
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is."""

    step: int
    doing: str
    beat: int
    """Counts on while the rank's watching thread lives."""
    line: str
    collective: str | None
    """What it waits for other ranks in."""

    @property
    def waits(self) -> bool:
        """Whether another rank may be what keeps it here."""
        return self.collective is not None or self.doing == FOR_GPU

    def __str__(self) -> str:
        doing = f"waiting in {self.collective}" if self.collective else self.doing
        return f"{doing} in step {self.step:,}, at {self.line}"


class Watchdog:
    """Watches this rank. `at` says where it is; before the first call and after `rest` nothing is timed."""

    def __init__(self, rank: int, world: int, timeout: timedelta, start: str = ""):
        self.rank, self.world, self.timeout = rank, world, timeout.total_seconds()
        self.place = f"{start}/gpubound/watch"  # of this start of the ranks: what those before have written is there, too
        self.look = min(self.timeout / LOOKS, 5.0)
        self.again = max(4 * self.look, FROZEN)
        self._main = threading.get_ident()
        self._at: tuple[int, str, float] | None = None
        self._beat = 0
        self._library = _HERE  # whose lines say less than those that call it
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: dist.Store | None = None  # once its thread has found it

    def at(self, step: int, doing: str) -> None:
        """This rank has come to `doing` in `step`: a note for its thread, and nothing else."""
        self._at = step, doing, time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="gpubound-watchdog", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """What comes now may take as long as it likes."""
        if self._at is not None:
            self._at = self._at[0], "done with its steps", math.inf

    @contextmanager
    def timing(self, doing: str, step: int | None = None) -> Iterator[None]:
        """Inside, this rank may wait for others. A loop of one's own says nothing between such calls, and is not timed there.
        `step` is that of the rank's last such call if left out."""
        before = self._at
        if before is not None and before[2] < math.inf:  # who called `at` knows better what this rank does
            yield
            return
        resting = BETWEEN if before is None else before[1]
        number = step if step is not None else 0 if before is None else before[0]
        self._library = _PACKAGE  # it is a loop of one's own
        self.at(number, doing)
        try:
            yield
        finally:
            self._at = number, resting, math.inf

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def heed(self) -> None:
        """After an error, when this is closed: end as the others if one of them has judged. To a rank that did not look in
        time, the one that judged and ended is lost."""
        if self._store is not None:
            with suppress(RuntimeError):  # the process that keeps the store is gone, too: others will say so
                self._obey(self._store)

    def _watch(self) -> None:
        try:
            store = self._store = dist.PrefixStore(self.place, meeting_place(ANSWER))
            while not self._over.wait(self.look):
                self._look(store)
        except (dist.DistError, RuntimeError) as error:  # the process that keeps the store is gone: others will say so
            if not self._over.is_set():
                fallback("watchdog", f"the store where the ranks met does not answer ({str(error).partition(chr(10))[0]})")

    def _look(self, store: dist.Store) -> None:
        if not self._write(store):
            return
        self._obey(store)
        late = self.late()
        first = late > self.timeout and store.add("judge", 1) == 1
        if first or late > self.timeout + 2 * self.again:  # whoever was first is gone
            said, behind = self._judged(store)
            store.set("verdict", json.dumps([said, behind]))
            self._end(said, behind, speaks=True)

    def _obey(self, store: dist.Store) -> None:
        if store.check(["verdict"]):
            said, behind = json.loads(store.get("verdict"))
            self._end(said, behind, speaks=False)

    def late(self) -> float:
        """For how many seconds this rank has been where it is."""
        return 0.0 if self._at is None else time.monotonic() - self._at[2]

    def _write(self, store: dist.Store) -> bool:
        """Tell the others where this rank is; False if it has not begun."""
        at, frame = self._at, sys._current_frames().get(self._main)
        if at is None or frame is None:
            return False
        self._beat += 1
        store.set(f"at/{self.rank}", json.dumps(asdict(Whereabouts(at[0], at[1], self._beat, *_line(frame, self._library)))))
        return True

    def _judged(self, store: dist.Store) -> tuple[str, list[int]]:
        """What all have written, and again a moment later: a rank that is frozen whole writes no more."""
        before = self._read(store)
        time.sleep(self.again)
        self._write(store)
        return judged(before, self._read(store), self.timeout)

    def _read(self, store: dist.Store) -> list[Whereabouts | None]:
        keys = [f"at/{rank}" for rank in range(self.world)]
        return [Whereabouts(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]

    def _end(self, said: str, behind: list[int], speaks: bool) -> None:
        """End this process at once: its main thread hears nothing. A rank that is behind says where, in its log."""
        trace = ""
        if self.rank in behind and (frame := sys._current_frames().get(self._main)):
            trace = "".join(traceback.format_stack(frame))
        Failure(behind[0], HUNG, said, 1, trace, time.time()).note()
        if not (started_by_us() and self.rank == 0):  # whose trace is written to a file from its note
            print(trace, end="", file=sys.stderr)
            if speaks or started_by_us():
                print(f"gpubound: {said}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


def judged(before: list[Whereabouts | None], now: list[Whereabouts | None], timeout: float) -> tuple[str, list[int]]:
    """The sentence on a run that stands still, and the ranks that are behind: frozen ones, else those in the earliest step,
    and of these the ones that do not wait for others."""
    places = {rank: place for rank, place in enumerate(now) if place is not None}
    absent = [rank for rank, place in enumerate(now) if place is None]
    frozen = [rank for rank, place in places.items() if (old := before[rank]) is not None and old.beat == place.beat]
    earliest = min(place.step for place in places.values())
    late = [rank for rank, place in places.items() if place.step == earliest]
    busy = [rank for rank in late if not places[rank].waits]
    behind = absent or frozen or busy or late
    listed = "; ".join(f"rank {rank} is {_told(places.get(rank), rank in frozen)}" for rank in behind[:4])
    listed += f"; so are {len(behind) - 4} more" if len(behind) > 4 else ""
    others = next((place for rank, place in places.items() if rank not in behind), None)
    rest = f"; the others are {others}" if others else ""
    return f"no step has ended within {duration(timeout)}: {listed}{rest}", behind


def _told(place: Whereabouts | None, frozen: bool) -> str:
    if place is None:
        return "not in a step yet"
    return f"frozen (its process answers no more), last {place}" if frozen else str(place)


def _line(frame: FrameType | None, library: str) -> tuple[str, str | None]:
    """The innermost line that is not torch's or in the folder `library`, and the collective that it waits in, if it does."""
    collective, first = None, None
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        first = first or f"{name}:{frame.f_lineno} ({function})"
        if name.startswith(os.path.join(_TORCH, "distributed")):
            if not function.startswith("_") and function != "wrapper":
                collective = function
        elif not name.startswith((_TORCH, library)):
            return f"{_short(name)}:{frame.f_lineno} ({function})", collective
        frame = frame.f_back
    return first or "no line", collective


def _short(path: str) -> str:
    return os.path.join(*Path(path).parts[-3:])
