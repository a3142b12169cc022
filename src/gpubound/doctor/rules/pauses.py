"""Times in which the host makes no progress: waits for data, garbage collections, compilations."""

from collections.abc import Iterator

from ...watch.site import Place
from ..claim import Claim, StallRule
from ..evidence import Evidence
from ..lines import Line, by_line, line_of, taped, times
from ..prices import Prices

WITH_WORKERS = "MultiProcess"  # in the name of torch's loader
MORE = "raise num_workers or prefetch_factor, or do less for an item: the workers cannot keep up"


def spans_of(evidence: Evidence, kind: str) -> dict[Line | None, tuple[Place, list[int]]]:
    """The spans of a kind, those of one line together."""
    found: dict[Line | None, tuple[Place, list[int]]] = {}
    for n, span in enumerate(evidence.tape.spans if evidence.tape else ()):
        if span.kind == kind:
            place = evidence.places.get(span.name, Place())
            found.setdefault(line_of(place), (place, []))[1].append(n)
    return found


def lasting(evidence: Evidence, spans: list[int]) -> float:
    """Milliseconds a step."""
    every = evidence.tape.spans if evidence.tape else ()
    return sum(every[n].end - every[n].start for n in spans) / taped(evidence) / 1e3


def data(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    for place, spans in spans_of(evidence, "data").values():
        workers = evidence.tape is not None and any(WITH_WORKERS in evidence.tape.spans[n].name for n in spans)
        said = f"the host is {lasting(evidence, spans):.3g} ms a step in the loader"
        count = len(spans) / taped(evidence)
        yield Claim("data", place, count, said, spans=frozenset(spans), fix=MORE if workers else "")


def collections(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    """One claim for each gc.collect(). Python's own fall on any line: they are one claim, at the line that has most of them."""
    spans = spans_of(evidence, "gc")
    for rows in by_line(evidence, "gc"):
        if (site := rows[0].place.site) and "gc.collect" in site.code:
            _, mine = spans.pop(line_of(rows[0].place), (None, []))
            said = f"gc.collect() takes {sum(row.ms for row in rows) / max(evidence.steps, 1):.3g} ms a step"
            fix = "leave out gc.collect(), or collect between epochs"
            yield Claim("gc", rows[0].place, times(evidence, rows), said, spans=frozenset(mine), fix=fix)
    if spans:
        every = [n for _, some in spans.values() for n in some]
        placed = [pair for line, pair in spans.items() if line]
        place, most = max(placed, key=lambda pair: lasting(evidence, pair[1]), default=(Place(), []))
        said = f"collections take {lasting(evidence, every):.3g} ms a step"
        said += f", {lasting(evidence, most):.3g} of them in this line" if len(placed) > 1 else ""
        yield Claim("gc", place, len(every) / taped(evidence), said, spans=frozenset(every))


def compilations(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    spans = spans_of(evidence, "compile")
    _, lost = spans.pop(None, (None, []))
    for rows in by_line(evidence, "compile"):  # the busiest first: what has no line is its own
        _, mine = spans.pop(line_of(rows[0].place), (None, []))
        count = times(evidence, rows)
        yield Claim("compile", rows[0].place, count, f"{rows[0].what}: {count:.3g} a step", spans=frozenset([*mine, *lost]))
        lost = []
    for place, mine in [*spans.values(), *([(Place(), lost)] if lost else [])]:
        yield Claim("compile", place, len(mine) / taped(evidence), "compilations after the warm-up", spans=frozenset(mine))


RULES = (
    StallRule(
        "data",
        ("data",),
        "waits for the next batch",
        "0.5 % of the step, by replay",
        "a loader that is ahead of the device is waited for, too, but for nothing",
        data,
    ),
    StallRule(
        "collections",
        ("gc",),
        "garbage collections, and gc.collect() in a step",
        "0.5 % of the step, by replay",
        "a young generation takes some 10 µs",
        collections,
    ),
    StallRule(
        "compilations",
        ("compile",),
        "compilations after the warm-up",
        "one",
        "a steady step compiles nothing",
        compilations,
    ),
)
