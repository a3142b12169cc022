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
    spans = [n for _, some in spans_of(evidence, "gc").values() for n in some]
    asked = [rows for rows in by_line(evidence, "gc") if rows[0].place.site and "gc.collect" in rows[0].place.site.code]
    if asked:
        rows, fix = asked[0], "leave out gc.collect(), or collect between epochs"
        said = f"gc.collect() takes {sum(row.ms for row in rows) / max(evidence.steps, 1):.3g} ms a step"
        yield Claim("gc", rows[0].place, times(evidence, rows), said, spans=frozenset(spans), fix=fix)
    elif spans:
        said = f"collections take {lasting(evidence, spans):.3g} ms a step"
        yield Claim("gc", Place(), len(spans) / taped(evidence), said, spans=frozenset(spans))


def compilations(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    every = spans_of(evidence, "compile")
    spans = frozenset(n for _, some in every.values() for n in some)
    lines = by_line(evidence, "compile")
    for nth, rows in enumerate(lines):
        mine = spans if nth == 0 else frozenset()  # spans without a line are the busiest one's
        count = times(evidence, rows)
        yield Claim("compile", rows[0].place, count, f"{rows[0].what}: {count:.3g} a step", spans=mine)
    if not lines and spans:
        place = next((place for line, (place, _) in every.items() if line), Place())
        yield Claim("compile", place, len(spans) / taped(evidence), "compilations after the warm-up", spans=spans)


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
