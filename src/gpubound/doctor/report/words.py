"""Words of a verdict that every report shares, the sentence that each begins with, and the report on the terminal.

The verdicts of a script's ranks are merged: each rank measures itself, the first one reports. Ranks that train together have
steps of one length: a quick rank waits in communication. So the price of a finding is that of the rank that pays most, and a
rank is late if its step without communication is longer than the others'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from math import floor
from statistics import median
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...distributed.rendezvous import gather_texts, rank_and_world
from ...trace import printable
from ..finding import COUNTS, GPU_TIME, KINDS, Finding, Verdict
from ..fix.copies import WORKERS
from ..rules.diagnose import HARMLESS
from ..rules.remedies import ANEW

SHARES = {
    "busy": "GPU busy",
    "host_late": "host late",
    "device_side": "between queued kernels",
    "comm": "communication alone",
    "unlocated": "idle, cause unknown",
}
LEAVES = {
    "sync": "a sync",
    "copy": "a blocking copy",
    "data": "data",
    "gc": "garbage collection",
    "compile": "compilation",
    "checkpoint": "a checkpoint",
    "alloc": "the allocator",
    "dispatch": "Python and dispatch",
}
# What the ceiling leaves out: waits of the host, and its pauses for data, collections, compilations and checkpoints.
HOST_STALLS = frozenset({
    "sync", "h2d", "d2h", "pageable", "repeat", "alloc", "free", "retry", "pin", "data", "gc", "compile", "checkpoint",
})  # fmt: skip
KIND_NAMES = {
    "h2d": "copy to the GPU",
    "d2h": "read from the GPU",
    "pageable": "pageable copy",
    "cpu_op": "CPU work",
    "host_work": "host work",
    "noop": "conversion",
    "launch_bound": "launch-bound",
    "gc": "garbage collection",
    "comm": "communication",
    "alloc": "allocation",
    "pin": "pinning",
}
"""Names of kinds in what a person reads, where they differ from those in doctor.json, in SARIF and in allowances."""

NOWHERE = "no single line"
NAMED = 6  # numbers that are listed individually
UNNAMED = 0.05  # of a step: a shorter wait for the host needs no sentence, since prices and gaps differ by as much
APART = 0.05  # of a step: the check of timed steps with plain ones reports a larger difference
SLOWED = 1.05  # a recording that slows a step by less is not reported


def milliseconds(ms: float) -> str:
    """
    >>> milliseconds(41.83), milliseconds(1.234), milliseconds(0)
    ('41.8 ms', '1.23 ms', '0.0 ms')
    """
    return f"{ms:.1f} ms" if abs(ms) >= 9.95 or abs(ms) < 0.005 else f"{ms:.2f} ms"


def kind_of(finding: Finding) -> str:
    """Return the name of a finding's kind for a person."""
    return KIND_NAMES.get(finding.kind, finding.kind)


def place_of(finding: Finding) -> str:
    """Return the file and line; of a loop its first and last line."""
    site = finding.line
    if site is None:
        return NOWHERE
    return f"{site.at}-{site.end}" if finding.kind == "launch_bound" and site.end > site.line else site.at


def code_of(finding: Finding) -> str:
    site = finding.line
    return site.code if site else ""


def through(finding: Finding) -> str:
    """Return the path below that line: the library's line, the autograd node, and the line that built it."""
    parts = [f"via {finding.via.in_package}"] if finding.via else []
    if finding.node:
        built = f", built at {finding.built.at}" if finding.built and finding.site else ""
        parts.append(f"in backward of {finding.node}{built}")
    return "; ".join(parts)


def times(finding: Finding) -> str:
    return f"{finding.count:.3g} a step"


def price(finding: Finding) -> str:
    """Return the saving of a step. Counts without a GPU have none."""
    return "not priced" if finding.ms is None else milliseconds(finding.ms)


def shares(verdict: Verdict) -> dict[str, float]:
    """Return the shares of a step in percent; empty if nothing was timed."""
    return verdict.bar.get("shares", {})


