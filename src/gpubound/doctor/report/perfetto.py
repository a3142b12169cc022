"""The tape as a trace for ui.perfetto.dev: the user's lines are slices, each above the calls that it made.

Perfetto drops a slice that begins inside another one and ends after it, by a nanosecond even. So calls, spans, lines and gaps
have tracks of their own, and so has each stream of a device. It drops what is before 0, too: times are whole nanoseconds since
the tape's first one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from ...errors import MeasureError
from ...watch.site import Place
from ..gaps import Gap
from ..recorded import Recorded
from ..tape import Tape, Work
from .words import LEAVES, SHARES, clean

HOST = 1  # the process of the host; device n is DEVICES + n
DEVICES = 100
STEPS, GAPS = 1, 1  # a track of the host, and one of each device
KINDS = ("lines", "calls", "spans")


def perfetto(recording: Recorded) -> str:
    tape = recording.tape
    about: dict[str, str] = {}
    gaps: tuple[Gap, ...] = ()
    try:
        gaps = recording.bar.gaps
    except MeasureError as error:
        about["idle"] = f"not told: {error}"
    events = [*_host(tape, recording.located), *_devices(tape), *_idle(gaps)]
    events.sort(
        key=lambda event: (event.get("ts", -inf), -event.get("dur", 0))
    )  # of one start the longest slice holds the others
    first = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        _in_us(event, first)
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}, separators=(",", ":"))


def _host(tape: Tape, located: Mapping[int, Place]) -> Iterator[dict[str, Any]]:
    track = _tracks(tape)
    names = {number: f"thread {number // 10}: {kind}" for (_, kind), number in track.items()}
    yield from _named(HOST, "host", {STEPS: "steps"} | names)
    for nth, (start, end) in enumerate(tape.steps, 1):
        yield _slice(f"step {nth}", HOST, STEPS, start, end)
    for n, call in enumerate(tape.calls):
        when = call.start, call.end
        yield _slice(call.name, HOST, track[call.thread, "calls"], *when, bytes=call.bytes, waits=call.waits)
        if n in located and (site := located[n].site or located[n].built):
            name = f"{site.at}  {site.code}"
            yield _slice(name, HOST, track[call.thread, "lines"], *when, function=clean(site.function))
    for span in tape.spans:
        yield _slice(span.name, HOST, track[span.thread, "spans"], span.start, span.end, kind=span.kind)


def _tracks(tape: Tape) -> dict[tuple[int, str], int]:
    """The track of each thread and kind: 10, 11, 12 are those of the first thread."""
    threads = dict.fromkeys([*(call.thread for call in tape.calls), *(span.thread for span in tape.spans)])
    return {(thread, kind): 10 * n + KINDS.index(kind) for n, thread in enumerate(threads, 1) for kind in KINDS}


def _devices(tape: Tape) -> Iterator[dict[str, Any]]:
    """Works, and an arrow from each launch to its first one."""
    queues = sorted({(work.device, work.stream) for work in tape.work})
    track = {queue: GAPS + 1 + n for n, queue in enumerate(queues)}
    for device in sorted({device for device, _ in queues}):
        names = {GAPS: "idle"} | {track[queue]: f"stream {queue[1]}" for queue in queues if queue[0] == device}
        yield from _named(DEVICES + device, f"GPU {device}", names)
    threads = _tracks(tape)
    arrows = {call.correlation: call for call in tape.calls if call.correlation}
    for work, begin in _apart(tape.work):
        where = DEVICES + work.device, track[work.device, work.stream]
        early = round(begin - work.start, 3)
        yield _slice(work.name, *where, begin, work.end, kind=work.kind, bytes=work.bytes, began_us_before=early)
        if call := arrows.pop(work.correlation, None):
            flow = {"cat": "launch", "name": "launch", "id": work.correlation}
            yield flow | {"ph": "s", "pid": HOST, "tid": threads[call.thread, "calls"], "ts": _ns(call.start)}
            yield flow | {"ph": "f", "bp": "e", "pid": where[0], "tid": where[1], "ts": _ns(begin)}


def _apart(works: Iterable[Work]) -> Iterator[tuple[Work, float]]:
    """Each work in the order of their starts, and from where on it is drawn.

    Two works of a stream may overlap, by an error of the clock or because the second was let in early. If the second also ends
    later, it is drawn from the end of the first.
    """
    drawn: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)  # those of a stream that go on
    for work in sorted(works, key=lambda work: (work.start, -work.end)):
        queue, begin = (work.device, work.stream), work.start
        drawn[queue] = [(first, last) for first, last in drawn[queue] if last > work.start]
        while ends := [last for first, last in drawn[queue] if first <= begin < last < work.end]:
            begin = max(ends)
        drawn[queue].append((begin, work.end))
        yield work, begin


def _idle(gaps: Sequence[Gap]) -> Iterator[dict[str, Any]]:
    for gap in gaps:
        yield _slice((SHARES | LEAVES)[gap.leaf or gap.cause], DEVICES + gap.device, GAPS, gap.start, gap.end)


def _named(process: int, name: str, tracks: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for track, title in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": title}}


def _slice(name: str, process: int, track: int, start: float, end: float, **args: Any) -> dict[str, Any]:
    kept = {key: value for key, value in args.items() if value}
    begin = _ns(start)
    event = {"ph": "X", "name": clean(name), "pid": process, "tid": track, "ts": begin, "dur": _ns(end) - begin}
    return event | ({"args": kept} if kept else {})


def _ns(us: float) -> int:
    return round(us * 1000)


def _in_us(event: dict[str, Any], first: int) -> None:
    """Perfetto cuts microseconds to nanoseconds, or rounds them: with a quarter more both give back the same."""
    if "ts" in event:
        event["ts"] = (event["ts"] - first + 0.25) / 1000
    if "dur" in event:
        event["dur"] = (event["dur"] + 0.25) / 1000
