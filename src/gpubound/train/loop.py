"""Step after step. The host draws, launches, then looks at the step before the one it has launched; never waiting for the newest.

What a record holds (see monitor/tape.py for the names) is measured: pace from the clock between steps whose numbers have come,
`host_lead_ms` as the time the host waited for a number because the device still worked on it, `gpu_busy` from events around
each step. `gpu_busy` is given for captured steps only: between the launches of an eager step the events see nothing. One early
step runs under the ledger, so that a run says how often its step makes the host wait, and what it copies.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..trace import span
from ..watch import Ledger, watch
from .result import StepResult
from .step import TrainStep

Record = dict[str, Any]
WATCHED = 5  # which step of a run is counted: behind compiling and capture, early enough for a short run


class Stop:
    """`with Stop() as stop:` turns Ctrl-C and SIGTERM into `stop.asked`, so that a run ends between two steps and saves itself.

    A second Ctrl-C interrupts at once. Outside the main thread signals cannot be caught; `stop.asked` may then be set by hand.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass
class _Launched:
    number: int
    result: StepResult
    begin: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    ledger: Ledger | None = None


def run_steps(
    step: TrainStep,
    batches: Iterator[Any],
    first: int,
    last: int,
    on_record: Callable[[Record], None],
    after: Callable[[int], None] = lambda number: None,
    stop: Stop | None = None,
) -> int:
    """Steps `first` to `last`, or until the batches end or `stop` is asked. Returns the number of the last step done.

    `on_record` gets each step's record one step late; `after(number)` is called when step `number` has been launched (save
    here: a checkpoint's snapshot is ordered behind the step by the device).
    """
    clock, previous, number = _Clock(step), None, first - 1
    for number in range(first, last + 1):
        launched = _launch(step, batches, number, counted=number == first + WATCHED)
        if launched is None:
            number -= 1
            break
        if previous is not None:
            on_record(clock.record(previous))
        previous = launched
        after(number)
        if stop is not None and stop.asked:
            break
    if previous is not None:
        on_record(clock.record(previous))
    return number


def _launch(step: TrainStep, batches: Iterator[Any], number: int, counted: bool) -> _Launched | None:
    if step.device.type != "cuda":  # nothing to wait for, nothing to count
        result = step(batches)
        return None if result is None else _Launched(number, result)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with watch() if counted else nullcontext() as ledger:
        begin.record()
        result = step(batches)
        end.record()
    return None if result is None else _Launched(number, result, begin, end, ledger)


class _Clock:
    """Turns launched steps into records as their numbers arrive."""

    def __init__(self, step: TrainStep):
        self.step = step
        self._then: float | None = None
        self._ended: torch.cuda.Event | None = None

    def record(self, done: _Launched) -> Record:
        asked = time.perf_counter()
        with span("train.read"):
            values = done.result.read()
        now = time.perf_counter()
        record: Record = {
            "step": done.number,
            "loss": values.loss,
            "grad_norm": values.grad_norm,
            "lr": values.lr,
            "tokens": values.tokens,
            "skipped": values.skipped,
        }
        if self._then is not None:  # the first step holds compiling and capture; its pace would say nothing
            record |= {"seconds": now - self._then, "tokens_per_s": values.tokens / (now - self._then)}
        if done.end is not None:
            record |= {"host_lead_ms": 1e3 * (now - asked), "memory_bytes": torch.cuda.max_memory_allocated(self.step.device)}
            record |= self._busy(done)
        if done.ledger is not None:
            totals = done.ledger.totals
            record |= {"syncs": totals["syncs"], "h2d_bytes": totals["h2d_bytes"]}
        self._then = now
        return record

    def _busy(self, done: _Launched) -> Record:
        """The share of this step's time, from the end of the step before, in which the device was at work on it."""
        before, self._ended = self._ended, done.end
        if before is None or not self.step.captured:
            return {}
        assert done.begin is not None and done.end is not None
        done.end.synchronize()  # already past: the report is read behind it
        return {"gpu_busy": done.begin.elapsed_time(done.end) / before.elapsed_time(done.end)}
