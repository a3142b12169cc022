"""The phases under the sensors of watch, with a mark in the profile for each stall: they give lines, and never prices.

Sampled stacks of the launching thread show where it is while the GPU has nothing to do, without a profiler. The tape shows
launches and waits, but not what the host does between them. So in some steps another thread takes the stack of the launching
thread twice a millisecond, and asks the driver whether all work that was launched is done. If it is, the host is late, and the
line it is in is the reason. In backward autograd's own thread launches, while this thread is in the line that called it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import lcm
from threading import local
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...trace import hooked
from ...watch.events import EMPTIED, KINDS, TORCH, Place, Site, Stack, here, owner, stack_of
from ...watch.ledger import Ledger, LedgerRow
from .phases import ANNOTATION, PATIENCE_S, Period, Phase, RecordedPhase
from .tape import MARK, Tape

LONGEST = 64  # steps: a longer period is not looked for
MARKED = frozenset({"sync", "h2d", "d2h", "alloc", "free", "pin"})


class MarkingLedger(Ledger):
    """A ledger that writes a mark for each stall into the running profile: the id of its place in `locations`."""

    def __init__(self, gputrace: bool, without: frozenset[str] = frozenset()):
        super().__init__(None, gputrace, "ops", without)
        self.locations: dict[str, Place] = {}
        self.lines: dict[Site | None, set[int]] = {}  # the steps in which each line blocked
        self.sizes: set[int] = set()  # bytes of each copy
        self._complete: dict[tuple, tuple[int, int, float]] = {}
        self._ids: dict[Place, str] = {}
        self._deaf: Collection[str] = ()

    @contextmanager
    def paused(self, kinds: Collection[str] = KINDS) -> Iterator[None]:
        """Ignore events, or those of these kinds, inside the block."""
        before, self._deaf = self._deaf, kinds
        try:
            yield
        finally:
            self._deaf = before

    def complete(self) -> None:
        """Mark the end of a step, after which `drop_incomplete` drops what was recorded."""
        self.step()
        with self._lock:
            rows = self._rows.copy()  # a garbage collection in the loop adds a row
            self._complete = {key: (row.count, row.bytes, row.ms) for key, row in rows.items()}

    def drop_incomplete(self) -> None:
        """Drop what was recorded after the last whole step, if there was one: a script's end is no step."""
        with self._lock:
            if self._complete:
                self._rows = {key: row for key, row in self._rows.copy().items() if key in self._complete}
                for key, row in self._rows.items():
                    row.count, row.bytes, row.ms = self._complete[key]

    def forget(self) -> None:
        """Drop all rows so far. Places keep their ids, which marks in the profile may have."""
        with self._lock:
            self._rows.clear()
        self.sizes.clear()

    def record(
        self, kind: str, what: str, count: int = 1, bytes: int = 0, ms: float = 0, detail: str = "", place: Place | None = None
    ) -> None:
        assert kind in KINDS, kind
        if kind in self._deaf:
            return
        if kind in MARKED and place is None:
            place = here(self.origins)
            self.lines.setdefault(place.line or place.built, set()).add(self.steps)
            self.sizes.add(bytes)
            number = self._ids.setdefault(place, str(len(self._ids)))
            self.locations[number] = place
            if ANNOTATION is not None:
                with ANNOTATION(MARK + number):
                    pass
        super().record(kind, what, count, bytes, ms, detail, place)


CONVERSIONS = ("to", "cuda", "float", "half", "bfloat16")


class _Inside(local):
    """State of the module conversion that this thread is in: None, or whether a tensor has changed."""

    changed: bool | None = None


