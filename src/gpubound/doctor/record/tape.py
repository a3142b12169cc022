"""A tape: what the host called and what the device did, in the order of one clock. The doctor reads nothing else.

All times are microseconds. A tape has names, sizes and times of a program, but no values and no paths.

A profiled program can write into its tape. An annotation (`torch.profiler.record_function`) whose name begins with MARK becomes
a `Mark`: the rest of the name is the id of a site. One whose name is SPAN, a kind and a name becomes a `Span` of this kind:
"span|checkpoint|save".

`match_lines` takes the lines of stalls from a tape recorded under sensors, which slow the host, to a tape recorded without.
Both show the same steps, so the blocking calls of a step are matched by their order, each with its thread, kind and bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import SequenceMatcher
from operator import attrgetter
from typing import Any, TypeVar

from ...watch.events import Place

MARK, SPAN = "stall|", "span|"

CALLS = ("launch", "copy", "sync", "alloc", "free", "pin", "graph", "event", "other")
WORKS = ("kernel", "h2d", "d2h", "d2d", "memset", "comm", "graph")
SPANS = ("op", "data", "gc", "compile", "checkpoint", "python", "backward", "optimizer", "annotation")

_WAITING = frozenset({"sync", "alloc", "free", "pin"})  # the driver waits in all of these: cudaMalloc stops the device, too


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the driver or runtime, on a thread of the host."""

    name: str
    kind: str  # one of CALLS; a call that never waits, such as cudaMallocAsync or cudaEventQuery, is "other"
    thread: int
    start: float
    end: float
    correlation: int = 0  # equal to that of the works that it launched; 0: not known
    stream: int | None = None  # on which it waits, records or launches; None: not known, or all streams of the device
    bytes: int = 0
    device: int | None = None
    blocks: bool = False  # a copy that may block its host: from or to pageable memory, or a plain cudaMemcpy
    record: int = 0  # for a wait on an event: the correlation of the call that recorded it

    @property
    def waits(self) -> bool:
        """Return whether the host may have waited for the device in here."""
        return self.kind in _WAITING or self.blocks


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel, copy or other operation of the device."""

    name: str
    kind: str  # one of WORKS; "graph": a whole replay, where its nodes were not recorded individually
    device: int
    stream: int
    start: float
    end: float
    correlation: int
    bytes: int = 0
    pageable: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of a host thread."""

    name: str
    kind: str  # one of SPANS
    thread: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Mark:
    """The position of a thread in the source: `site` is the id of the line."""

    site: str
    thread: int
    at: float

    @property
    def start(self) -> float:
        return self.at


