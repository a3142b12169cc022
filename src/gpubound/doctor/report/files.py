"""Reports of a verdict in a folder: JSON, SARIF 2.1.0 for code hosts, and a page.

The page shows where a step's time goes, the findings with their lines, the timeline, and a what-if by replay.
"""

from __future__ import annotations

import base64
import gzip
import json
import linecache
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from jinja2 import Template

from ...errors import MeasureError
from ...files import make_folder, read_json, write_atomic
from ...pages import check_page, environment, write_page
from ...trace import printable
from ...version import __version__
from ...watch.events import Place, Site
from ..finding import KINDS, Finding, Verdict
from ..fix.prove import Proof
from ..price.idle import Gap, Stalls
from ..price.prices import Measurements, Replay
from ..price.simulator import Simulator
from ..record.tape import Call, Mark, Span, Tape, Work
from ..rules.diagnose import HARMLESS
from ..rules.waits import copy_preparation
from . import words

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
    """Return for each finding the calls of its line and their preparation; for a stall without calls the spans of its kind."""
    at: dict[tuple[str, int], set[int]] = {}
    for call, place in located.items():
        if site := place.site or place.built:
            at.setdefault((site.file, site.line), set()).add(call)
    result = []
    for finding in findings:
        if finding.certainty != "replayed":  # its price is not from the replay, so a box would show another one
            result.append(Pick())
            continue
        site = finding.line
        calls = at.get((site.file, site.line), set()) if site else set()
        spans = {n for n, span in enumerate(tape.spans) if finding.kind in SPANS and span.kind == finding.kind}
        spans |= copy_preparation(tape, calls) if finding.kind in COPIES else set()
        result.append(Pick(frozenset(c for c in calls if tape.calls[c].waits), frozenset(spans)))
    return result


def program(replay: Replay, chosen: Sequence[Pick]) -> dict[str, Any]:
    """Return the lists of the replay's simulator, and the changes of each pick in them. Pick 0 is everything that stalls the
    host."""
    played, every = replay.simulator, (Pick(replay.waits, replay.stalls), *chosen)
    return {
        **{name: getattr(played, name) for name in LISTS},
        "ends": [call.end - played.high for call in played.calls],
        "times": replay.times,
        "steps": replay.steps,
        "picks": [_changed(played, played.without(pick.calls)) if pick.calls else [] for pick in every],
        "stalls": list(_stalls(replay, every)),
    }


def _changed(played: Simulator, left: Simulator) -> list[tuple[int, float, float, float]]:
    """Return (call, its cost, its work's latency and length) of the calls that no longer wait."""
    was, now = (zip(each.cost, each.latency, each.run, each.waits_for, each.room) for each in (played, left))
    return [(at, *after[:3]) for at, (before, after) in enumerate(zip(was, now)) if before != after]


def _stalls(replay: Replay, chosen: Sequence[Pick]) -> Iterator[tuple[int, float, list[int]]]:
    """Yield (call, µs of the pause before it, the picks that leave these out). Overlapping spans are split at their ends."""
    pieces: dict[tuple[int, ...], list[Span]] = {}
    for thread in {span.thread for span in replay.tape.spans}:
        mine = {n: s for pick in chosen for n in pick.spans if (s := replay.tape.spans[n]).thread == thread}
        cuts = sorted({time for span in mine.values() for time in (span.start, span.end)})
        for start, end in pairwise(cuts):
            over = {n for n, span in mine.items() if span.start <= start and end <= span.end}
            if over:
                covering = tuple(number for number, pick in enumerate(chosen) if pick.spans & over)
                kind = "data" if {mine[n].kind for n in over} == {"data"} else "gc"
                pieces.setdefault(covering, []).append(Span("", kind, thread, start, end))
    for covering, some in pieces.items():
        awake = replay.simulator.awake(Stalls(Tape(spans=tuple(some)), loading=replay.loading))
        for at, (was, left) in enumerate(zip(replay.simulator.pause, awake.pause)):
            if left < was:
                yield at, was - left, list(covering)