@contextmanager
def unchanged() -> Iterator[dict[tuple[str, Place], LedgerRow]]:
    """Count, inside the block, conversions such as `.to()` that return their argument: a row of kind "noop" per user's line."""
    rows: dict[tuple[str, Place], LedgerRow] = {}
    inside = _Inside()

    def of_tensor(original: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(tensor, *args, **kwargs)
        took = time.perf_counter() - began
        if inside.changed is not None:
            inside.changed |= result is not tensor
        elif result is tensor:
            add(original.__name__, took)
        return result

    def of_module(original: Callable, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer, inside.changed = inside.changed, False
        began = time.perf_counter()
        try:
            result = original(module, *args, **kwargs)
            took = time.perf_counter() - began
            if outer is None and not inside.changed:
                add(original.__name__, took)
        finally:
            inside.changed = None if outer is None else outer or inside.changed
        return result

    def add(name: str, seconds: float) -> None:
        place = here()
        if place.site is not None and (place.via is None or owner(place.via.file) is TORCH):  # else a library's, not the user's
            row = rows.setdefault((name, place), LedgerRow("noop", f".{name}()", place))
            row.count += 1
            row.ms += 1e3 * seconds

    with ExitStack() as stack:
        for name in CONVERSIONS:
            stack.enter_context(hooked(torch.Tensor, name, of_tensor))
            stack.enter_context(hooked(torch.nn.Module, name, of_module))
        yield rows


class WatchedPhase(Phase):
    """Steps under the ledger's sensors. `named_lines` are the lines that wait for data, by their spans' names. `unchanged` are
    conversions that change nothing."""

    name = "watched"
    without: frozenset[str] = frozenset()  # sensors that are left out

    def begin(self) -> None:
        super().begin()
        self._loading: Counter[tuple[str, Place]] = Counter()
        self.ledger = MarkingLedger(torch.cuda.is_available(), self.without)
        self.ending.callback(self.ledger.drop_incomplete)
        self.ending.enter_context(self.ledger)
        self._unchanged = self.ending.enter_context(unchanged())
        self.ending.enter_context(hooked(_BaseDataLoaderIter, "__next__", self._loaded))

    def step(self) -> None:
        super().step()
        self.ledger.complete()

    def _loaded(self, original: Callable, iterator: Any) -> Any:
        self._loading[iterator._profile_name, Place(here().site)] += 1
        with self.ledger.paused({"cpu_op"}):  # such work belongs in the loader; waits for it are counted as data
            return original(iterator)

    @property
    def named_lines(self) -> dict[str, Place]:
        """The line of each loader's name; of several lines the busiest."""
        return {name: place for (name, place), _ in reversed(self._loading.most_common())}

    @property
    def unchanged(self) -> list[LedgerRow]:
        return list(self._unchanged.values())


class LocatedPhase(WatchedPhase):
    """Steps under the sensors and on a tape, where each stall leaves a mark. `copied` returns the bytes of the blocking copies
    that the other recording has; each should have its line."""

    name = "located"

    def __init__(self, steps: int, period: Period | None = None, copied: Callable[[], Collection[int]] = frozenset):
        super().__init__(steps + 1)  # the recording's first step is not on its tape, and not counted
        self.least, self._taped, self._copied = steps, RecordedPhase(steps, period), copied

    def begin(self) -> None:
        self._taped.begin()
        self.steps = self._taped.steps
        self.ending.callback(self._taped.end)  # after the sensors: a profiler that stops waits for the device
        super().begin()
        self.ending.enter_context(hooked(torch.cuda, "empty_cache", self._emptied))

    def step(self) -> None:
        Phase.step(self)
        if self.done == 1:
            self.ledger.forget()
        else:
            self.ledger.step()
        with self.ledger.paused():  # a profiler that ends waits for the device: 0.3 waits a step
            if self.done == self.steps - 1 and self._unknown():
                self.steps += self._taped.more()
            self._taped.step()

    def _unknown(self) -> bool:
        """Return whether a blocking copy of the other recording had no line yet, as long as there is time to look for it."""
        if self.steps >= LONGEST or time.perf_counter() - self.began > PATIENCE_S:
            return False
        return not self.ledger.sizes.issuperset(self._copied())

    def _emptied(self, original: Callable) -> None:
        self.ledger.record("free", EMPTIED, count=0)  # frees are counted by another sensor, but without their line
        original()

    @property
    def tape(self) -> Tape | None:
        return self._taped.tape


def repeats_after(steps: Collection[int], window: int) -> int:
    """Return the distance at which these steps of a window repeat; 0 if one of them was not seen to."""
    marked = [step in steps for step in range(window)]
    for distance in range(1, window):
        if all(a == b for a, b in zip(marked, marked[distance:])):
            repeats = all(step + distance in steps or step - distance in steps for step in steps)
            return distance if steps and repeats else 0
    return 0


def period_of(lines: Mapping[Any, Collection[int]], window: int) -> tuple[int, bool]:
    """Return the period of a window of steps, and whether a longer window may have another.

    `lines` are the steps in which each line blocked. A line without a rhythm, such as a read in a random branch, is left out.
    The period of several lines is their least common multiple, or if that is above LONGEST, the longest one.
    """
    distances = {repeats_after(steps, window) for steps in map(frozenset, lines.values())} - {0}
    longest = max(distances, default=1)
    common = lcm(*distances)
    single = any(len(frozenset(steps)) == 1 for steps in lines.values())
    return common if common <= LONGEST else min(longest, LONGEST), single


FEWEST = 20  # steps: two events of every tenth step are among them, and one of every sixteenth


class SurveyPhase(WatchedPhase):
    """Steps under the ledger's sensors until the loop's period is known, in whole periods: at least `steps`, and FEWEST if they
    are fast. It goes on while a line was seen in a single step, up to LONGEST steps."""

    without = frozenset({"allocator"})  # it records every allocation, which takes time to read

    def __init__(self, steps: int, period: Period, name: str = "surveyed"):
        super().__init__(steps, period)
        self.name = name

    def step(self) -> None:
        super().step()
        self.period.steps, open = period_of(self.ledger.lines, self.done)
        if self.done < self.steps or time.perf_counter() - self.began > PATIENCE_S:
            return
        if self.done < FEWEST or (open and self.done < LONGEST) or self.done % self.period.steps:
            self.steps += 1


EVERY_S = 0.0005  # from one sample to the next
SWITCH_S = 0.0001  # after which Python's code lets the sampling thread run; by default 5 ms, as long as some steps
ENOUGH_S, MOST = 0.7, 100  # seconds and steps, whichever is reached first


@dataclass(frozen=True)
class Samples:
    """Numbers of samples by stack: all, and those in which the device was idle."""

    stacks: Mapping[Stack, int] = field(default_factory=dict)
    late: Mapping[Stack, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.stacks.values())


def device_idle() -> Callable[[], bool]:
    """Return a function that returns whether this thread's device has done all work of this thread's streams."""
    streams = {torch.cuda.default_stream(), torch.cuda.current_stream()}
    return lambda: all(stream.query() for stream in streams)


class SampledPhase(Phase):
    """Steps in which the stack of the thread that runs them is sampled, in whole periods, for ENOUGH_S or MOST steps."""

    name = "sampled"

    def __init__(self, steps: int, period: Period, idle: Callable[[], Callable[[], bool]] = device_idle):
        super().__init__(steps, period)
        self._idle_of = idle
        self._stacks: Counter[Stack] = Counter()
        self._late: Counter[Stack] = Counter()

    def begin(self) -> None:
        super().begin()
        self._home, self._idle = threading.get_ident(), self._idle_of()
        self._over, self._lock = threading.Event(), threading.Lock()
        self.ending.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_S)
        self.ending.enter_context(hooked(torch.cuda.CUDAGraph, "capture_begin", self._captured))
        self._thread = threading.Thread(target=self._sample, name="gpubound-samples", daemon=True)
        self._thread.start()
        self.ending.callback(self._thread.join)
        self.ending.callback(self._over.set)  # before it is waited for

    def _captured(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Stop before a capture, which a query of a stream would end."""
        with self._lock:
            self._over.set()
        self.absent["lines of the host"] = "the script captured a graph while they were sampled"
        return original(*args, **kwargs)

    def _sample(self) -> None:
        while not self._over.wait(EVERY_S):
            with self._lock:
                if self._over.is_set():
                    return
                frame = sys._current_frames().get(self._home)
                late = self._idle()
            if frame is not None:
                stack = stack_of(frame)
                self._stacks[stack] += 1
                self._late[stack] += late

    def step(self) -> None:
        super().step()
        if self.done == self.steps and self.done < MOST and time.perf_counter() - self.began < ENOUGH_S:
            self.steps += self.period.steps

    @property
    def samples(self) -> Samples:
        return Samples(self._stacks, +self._late)
