"""Texts of a verdict: the words that every report shares, and the report on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...trace import printable
from ..finding import COUNTS, Finding, Verdict

SHARES = {
    "busy": "GPU busy",
    "host_late": "host late",
    "device_side": "device-side",
    "comm": "comm alone",
    "unlocated": "unlocated",
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
NOWHERE = "no single line"
NAMED = 6  # numbers that are listed individually
SLOWED = 1.05  # a recording that slows a step by less is not reported


def milliseconds(ms: float) -> str:
    """
    >>> milliseconds(41.83), milliseconds(1.234), milliseconds(0)
    ('41.8 ms', '1.23 ms', '0.0 ms')
    """
    return f"{ms:.1f} ms" if abs(ms) >= 9.95 or abs(ms) < 0.005 else f"{ms:.2f} ms"


def place_of(finding: Finding) -> str:
    site = finding.line
    return site.at if site else NOWHERE


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
    if verdict.distortion is not None and verdict.distortion > SLOWED:
        remarks.append(
            f"A recorded step took {verdict.distortion:.1f} times as long as a timed step; prices are for timed steps."
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


def ceiling(verdict: Verdict) -> str:
    """Return the ceiling's assumption, and the findings that it leaves out because they are no stall of the host."""
    others = [f"{n} {f.kind}" for n, f in enumerate(verdict.findings, 1) if f.ms and f.kind not in HOST_STALLS]
    return "if the host never stalled" + (f", with {' and '.join(others)} still in it" if others else "")


def together(verdict: Verdict) -> list[str]:
    """Return the joint saving of all priced findings, and the step that is left. Waits overlap: it is not the sum."""
    numbers = [number for number, finding in enumerate(verdict.findings, 1) if finding.ms]
    if verdict.together_ms is None or len(numbers) < 2:
        return []
    alone = sum(finding.ms for finding in verdict.findings if finding.ms)
    named = "+".join(map(str, numbers)) if len(numbers) <= NAMED else f"{len(numbers)} priced ones"
    text = f"{named} together: {milliseconds(verdict.together_ms)} a step (alone they add up to {milliseconds(alone)})"
    if verdict.step_ms and verdict.together_ms < verdict.step_ms:
        left = verdict.step_ms - verdict.together_ms
        text += f", which leaves {milliseconds(left)} ({verdict.step_ms / left:.2f}x)"
    return [text]


def summary(finding: Finding) -> str:
    """Return a finding in one sentence or two, for a program that shows texts."""
    text = f"{finding.kind}, {times(finding)}, {price(finding)} a step ({finding.certainty})" if finding.ms is not None else ""
    text = text or f"{finding.kind}, {times(finding)}"
    below = f", {through(finding)}" if through(finding) else ""
    evidence = f": {finding.evidence}" if finding.evidence else ""
    return f"{text}{below}{evidence}. Instead: {finding.fix}"


def clean(text: str) -> str:
    """Return a text that any reader of UTF-8 accepts: a file's name may contain half a surrogate pair."""
    return printable(text.encode("utf-8", "replace").decode())


NARROW = 100  # columns; a narrower screen shows a finding in several lines
FINDINGS = 8  # shown; those after the eighth cost little
HARMLESS = 3  # named; the rest are counted
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
    yield _text(f"doctor  {verdict.script}", "bold")
    yield _text(machine(verdict), "dim")
    yield from (_text(note, "dim") for note in notes(verdict))
    if verdict.step_ms is not None:
        yield _step(verdict)
    if verdict.step_ms and verdict.ceiling_ms:
        faster = verdict.step_ms / verdict.ceiling_ms
        yield _text(f"CEILING {milliseconds(verdict.ceiling_ms)} ({faster:.2f}x) {ceiling(verdict)}", "bold")
    shown = verdict.findings if everything else verdict.findings[:FINDINGS]
    if shown:
        yield Text()
        yield from [_table(shown)] if width >= NARROW else _list(shown)
    else:
        yield _text("no finding", "green")
    if rest := verdict.findings[len(shown) :]:
        dearest = "" if rest[0].ms is None else f", the dearest of them {price(rest[0])}"
        yield _text(f"{len(rest)} more{dearest} (--all lists them)")
    for line in (*together(verdict), *_harmless(verdict, everything), *verdict.unlocated):
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
    line, percentages = Text(), shares(verdict)
    line.append(f"STEP {milliseconds(verdict.step_ms or 0.0)}", "bold")
    for share, name in SHARES.items():
        if share in percentages:
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
        kind = _text(f"{finding.kind}\n{times(finding)}").append(f"\n{finding.certainty}", "dim")
        table.add_row(str(number), Text(cost, "bold"), kind, _where(finding), _fix(finding))
    return table


def _list(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    for number, finding in enumerate(findings, 1):
        head = f"{number}. {price(finding)}  {finding.kind}, {times(finding)}, {finding.certainty}"
        yield _text(head, "bold")
        yield Padding(_where(finding), (0, 0, 0, 3))
        yield Padding(Text("fix: ").append_text(_fix(finding)), (0, 0, 0, 3))


def _fix(finding: Finding) -> Text:
    text = _text(finding.fix)
    return text.append("  [patch]", "green") if finding.patch else text


def _harmless(verdict: Verdict, everything: bool) -> Iterator[str]:
    shown = verdict.harmless if everything else verdict.harmless[:HARMLESS]
    for finding in shown:
        code = code_of(finding)
        yield f"harmless: {place_of(finding)}  {code}{', ' if code else ''}{times(finding)}, {price(finding)}"
    if rest := len(verdict.harmless) - len(shown):
        yield f"harmless: {rest} more (--all lists them)"
