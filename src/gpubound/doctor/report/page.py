"""The verdict as one page: where a step goes, the findings with their lines, the timeline, and a what-if by replay."""

from __future__ import annotations

import base64
import gzip
import json
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import Any

from jinja2 import Template

from ...errors import MeasureError
from ...pages import environment
from ...trace import printable
from ...watch.source_line import Place
from ..finding import Finding, Verdict
from ..fix.prove import Proof
from ..price.dependencies import Stalls
from ..price.idle import Gap
from ..price.measurements import Profile
from ..price.replay import Replay
from ..price.simulator import Simulator
from ..record.tape import Call, Mark, Span, Tape, Work
from ..rules.diagnose import HARMLESS
from ..rules.waits import copy_preparation
from .words import (
    LEAVES,
    SHARES,
    ceiling,
    code_of,
    late,
    machine,
    milliseconds,
    notes,
    place_of,
    price,
    shares,
    through,
    times,
    together,
)

SPANS = {"data", "gc", "compile", "checkpoint"}  # kinds of findings that are a stall of the host without a call
COPIES = {"h2d", "d2h", "pageable"}
LISTS = ("before", "previous", "pause", "cost", "waits_for", "room", "tail", "after", "latency", "gap", "run")


@dataclass(frozen=True)
class Pick:
    """The calls and spans that one check box leaves out, as indices on the tape."""

    calls: frozenset[int] = frozenset()
    spans: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.calls or self.spans)


def picks(tape: Tape, findings: Iterable[Finding], located: Mapping[int, Place]) -> list[Pick]:
    """For each finding the calls of its line and what prepares them; for a stall without calls the spans of its kind."""
    at: dict[tuple[str, int], set[int]] = {}
    for call, place in located.items():
        if site := place.site or place.built:
            at.setdefault((site.file, site.line), set()).add(call)
    result = []
    for finding in findings:
        if finding.certainty != "replayed":  # its price is no replay's, so its box would say another one
            result.append(Pick())
            continue
        site = finding.line
        calls = at.get((site.file, site.line), set()) if site else set()
        spans = {n for n, span in enumerate(tape.spans) if finding.kind in SPANS and span.kind == finding.kind}
        spans |= copy_preparation(tape, calls) if finding.kind in COPIES else set()
        result.append(Pick(frozenset(c for c in calls if tape.calls[c].waits), frozenset(spans)))
    return result


def program(replay: Replay, chosen: Sequence[Pick]) -> dict[str, Any]:
    """The lists of the replay's mechanism, and what each pick changes in them. Pick 0 is everything that stalls the host."""
    played, every = replay.mechanism, (Pick(replay.waits, replay.stalls), *chosen)
    return {
        **{name: getattr(played, name) for name in LISTS},
        "ends": [call.end - played.high for call in played.calls],
        "times": replay.times,
        "steps": replay.steps,
        "picks": [_changed(played, played.without(pick.calls)) if pick.calls else [] for pick in every],
        "stalls": list(_stalls(replay, every)),
    }


def _changed(played: Simulator, left: Simulator) -> list[tuple[int, float, float, float]]:
    """(call, its cost, its work's latency and length) of the calls that wait no more."""
    was, now = (zip(each.cost, each.latency, each.run, each.waits_for, each.room) for each in (played, left))
    return [(at, *after[:3]) for at, (before, after) in enumerate(zip(was, now)) if before != after]


def _stalls(replay: Replay, chosen: Sequence[Pick]) -> Iterator[tuple[int, float, list[int]]]:
    """(call, µs of the pause before it, the picks that leave these out). Spans may overlap, so time is cut at their ends."""
    pieces: dict[tuple[int, ...], list[Span]] = {}
    for thread in {span.thread for span in replay.tape.spans}:
        mine = {n: s for pick in chosen for n in pick.spans if (s := replay.tape.spans[n]).thread == thread}
        cuts = sorted({time for span in mine.values() for time in (span.start, span.end)})
        for start, end in pairwise(cuts):
            over = {n for n, span in mine.items() if span.start <= start and end <= span.end}
            if over:
                covering = tuple(number for number, pick in enumerate(chosen) if pick.spans & over)
                pieces.setdefault(covering, []).append(Span("", "data", thread, start, end))
    for covering, some in pieces.items():
        awake = replay.mechanism.awake(Stalls(Tape(spans=tuple(some))))
        for at, (was, left) in enumerate(zip(replay.mechanism.pause, awake.pause)):
            if left < was:
                yield at, was - left, list(covering)


MOST = 1_700_000  # bytes of packed tape; with styles and script a page stays below 2 MB
AROUND = 2  # lines of source above and below
ROWS = {"calls": Call, "work": Work, "spans": Span, "marks": Mark}


def page(verdict: Verdict, recording: Profile | None = None, proof: Proof | None = None, patch: str = "") -> str:
    """The page as HTML. `proof`, of this `patch`, gets a separate tab."""
    packed = Payload() if recording is None else _packed(verdict, recording)
    return _template().render(
        verdict=verdict,
        notes=notes(verdict),
        tiles=_tiles(verdict),
        shares=shares(verdict),
        late=late(verdict),
        share_names=SHARES,
        leaf_names=LEAVES,
        causes={name: words for name, words in SHARES.items() if name != "host_late"} | LEAVES,
        said=[*together(verdict), *verdict.unlocated],
        measured=_measured(verdict),
        packed=packed,
        harmless=f"{HARMLESS:.1%}",
        proof=proof,
        rounds=_rounds(proof) if proof and proof.timed else {},
        patch_text=patch,
    )


