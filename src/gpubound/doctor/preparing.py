"""What an op's host does beside the copy that the op is for: it converts the bytes, or gathers them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

from .tape import Span, Tape

MUCH = 100.0  # µs; an op that only copies kept its host for 45 to 56 beside the copy's own call, on a machine with an H200


def preparing(tape: Tape, calls: Collection[int]) -> frozenset[int]:
    """The outermost ops around these copies, as far as their host was busy for longer than that in them."""
    outermost = _outermost_ops(tape)
    busy: dict[int, float] = {}
    for place in calls:
        call = tape.calls[place]
        spans = outermost.get(call.thread, [])
        before = bisect_right(spans, call.start, key=lambda pair: pair[1].start) - 1
        if call.kind == "copy" and before >= 0 and call.end <= spans[before][1].end:
            number, span = spans[before]
            busy[number] = busy.get(number, span.end - span.start) - (call.end - call.start)
    return frozenset(number for number, us in busy.items() if us > MUCH)


def _outermost_ops(tape: Tape) -> dict[int, list[tuple[int, Span]]]:
    """Each thread's ops that lie in no other op, with their places on the tape."""
    found: dict[int, list[tuple[int, Span]]] = {}
    for place, span in enumerate(tape.spans):
        if span.kind == "op":
            mine = found.setdefault(span.thread, [])
            if not mine or span.start >= mine[-1][1].end:
                mine.append((place, span))
            elif span.start == mine[-1][1].start and span.end > mine[-1][1].end:
                mine[-1] = (place, span)
    return found