def rounded(parts: Mapping[str, float], digits: int = 0) -> dict[str, float]:
    """Return percentages that add up to their rounded sum: the largest remainders are rounded up.

    >>> rounded({"busy": 62.4, "host_late": 31.4, "comm": 6.2})
    {'busy': 63.0, 'host_late': 31.0, 'comm': 6.0}
    """
    unit = 10.0**-digits
    units = {name: share / unit for name, share in parts.items()}
    integers = {name: floor(share) for name, share in units.items()}
    missing = round(sum(units.values())) - sum(integers.values())
    for name in sorted(units, key=lambda name: integers[name] - units[name])[:missing]:
        integers[name] += 1
    return {name: round(share * unit, digits) for name, share in integers.items()}


def late(verdict: Verdict) -> dict[str, float]:
    """Return the activities of the host while it was late, in percent of a step."""
    return {leaf: share for leaf, share in verdict.bar.get("late", {}).items() if share}


def machine(verdict: Verdict) -> str:
    """Return the device, with the other facts about the machine."""
    facts = {name: value for name, value in verdict.machine.items() if value not in (None, "")}
    return " · ".join(str(value) if name == "device" else f"{name} {value}" for name, value in facts.items())


def notes(verdict: Verdict) -> list[str]:
    """Return remarks that a reader needs to interpret the numbers."""
    remarks = [rank_ranges(verdict)] if verdict.ranks else []
    if verdict.step:
        remarks.append(f"No optimizer made a step, so a step is {verdict.step}; --step-marker names another one.")
    if verdict.distortion is not None and verdict.distortion > SLOWED:
        remarks.append(
            f"A recorded step took {verdict.distortion:.1f} times as long as a timed step; all numbers are for timed steps."
        )
    if verdict.plain_ms and verdict.timed_ms and abs(verdict.timed_ms / verdict.plain_ms - 1) > APART:
        remarks.append(
            f"The median of the steps before any sensor was attached is {milliseconds(verdict.plain_ms)}, that of later ones "
            f"{milliseconds(verdict.timed_ms)}: all numbers are for their mean."
        )
    if (verdict.spread or 0.0) > APART:
        remarks.append(f"The timed steps differ: their mean is known to {100 * (verdict.spread or 0.0):.0f} %. Run it again.")
    if verdict.period > 1:
        remarks.append(f"The loop repeats every {verdict.period} steps; each window is a multiple of that.")
    if len(verdict.rare) == 3:
        steps, times, part = (verdict.rare[name] for name in ("steps", "times", "time"))
        remarks.append(
            f"{100 * steps:.2g} % of the steps take {times:.3g} times the median, and hold {100 * part:.2g} % of the time."
        )
    unpriced = verdict.step_ms is None and "prices" not in verdict.absent  # else the reason is listed with all that is absent
    if unpriced and verdict.findings and all(finding.ms is None for finding in verdict.findings):
        remarks.append("Counts and lines only: prices need a GPU.")
    return remarks


def rank_ranges(verdict: Verdict) -> str:
    """Return the ranges of the ranks' steps and shares."""
    parts = []
    for name, words, unit in (("step_ms", "a step", " ms"), *((share, SHARES[share], " %") for share in SHARES)):
        values = sorted(about[name] for about in verdict.ranks if about.get(name) is not None)
        if values:
            parts.append(f"{words} {values[0]:.3g} to {values[-1]:.3g}{unit}")
    ranges = f": {', '.join(parts)}; the bar is rank 0's." if parts else "."
    return f"{len(verdict.ranks)} ranks measured themselves{ranges}"


def without(verdict: Verdict) -> list[str]:
    """Return the missing measurements and their reasons."""
    return [f"without {what}: {why}" for what, why in verdict.absent.items()]


