"""Report the failure of a run of many processes once, in one sentence, and end a run whose ranks wait too long for each other.

A rank that fails writes an error file where torch's agent expects one, in the format of torch's `record`. The launcher reads
the files and finds the first failure: when one rank is gone, the others fail too, because they wait for it.

The watchdog ends such a run with one sentence that names the rank, its step and its line. A thread of each rank writes the
rank's state to the rendezvous store: the step, the current activity, and the line of the main thread. The thread uses no device
and no other rank's main thread, so it works while both hang: in a collective of gloo or NCCL, in a CUDA graph replay, in a file
system. A rank whose main thread makes no progress within the time-out reads the states of all ranks, reports the ranks that are
late, and all ranks exit. NCCL's watchdog would end the process with a C++ trace; it knows no Python line and sees no collective
inside a CUDA graph. Its time-out is set longer, so that this watchdog reports first.
"""

import hashlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..errors import GpuboundError, RankError
from ..formatting import duration
from ..trace import fallback
from .rendezvous import attempt, connect

LAUNCHER = "GPUBOUND_LAUNCHER"  # environment variable with the process id of the launcher
OURS = "gpubound-"  # prefix of the run ids of distributed/launch.py

# Kinds of failure.
KILLED = "killed"  # by a signal
HUNG = "hung"  # the watchdog ended it
RAISED = "raised"  # an unexpected error
REFUSED = "refused"  # an expected error, which the next attempt would raise, too
UNSOUND = "unsound"  # the work is done, but the exit code is not 0
BEREFT = "bereft"  # another rank is gone

AGAIN = (KILLED, HUNG, RAISED, BEREFT)
"""Kinds of failure after which another attempt may succeed."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, if no checkpoint was saved for it."""

MOMENT = timedelta(seconds=1)  # maximum delay between ranks that refuse the same input

SMALLER = "take a smaller micro_batch, or recompute=blocks"

