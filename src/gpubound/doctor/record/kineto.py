"""Read what torch.profiler writes (Kineto's JSON in Chrome's trace format, of CUDA or ROCm) into a tape, event by event."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from ...errors import DataError
from ...files import reading, regular
from ...formatting import readable, shown
from .tape import MARK, SPAN, SPANS, Call, Mark, Span, Tape, Work

CHUNK = 1 << 20  # characters
LONG = 1 << 20  # characters; no event is as long: an error so far from the end is damage, not a truncated file

WANTED = "give the file that torch.profiler's export_chrome_trace wrote (.json or .json.gz)."

_decode = json.JSONDecoder(strict=False).raw_decode
_space = re.compile(r"[\s,]*")
_events = re.compile(r'"traceEvents"\s*:\s*\[')


def events(path: Path, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each event of a trace, of which only a part is in memory. The values before the events are put into `head`."""
    with reading(regular(path)), open(path, "rb") as file:
        begin = file.read(16)
    if begin.startswith(b"SQLite format 3") or path.suffix in (".nsys-rep", ".qdrep"):
        raise DataError(f"{path}: is a report of Nsight Systems, wanted a trace of torch.profiler; {WANTED}")
    open_ = gzip.open if begin.startswith(b"\x1f\x8b") else open
    with reading(path), open_(path, "rt", encoding="utf-8", errors="replace") as text:
        yield from _decoded(path, text, head)


