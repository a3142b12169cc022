"""The phases that a run goes through, so that the steps that locate a stall never price it.

Warm-up, then steps timed without hooks, then steps under the profiler without sensors, then steps under the sensors of watch
(located.py). What a phase could not do goes into `absent`, with the reason.

The time that a script waits for its DataLoader is measured in the timed steps. A profiler slows the host, but not the loader's
workers. So a loader that cannot keep up with the script may keep up with the recorded script, and the tape has no waits for it.
Slow steps also fill the loader's queue: the steps after them take batches that were made before, until the queue is empty.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from typing import Any
from weakref import finalize

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from ...formatting import in_words
from ...trace import hooked
from ...watch.events import Place, here
from ...watch.sensors import statistics
from .kineto import read_trace
from .script import StopScript
from .tape import SPAN, Tape

SCALAR = 16  # bytes of the largest single value
ANNOTATION: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)  # private; it bypasses dispatch modes


@dataclass
class Period:
    """Number of steps after which the loop repeats itself, shared by the phases; 1 if all steps are alike.

    A window that is no multiple of the period counts a rare event too often or not at all.
    """

    steps: int = 1

    def rounded(self, steps: int) -> int:
        """Return the smallest multiple of the period that is at least `steps`."""
        return -(-steps // self.steps) * self.steps


class Phase:
    """A number of steps, in whole periods of the loop, with hooks at their edges."""

    name = "warm-up"

    def __init__(self, steps: int, period: Period | None = None):
        self.least = self.steps = steps  # `steps` may grow: to whole periods, or until all lines are known
        self.period = period or Period()
        self.done, self.seconds, self.began = 0, 0.0, 0.0
        self.absent: dict[str, str] = {}
        self.ending = ExitStack()  # what is undone when the phase ends

    def begin(self) -> None:
        self.steps = self.period.rounded(self.steps)
        self.began = time.perf_counter()

    def step(self) -> None:
        self.done += 1

    def end(self) -> None:
        """End the phase. Also called if the script ended first."""
        self.ending.close()
        self.seconds = time.perf_counter() - self.began

    def as_dict(self) -> dict[str, float]:
        return {"steps": self.done, "seconds": round(self.seconds, 3)}


class LoaderClock:
    """Inside its block, the seconds in which the thread that opened it was in a DataLoader, and those of them in which workers
    started and made the first batch, in every epoch unless they are persistent."""

    def __init__(self) -> None:
        self.seconds = self.starting = 0.0
        self.ahead = 0  # batches that workers may have made in advance
        self.waited = False  # whether a batch was not ready when it was asked for
        self.workers = 0  # of the loader that has the most
        self._home = 0
        self._ending = ExitStack()

    def __enter__(self) -> LoaderClock:
        self._home = threading.get_ident()
        self._ending.enter_context(hooked(_BaseDataLoaderIter, "__next__", self._timed))
        self._ending.enter_context(hooked(_MultiProcessingDataLoaderIter, "__init__", self._begun))
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.close()

    def _begun(self, original: Callable, iterator: Any, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        original(iterator, *args, **kwargs)
        if threading.get_ident() == self._home:
            self._add(time.perf_counter() - began, True)

    def _add(self, seconds: float, starts: bool) -> None:
        self.seconds += seconds
        self.starting += seconds if starts else 0.0

    def _timed(self, original: Callable, iterator: Any) -> Any:
        if threading.get_ident() != self._home:
            return original(iterator)
        self.ahead = max(self.ahead, batches_ahead(iterator))
        self.workers = max(self.workers, getattr(iterator, "_num_workers", 0))
        self.waited |= not is_ready(iterator)
        first = batches_ahead(iterator) > 0 and not (getattr(iterator, "_num_yielded", 1) or iterator._persistent_workers)
        began = time.perf_counter()
        try:
            return original(iterator)
        finally:
            self._add(time.perf_counter() - began, first)


def batches_ahead(iterator: Any) -> int:
    """Return how many batches the workers of a DataLoader's iterator make in advance; 0 without workers."""
    return getattr(iterator, "_num_workers", 0) * (getattr(iterator, "_prefetch_factor", None) or 0)


def is_ready(iterator: Any) -> bool:
    """Return whether the next batch of a DataLoader's iterator has been made. Without workers, none is made in advance."""
    queue, tasks = getattr(iterator, "_data_queue", None), getattr(iterator, "_task_info", {})
    arrived = len(tasks.get(getattr(iterator, "_rcvd_idx", None), ())) == 2  # out of order: it is kept with its worker's number
    return arrived or (queue is not None and not queue.empty())