def parts(verdict: Verdict) -> dict[str, float]:
    """Return milliseconds that add up to the step: the GPU's shares, and of the time in which the host is late, what the
    findings have and the rest. Empty if the step or its shares were not measured.

    Findings may save more than the time in which the host is late: without them copies are shorter, and streams overlap. That
    is less busy time.
    """
    times = {share: (verdict.step_ms or 0.0) * percent / 100 for share, percent in shares(verdict).items()}
    if not verdict.step_ms or "host_late" not in times:
        return {}
    late_ms = times.pop("host_late")
    gpu = sum(finding.ms or 0.0 for finding in verdict.findings if finding.kind in GPU_TIME | {"comm"})
    named = max((verdict.together_ms or 0.0) - gpu, 0.0)
    overlapping = min(max(named - late_ms, 0.0), times["busy"])
    named = min(named, late_ms + overlapping)
    return times | {"busy": times["busy"] - overlapping, "findings": named, "rest": late_ms + overlapping - named}


def unnamed(verdict: Verdict) -> float | None:
    """Return milliseconds a step in which the GPU waits for its host, and that no finding has; None if they are few."""
    left = parts(verdict).get("rest")
    if left is None or not verdict.step_ms or any(finding.ms is None for finding in verdict.findings):
        return None  # a finding without a price may have all of it
    return left if left >= UNNAMED * verdict.step_ms else None


def adds_up(verdict: Verdict) -> list[str]:
    """Return the step as a sum: the GPU's work, the findings, and what is in neither."""
    step = verdict.step_ms or 0.0
    digits = 1 if step >= 9.95 else 2
    names = SHARES | {"findings": "findings", "rest": "harmless or in no finding"}
    times = parts(verdict)
    if times and times["busy"] < step * (shares(verdict)["busy"] / 100 - UNNAMED):
        names |= {"busy": "GPU busy without them"}
    terms = [f"{names[part]} {ms:.{digits}f}" for part, ms in rounded(times, digits).items() if ms >= 10.0**-digits / 2]
    return [f"{milliseconds(step)} = {' + '.join(terms)}"] if terms else []


def late_for(verdict: Verdict) -> list[str]:
    """Return what the host was late for, in milliseconds that add up to the time of its share; then what no finding has."""
    if not verdict.step_ms or not late(verdict):
        return []
    parts = sorted(late(verdict).items(), key=lambda part: -part[1])
    named = [f"{LEAVES[leaf]} {milliseconds(verdict.step_ms * share / 100)}" for leaf, share in parts]
    total = milliseconds(verdict.step_ms * shares(verdict)["host_late"] / 100)
    left = unnamed(verdict)
    rest = "" if left is None else f"; {milliseconds(left)} of it in no finding"
    return [f"HOST LATE {total}: {', '.join(named)}{rest}"]


def ceilings(verdict: Verdict) -> list[tuple[float, str]]:
    """Return (milliseconds of a step, under which assumption), the shortest first.

    A step that is bound by launches has two: the GPU's own time, which a CUDA graph comes near to, and that of a host that
    still launches every kernel.
    """
    if verdict.ceiling_ms is None:
        return []
    bound = any(finding.kind == "launch_bound" for finding in verdict.findings)
    if bound and verdict.device_ms is not None:
        never = (verdict.ceiling_ms, "if the host never stalled, but still launched each kernel")
        return [(verdict.device_ms, "if the GPU never waited for the host"), never]
    others = [f"{n} {kind_of(f)}" for n, f in enumerate(verdict.findings, 1) if f.ms and f.kind not in HOST_STALLS]
    still = f", with {' and '.join(others)} still in it" if others else ""
    return [(verdict.ceiling_ms, "if the host never stalled" + still)]