def _decoded(path: Path, text: IO[str], head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    count, buffer = 0, ""

    def more() -> None:
        nonlocal buffer
        try:
            chunk = text.read(CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            chunk = ""
        if not chunk:
            raise DataError(
                f"{path}: ends in the middle, after {count:,} events; let the profiler finish writing, or copy the file again."
            )
        buffer += chunk

    def damaged() -> DataError:
        read = readable(path.stat().st_size)
        return DataError(f"{path}: is not JSON after event {count:,} (file of {read}); record the trace again.")

    more()
    if buffer.lstrip()[:1] not in ("{", "["):
        raise DataError(f"{path}: begins with {shown(buffer[:20])}, wanted JSON; {WANTED}")
    if buffer.lstrip().startswith("["):
        at = buffer.index("[") + 1
    else:
        while (start := _events.search(buffer)) is None:
            try:
                more()
            except DataError as cut:
                why = cut
                with suppress(json.JSONDecodeError):
                    json.loads(buffer, strict=False)
                    why = DataError(f"{path}: is JSON without traceEvents, so it is no trace; {WANTED}")
                raise why from None
        with suppress(json.JSONDecodeError):  # the events may be readable all the same
            head |= json.loads(buffer[: start.start()] + '"": 0}', strict=False)
        at = start.end()
    while True:
        at = _space.match(buffer, at).end()  # type: ignore[union-attr]
        try:
            if buffer[at : at + 1] == "]":
                return
            event, end = _decode(buffer, at)
        except json.JSONDecodeError as error:
            if error.pos and len(buffer) - error.pos > LONG:
                raise damaged() from error
            buffer, at = buffer[at:], 0
            more()
            continue
        if not isinstance(event, dict):
            raise damaged()
        at, count = end, count + 1
        yield event


TIMED = "(dynamo_timed)"  # suffix of torch's spans of a compilation and its parts
PYTHON = 100.0  # µs; shorter calls of Python functions are left out: a trace with stacks has millions of them

RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver"})
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
HOST = frozenset({"cpu_op", "user_annotation", "python_function"})
CATEGORIES = RUNTIME | DEVICE | HOST | {"cuda_sync", "gpu_user_annotation", "overhead", "ac2g", "Trace"}

_PREFIX = re.compile(r"^(?:cuda|cu|hip)(?=[A-Z])|_(?:v\d+|ptsz|spt|ptds).*$")
_COMM = re.compile(r"nccl|rccl|msccl|nvshmem|cross_device_reduce|all_?reduce_kernel", re.IGNORECASE)

# Calls by their names without prefix and version; the first match counts.
_CALLS: list[tuple[str, str]] = [
    (r"GraphLaunch", "graph"),
    (r"(Stream|Device|Event|Ctx)Synchronize", "sync"),
    (r"LaunchHostFunc|.*(Malloc|Free|Alloc)\w*Async", "other"),
    (r"(Ext|Module|ExtModule)?Launch|Memset", "launch"),
    (r"Memcpy", "copy"),
    (r"HostAlloc|HostMalloc|MallocHost|MemHostAlloc|HostRegister|MemHostRegister", "pin"),
    (r"FreeHost|HostFree|MemFreeHost|HostUnregister|MemHostUnregister", "pin"),
    (r"Malloc|MemAlloc|MemCreate|MemMap", "alloc"),
    (r"Free|MemFree|MemUnmap|MemRelease", "free"),
    (r"EventRecord|StreamWaitEvent", "event"),
]
_COPIES = {"HtoD": "h2d", "HostToDevice": "h2d", "DtoH": "d2h", "DeviceToHost": "d2h"}


def call_kind(name: str) -> str:
    """Classify a call of the runtime or driver by its name.

    >>> call_kind("cudaLaunchKernelExC_v11060"), call_kind("hipFree"), call_kind("cudaMallocAsync")
    ('launch', 'free', 'other')
    """
    bare = _PREFIX.sub("", name)
    return next((kind for pattern, kind in _CALLS if re.match(pattern, bare)), "other")


def read_trace(path: str | Path, step: str = "") -> Tape:
    """Read the tape of a trace. A step is the span of an annotation named `step`, or else the profiler's step, or else the time
    between two ends of Optimizer.step; without any of them the tape has no steps."""
    path = Path(path)
    reader = _Reader(step)
    head: dict[str, Any] = {}
    ours = count = 0
    for event in events(path, head):
        count += 1
        if event.get("cat") in CATEGORIES:
            ours += 1
            try:
                reader.take(event)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise DataError(
                    f"{path}: event {count:,} is damaged ({type(error).__name__}: {error}); record it again."
                ) from error
    if not ours:
        raise DataError(f"{path}: has {count:,} events, but none of torch.profiler (cpu_op, cuda_runtime, kernel); {WANTED}")
    return reader.tape(head)


class _Reader:
    def __init__(self, step: str):
        self.step = step
        self.first_time: float | None = None  # the first event's time: small numbers keep their nanoseconds
        self.calls: list[Call] = []
        self.work: list[Work] = []
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.marked: list[tuple[float, float]] = []
        self.profiled: list[tuple[float, float]] = []
        self.updates: list[float] = []
        self.waits: dict[int, dict[str, Any]] = {}  # arguments of each wait, by its call's correlation
        self.names: dict[str, str] = {}  # one string for all events of a name; sys.intern would grow the process's table
        self.call_kinds: dict[str, str] = {}
        self.streams: dict[str, int] = {}

    def take(self, event: dict[str, Any]) -> None:
        category, args = event["cat"], event.get("args") or {}
        if event.get("ph") != "X" or "ts" not in event or category == "Trace":
            return
        ts = float(event["ts"])
        if self.first_time is None:
            self.first_time = ts
        start = ts - self.first_time
        end = start + max(float(event.get("dur") or 0.0), 0.0)
        name = str(event["name"])
        name = self.names.setdefault(name, name)
        if category in RUNTIME:
            kind = self.call_kinds.get(name) or self.call_kinds.setdefault(name, call_kind(name))
            self.calls.append(Call(name, kind, int(event["tid"]), start, end, _correlation(args)))
        elif category in DEVICE:
            self._work(category, name, start, end, args, event)
        elif category == "cuda_sync":
            self.waits[int(args.get("correlation") or 0)] = args
        elif category in HOST:
            self._span(category, name, int(event["tid"]), start, end)

    def _work(self, category: str, name: str, start: float, end: float, args: dict[str, Any], event: dict[str, Any]) -> None:
        kind = "comm" if _COMM.search(name) else "kernel"
        if category == "gpu_memset":
            kind = "memset"
        elif category == "gpu_memcpy":
            kind = next((kind for word, kind in _COPIES.items() if word in name), "d2d")
        device, stream = int(args.get("device", event["pid"])), self._stream(args.get("stream", event["tid"]))
        size = int(args.get("bytes") or 0)
        self.work.append(Work(name, kind, device, stream, start, end, _correlation(args), size, "Pageable" in name))

    def _stream(self, value: Any) -> int:
        """Return a stream's number. ROCm may write an address."""
        text = str(value)
        return int(text) if text.lstrip("-").isdigit() else self.streams.setdefault(text, 1_000 + len(self.streams))

    def _span(self, category: str, name: str, thread: int, start: float, end: float) -> None:
        if name.startswith(MARK):
            self.marks.append(Mark(name[len(MARK) :], thread, start))
            return
        if self.step and name == self.step:
            self.marked.append((start, end))
        if name.startswith("ProfilerStep#"):
            self.profiled.append((start, end))
            return
        kind = {"cpu_op": "op", "python_function": "python"}.get(category, "annotation")
        if name.startswith(SPAN):
            _, kind, name = name.split("|", 2)
            if kind not in SPANS:
                raise ValueError(f"a span of kind {kind!r}, wanted one of {', '.join(SPANS)}")
        elif name.startswith("Optimizer.step"):
            kind = "optimizer"
            self.updates.append(end)
        elif name.startswith("enumerate(DataLoader)"):
            kind = "data"
        elif name == "Python GC":
            kind = "gc"
        elif name.endswith(TIMED):
            kind = "compile"
        elif name.startswith("autograd::engine::evaluate_function"):
            kind = "backward"
        elif kind == "python":
            if end - start < PYTHON:
                return
            name = "/".join(name.split("/")[-2:])  # without the folders of the machine
        self.spans.append(Span(name, kind, thread, start, end))

    def tape(self, head: dict[str, Any]) -> Tape:
        steps = self.marked or self.profiled or list(pairwise(sorted(self.updates)))
        return Tape(self._completed(), self.work, _outermost(self.spans), self.marks, steps, _about(head))

    def _completed(self) -> list[Call]:
        """Return the calls with the facts that other events have of them; nested calls are merged."""
        launched = {work.correlation: work for work in reversed(self.work) if work.correlation}
        sources = {
            int(args["wait_on_cuda_event_record_corr_id"]): int(args.get("wait_on_stream", -1))
            for args in self.waits.values()
            if int(args.get("wait_on_cuda_event_record_corr_id", -1)) > 0
        }
        calls: list[Call] = []
        last: dict[int, int] = {}  # index of each thread's last call
        for call in sorted(self.calls, key=lambda call: (call.start, -call.end)):
            index = last.get(call.thread)
            if index is not None and call.start < calls[index].end and call.end <= calls[index].end:
                outer = calls[index]  # the runtime's call, and inside it the driver's
                if call.correlation in launched and outer.correlation not in launched:
                    calls[index] = replace(outer, correlation=call.correlation, kind=call.kind)
                if calls[index] is not outer or call.correlation not in launched:
                    continue
            last[call.thread] = len(calls)
            calls.append(call)
        return [self._with_facts(call, launched.get(call.correlation), sources) for call in calls]

    def _with_facts(self, call: Call, work: Work | None, sources: dict[int, int]) -> Call:
        if work is not None and call.correlation:
            plain = call.kind == "copy" and "Async" not in call.name and work.kind != "d2d"
            blocks = call.kind == "copy" and (work.pageable or plain)
            return replace(call, stream=work.stream, device=work.device, bytes=work.bytes, blocks=blocks)
        if (args := self.waits.get(call.correlation)) and call.correlation:
            stream, record = (int(args.get(key, -1)) for key in ("stream", "wait_on_cuda_event_record_corr_id"))
            device = int(args["device"]) if "device" in args else None
            return replace(call, stream=stream if stream >= 0 else None, device=device, record=max(record, 0))
        if (stream := sources.get(call.correlation, -1)) >= 0:
            return replace(call, stream=stream)
        return call


def _outermost(spans: list[Span]) -> list[Span]:
    """Keep the outermost span of each compilation, which torch times in nested parts, with the name from the doctor."""
    candidates = [span for span in spans if span.kind != "compile"]
    outermost: dict[int, Span] = {}  # each thread's last one
    for span in sorted((span for span in spans if span.kind == "compile"), key=lambda span: (span.start, -span.end)):
        outer = outermost.get(span.thread)
        if outer is None or span.start >= outer.end:
            outermost[span.thread] = span
            candidates += [outer] if outer else []
        elif not span.name.endswith(TIMED):
            outermost[span.thread] = replace(outer, name=span.name)
    return candidates + list(outermost.values())


def _correlation(args: dict[str, Any]) -> int:
    """Return the id that a work shares with its launch. Older traces of ROCm have only External id for it."""
    return int(args.get("correlation") or args.get("External id") or 0)


def _about(head: dict[str, Any]) -> dict[str, Any]:
    """Return the trace's facts about its machine, without names of hosts or files."""
    devices = [str(each.get("name", "")) for each in head.get("deviceProperties") or [] if isinstance(each, dict)]
    spread = head.get("distributedInfo") or {}
    ranks = {key: spread[key] for key in ("backend", "rank", "world_size") if key in spread} if isinstance(spread, dict) else {}
    return {"source": "torch.profiler", "devices": devices, **ranks}
