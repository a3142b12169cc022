"""Time a callable:

- Device work is asynchronous, so it is timed by events on the device; the host synchronises once, after the last run.
- Warm-up runs keep compilation, allocation and handle creation out of the figure.
- A run that finds its inputs in L2 measures L2. `cold_l2` overwrites four times its size before each run, off the clock. The
  dirty lines left there are written back during the run, as an output's last lines are during the next: a kernel that writes
  as much as L2 holds pays exactly what it owes, one that only reads pays up to L2's size too much. Never too little.
- `host_ahead` keeps the device spinning until the host has queued the whole run, so that launch gaps do not count. Without it
  they do: use it to judge kernels, leave it out to judge what a user waits for. `graph` removes launches altogether.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ..device import resolve
from ..errors import MeasureError
from ..formatting import in_words

GRAPH_CALLS = 20  # calls in one graph: the device's own cost of starting a graph, 1-2 µs, then adds 1/20 of that to each
SLEEP_CYCLES_PER_S = 2e9  # an upper bound on today's clocks: a slower device waits longer than needed, outside the clock


@dataclass(frozen=True)
class Prepared:
    """Work with a part that must not be timed. Before every run, `prepare()` is called untimed, and `run` gets its result."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]


Work = Callable[[], Any] | Prepared


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the quartiles of `runs` runs, and which clock read them."""

    median_s: float
    low_s: float
    high_s: float
    runs: int
    clock: str

    @classmethod
    def of(cls, seconds: list[float], clock: str) -> "Timing":
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        return cls(middle, low, high, len(seconds), clock)

    @property
    def spread(self) -> float:
        """The distance between the quartiles over the median: differences smaller than this are noise."""
        return (self.high_s - self.low_s) / self.median_s

    def __str__(self) -> str:
        return f"{in_words(self.median_s)} ({in_words(self.low_s)} to {in_words(self.high_s)}, {self.runs} runs, {self.clock})"


def time(
    fn: Work,
    *,
    warmup: int = 3,
    runs: int = 20,
    cold_l2: bool = False,
    host_ahead: bool = False,
    graph: bool = False,
    device: torch.device | str | None = None,
) -> Timing:
    """Time `runs` calls of `fn`: median and quartiles. `device` is where the work runs; None: the current GPU, else the CPU.

    `graph=True` captures GRAPH_CALLS calls in one CUDA graph and times its replays: use it for small, launch-bound work.
    """
    check_counts("time", warmup=(warmup, 0), runs=(runs, 1))
    where = place_of(device)
    if graph:
        fn, warmup = captured("time", fn, where, max(1, warmup), cold_l2, host_ahead), 1
    clock = clock_for("time", where, cold_l2, host_ahead, graph)
    clock.warm("fn", fn, warmup)
    return Timing.of(clock.read([clock.run("fn", fn) for _ in range(runs)]), clock.name)


def captured(caller: str, work: Work, device: torch.device, warmup: int, cold_l2: bool, host_ahead: bool) -> Callable[[], Any]:
    """Return the replay of a graph of GRAPH_CALLS calls, captured on a new stream of that device."""
    if device.type != "cuda" or cold_l2 or host_ahead or isinstance(work, Prepared):
        raise ValueError(
            f"{caller}: graph=True wants a plain callable on a CUDA device without cold_l2 and host_ahead, got "
            f"{type(work).__name__} on {device}, cold_l2={cold_l2}, host_ahead={host_ahead}; leave one of them out."
        )
    here = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            run_once(work)
    here.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: kernels' self-tests may still be running on other threads, and allocate
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(GRAPH_CALLS):
                run_once(work)
    except RuntimeError as error:
        cause = str(error).strip().splitlines()[0]
        raise MeasureError(
            f"{caller}: graph=True, but this work cannot be captured: {cause}. Time it without graph."
        ) from error
    return graph.replay


class HostClock:
    """One run at a time: `run` returns a handle, `read` turns handles into seconds once everything has finished."""

    name = "perf_counter"

    def warm(self, name: str, work: Work, times: int) -> None:
        for _ in range(times):
            run_once(work)

    def run(self, name: str, work: Work) -> float:
        go = _ready(work)
        start = perf_counter()
        go()
        return perf_counter() - start

    def read(self, handles: list[Any]) -> list[float]:
        return handles


class DeviceClock:
    """Clock by events on the device. With `graph`, a run is the replay of a graph, and its seconds are those of one call."""

    def __init__(self, device: torch.device, cold_l2: bool = False, host_ahead: bool = False, graph: bool = False):
        self.device, self.host_ahead, self.calls = device, host_ahead or graph, GRAPH_CALLS if graph else 1
        self.name = "device events" + (", cold L2" if cold_l2 else "") + (", host ahead" if self.host_ahead else "")
        self.name += f", around a graph of {GRAPH_CALLS} calls" if graph else ""
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if cold_l2 else 0
        self.flush = torch.empty(4 * l2_bytes, dtype=torch.uint8, device=device) if cold_l2 else None
        self.queue_s: dict[str, float] = {}

    def warm(self, name: str, work: Work, times: int) -> None:
        """Run `times` times (and once more under host_ahead), and note how long the host takes to queue one warm run."""
        for _ in range(times + self.host_ahead):
            self.queue_s[name] = HostClock().run(name, work)
        torch.cuda.synchronize(self.device)

    def run(self, name: str, work: Work) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        with torch.cuda.device(self.device):
            go = _ready(work)
            if self.flush is not None:
                self.flush.fill_(1)
            if self.host_ahead:  # twice what the last warm run took; a work that synchronises is still timed whole
                torch.cuda._sleep(int(2 * min(self.queue_s[name], 0.01) * SLEEP_CYCLES_PER_S))
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            go()
            end.record()
        return begin, end

    def read(self, handles: list[Any]) -> list[float]:
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 / self.calls for begin, end in handles]


def _ready(work: Work) -> Callable[[], Any]:
    """Return the callable of this run, prepared now."""
    return partial(work.run, work.prepare()) if isinstance(work, Prepared) else work


def run_once(work: Work) -> Any:
    """Run the work once, untimed, and return its result."""
    return _ready(work)()


def clock_for(
    caller: str, device: torch.device, cold_l2: bool, host_ahead: bool, graph: bool = False
) -> HostClock | DeviceClock:
    if device.type == "cuda":
        return DeviceClock(device, cold_l2, host_ahead, graph)
    if cold_l2 or host_ahead:
        asked = "cold_l2" if cold_l2 else "host_ahead"
        raise ValueError(f"{caller}: {asked}=True needs a CUDA device, got {device}; leave it out.")
    return HostClock()


def place_of(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return resolve(device)  # a name is no GPU


def check_counts(caller: str, **counts: tuple[int, int]) -> None:
    for name, (got, least) in counts.items():
        if not isinstance(got, int) or got < least:
            raise ValueError(f"{caller}: {name} must be an integer of at least {least}, got {got!r}.")