PATIENCE_S = 8.0  # seconds after which no further steps are looked at
TIMED_S, MORE = 0.5, 3  # seconds that are timed, with at most so many times the steps asked for: the host's time scatters


class TimedPhase(Phase):
    """Steps without hooks inside, in whole periods, for `seconds` if that is longer: an event of the device after each, read
    when all are done.

    The steps before may have been slow, and filled the loader's queue. So the first steps are not timed until a batch has to be
    waited for, or twice as many batches were taken as workers make in advance: `drained` steps.
    """

    step_ms: Sequence[float] = ()

    def __init__(self, steps: int, period: Period | None = None, name: str = "timed", seconds: float = TIMED_S):
        super().__init__(steps, period)
        self.name, self.drained, self._for = name, 0, seconds

    def begin(self) -> None:
        super().begin()
        self.loader = self.ending.enter_context(LoaderClock())
        torch.cuda.synchronize()
        self._open()

    def _open(self) -> None:
        """Begin the time of the first timed step."""
        self._before = statistics()
        self._events: list[torch.cuda.Event] = []
        self._loading: list[tuple[float, float]] = []  # in the loader until each event, and of it while workers start
        self._record()

    def _record(self) -> None:
        self._loading.append((self.loader.seconds, self.loader.starting))
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()

    def step(self) -> None:
        super().step()
        if self.done == self.drained + 1 and self._holds_old_batches():
            self.drained += 1
            self.steps += 1
            self._open()
        else:
            self._record()
        timed = self.done - self.drained
        short = time.perf_counter() - self.began < self._for and timed + self.period.steps <= MORE * self.least
        if self.done == self.steps and timed and short:
            self.steps += self.period.steps

    def _holds_old_batches(self) -> bool:
        late = self.done >= 2 * self.loader.ahead or time.perf_counter() - self.began > PATIENCE_S
        return not (self.loader.waited or late)

    def as_dict(self) -> dict[str, float]:
        return super().as_dict() | ({"drained": self.drained} if self.drained else {})

    def end(self) -> None:
        torch.cuda.synchronize()
        self.step_ms = [before.elapsed_time(after) for before, after in pairwise(self._events)]
        after = statistics()
        self.memory = {kind: (after[kind] - self._before[kind]) / max(len(self.step_ms), 1) for kind in after}
        super().end()

    def measured(self, period: int) -> dict[str, Any]:
        """Return what the last whole periods of the timed steps took, as Measurements have it; {} if there are none."""
        count = len(self.step_ms) // period * period
        if not count:
            return {}
        loading, starting = (1e3 * (b - a) / count for a, b in zip(self._loading[-1 - count], self._loading[-1]))
        times = {"step_ms": self.step_ms[-count:], "loading_ms": loading, "starting_ms": starting}
        return times | {"memory": self.memory, "workers": self.loader.workers}


