"""Rules for what the host waits for: checkpoints, data, collections, compilations, memory, copies, reads of the device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from ...formatting import readable
from ...watch.events import DOWNLOAD, EMPTIED, HOST_DATA, MASKING, UPLOAD, Place
from ...watch.ledger import LedgerRow
from ...watch.ops import DOWN, UP
from ..finding import KINDS
from ..price.prices import Line, Measurements, Prices, line_of
from ..record.tape import Span, Tape
from .remedies import ANEW, OFTEN, RAISED, RARE, RARELY, SELDOM, UNVALIDATED, index_of, of_copy, of_read, reads_result


@dataclass(frozen=True)
class StallCandidate:
    """A candidate for a finding. Its price is the saving of a step without `calls` and `spans`, or `ms` if a rule knows it."""

    kind: str
    place: Place
    count: float  # a step
    evidence: str
    calls: frozenset[int] = frozenset()
    spans: frozenset[int] = frozenset()
    ms: float | None = None
    certainty: str = "counted"
    fix: str = ""  # empty: the remedy of its kind
    waits: bool = False  # it consists of waits: if none of them is located, they are among those without a line


def estimate(kind: str, place: Place, count: float, evidence: str, ms: float | None, fix: str = "") -> StallCandidate:
    """Return a candidate whose price `ms` the rule estimates; None: it is counted only."""
    return StallCandidate(kind, place, count, evidence, ms=ms, certainty="counted" if ms is None else "estimate", fix=fix)


WRITERS = ("torch/serialization.py", "torch/storage.py", "torch/distributed/checkpoint/", "safetensors/torch.py")


def writes_checkpoint(row: LedgerRow) -> bool:
    """Return whether a file of weights was being written."""
    via = row.place.via
    return via is not None and any(writer in via.file.replace("\\", "/") for writer in WRITERS)


def checkpoints(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    spans = [n for n, span in enumerate(evidence.tape.spans) if span.kind == "checkpoint"]
    rows = [row for row in evidence.rows if writes_checkpoint(row) and row.kind in ("sync", "d2h")]
    locations = [evidence.named_lines.get(evidence.tape.spans[n].name) for n in spans]
    place = next((p for p in [*locations, *(row.place for row in rows)] if p is not None and line_of(p)), Place())
    if not spans and not rows:
        return
    calls = prices.inside(lambda span: span.kind == "checkpoint")
    for row in rows:
        calls |= evidence.calls_at(row.place)
    count = len(spans) / evidence.taped_steps if spans else 1 / max(evidence.steps, 1)
    waits = frozenset(n for n in calls if evidence.tape.calls[n].waits)
    yield StallCandidate("checkpoint", place, count, f"{count:.3g} checkpoints a step", waits, frozenset(spans))


WITH_WORKERS = "MultiProcess"  # in the name of torch's loader
MORE = "raise num_workers or prefetch_factor, or do less for an item: the workers cannot keep up"


def spans_of(evidence: Measurements, kind: str) -> dict[Line | None, tuple[Place, list[int]]]:
    """Return the spans of a kind, grouped by line."""
    by_line_: dict[Line | None, tuple[Place, list[int]]] = {}
    for n, span in enumerate(evidence.tape.spans):
        if span.kind == kind:
            place = evidence.named_lines.get(span.name, Place())
            by_line_.setdefault(line_of(place), (place, []))[1].append(n)
    return by_line_


def lasting(evidence: Measurements, spans: list[int]) -> float:
    """Milliseconds a step."""
    return sum(evidence.tape.spans[n].end - evidence.tape.spans[n].start for n in spans) / evidence.taped_steps / 1e3


def data(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    times = prices.replay.loading if prices.replay else 1.0  # longer than on the tape: a recorded host is slow
    for place, spans in spans_of(evidence, "data").values():
        workers = any(WITH_WORKERS in evidence.tape.spans[n].name for n in spans)
        text = f"the host is {times * lasting(evidence, spans):.3g} ms a step in the loader"
        anew = evidence.starting_ms > (evidence.loading_ms or 0.0) / 2
        text += f", {evidence.starting_ms:.3g} ms of it while workers start" if anew else ""
        count = len(spans) / evidence.taped_steps
        fix = ANEW if anew else MORE if workers else ""
        yield StallCandidate("data", place, count, text, spans=frozenset(spans), fix=fix)


def collections(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    """Yield a claim for each gc.collect(), and one for Python's collections, at the line with the longest of them."""
    spans = spans_of(evidence, "gc")
    for rows in evidence.by_line("gc"):
        if (site := rows[0].place.site) and "gc.collect" in site.code:
            _, mine = spans.pop(line_of(rows[0].place), (None, []))
            text = f"gc.collect() takes {sum(row.ms for row in rows) / max(evidence.steps, 1):.3g} ms a step"
            fix = "leave out gc.collect(), or collect between epochs"
            yield StallCandidate("gc", rows[0].place, evidence.count_per_step(rows), text, spans=frozenset(mine), fix=fix)
    if spans:
        every = [n for _, some in spans.values() for n in some]
        placed = [pair for line, pair in spans.items() if line]
        place, most = max(placed, key=lambda pair: lasting(evidence, pair[1]), default=(Place(), []))
        text = f"collections take {lasting(evidence, every):.3g} ms a step"
        text += f", {lasting(evidence, most):.3g} of them in this line" if len(placed) > 1 else ""
        yield StallCandidate("gc", place, len(every) / evidence.taped_steps, text, spans=frozenset(every))


