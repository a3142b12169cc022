"""The tape as a trace for ui.perfetto.dev: the user's lines are slices, each above the calls that it made.

Perfetto drops a slice that begins inside another one and ends after it. So calls, spans, lines and gaps have tracks of their
own, and so has each stream of a device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import MeasureError
from ...watch.site import Place
from ..gaps import Gap
from ..recorded import Recorded
from ..tape import Tape
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
    for work in tape.work:
        where = DEVICES + work.device, track[work.device, work.stream]
        yield _slice(work.name, *where, work.start, work.end, kind=work.kind, bytes=work.bytes)
        if call := arrows.pop(work.correlation, None):
            flow = {"cat": "launch", "name": "launch", "id": work.correlation}
            yield flow | {"ph": "s", "pid": HOST, "tid": threads[call.thread, "calls"], "ts": call.start}
            yield flow | {"ph": "f", "bp": "e", "pid": where[0], "tid": where[1], "ts": work.start}


def _idle(gaps: Sequence[Gap]) -> Iterator[dict[str, Any]]:
    for gap in gaps:
        yield _slice((SHARES | LEAVES)[gap.leaf or gap.cause], DEVICES + gap.device, GAPS, gap.start, gap.end)


def _named(process: int, name: str, tracks: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for track, title in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": title}}


def _slice(name: str, process: int, track: int, start: float, end: float, **args: Any) -> dict[str, Any]:
    kept = {key: value for key, value in args.items() if value}
    event = {"ph": "X", "name": clean(name), "pid": process, "tid": track, "ts": round(start, 3), "dur": round(end - start, 3)}
    return event | ({"args": kept} if kept else {})
