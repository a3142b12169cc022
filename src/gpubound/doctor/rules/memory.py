"""Calls of the driver for memory, which stop the device."""

from collections.abc import Iterator

from ...watch.events import EMPTIED
from ...watch.site import Place
from ..claim import Claim, StallRule
from ..evidence import Evidence
from ..lines import Line, by_line, line_of, taped, times
from ..prices import Prices

KINDS = ("free", "alloc", "pin")
STEADY = 0.5  # a step


def look(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    tape = evidence.tape.calls if evidence.tape else ()
    emptied = any(row.what == EMPTIED for row in evidence.rows)
    again = frozenset(n for n, call in enumerate(tape) if call.kind == "alloc" and emptied)
    claimed: frozenset[int] = frozenset()
    for kind in KINDS:
        if evidence.memory.get(kind, STEADY) < STEADY:  # the timed steps were steadier than the recorded ones
            continue
        known = next((rows[0].place for rows in by_line(evidence, kind) if line_of(rows[0].place)), Place())
        lines: dict[Line | None, tuple[Place, list[int]]] = {}
        for n, call in enumerate(tape):
            if call.kind == kind and n not in claimed:
                place = evidence.located.get(n, known)
                lines.setdefault(line_of(place), (place, []))[1].append(n)
        for place, calls in lines.values():
            if (count := len(calls) / taped(evidence)) >= STEADY:
                mine = frozenset(calls) | again if kind == "free" else frozenset(calls)  # what is given back is asked for again
                claimed |= mine
                yield Claim(kind, place, count, f"{count:.3g} a step", mine)
    for rows in by_line(evidence, "retry"):
        count = times(evidence, rows)
        yield Claim("retry", rows[0].place, count, f"the memory was full {count:.3g} times a step")


RULE = StallRule(
    "memory",
    ("alloc", "free", "pin", "retry"),
    "cudaMalloc, cudaFree (empty_cache), pinning, retries when memory is full",
    "one in two steps",
    "a cache that still grows asks now and then; a retry is one too many",
    look,
)
