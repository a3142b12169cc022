"""Tapes without a GPU. `Synthetic` goes through a program as a host and its devices do, and writes down when what happened.

Each thread has a clock, each stream the moment at which its queue is empty. So a program with a plant and one without it have
true step times, and what the doctor says of the first can be held against the second:

    tape = Synthetic().launch(run=50).sync().step().launch(run=50).sync().step().tape()
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gpubound.doctor.record.tape import Call, Mark, Span, Tape, Work

MAIN, AUTOGRAD, LOADER = 1, 2, 3


class Synthetic:
    """`latency`: from a launch's start to the device's; `gap`: between two works in a queue; `tail`: from a work's end to the
    end of what waited for it. All in microseconds."""

    def __init__(self, latency: float = 5.0, gap: float = 1.0, tail: float = 2.0, depth: int = 1024):
        self.latency, self.gap, self.tail, self.depth = latency, gap, tail, depth
        self.clock: dict[int, float] = defaultdict(float)
        self.free: dict[tuple[int, int], float] = defaultdict(lambda: -1e9)  # when a queue is empty
        self.ready: dict[tuple[int, int], float] = defaultdict(float)  # no work of a queue starts before: waits on events
        self.began: dict[int, list[float]] = defaultdict(list)  # when each work of a device began
        self.events: dict[str, tuple[float, int]] = {}  # name -> when the device comes to it, its record's correlation
        self.calls: list[Call] = []
        self.work: list[Work] = []
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.steps: list[tuple[float, float]] = []
        self._number = 0
        self._step_from = 0.0

    # the host

    def think(self, us: float, thread: int = MAIN) -> Synthetic:
        """Python between calls."""
        self.clock[thread] += us
        return self

    def doing(self, kind: str, us: float, name: str = "", thread: int = MAIN) -> Synthetic:
        """A span of `kind` in which the host makes no calls: a wait for data, a collection, a compilation."""
        start = self.clock[thread]
        self.clock[thread] += us
        self.spans.append(Span(name or kind, kind, thread, start, start + us))
        return self

    def hand(self, to: int, of: int = MAIN, us: float = 10.0) -> Synthetic:
        """Thread `of` waits from here on, until it is handed back; thread `to` goes on."""
        self.clock[to] = max(self.clock[to], self.clock[of]) + us
        return self

    def mark(self, site: str, thread: int = MAIN) -> Synthetic:
        self.marks.append(Mark(site, thread, self.clock[thread]))
        return self

    def step(self, thread: int = MAIN) -> Synthetic:
        """The end of a step."""
        self.steps.append((self._step_from, self.clock[thread]))
        self._step_from = self.clock[thread]
        return self

    def _call(self, name: str, kind: str, thread: int, end: float, **rest) -> int:
        self._number += 1
        self.calls.append(Call(name, kind, thread, self.clock[thread], end, self._number, **rest))
        self.clock[thread] = end
        return self._number

    # the device

    def _run(self, name: str, kind: str, run: float, issued: float, number: int, device: int, stream: int, **rest) -> float:
        queue = (device, stream)
        start = max(issued + self.latency, self.free[queue] + self.gap, self.ready[queue])
        self.free[queue] = start + run
        self.began[device].append(start)
        self.work.append(Work(name, kind, device, stream, start, start + run, number, **rest))
        return start + run

    def _room(self, now: float, device: int) -> float:
        """When the device's queue has a place: a launch into a full one waits."""
        begun = self.began[device]
        return now if len(begun) < self.depth else max(now, begun[-self.depth])

    def launch(
        self, run: float = 10.0, host: float = 4.0, stream: int = 7, device: int = 0, thread: int = MAIN,
        name: str = "kernel", kind: str = "kernel", times: int = 1,
    ) -> Synthetic:  # fmt: skip
        """A kernel of `run` microseconds whose launch takes `host`; `kind="comm"` for a collective."""
        for _ in range(times):
            issued = self._room(self.clock[thread], device)
            end = issued + host
            number = self._call("cudaLaunchKernel", "launch", thread, end, stream=stream, device=device)
            self._run(name, kind, run, issued, number, device, stream)
        return self

    def copy(
        self, kind: str = "h2d", run: float = 10.0, bytes: int = 1 << 20, pageable: bool = False, host: float = 4.0,
        stream: int = 7, device: int = 0, thread: int = MAIN,
    ) -> Synthetic:  # fmt: skip
        """cudaMemcpyAsync. From or to pageable memory it keeps its host until the copy is done."""
        issued = self.clock[thread]
        queue = (device, stream)
        done = max(issued + self.latency, self.free[queue] + self.gap, self.ready[queue]) + run
        end = max(issued + host, done + self.tail) if pageable else issued + host
        where = {"stream": stream, "device": device, "bytes": bytes}
        number = self._call("cudaMemcpyAsync", "copy", thread, end, blocks=pageable, **where)
        self._run(f"Memcpy {kind}", kind, run, issued, number, device, stream, bytes=bytes, pageable=pageable)
        return self

    def sync(
        self, stream: int | None = 7, device: int = 0, thread: int = MAIN, host: float = 3.0, event: str = ""
    ) -> Synthetic:
        """Wait for a stream, for an event, or with `stream=None` for everything on the device."""
        if event:
            done, record = self.events[event]
            end = max(self.clock[thread] + host, done + self.tail)
            self._call("cudaEventSynchronize", "sync", thread, end, record=record, device=device)
            return self
        queues = [q for q in self.free if q[0] == device and stream in (None, q[1])]
        done = max((max(self.free[q], self.ready[q]) for q in queues), default=0.0)
        name = "cudaDeviceSynchronize" if stream is None else "cudaStreamSynchronize"
        end = max(self.clock[thread] + host, done + self.tail)
        self._call(name, "sync", thread, end, stream=stream, device=device)
        return self

    def item(self, stream: int = 7, thread: int = MAIN) -> Synthetic:
        """`.item()`: a small copy to pinned memory, then a wait for its stream."""
        return self.copy("d2h", run=1.5, bytes=4, stream=stream, thread=thread).sync(stream, thread=thread)

    def stop(self, kind: str = "alloc", us: float = 100.0, device: int = 0, thread: int = MAIN) -> Synthetic:
        """cudaMalloc, cudaFree or cudaHostAlloc: waits for the whole device, then takes its time."""
        name = {"alloc": "cudaMalloc", "free": "cudaFree", "pin": "cudaHostAlloc"}[kind]
        done = max((end for (where, _), end in self.free.items() if where == device), default=0.0)
        self._call(name, kind, thread, max(self.clock[thread], done) + us, device=device)
        return self

    def record(self, event: str, stream: int = 7, device: int = 0, thread: int = MAIN) -> Synthetic:
        queue = (device, stream)
        number = self._call("cudaEventRecord", "event", thread, self.clock[thread] + 1.0, stream=stream, device=device)
        self.events[event] = (max(self.free[queue], self.ready[queue], self.clock[thread]), number)
        return self

    def wait_event(self, event: str, stream: int, device: int = 0, thread: int = MAIN) -> Synthetic:
        """The stream waits for the event; the host does not."""
        done, record = self.events[event]
        end = self.clock[thread] + 1.0
        self._call("cudaStreamWaitEvent", "event", thread, end, stream=stream, device=device, record=record)
        queue = (device, stream)
        self.ready[queue] = max(self.ready[queue], done)
        return self

    def graph(
        self, runs: Sequence[float] = (10.0, 10.0, 10.0), host: float = 12.0, hidden: bool = False, whole: bool = False,
        stream: int = 7, device: int = 0, thread: int = MAIN,
    ) -> Synthetic:  # fmt: skip
        """A replay: its nodes one by one, as one work (`whole`), or not on the tape at all (`hidden`)."""
        issued, queue = self.clock[thread], (device, stream)
        number = self._call("cudaGraphLaunch", "graph", thread, issued + host, stream=stream, device=device)
        before = len(self.work)
        for run in runs:
            self._run("node", "kernel", run, issued, number, device, stream)
        nodes = self.work[before:]
        if hidden or whole:
            del self.work[before:]
        if whole:
            self.work.append(Work("graph", "graph", *queue, nodes[0].start, nodes[-1].end, number))
        return self

    def tape(self, **about) -> Tape:
        return Tape(self.calls, self.work, self.spans, self.marks, self.steps, about)