def together(verdict: Verdict) -> list[str]:
    """Return the joint saving of all priced findings, and the step that is left. Waits overlap: it is not the sum."""
    numbers = [number for number, finding in enumerate(verdict.findings, 1) if finding.ms]
    if verdict.together_ms is None or len(numbers) < 2:
        return []
    alone = milliseconds(sum(finding.ms for finding in verdict.findings if finding.ms))
    joint = milliseconds(verdict.together_ms)
    named = "+".join(map(str, numbers)) if len(numbers) <= NAMED else f"{len(numbers)} priced ones"
    text = f"{named} together: {joint} a step" + (f" (separately {alone}: waits overlap)" if alone != joint else "")
    if verdict.step_ms and verdict.together_ms < verdict.step_ms:
        left = verdict.step_ms - verdict.together_ms
        text += f", which leaves {milliseconds(left)} ({verdict.step_ms / left:.2f}x)"
    return [text]


def summary(finding: Finding) -> str:
    """Return a finding in one sentence or two, for a program that shows texts."""
    text = (
        f"{kind_of(finding)}, {times(finding)}, {price(finding)} a step ({finding.certainty})" if finding.ms is not None else ""
    )
    text = text or f"{kind_of(finding)}, {times(finding)}"
    below = f", {through(finding)}" if through(finding) else ""
    evidence = f": {finding.evidence}" if finding.evidence else ""
    return f"{text}{below}{evidence}. Instead: {finding.fix}"


def clean(text: str) -> str:
    """Return a text that any reader of UTF-8 accepts: a file's name may contain half a surrogate pair."""
    return printable(text.encode("utf-8", "replace").decode())


# Why a line costs time, where it is not "it", followed by the words of KINDS.
REASONS = {
    "data": "the loader cannot keep up",
    ANEW: "the loader's workers start anew in every epoch",
    "sync": "the host waits there for the GPU",
    "h2d": "the host waits there for a copy to the GPU",
    "d2h": "the host waits there for a read from the GPU",
    "launch": "it launches one kernel for each of many tensors",
    "launch_bound": "the host launches work more slowly than the GPU does it",
}
EVIDENT = frozenset({"precision", "cpu_op"})  # their evidence has the reason
OUTCOMES = {"launch_bound": "Captured in a CUDA graph", "precision": "With the fix"}


def conclusion(verdict: Verdict) -> str:
    """Return the largest loss, its cause, and the step without it; or how many findings there are without prices."""
    first = verdict.findings[0] if verdict.findings else None
    dearest = (first.ms or 0.0) if first else 0.0
    if (left := unnamed(verdict)) is not None and left > dearest:
        return _unnamed(verdict, left)
    if first is None:
        return _nothing(verdict)
    return _priced(first, first.ms, verdict.step_ms, verdict) if first.ms and verdict.step_ms else _counted(first, verdict)


def _priced(finding: Finding, ms: float, step_ms: float, verdict: Verdict) -> str:
    share, work = _percent(ms / step_ms), ", as work of the GPU" if finding.kind in GPU_TIME else ""
    if subject := _subject(finding):
        cost = f"{subject} costs {share} of a step{work}: {_reason(finding)}."
    else:
        cost = f"{share} of a step goes to {kind_of(finding)}, on no single line{work}: {_reason(finding)}."
    outcome, left = OUTCOMES.get(finding.kind, "Without it"), max(step_ms - ms, 0.0)
    if finding.kind == "data" and finding.fix != ANEW and verdict.loader and verdict.loader["workers"] < WORKERS:
        outcome, left = f"With num_workers={WORKERS}", max(left, verdict.loaded_ms(WORKERS))
    step = milliseconds(step_ms).removesuffix(" ms")
    return f"{cost} {outcome} a step takes about {milliseconds(left)} instead of {step}."


def _counted(finding: Finding, verdict: Verdict) -> str:
    subject = _subject(finding) or f"{kind_of(finding).capitalize()}, on no single line"
    count = "" if finding.kind in EVIDENT else f", {finding.count:.3g} {'time' if finding.count == 1 else 'times'} a step"
    others = len(verdict.findings) - 1
    more = f" {others} more {'finding follows' if others == 1 else 'findings follow'}." if others else ""
    return f"{subject}{count}: {_reason(finding)}.{more} {'They are' if others else 'It is'} counted, not priced."


