"""Time a callable, or several against each other:

- Device work is asynchronous, so it is timed by events on the device; the host synchronises once, after the last run.
- Warm-up runs keep compilation, allocation and handle creation out of the figure.
- A run whose inputs are in L2 measures L2. `cold_l2` overwrites four times its size before each run, untimed. The dirty lines
  are written back during the run, like an output's last lines during the next run: a kernel that writes as much as L2 holds
  is charged exactly, one that only reads is charged up to L2's size too much, never too little.
- `host_ahead` keeps the device spinning until the host has queued the whole run, so that launch gaps do not count. Use it to
  time kernels, leave it out to time what a user waits for. `graph` removes launches altogether.

`compare` times several callables alternately, in random order. A drifting clock (heat, another process, power) changes
neighbouring runs equally, so the ratio is taken inside each round, and then the median over rounds.
"""

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..device import resolve
from ..errors import MeasureError
from ..formatting import in_words

GRAPH_CALLS = 20  # calls in one graph: starting a graph costs the device 1-2 µs, of which each call has 1/20
SLEEP_CYCLES_PER_S = 2e9  # an upper bound on today's clocks: a slower device waits longer than needed, untimed


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
    device = resolve_device(device)
    if graph:
        fn, warmup = captured("time", fn, device, max(1, warmup), cold_l2, host_ahead), 1
    clock = clock_for("time", device, cold_l2, host_ahead, graph)
    clock.warm("fn", fn, warmup)
    return Timing.of(clock.read([clock.run("fn", fn) for _ in range(runs)]), clock.name)


def captured(caller: str, work: Work, device: torch.device, warmup: int, cold_l2: bool, host_ahead: bool) -> Callable[[], Any]:
    """Return the replay of a graph of GRAPH_CALLS calls, captured on a new stream of that device."""
    if device.type != "cuda" or cold_l2 or host_ahead or isinstance(work, Prepared):
        raise ValueError(
            f"{caller}: graph=True wants a plain callable on a CUDA device without cold_l2 and host_ahead, got "
            f"{type(work).__name__} on {device}, cold_l2={cold_l2}, host_ahead={host_ahead}; leave one of them out."
        )
    current = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            run_once(work)
    current.wait_stream(stream)
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
    """Clock of the host. `run` runs work and returns a handle, `read` converts handles to seconds after all runs."""

    name = "perf_counter"

    def warm(self, name: str, work: Work, times: int) -> None:
        for _ in range(times):
            run_once(work)

    def run(self, name: str, work: Work) -> float:
        call = _prepared(work)
        start = perf_counter()
        call()
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
        """Run `times` times (and once more under host_ahead), and record how long the host takes to queue one warm run."""
        for _ in range(times + self.host_ahead):
            self.queue_s[name] = HostClock().run(name, work)
        torch.cuda.synchronize(self.device)

    def run(self, name: str, work: Work) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        with torch.cuda.device(self.device):
            call = _prepared(work)
            if self.flush is not None:
                self.flush.fill_(1)
            if self.host_ahead:  # twice the time of the last warm run; work that synchronises is still timed fully
                torch.cuda._sleep(int(2 * min(self.queue_s[name], 0.01) * SLEEP_CYCLES_PER_S))
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
        return begin, end

    def read(self, handles: list[Any]) -> list[float]:
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 / self.calls for begin, end in handles]


def _prepared(work: Work) -> Callable[[], Any]:
    return partial(work.run, work.prepare()) if isinstance(work, Prepared) else work


def run_once(work: Work) -> Any:
    """Run the work once, untimed, and return its result."""
    return _prepared(work)()


def clock_for(
    caller: str, device: torch.device, cold_l2: bool, host_ahead: bool, graph: bool = False
) -> HostClock | DeviceClock:
    if device.type == "cuda":
        return DeviceClock(device, cold_l2, host_ahead, graph)
    if cold_l2 or host_ahead:
        option = "cold_l2" if cold_l2 else "host_ahead"
        raise ValueError(f"{caller}: {option}=True needs a CUDA device, got {device}; leave it out.")
    return HostClock()


def resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return resolve(device)


def check_counts(caller: str, **counts: tuple[int, int]) -> None:
    for name, (got, least) in counts.items():
        if not isinstance(got, int) or got < least:
            raise ValueError(f"{caller}: {name} must be an integer of at least {least}, got {got!r}.")


RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """The peer's time over ours: above 1, ours is faster. `low` to `high` is the 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half the interval, relative to the value: read it as plus or minus."""
        return (self.high - self.low) / (2 * self.value)

    def __str__(self) -> str:
        return f"{self.value:.3f}x ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`: a Timing for each name, and for each peer the Ratio of ours over it."""

    ours: str
    timings: dict[str, Timing]
    ratios: dict[str, Ratio]

    @property
    def ratio(self) -> float:
        return self._only().value

    @property
    def spread(self) -> float:
        return self._only().spread

    def _only(self) -> Ratio:
        if len(self.ratios) != 1:
            raise ValueError(
                f"comparison: {len(self.ratios)} peers were timed ({', '.join(self.ratios)}); take one of comparison.ratios."
            )
        return next(iter(self.ratios.values()))

    def __str__(self) -> str:
        width = max(map(len, self.timings))
        lines = [f"{self.ours:{width}}  {in_words(self.timings[self.ours].median_s):>8}"]
        for name, ratio in self.ratios.items():
            lines.append(f"{name:{width}}  {in_words(self.timings[name].median_s):>8}  {self.ours} is {ratio}")
        return "\n".join(lines)


def compare(
    works: Mapping[str, Work],
    *,
    rounds: int = 20,
    warmup: int = 3,
    cold_l2: bool = False,
    host_ahead: bool = False,
    graph: bool = False,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Comparison:
    """Time `works` alternately, round after round. The first is ours, the others are its peers. Options as in `time`."""
    if len(works) < 2:
        raise ValueError(
            f"compare: got {len(works)} callables, wanted ours and at least one peer, as in {{'ours': f, 'peer': g}}."
        )
    check_counts("compare", rounds=(rounds, 3), warmup=(warmup, 0))
    device, order = resolve_device(device), list(works)
    if graph:
        works = {name: captured("compare", works[name], device, max(1, warmup), cold_l2, host_ahead) for name in order}
    clock = clock_for("compare", device, cold_l2, host_ahead, graph)
    handles: dict[str, list[Any]] = {name: [] for name in works}
    shuffle = random.Random(seed).shuffle
    try:
        for name in order:
            clock.warm(name, works[name], warmup)
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                handles[name].append(clock.run(name, works[name]))
    except Exception as error:
        error.add_note(f"compare: raised by {name!r}")
        raise
    return compare_samples({name: clock.read(handles[name]) for name in works}, clock=clock.name)


def compare_samples(seconds: Mapping[str, list[float]], *, clock: str = "given") -> Comparison:
    """Compare samples that were measured elsewhere: `seconds[name][i]` is round i. The first name is ours."""
    names = list(seconds)
    rounds = len(seconds[names[0]])
    if len(names) < 2 or any(len(samples) != rounds for samples in seconds.values()):
        raise ValueError(
            "compare_samples: got "
            + ", ".join(f"{len(s)} rounds of {n!r}" for n, s in seconds.items())
            + "; wanted the same number for ours and at least one peer."
        )
    ours = np.asarray(seconds[names[0]])
    ratios = {name: _interval(np.asarray(seconds[name]) / ours) for name in names[1:]}
    return Comparison(names[0], {name: Timing.of(list(samples), clock) for name, samples in seconds.items()}, ratios)


def _interval(per_round: np.ndarray) -> Ratio:
    """Return the median and its 95 % bootstrap interval, with a fixed seed."""
    picks = np.random.default_rng(0).integers(0, len(per_round), (RESAMPLES, len(per_round)))
    medians = np.median(per_round[picks], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(per_round)), float(low), float(high))