MOST = 1_700_000  # bytes of packed tape; with styles and script a page stays below 2 MB
AROUND = 2  # lines of source above and below
ROWS = {"calls": Call, "work": Work, "spans": Span, "marks": Mark}


def page(verdict: Verdict, evidence: Measurements | None = None, proof: Proof | None = None, patch: str = "") -> str:
    """Return the page as HTML. `proof`, of this `patch`, gets a separate tab."""
    packed = Payload() if evidence is None or not evidence.tape else _packed(verdict, evidence)
    return _template().render(
        verdict=verdict,
        words=words,
        tiles=_tiles(verdict),
        stacked=_stacked(verdict),
        patches=sum(bool(finding.patch) for finding in verdict.findings),
        causes={k: name for k, name in words.SHARES.items() if k != "host_late" or not words.late(verdict)} | words.LEAVES,
        measured=_measured(verdict),
        packed=packed,
        harmless=f"{HARMLESS:.1%}",
        proof=proof,
        rounds=_rounds(proof) if proof and proof.speedup else {},
        patch_text=patch,
    )


@dataclass(frozen=True)
class Payload:
    """Data of the page's script as text, with remarks for the page."""

    text: str = ""
    extent: str = ""  # how much of the tape it holds
    missing: tuple[str, ...] = ()
    pickable: frozenset[int] = frozenset()  # numbers of the findings that have a check box
    visible: frozenset[str] = frozenset()  # causes that the timeline draws
    zoom: tuple[int | str, ...] = ()  # for each finding its index in the script's places, or the cause of its gaps


@cache
def _template() -> Template:
    return environment("gpubound.doctor.report", snippet=snippet).get_template("doctor.html.j2")


def snippet(finding: Finding) -> list[tuple[int, str, bool]]:
    """Return (number, text, whether it is the finding's) of the lines around; that line alone if the file cannot be read."""
    site = finding.line
    if site is None:
        return []
    lines = linecache.getlines(site.file)
    if not (0 < site.line <= len(lines) and lines[site.line - 1].strip() == site.code):  # changed since the run
        return [(site.line, site.code, True)] if site.code else []
    around = range(max(site.line - AROUND, 1), min(site.end + AROUND, len(lines)) + 1)
    return [(n, printable(lines[n - 1].rstrip()), site.line <= n <= site.end) for n in around]


def _stacked(verdict: Verdict) -> dict[str, float]:
    """Return percentages of one bar: the GPU's shares, and what the host did instead of the share in which it is late."""
    parts, leaves = dict(words.shares(verdict)), words.late(verdict)
    if leaves:
        rest = parts.pop("host_late", 0.0) - sum(leaves.values())
        leaves["dispatch"] = leaves.get("dispatch", 0.0) + max(rest, 0.0)
    return words.rounded(parts | leaves, 1)


def _tiles(verdict: Verdict) -> list[tuple[str, str]]:
    tiles, parts = [], words.rounded(words.shares(verdict))
    if verdict.step_ms is not None:
        tiles.append(("a step", words.milliseconds(verdict.step_ms)))
    tiles += [(words.SHARES[share], f"{parts[share]:.0f} %") for share in ("busy", "host_late") if share in parts]
    tiles += [(f"a step {assumption}", words.milliseconds(ms)) for ms, assumption in words.ceilings(verdict)]
    if verdict.together_ms is not None and verdict.step_ms is not None:
        left = max(verdict.step_ms - verdict.together_ms, 0.0)
        tiles.append(("a step without all findings", words.milliseconds(left)))
    return tiles


def _measured(verdict: Verdict) -> list[tuple[str, str]]:
    phases = verdict.phases.items()
    rows = [(f"phase: {name}", ", ".join(f"{unit} {value}" for unit, value in what.items())) for name, what in phases]
    return rows + [(f"without {what}", why) for what, why in verdict.absent.items()]