@dataclass(frozen=True)
class Payload:
    """The data of the page's script as a text, and the page's remarks on it."""

    text: str = ""
    extent: str = ""  # how much of the tape it holds
    missing: tuple[str, ...] = ()
    pickable: frozenset[int] = frozenset()  # numbers of the findings that have a check box
    zoom: tuple[int | str, ...] = ()  # for each finding its place in the script's places, or what its gaps are for


@cache
def _template() -> Template:
    filters: dict[str, Callable[..., Any]] = {
        "ms": milliseconds, "machine": machine, "price": price, "place": place_of, "times": times, "through": through,
        "code": code_of, "snippet": snippet,
    }  # fmt: skip
    return environment("gpubound.doctor.report", **filters).get_template("doctor.html.j2")


def snippet(finding: Finding) -> list[tuple[int, str, bool]]:
    """(number, text, whether it is the line) of the lines around; the line alone where the file cannot be read."""
    site = finding.line
    if site is None:
        return []
    lines = linecache.getlines(site.file)
    if not (0 < site.line <= len(lines) and lines[site.line - 1].strip() == site.code):  # another file, or changed since
        return [(site.line, site.code, True)] if site.code else []
    around = range(max(site.line - AROUND, 1), min(site.end + AROUND, len(lines)) + 1)
    return [(n, printable(lines[n - 1].rstrip()), site.line <= n <= site.end) for n in around]


def _tiles(verdict: Verdict) -> list[tuple[str, str]]:
    tiles, parts = [], shares(verdict)
    if verdict.step_ms is not None:
        tiles.append(("a step", milliseconds(verdict.step_ms)))
    tiles += [(SHARES[share], f"{parts[share]:.0f} %") for share in ("busy", "host_late") if share in parts]
    if verdict.ceiling_ms is not None:
        tiles.append((f"a step {ceiling(verdict)}", milliseconds(verdict.ceiling_ms)))
    if verdict.together_ms is not None:
        tiles.append(("all findings together", milliseconds(verdict.together_ms)))
    return tiles


def _measured(verdict: Verdict) -> list[tuple[str, str]]:
    rows = [(f"phase: {name}", _in_words(what)) for name, what in verdict.phases.items()]
    return rows + [(f"without {what}", why) for what, why in verdict.absent.items()]


def _in_words(what: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in what.items()) if isinstance(what, Mapping) else str(what)


def _rounds(proof: Proof) -> dict[str, list[tuple[float, float]]]:
    """(milliseconds, its place in percent) of each round, before and after, on one scale from zero."""
    most = max(*proof.before_ms, *proof.after_ms) * 1.05
    sides = {"before": proof.before_ms, "after": proof.after_ms}
    return {name: [(ms, 100 * ms / most) for ms in side] for name, side in sides.items()}


# What the page's script gets.


def _packed(verdict: Verdict, recording: Profile) -> Payload:
    steps = count = max(len(recording.tape.steps), 1)
    while True:
        part = recording.cut(count)
        content, payload = _content(verdict, part)
        text = base64.b64encode(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)).decode()
        if len(text) <= MOST:
            return replace(payload, text=text, extent=f"{count} of {steps} recorded steps")
        if count == 1:
            events = len(part.tape.calls) + len(part.tape.work) + len(part.tape.spans)
            return Payload(missing=(f"No timeline and no what-if: one step has {events:,} events, too many for a page.",))
        count = max(min(count * MOST // len(text), count - 1), 1)


def _content(verdict: Verdict, recording: Profile) -> tuple[dict[str, Any], Payload]:
    tape, places = recording.tape, recording.places
    sites = {call: site for call, place in recording.located.items() if (site := place.site or place.built)}
    named = {span.name: site for span in tape.spans if span.name in places and (site := places[span.name].site)}
    number = {site: n for n, site in enumerate(dict.fromkeys([*sites.values(), *named.values()]))}
    content: dict[str, Any] = {
        "tape": tape.as_dict(),
        "fields": {name: [each.name for each in fields(kind)] for name, kind in ROWS.items()},
        "places": [{"at": site.at, "code": site.code} for site in number],
        "located": [number[sites[call]] if call in sites else None for call in range(len(tape.calls))],
        "causes": SHARES | LEAVES,
        "named": {name: number[site] for name, site in named.items()},
        "gaps": [],
    }
    lines = {(site.file, site.line): n for site, n in number.items()}
    zoom = tuple(lines.get((s.file, s.line), f.kind) if (s := f.line) else f.kind for f in verdict.findings)
    try:
        bar = recording.bar
        content["gaps"] = [_gap(gap, tape, content) for gap in bar.gaps]
        chosen = picks(tape, verdict.findings, recording.located)
        if any(chosen):  # without a box the page has nothing to play again
            replay = recording.replay
            content["program"] = program(replay, chosen)
            content["scale"] = (verdict.step_ms or replay.step_ms) / replay.step_ms  # what is left between them at one pace
    except MeasureError as error:
        return content, Payload(missing=(f"No what-if: {error}",), zoom=zoom)
    return content, Payload(pickable=frozenset(n for n, pick in enumerate(chosen, 1) if pick), zoom=zoom)


def _gap(gap: Gap, tape: Tape, content: dict[str, Any]) -> dict[str, Any]:
    place = None if gap.call is None else content["located"][gap.call]
    if gap.span is not None:
        place = content["named"].get(tape.spans[gap.span].name)
    return {"device": gap.device, "start": gap.start, "end": gap.end, "cause": gap.leaf or gap.cause, "place": place}