_SIGNS = re.compile(r"gloo/|\bnccl|Connection (closed|reset) by peer|process group", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, or another rank's report of it."""

    rank: int
    kind: str
    text: str = ""
    code: int = 1
    trace: str = ""
    when: float = 0.0

    @property
    def sentence(self) -> str:
        """Return `text`, prefixed with the rank unless `text` names it. A refusal on rank 0 is reported for the whole run."""
        named = self.kind in (KILLED, HUNG) or re.match(rf"rank {self.rank}\b", self.text)
        plain = named or not self.text or (self.kind == REFUSED and self.rank == 0)
        return self.text if plain else f"rank {self.rank}: {self.text}"

    def write(self) -> None:
        """Write the error file for the agent. Without an agent no file is written."""
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            about: dict[str, Any] = {"timestamp": str(int(self.when)), "py_callstack": self.trace or self.text}
            about |= {"rank": self.rank, "kind": self.kind, "code": self.code, "when": self.when}
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": self.text, "extraInfo": about}}, file)


def failure_of(error: Exception, rank: int, text: str, code: int) -> Failure:
    """Return the failure for `error`, with its one-line message and its exit code."""
    kind = REFUSED if isinstance(error, GpuboundError | ValueError | OSError) else RAISED
    if isinstance(error, torch.OutOfMemoryError):
        kind, text = REFUSED, f"rank {rank} ran out of memory: {text.rstrip('.')}; {SMALLER}."
    elif of_another(error):
        kind, code = BEREFT, 1  # this rank's input is valid
        if not isinstance(error, RankError):
            text = f"rank {rank} waited for another rank that is gone: {text}"
    elif kind == REFUSED and refused_by_first(rank, text):
        rank = 0
    trace = "".join(traceback.format_exception(error))
    return Failure(rank, kind, text, code, trace, time.time())


def refused_by_first(rank: int, text: str) -> bool:
    """Return whether rank 0 raises the same error, now or within a moment: the error is then the run's, not this rank's."""
    key = f"gpubound/refused/{attempt()}/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        store = connect(5 * MOMENT)
        if rank == 0:
            store.set(key, "")
        else:
            store.wait([key], MOMENT)
        return True
    except (dist.DistError, RuntimeError):  # rank 0 raises no such error, or the store's process has exited
        return False


def of_another(error: BaseException) -> bool:
    """Return whether `error` only reports that another rank is gone. gloo raises plain RuntimeError, matched by its text."""
    if isinstance(error, RankError) and error.__cause__ is not None:  # raised by `join` from such an error
        return of_another(error.__cause__)
    if isinstance(error, dist.DistError):  # raised by NCCL and by the store
        return True
    return type(error) is RuntimeError and _SIGNS.search(str(error)) is not None


def failure_from(rank: int, process: Any) -> Failure:
    """Return the failure for a `ProcessFailure` of torch's agent, with the rank's error file."""
    message, code = process.message, process.exitcode
    if isinstance(message, dict):
        about = message["extraInfo"]
        if "kind" in about:
            own = {name: about[name] for name in ("rank", "kind", "code", "when")}
            return Failure(text=message["message"], trace=about["py_callstack"], **own)
        return Failure(rank, RAISED, message["message"], code, about["py_callstack"], float(about["timestamp"]))
    if code >= 0:
        text = f"rank {rank} ended with exit code {code} and without a message"
        return Failure(rank, RAISED, text, code, when=process.timestamp)
    number = signal.Signals(-code)
    # An abort is often torch's reaction to another rank's end, and this time is truncated to whole seconds.
    when = process.timestamp + (1 if number == signal.SIGABRT else 0)
    kind = BEREFT if number == signal.SIGTERM else KILLED  # the agent sends SIGTERM to the remaining ranks
    why = " (the system does so, too, when the machine's memory runs out)" if number == signal.SIGKILL else ""
    text = f"rank {rank} (process {process.pid}) was killed by {number.name}{why}"
    return Failure(rank, kind, text, INTERRUPTED if number in (signal.SIGINT, signal.SIGTERM) else 1, when=when)


def first_of(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others."""
    return min(failures, key=lambda f: (f.kind == BEREFT, f.when, f.rank))


def reports() -> bool:
    """Return whether this rank is the first to call: under an external torchrun that rank reports why all ranks end."""
    try:
        return connect(timedelta(seconds=5)).add(f"gpubound/said/{attempt()}", 1) == 1
    except (dist.DistError, RuntimeError):  # the store's process has exited; a second report is better than none
        return True


def started_by_us() -> bool:
    """Return whether distributed/launch.py started this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OURS)


CHECKS = 20  # checks per time-out, at most 5 s apart
FOR_GPU = "waiting for the GPU"
"""Activity of a rank that reads a result. Its GPU may wait for another rank's GPU, which no Python line shows."""
BETWEEN = "busy with something else"
FROZEN = 1.0  # minimum seconds (and four checks) within which a live thread writes again
ANSWER = timedelta(seconds=10)  # time-out of the store
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class RankState:
    """State of a rank, as its watchdog writes it to the store."""

    step: int
    activity: str
    beat: int
    """Heartbeat counter; it increases while the rank's watchdog thread is alive."""
    line: str
    collective: str | None
    """Collective in which the rank waits for other ranks."""

    @property
    def waits(self) -> bool:
        """Return whether the rank may be waiting for another rank."""
        return self.collective is not None or self.activity == FOR_GPU

    def __str__(self) -> str:
        activity = f"waiting in {self.collective}" if self.collective else self.activity
        return f"{activity} in step {self.step:,}, at {self.line}"


class Watchdog:
    """Watch the progress of this rank. `at` records its activity; no time-out runs before the first `at` and after `rest`."""

    def __init__(self, rank: int, world: int, timeout: timedelta, start: str = ""):
        self.rank, self.world, self.timeout = rank, world, timeout.total_seconds()
        self._prefix = f"{start}/gpubound/watch"  # key prefix of this start: the store still has the keys of earlier starts
        self.interval = min(self.timeout / CHECKS, 5.0)
        self.recheck = max(4 * self.interval, FROZEN)
        self._main = threading.get_ident()
        self._at: tuple[int, str, float] | None = None
        self._beat = 0
        self._library = _HERE  # folder whose frames are skipped in favour of their callers
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: dist.Store | None = None  # set by the watchdog thread

    def at(self, step: int, activity: str) -> None:
        """Record that this rank has begun `activity` in `step`. The watchdog thread reads the record."""
        self._at = step, activity, time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="gpubound-watchdog", daemon=True)
            self._thread.start()

    def idle(self) -> None:
        """Suspend the time-out: the work after the last step may take any time."""
        if self._at is not None:
            self._at = self._at[0], "done with its steps", math.inf

    @contextmanager
    def timing(self, activity: str, step: int | None = None) -> Iterator[None]:
        """Apply the time-out to the block, in which this rank may wait for others. A custom training loop is not timed
        between such blocks. `step` defaults to the step of the rank's last call."""
        before = self._at
        if before is not None and before[2] < math.inf:  # the caller of `at` has recorded a more precise activity
            yield
            return
        idle_activity = BETWEEN if before is None else before[1]
        number = step if step is not None else 0 if before is None else before[0]
        self._library = _PACKAGE  # a custom training loop
        self.at(number, activity)
        try:
            yield
        finally:
            self._at = number, idle_activity, math.inf

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def exit_if_ended(self) -> None:
        """Exit like the other ranks if one of them has ended the run; call it after an error, when this watchdog is closed.
        A rank that has not read the store in time sees only that the rank that ended the run is lost."""
        if self._store is not None:
            with suppress(RuntimeError):  # the store's process has exited, too: other ranks report it
                self._exit_if_ended(self._store)

    def _watch(self) -> None:
        try:
            store = self._store = dist.PrefixStore(self._prefix, connect(ANSWER))
            while not self._closed.wait(self.interval):
                self._check(store)
        except (dist.DistError, RuntimeError) as error:  # the store's process has exited: other ranks report it
            if not self._closed.is_set():
                fallback("watchdog", f"the rendezvous store does not answer ({str(error).partition(chr(10))[0]})")

    def _check(self, store: dist.Store) -> None:
        if not self._write(store):
            return
        self._exit_if_ended(store)
        late = self.late()
        first = late > self.timeout and store.add("judge", 1) == 1
        if first or late > self.timeout + 2 * self.recheck:  # the first judging rank has exited
            before = self._read(store)
            time.sleep(self.recheck)
            self._write(store)
            text, late_ranks = find_late_ranks(before, self._read(store), self.timeout)
            store.set("verdict", json.dumps([text, late_ranks]))
            self._end(text, late_ranks, reports=True)

    def _exit_if_ended(self, store: dist.Store) -> None:
        if store.check(["verdict"]):
            text, late_ranks = json.loads(store.get("verdict"))
            self._end(text, late_ranks, reports=False)

    def late(self) -> float:
        """Return the seconds since this rank's last progress."""
        return 0.0 if self._at is None else time.monotonic() - self._at[2]

    def _write(self, store: dist.Store) -> bool:
        """Write this rank's state to the store; return False if the rank has not begun."""
        at, frame = self._at, sys._current_frames().get(self._main)
        if at is None or frame is None:
            return False
        self._beat += 1
        store.set(f"at/{self.rank}", json.dumps(asdict(RankState(at[0], at[1], self._beat, *_line(frame, self._library)))))
        return True

    def _read(self, store: dist.Store) -> list[RankState | None]:
        keys = [f"at/{rank}" for rank in range(self.world)]
        return [RankState(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]

    def _end(self, text: str, late_ranks: list[int], reports: bool) -> None:
        """End this process at once; its main thread receives no exception. A late rank prints its stack to its log."""
        trace = ""
        if self.rank in late_ranks and (frame := sys._current_frames().get(self._main)):
            trace = "".join(traceback.format_stack(frame))
        Failure(late_ranks[0], HUNG, text, 1, trace, time.time()).write()
        if not (started_by_us() and self.rank == 0):  # launch writes rank 0's trace to a file
            print(trace, end="", file=sys.stderr)
            if reports or started_by_us():
                print(f"gpubound: {text}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


def find_late_ranks(before: list[RankState | None], now: list[RankState | None], timeout: float) -> tuple[str, list[int]]:
    """Return the error sentence for a run without progress, and the late ranks: frozen ones, else those in the earliest
    step, and among these the ranks that do not wait for others.

    before, now  states of all ranks at two moments: a frozen process writes no new heartbeat
    """
    states = {rank: state for rank, state in enumerate(now) if state is not None}
    absent = [rank for rank, state in enumerate(now) if state is None]
    frozen = [rank for rank, state in states.items() if (old := before[rank]) is not None and old.beat == state.beat]
    earliest = min(state.step for state in states.values())
    last = [rank for rank, state in states.items() if state.step == earliest]
    busy = [rank for rank in last if not states[rank].waits]
    late = absent or frozen or busy or last

    def describe(rank: int) -> str:
        if rank in absent:
            return f"rank {rank} is not in a step yet"
        return f"rank {rank} is {'frozen (its process does not answer), last ' if rank in frozen else ''}{states[rank]}"

    text = "; ".join(map(describe, late[:4])) + (f"; so are {len(late) - 4} more" if len(late) > 4 else "")
    others = next((state for rank, state in states.items() if rank not in late), None)
    rest = f"; the others are {others}" if others else ""
    return f"no step has ended within {duration(timeout)}: {text}{rest}", late


def _line(frame: FrameType | None, library: str) -> tuple[str, str | None]:
    """Return the innermost line outside torch and the folder `library`, and the collective in which that line waits, or
    None."""
    collective, first = None, None
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        first = first or f"{name}:{frame.f_lineno} ({function})"
        if name.startswith(os.path.join(_TORCH, "distributed")):
            if not function.startswith("_") and function != "wrapper":
                collective = function
        elif not name.startswith((_TORCH, library)):
            return f"{os.path.join(*Path(name).parts[-3:])}:{frame.f_lineno} ({function})", collective
        frame = frame.f_back
    return first or "no line", collective