def _rounds(proof: Proof) -> dict[str, list[tuple[float, float]]]:
    """Return (milliseconds, position in percent) of each round, before and after, on one scale from zero."""
    most = max(*proof.before_ms, *proof.after_ms) * 1.05
    sides = {"before": proof.before_ms, "after": proof.after_ms}
    return {name: [(ms, 100 * ms / most) for ms in side] for name, side in sides.items()}


# What the page's script gets.


def _packed(verdict: Verdict, evidence: Measurements) -> Payload:
    steps = count = evidence.taped_steps
    while True:
        part = evidence.cut(count)
        content, payload = _content(verdict, part)
        text = base64.b64encode(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)).decode()
        if len(text) <= MOST:
            return replace(payload, text=text, extent=f"{count} of {steps} recorded steps")
        if count == 1:
            events = sum(len(content["tape"][name]) for name in ("calls", "work", "spans"))
            return Payload(missing=(f"No timeline and no what-if: one step has {events:,} events, too many for a page.",))
        count = max(min(count * MOST // len(text), count - 1), 1)


def _content(verdict: Verdict, evidence: Measurements) -> tuple[dict[str, Any], Payload]:
    tape, named_lines = evidence.order.tape, evidence.named_lines
    sites = {call: site for call, place in evidence.located.items() if (site := place.site or place.built)}
    named = {span.name: site for span in tape.spans if span.name in named_lines and (site := named_lines[span.name].site)}
    number = {site: n for n, site in enumerate(dict.fromkeys([*sites.values(), *named.values()]))}
    content: dict[str, Any] = {
        "tape": tape.as_dict(),
        "fields": {name: [each.name for each in fields(kind)] for name, kind in ROWS.items()},
        "places": [{"at": site.at, "code": site.code} for site in number],
        "located": [number[sites[call]] if call in sites else None for call in range(len(tape.calls))],
        "causes": words.SHARES | words.LEAVES,
        "named": {name: number[site] for name, site in named.items()},
        "gaps": [],
    }
    lines = {(site.file, site.line): n for site, n in number.items()}
    zoom = tuple(lines.get((s.file, s.line), f.kind) if (s := f.line) else f.kind for f in verdict.findings)
    try:
        bar = evidence.bar
        content["gaps"] = [_gap(gap, tape, content) for gap in bar.gaps]
        chosen = picks(tape, verdict.findings, evidence.located)
        if any(chosen):  # without a box the page replays nothing
            replay = evidence.replay
            content["program"] = program(replay, chosen)
            content["scale"] = (verdict.step_ms or replay.step_ms) / replay.step_ms  # what is left between them at one pace
    except MeasureError as error:
        return content, Payload(missing=(f"No what-if: {error}",), zoom=zoom, visible=_visible(content))
    pickable = frozenset(n for n, pick in enumerate(chosen, 1) if pick)
    return content, Payload(pickable=pickable, zoom=zoom, visible=_visible(content))


def _visible(content: dict[str, Any]) -> frozenset[str]:
    """Return the causes that the timeline draws."""
    kind = list(content["fields"]["spans"]).index("kind")
    causes = {row[kind] for row in content["tape"]["spans"]}
    return frozenset({"busy"} | causes | {gap["cause"] for gap in content["gaps"]})


def _gap(gap: Gap, tape: Tape, content: dict[str, Any]) -> dict[str, Any]:
    place = None if gap.call is None else content["located"][gap.call]
    if gap.span is not None:
        place = content["named"].get(tape.spans[gap.span].name)
    return {"device": gap.device, "start": gap.start, "end": gap.end, "cause": gap.leaf or gap.cause, "place": place}


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(verdict: Verdict) -> str:
    kinds = list(dict.fromkeys(finding.kind for finding in verdict.findings))
    files = [finding.line.portable.file for finding in verdict.findings if finding.line]
    script = next((file for file in files if PurePath(file).name == verdict.script), verdict.script)  # with its folder
    occurrences: Counter[str] = Counter()
    run = {
        "tool": {"driver": {"name": "gpubound doctor", "version": __version__, "rules": [_rule(kind) for kind in kinds]}},
        "results": [_result(finding, kinds, occurrences, script) for finding in verdict.findings],
        "properties": {"script": words.clean(verdict.script), "step_ms": verdict.step_ms, "ceiling_ms": verdict.ceiling_ms},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def fingerprint(finding: Finding) -> str:
    site = finding.line
    words = (finding.kind, site.function if site else "", " ".join(site.code.split()) if site else finding.node)
    return sha256("\0".join(words).encode("utf-8", "replace")).hexdigest()[:32]


def _rule(kind: str) -> dict[str, Any]:
    """Return the rule with the fields that GitHub's code scanning requires."""
    cause = KINDS[kind]
    text = {"text": f"A line of the step {cause.does}."}
    return {"id": kind, "shortDescription": text, "fullDescription": text, "help": {"text": f"Instead: {cause.remedy}."}}


def _result(finding: Finding, kinds: list[str], occurrences: Counter[str], script: str) -> dict[str, Any]:
    """Return a result. GitHub requires a location: without a line, it is the start of `script`. `occurrences` counts equal
    fingerprints, because a function may have two equal lines."""
    print_ = fingerprint(finding)
    occurrences[print_] += 1
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": kinds.index(finding.kind),
        "level": "warning",
        "message": {"text": words.clean(words.summary(finding))},
        "partialFingerprints": {"gpubound/v1": f"{print_}:{occurrences[print_]}"},
        "properties": {"ms_per_step": finding.ms, "count": finding.count, "certainty": finding.certainty},
        "locations": [_location(finding.line) if finding.line else {"physicalLocation": _physical(script, {"startLine": 1})}],
    }
    if finding.built and finding.site:
        result["relatedLocations"] = [_location(finding.built) | {"message": {"text": words.clean(words.through(finding))}}]
    return result


def _location(site: Site) -> dict[str, Any]:
    """Return the location relative to the working directory: an absolute path would name the user's home."""
    region = {
        "startLine": max(site.line, 1),
        "endLine": max(site.end, site.line, 1),
        "snippet": {"text": words.clean(site.code)},
    }
    place = _physical(site.portable.file, region)
    return {"physicalLocation": place, "logicalLocations": [{"name": words.clean(site.function), "kind": "function"}]}


def _physical(file: str, region: dict[str, Any]) -> dict[str, Any]:
    return {"artifactLocation": {"uri": quote(words.clean(file)), "uriBaseId": "%SRCROOT%"}, "region": region}


JSON, PAGE, SARIF = "doctor.json", "doctor.html", "doctor.sarif"


def check_reports(folder: Path) -> None:
    """Raise ValueError if a report would replace a file in `folder` that the doctor did not write."""
    if (folder / PAGE).is_file():
        check_page(folder / PAGE)
    for name, key in ((JSON, "findings"), (SARIF, "runs")):
        if (folder / name).is_file() and key not in read_json(folder / name, "give another folder with --out"):
            raise ValueError(f"out: {folder / name} was not written by the doctor; give another folder.")


def write_reports(
    folder: Path, verdict: Verdict, evidence: Measurements | None = None, proof: Proof | None = None, patch: str = ""
) -> list[Path]:
    """Write doctor.json, doctor.html and doctor.sarif; return their paths. `evidence`, `proof` and `patch` go to the page."""
    check_reports(folder)
    make_folder(folder)
    write_atomic(folder / JSON, json.dumps(verdict.as_dict(), indent=1) + "\n")
    write_page(folder / PAGE, page(verdict, evidence, proof, patch))
    write_atomic(folder / SARIF, sarif(verdict) + "\n")
    return [folder / name for name in (JSON, PAGE, SARIF)]