@dataclass(frozen=True)
class Tape:
    """All events, sorted by their starts. A step is (start, end) on the host; without steps the tape counts as one."""

    calls: Sequence[Call] = ()
    work: Sequence[Work] = ()
    spans: Sequence[Span] = ()
    marks: Sequence[Mark] = ()
    steps: Sequence[tuple[float, float]] = ()
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _ROWS:
            object.__setattr__(self, name, tuple(sorted(getattr(self, name), key=attrgetter("start"))))
        object.__setattr__(self, "steps", tuple(sorted((float(start), float(end)) for start, end in self.steps)))

    def __bool__(self) -> bool:
        """Return whether anything was recorded."""
        return bool(self.calls or self.work or self.spans or self.steps)

    @property
    def window(self) -> tuple[float, float]:
        """Times from the first step's start to the last one's end; without steps, from the first event to the last."""
        if self.steps:
            return self.steps[0][0], max(end for _, end in self.steps)
        events: list[Call | Work] = [*self.calls, *self.work]
        return min((e.start for e in events), default=0.0), max((e.end for e in events), default=0.0)

    def cut(self, first: int, count: int) -> Tape:
        """Return the tape of the steps `first` to `first + count` alone, with the works that their calls launched."""
        steps = self.steps[first : first + count]
        if not steps:
            raise ValueError(f"a tape of {len(self.steps)} steps has no steps {first} to {first + count}; cut within them.")
        start, end = steps[0][0], max(end for _, end in steps)
        calls = [call for call in self.calls if start <= call.start < end]
        launched = {call.correlation for call in calls} - {0}
        return Tape(
            calls,
            [w for w in self.work if w.correlation in launched],
            [s for s in self.spans if start <= s.start < end],
            [m for m in self.marks if start <= m.at < end],
            steps,
            self.about,
        )

    def spans_around(self, calls: Iterable[int], wanted: Callable[[Span], bool]) -> dict[int, int]:
        """Return the outermost span of this kind around each of these calls on its thread, as indices, where there is one."""
        outermost: dict[int, list[int]] = {}
        for index, span in enumerate(self.spans):
            if wanted(span):
                mine = outermost.setdefault(span.thread, [])
                last = self.spans[mine[-1]] if mine else None
                if last is None or span.start >= last.end:
                    mine.append(index)
                elif span.start == last.start and span.end > last.end:
                    mine[-1] = index
        around = {}
        for index in calls:
            call, spans = self.calls[index], outermost.get(self.calls[index].thread, [])
            before = bisect_right(spans, call.start, key=lambda n: self.spans[n].start) - 1
            if before >= 0 and call.start < self.spans[spans[before]].end:
                around[index] = spans[before]
        return around

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON. An event is the list of its fields, its name an index into `names`, its times rounded to the
        ns."""
        names: dict[str, int] = {}
        rows = {name: [_row(event, names) for event in getattr(self, name)] for name in _ROWS}
        steps = [[round(start, 3), round(end, 3)] for start, end in self.steps]
        return {"about": self.about, "names": list(names), **rows, "steps": steps}


_ROWS: dict[str, type] = {"calls": Call, "work": Work, "spans": Span, "marks": Mark}


def _row(event: Any, names: dict[str, int]) -> list:
    name, *rest = (getattr(event, each.name) for each in fields(event))
    return [names.setdefault(name, len(names)), *(round(v, 3) if isinstance(v, float) else v for v in rest)]


def chosen(indices: Iterable[int], size: int, of: str) -> frozenset[int]:
    """Return indices on a tape; raise ValueError for one that the tape does not have."""
    picked = frozenset(indices)
    if wrong := sorted(i for i in picked if not 0 <= i < size):
        raise ValueError(f"{of} are numbered 0 to {size - 1} on this tape, got {wrong[0]}; give places of tape.{of}.")
    return picked


Id = TypeVar("Id")
Key = tuple[bool, str, int]


def lines_by_mark(tape: Tape, locations: Mapping[str, Place]) -> dict[int, Place]:
    """Return the line of each blocking call of a tape with marks: that of the last mark on its thread before it.

    A mark belongs to the next blocking call of its thread, and if that is a copy, also to the wait of this call. Without this
    rule, a call that no sensor reported would get the line of another one.
    """
    lines: dict[int, Place] = {}
    newest: dict[int, str] = {}
    spent: dict[int, tuple[str, bool]] = {}  # thread -> the mark that it used last, and whether a copy did
    events = sorted([(m.at, 0, n) for n, m in enumerate(tape.marks)] + [(c.start, 1, n) for n, c in enumerate(tape.calls)])
    for _, is_call, n in events:
        if not is_call:
            mark = tape.marks[n]
            newest[mark.thread] = mark.site
            spent.pop(mark.thread, None)
            continue
        call = tape.calls[n]
        if not _blocking(call) or call.thread not in newest:
            continue
        used = spent.get(call.thread)
        if used is None or (used[1] and call.kind == "sync"):
            if newest[call.thread] in locations:
                lines[n] = locations[newest[call.thread]]
            spent[call.thread] = (newest[call.thread], call.kind == "copy")
    return lines


def match_lines(clean: Tape, located: Tape, lines: Mapping[int, Place]) -> dict[int, Place]:
    """Return `lines`, of the calls of `located`, for the matching calls of `clean`. A call without a match is left out."""
    matched: dict[int, Place] = {}
    known = _by_step(located)
    for mine in _by_step(clean):
        keys = [key for key, _ in mine]
        best = max(known, key=lambda other: SequenceMatcher(None, keys, [k for k, _ in other], False).ratio(), default=[])
        for block in SequenceMatcher(None, keys, [key for key, _ in best], False).get_matching_blocks():
            for (_, here), (_, other) in zip(mine[block.a : block.a + block.size], best[block.b : block.b + block.size]):
                if other in lines:
                    matched[here] = lines[other]
    return matched


def _blocking(call: Call) -> bool:
    return call.waits or call.kind == "copy"


def _by_step(tape: Tape) -> list[list[tuple[Key, int]]]:
    """Return the blocking calls of each step, with the keys that they are matched by."""
    home = _home(tape)
    steps = tape.steps or (tape.window,)
    rows: list[list[tuple[Key, int]]] = [[] for _ in steps]
    for n, call in enumerate(tape.calls):
        if _blocking(call):
            step = next((s for s, (start, end) in enumerate(steps) if start <= call.start < end), None)
            if step is not None:
                rows[step].append(((call.thread == home, call.kind, call.bytes), n))
    return [sorted(row, key=lambda entry: (not entry[0][0], entry[1])) for row in rows]


def _home(tape: Tape) -> int | None:
    """Return the thread that runs the steps: the one that updates, or else the one that makes most calls."""
    if updates := [span.thread for span in tape.spans if span.kind == "optimizer"]:
        return updates[-1]
    threads = [call.thread for call in tape.calls]
    return max(set(threads), key=threads.count, default=None)