class RecordedPhase(Phase):
    """Steps under the profiler, in whole periods, without stacks. One more comes before them, which is not on the tape, because
    a profiler is slow to start."""

    name = "taped"
    other_profiler = False  # whether the script runs a profiler

    def __init__(self, steps: int, period: Period | None = None):
        super().__init__(steps + 1, period)
        self.named_lines: dict[str, Place] = {}  # a span's name -> its line
        folder = tempfile.mkdtemp(prefix="gpubound-tape-")
        self._trace = Path(folder) / "trace.json"
        finalize(self, rmtree, folder, ignore_errors=True)

    @cached_property
    def tape(self) -> Tape | None:
        """The tape, read on the first access, after the script has ended: a second for 100,000 events."""
        return read_trace(self._trace) if self._trace.exists() else None

    def begin(self) -> None:
        super().begin()
        self.steps = self.period.rounded(self.least - 1) + 1
        self._profile: profile | None = None
        if torch.autograd._profiler_enabled():
            self.other_profiler = True
            self.absent["tape"] = "the script runs a profiler itself; leave it out while the doctor measures"
            return
        torch.cuda.synchronize()
        self._profile = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=self._action,
            experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True),
            on_trace_ready=lambda done: done.export_chrome_trace(str(self._trace)),
        )
        with warnings.catch_warnings():  # torch 2.11 warns that a cycle's events go when it ends; there is one cycle
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._profile.start()
        self.ending.callback(self._profile.stop)
        if ANNOTATION is None:
            self.absent["marks"] = f"torch {torch.__version__} has no _RecordFunctionFast"
            return
        gc.callbacks.append(self._collecting)
        self.ending.callback(gc.callbacks.remove, self._collecting)
        self.ending.enter_context(hooked(torch, "save", self._saving))
        self.ending.enter_context(hooked(_MultiProcessingDataLoaderIter, "__init__", self._starting))
        if (dynamo := sys.modules.get("torch._dynamo.callback")) is not None:
            dynamo.callback_handler.register_start_callback(self._compiling)
            self.ending.callback(dynamo.callback_handler.remove_start_callback, self._compiling)

    def step(self) -> None:
        super().step()
        if self._profile is None:
            return
        if self.done == 1:  # works left in the queues would delay the next step's works without being on the tape
            torch.cuda.synchronize()
        self._profile.step()

    def more(self) -> int:
        """Record another period. Return its steps."""
        self.steps += self.period.steps
        return self.period.steps

    @property
    def copied(self) -> frozenset[int]:
        """Return the sizes of the blocking copies on the tape, without those of single values, which a ledger has as waits."""
        calls = self.tape.calls if self.tape is not None else ()
        return frozenset(call.bytes for call in calls if call.blocks and call.bytes > SCALAR)

    def _action(self, step: int) -> ProfilerAction:
        if step == self.steps - 1:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if 0 < step < self.steps else ProfilerAction.WARMUP if step == 0 else ProfilerAction.NONE

    def _named(self, what: str) -> str:
        """Return the name of a span of what happens here, which maps to its line."""
        place = Place(here().site)
        known = (name for name, location in self.named_lines.items() if location == place and name.startswith(what))
        name = next(known, f"{what} ({len(self.named_lines)})")
        self.named_lines[name] = place
        return name

    def _saving(self, save: Callable, *args: Any, **kwargs: Any) -> Any:
        with ANNOTATION(f"{SPAN}checkpoint|{self._named('save')}"):
            return save(*args, **kwargs)

    def _starting(self, begin: Callable, iterator: Any, *args: Any, **kwargs: Any) -> None:
        """Write a span for the start of workers: torch's are of batches alone."""
        with ANNOTATION(f"{SPAN}data|{self._named(type(iterator).__name__)}"):
            begin(iterator, *args, **kwargs)

    def _compiling(self, args: Any) -> None:
        """Write a span with a line: the span that torch writes for a compilation has none."""
        with ANNOTATION(f"{SPAN}compile|{self._named('compile')}"):
            pass

    def _collecting(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            what = f"generation {info['generation']}"
            # A young generation takes some 10 µs, as long as finding its line.
            self._collection = ANNOTATION(f"{SPAN}gc|{self._named(what) if info['generation'] else what}")
            self._collection.__enter__()
        elif (begun := self.__dict__.pop("_collection", None)) is not None:
            begun.__exit__(None, None, None)


QUIET_S = 10.0  # of slow steps, after which a line of progress is printed within a phase


class Phases:
    """Sequence of the phases of a script, which is stopped after the last one unless `keep_going` is true.

    `report` receives a line of progress when a phase ends, and in a phase of slow steps every QUIET_S seconds.
    """

    def __init__(self, phases: Sequence[Phase], keep_going: bool = False, report: Callable[[str], None] | None = None):
        self.phases, self.keep_going = phases, keep_going
        self._report = report
        self._reported = 0.0
        self.total = 0
        self._now = 0
        self._open = False

    def __enter__(self) -> Phases:
        self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    @property
    def finished(self) -> bool:
        return self._now >= len(self.phases)

    def ended(self) -> None:
        """Count the end of a step."""
        self.total += 1
        if not self.finished:
            phase = self.phases[self._now]
            phase.step()
            if phase.done >= phase.steps:
                self._end()
                self._progress(phase, phase.seconds)
                self._now += 1
                self._begin()
            elif time.perf_counter() - self._reported > QUIET_S:
                self._progress(phase, time.perf_counter() - phase.began)
        if self.finished and not self.keep_going:
            raise StopScript

    def _begin(self) -> None:
        if not self.finished:
            self._open = True  # a phase that has begun is ended, also if its beginning fails
            self.phases[self._now].begin()
            self._reported = time.perf_counter()

    def _progress(self, phase: Phase, seconds: float) -> None:
        self._reported = time.perf_counter()
        if self._report is not None:
            first = phase is self.phases[0]  # which began before the script's imports
            took = f"after {in_words(seconds)}" if first else f"{in_words(seconds / max(phase.done, 1))} a step"
            self._report(f"{phase.name} {phase.done}/{phase.steps}, {took}")

    def _end(self) -> None:
        if self._open:
            self._open = False
            self.phases[self._now].end()