def _unnamed(verdict: Verdict, left: float) -> str:
    assert verdict.step_ms is not None
    part = rounded(shares(verdict))["host_late"]
    which = (
        "no finding names its cause" if not verdict.findings else f"no finding names the cause of {milliseconds(left)} of it"
    )
    late = milliseconds(verdict.step_ms * shares(verdict)["host_late"] / 100)
    return f"The GPU waits for the host in {part:.0f} % of a step ({late}), and {which}."


def _nothing(verdict: Verdict) -> str:
    parts = rounded(shares(verdict))
    if verdict.ceiling_ms is not None and "busy" in parts:
        return f"No stall costs {HARMLESS:.1%} of a step or more; the GPU is busy in {parts['busy']:.0f} % of it."
    if verdict.counts:
        return "No finding in the steps that were watched."
    return "No finding; see below for what was not measured." if verdict.absent else "No finding."


def _subject(finding: Finding) -> str:
    """Return the line in words; empty for a finding without one."""
    site = finding.line
    if finding.kind == "launch_bound":  # the whole loop, not its line
        loop = f" in lines {site.line} to {site.end} of {site.at.rpartition(':')[0]}" if site and site.end > site.line else ""
        return f"Launching{loop}"
    return f"Line {site.line} of {site.at.rpartition(':')[0]}" if site else ""


def _reason(finding: Finding) -> str:
    if finding.kind in EVIDENT and finding.evidence:
        return finding.evidence
    return REASONS.get(finding.fix) or REASONS.get(finding.kind) or f"it {KINDS[finding.kind].does}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1f} %"


NARROW = 100  # columns; a narrower screen shows a finding in several lines
FINDINGS = 8  # shown; those after the eighth cost little
HARMLESS_SHOWN = 3  # named; the rest are counted
COLOURS = {"busy": "green", "host_late": "red", "unlocated": "yellow"}