def compilations(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    spans = spans_of(evidence, "compile")
    _, lost = spans.pop(None, (None, []))
    for rows in evidence.by_line("compile"):  # the busiest first: spans without a line are its own
        _, mine = spans.pop(line_of(rows[0].place), (None, []))
        count = evidence.count_per_step(rows)
        yield StallCandidate(
            "compile", rows[0].place, count, f"{rows[0].what}: {count:.3g} a step", spans=frozenset([*mine, *lost])
        )
        lost = []
    for place, mine in [*spans.values(), *([(Place(), lost)] if lost else [])]:
        yield StallCandidate(
            "compile", place, len(mine) / evidence.taped_steps, "compilations after the warm-up", spans=frozenset(mine)
        )


MEMORY_KINDS = ("free", "alloc", "pin")
STEADY = 0.5  # a step


def driver_calls(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    tape = evidence.tape.calls
    emptied = any(row.what == EMPTIED for row in evidence.rows)
    again = frozenset(n for n, call in enumerate(tape) if call.kind == "alloc" and emptied)
    claimed: frozenset[int] = frozenset()
    for kind in MEMORY_KINDS:
        if evidence.memory.get(kind, STEADY) < STEADY:  # the timed steps were steadier than the recorded ones
            continue
        known = next((rows[0].place for rows in evidence.by_line(kind) if line_of(rows[0].place)), Place())
        lines: dict[Line | None, tuple[Place, list[int]]] = {}
        for n, call in enumerate(tape):
            if call.kind == kind and n not in claimed:
                place = evidence.located.get(n, known)
                lines.setdefault(line_of(place), (place, []))[1].append(n)
        for place, calls in lines.values():
            if (count := len(calls) / evidence.taped_steps) >= STEADY:
                mine = frozenset(calls) | again if kind == "free" else frozenset(calls)  # what is given back is asked for again
                claimed |= mine
                yield StallCandidate(kind, place, count, f"{count:.3g} a step", mine)
    for rows in evidence.by_line("retry"):
        count = evidence.count_per_step(rows)
        yield StallCandidate("retry", rows[0].place, count, f"the memory was full {count:.3g} times a step")


MUCH = 100.0  # µs; an op that only copies kept its host for 45 to 56 besides the copy's own call, on a machine with an H200


def copy_preparation(tape: Tape, calls: Collection[int]) -> frozenset[int]:
    """Return the outermost ops around these copies in which the host was busy for more than MUCH µs besides the copy."""
    busy: dict[int, float] = {}
    copies = [index for index in calls if tape.calls[index].kind == "copy"]
    for index, number in tape.spans_around(copies, lambda span: span.kind == "op").items():
        call, span = tape.calls[index], tape.spans[number]
        busy[number] = busy.get(number, span.end - span.start) - (call.end - call.start)
    return frozenset(number for number, us in busy.items() if us > MUCH)


FREE = "pinned, non_blocking"
ROUND_TRIP = "keep it on the device: what goes down here comes up again"
RESULT = "copy it up from pinned memory with non_blocking=True, and read the result a step later"
CONVERTED = "the host prepares it first: copy it first, and convert on the device: x.to(device, non_blocking=True).to(dtype)"
BUILT = ("torch.tensor(", "as_tensor(")


def copies(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    for rows in _by_index(evidence.by_line("h2d", "d2h")):
        count = evidence.count_per_step(rows)
        kind, fix = kind_and_fix(rows, count)
        text = f"{readable(evidence.bytes_per_step(rows))} a step ({rows[0].detail})"
        lines = sorted({row.place.site.line for row in rows if row.place.site})
        text += f"; the same index on lines {', '.join(map(str, lines))}" if len(lines) > 1 else ""
        calls = frozenset[int]().union(*(evidence.calls_at(row.place) for row in rows))
        staged = rows[0].pageable  # the host has nothing to do for a copy of pinned memory
        prepared = copy_preparation(evidence.tape, calls) if staged else frozenset[int]()
        fix = CONVERTED if prepared and kind != "d2h" else fix
        claim = StallCandidate(kind, rows[0].place, count, text, calls, prepared, fix=fix, waits=True)
        if len(lines) > 1 and (ms := prices.saved(calls, prepared)[0]) is not None:  # a box of the page leaves out one line
            claim = replace(claim, ms=ms, certainty="estimate")
        if fix == ROUND_TRIP and (ms := prices.without_work(calls, 1.0, prepared)) is not None:  # the copies go, too
            claim = replace(claim, ms=ms, certainty="estimate")
        yield claim


def _by_index(by_line: list[list[LedgerRow]]) -> list[list[LedgerRow]]:
    """Return the blocking copies of each line. Lines of a file that copy an index of one name are together: one cause."""
    groups: dict[object, list[LedgerRow]] = {}
    for rows in by_line:
        rows = [row for row in rows if row.detail != FREE and not writes_checkpoint(row)]
        if rows:
            name, site = index_of(rows[0]), rows[0].place.site or rows[0].place.built
            alone = not name or site is None or len({row.kind for row in rows}) == 2
            groups.setdefault(line_of(rows[0].place) if alone or site is None else (site.file, name), []).extend(rows)
    return list(groups.values())


def kind_and_fix(rows: list[LedgerRow], count: float) -> tuple[str, str]:
    """Return the kind and the remedy of one line's copies, of which a step has `count`."""
    first, site = rows[0], rows[0].place.site
    remedy = of_copy(first, count)
    if len({row.kind for row in rows}) == 2:
        if first.place.via and remedy:
            return "d2h", remedy
        return "d2h", RESULT if reads_result(site) else ROUND_TRIP
    if first.kind == "d2h":
        return "d2h", remedy or DOWNLOAD.remedy
    if first.detail == "pageable, non_blocking":  # said to be non_blocking: the driver stages it, and the host waits
        return "pageable", remedy if first.place.via and remedy else KINDS["pageable"].remedy
    if remedy:
        return "h2d", remedy
    if site and any(call in site.code for call in BUILT):
        return "h2d", HOST_DATA.remedy
    return "h2d", UPLOAD.remedy if first.pageable else "pass non_blocking=True: the memory is pinned"


MASKED = 0.9  # of what indexing by a mask takes, with its backward, which sorts and scatters; torch.where has passes, too


def reads(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    masks = list({line_of(row.place) for row in evidence.rows if row.what == MASKING} - {None})
    for rows in evidence.by_line("sync"):
        rows = [row for row in rows if row.what not in (UP, DOWN) and not writes_checkpoint(row)]
        if not rows:
            continue
        first = rows[0]
        count = evidence.count_per_step(rows)
        what = ", ".join(dict.fromkeys(row.what for row in rows))
        calls = evidence.calls_at(first.place)
        line, fix = line_of(first.place), of_read(first, count)
        if (fix in (RARELY, RAISED) or SELDOM in fix) and line is not None and evidence.parts.get(line, 1.0) <= OFTEN:
            fix = RARE  # several values in few steps
        claim = StallCandidate("sync", first.place, count, f"waits in {what}", calls, fix=fix, waits=True)
        checks = validating(evidence, first.place) if fix == UNVALIDATED else 0.0
        if checks > (prices.saved(calls)[0] or 0.0):
            text = f"{claim.evidence}, and the checks take {checks:.3g} ms a step with what they launch"
            claim = replace(claim, ms=checks, certainty="estimate", evidence=text)
        if masks == [line_of(first.place)] and (ms := masking(evidence, prices)) is not None:
            claim = replace(claim, ms=ms, certainty="estimate")
        yield claim


CHECKS = ("torch/distributions/distribution.py", "torch/distributions/constraints.py")


def validating(evidence: Measurements, place: Place) -> float:
    """Estimate the milliseconds a step in which the device is idle while this line validates a distribution.

    A replay without the reads keeps the launches of what is read. Without both PPO's steps took 12.8 ms instead of 16.8 (H200).
    """
    late = 0
    for stack, count in evidence.samples.late.items():
        checks = stack.torch is not None and stack.torch.file.replace("\\", "/").endswith(CHECKS)
        late += count if checks and line_of(Place(stack.user)) == line_of(Place(place.site)) else 0
    return evidence.sampled_ms(late)


def masking(evidence: Measurements, prices: Prices) -> float | None:
    """Estimate the saving of a step without masks as indices: its waits, and the kernels that gather and scatter."""
    spans = evidence.tape.spans
    chosen = sorted((s.thread, s.start) for s in spans if s.name == "aten::nonzero")

    def masked(span: Span) -> bool:
        at = bisect_left(chosen, (span.thread, span.start))
        return at < len(chosen) and chosen[at] < (span.thread, span.end)

    every = [span for span in spans if span.name == "aten::index"]
    alone = bool(every) and all(masked(span) for span in every)  # or it is not known which backward is a mask's
    calls = prices.inside(lambda s: (s.name == "aten::index" and masked(s)) or (alone and s.name == "IndexBackward0"))
    return prices.without_work(calls, MASKED) if calls and prices.replay is not None else None