def screen(
    verdict: Verdict, width: int = 100, colour: bool = False, everything: bool = False, files: Sequence[str] = ()
) -> str:
    """Return the text of the screen, `width` columns wide. `everything` lists all harmless findings; `files` are named at the
    end."""
    out = StringIO()
    console = Console(
        file=out, width=max(width, 40), force_terminal=colour, color_system="standard" if colour else None, no_color=not colour,
        highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    for part in _parts(verdict, console.width, everything, files):
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _parts(verdict: Verdict, width: int, everything: bool, files: Sequence[str]) -> Iterator[RenderableType]:
    yield _text(conclusion(verdict), "bold")
    yield Text()
    yield _text(f"doctor  {verdict.script}", "bold")
    yield _text(machine(verdict), "dim")
    yield from (_text(note, "dim") for note in notes(verdict))
    if verdict.step_ms is not None:
        yield _step(verdict)
    if verdict.step_ms and (limits := ceilings(verdict)):
        texts = [f"{milliseconds(ms)} ({verdict.step_ms / ms:.2f}x) {assumption}" for ms, assumption in limits if ms]
        yield _text(f"CEILING {'; '.join(texts)}", "bold")
    yield from (_text(line) for line in late_for(verdict))
    shown = verdict.findings if everything else verdict.findings[:FINDINGS]
    if shown:
        yield Text()
        yield from [_table(shown)] if width >= NARROW else _list(shown)
    else:
        yield _text("no finding", "green")
    if rest := verdict.findings[len(shown) :]:
        dearest = "" if rest[0].ms is None else f", the dearest of them {price(rest[0])}"
        yield _text(f"{len(rest)} more{dearest} (--all lists them)")
    for line in (*together(verdict), *adds_up(verdict), *_harmless(verdict, everything), *verdict.unlocated):
        yield _text(line)
    yield from (_text(line, "dim") for line in without(verdict))
    if files:
        yield _text(f"written: {', '.join(files)}", "dim")


def brief(verdict: Verdict) -> list[str]:
    """Return the verdict in a few lines, for the end of a run that describes itself."""
    lines = [] if verdict.step_ms is None else [_step(verdict).plain]
    counted = [f"{verdict.counts[name]:.3g} {what}" for name, what in COUNTS.items() if name in verdict.counts]
    if counted:
        lines.append(f"a step has {' and '.join(counted)}")
    for number, finding in enumerate(verdict.findings, 1):
        lines.append(clean(f"{number}. {place_of(finding)}  {code_of(finding)}: {summary(finding)}"))
    if counted and not verdict.findings:
        lines.append("no finding")
    return [*lines, *without(verdict)]


def _text(text: str, style: str = "") -> Text:
    return Text(clean(text), style)


def _step(verdict: Verdict) -> Text:
    """Return one line: the step, and its shares in percent."""
    line, percentages = Text(), rounded(shares(verdict))
    line.append(f"STEP {milliseconds(verdict.step_ms or 0.0)}", "bold")
    if verdict.spread is not None:
        line.append(f" ± {100 * verdict.spread:.0f}%")
    for share, name in SHARES.items():
        if percentages.get(share):  # those of no per cent are left out
            line.append(f"   {name} ").append(f"{percentages[share]:.0f}%", COLOURS.get(share, ""))
    if verdict.lead_ms is not None:
        line.append(f"   host ahead {milliseconds(verdict.lead_ms)}")
    return line


def _where(finding: Finding) -> Text:
    lines = [(place_of(finding), "bold"), (code_of(finding), ""), (through(finding), "dim")]
    return Text("\n").join(_text(text, style) for text, style in lines if text)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("ms/step", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("where", ratio=5, overflow="fold")
    table.add_column("fix", ratio=4, overflow="fold")
    for number, finding in enumerate(findings, 1):
        cost = "-" if finding.ms is None else milliseconds(finding.ms).removesuffix(" ms")
        kind = _text(f"{kind_of(finding)}\n{times(finding)}").append(f"\n{finding.certainty}", "dim")
        table.add_row(str(number), Text(cost, "bold"), kind, _where(finding), _fix(finding))
    return table


def _list(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    for number, finding in enumerate(findings, 1):
        head = f"{number}. {price(finding)}  {kind_of(finding)}, {times(finding)}, {finding.certainty}"
        yield _text(head, "bold")
        yield Padding(_where(finding), (0, 0, 0, 3))
        yield Padding(Text("fix: ").append_text(_fix(finding)), (0, 0, 0, 3))


def _fix(finding: Finding) -> Text:
    text = _text(finding.fix)
    return text.append("  [patch]", "green") if finding.patch else text


def _harmless(verdict: Verdict, everything: bool) -> Iterator[str]:
    shown = verdict.harmless if everything else verdict.harmless[:HARMLESS_SHOWN]
    for finding in shown:
        code = code_of(finding)
        yield f"harmless: {place_of(finding)}  {code}{', ' if code else ''}{times(finding)}, {price(finding)}"
    if rest := len(verdict.harmless) - len(shown):
        yield f"harmless: {rest} more (--all lists them)"


LATE = 0.05  # of a step: the work of ranks differs by less from step to step
SILENT = "it has told nothing; look into its log"
RANK_SHARES = ("busy", "host_late", "comm")
ERROR = "error"


def merge_ranks(verdict: Verdict) -> Verdict:
    """Return this rank's verdict; on the first of several ranks the merged one."""
    _, world = rank_and_world()
    reports = {rank: json.loads(text) for rank, text in gather_texts(json.dumps(verdict.as_dict())).items()}
    if world == 1 or not reports:
        return verdict
    failed = {rank: SILENT for rank in range(world) if rank not in reports}
    failed |= {rank: about[ERROR] for rank, about in reports.items() if ERROR in about}
    others = {rank: Verdict.from_dict(about) for rank, about in reports.items() if rank and rank not in failed}
    return merged({0: verdict} | others, failed)


def send_error(error: Exception) -> None:
    """Send the first rank the reason why this rank has no verdict."""
    if rank_and_world()[0]:
        gather_texts(json.dumps({ERROR: str(error)}))


def merged(verdicts: Mapping[int, Verdict], failed: Mapping[int, str]) -> Verdict:
    """Merge `verdicts`, which have that of rank 0. `failed` maps ranks without a verdict to the reason."""
    first = verdicts[0]
    by_line: dict[Any, dict[int, Finding]] = {}
    for rank, verdict in verdicts.items():
        for finding in verdict.findings:
            by_line.setdefault(_key(finding), {})[rank] = finding
    findings = [_merged_finding(by_rank, len(verdicts) + len(failed)) for by_rank in by_line.values()] + _late(verdicts)
    findings.sort(key=lambda finding: (finding.ms is None, -(finding.ms or 0.0), -finding.count))
    times: dict[str, Any] = {}
    for name in ("step_ms", "ceiling_ms", "device_ms", "together_ms"):
        values = (getattr(verdict, name) for verdict in verdicts.values())
        times[name] = max((value for value in values if value is not None), default=None)
    return replace(
        first,
        findings=findings,
        harmless=[finding for finding in first.harmless if _key(finding) not in by_line],
        **times,
        counts={name: max(v.counts[name] for v in verdicts.values() if name in v.counts) for name in first.counts},
        absent=first.absent | {f"rank {rank}": why for rank, why in sorted(failed.items())},
        ranks=[_about(rank, verdict) for rank, verdict in sorted(verdicts.items())],
    )


def _key(finding: Finding) -> tuple[str, str, int]:
    line = finding.line
    return (finding.kind, line.portable.file, line.line) if line else (finding.kind, "", 0)


def _merged_finding(by_rank: Mapping[int, Finding], world: int) -> Finding:
    """Return the finding of the rank that pays most, with the range of all ranks' prices."""
    costliest = max(by_rank.values(), key=lambda finding: (finding.ms or 0.0, finding.count))
    prices = sorted(finding.ms for finding in by_rank.values() if finding.ms is not None)
    counts = sorted(finding.count for finding in by_rank.values())
    text = f"{counts[0]:.3g} to {counts[-1]:.3g} a step"
    if prices:
        text = f"{milliseconds(prices[0])} to {milliseconds(prices[-1])}"
    where = f"on {len(by_rank)} of {world} ranks" if len(by_rank) > 1 else f"on rank {next(iter(by_rank))} of {world} alone"
    return replace(costliest, evidence=f"{costliest.evidence}; {where}" + (f", {text}" if len(by_rank) > 1 else ""))


def _about(rank: int, verdict: Verdict) -> dict[str, Any]:
    shares = verdict.bar.get("shares", {})
    return {"rank": rank, "step_ms": verdict.step_ms} | {name: shares[name] for name in RANK_SHARES if name in shares}


def _late(verdicts: Mapping[int, Verdict]) -> list[Finding]:
    """Return a finding for the rank that the others wait for, if there is one."""
    own = {
        rank: verdict.step_ms * (1 - verdict.bar["shares"]["comm"] / 100)
        for rank, verdict in verdicts.items()
        if verdict.step_ms is not None and "comm" in verdict.bar.get("shares", {})
    }
    if len(own) < 2:
        return []
    last = max(own, key=lambda rank: own[rank])
    usual = median(ms for rank, ms in own.items() if rank != last)
    if own[last] - usual < LATE * max(verdicts[rank].step_ms or 0.0 for rank in own):
        return []
    apart = f"its step takes {milliseconds(own[last])}, another's {milliseconds(usual)}"
    evidence = f"rank {last} comes late: without communication {apart}"
    return [Finding("comm", None, None, "", None, 1, own[last] - usual, "estimate", evidence, KINDS["comm"].remedy)]
