"""The report on the terminal, and a short one for the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..finding import COUNTS, Finding, Verdict
from . import words

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
    yield _text(words.conclusion(verdict), "bold")
    yield Text()
    yield _text(f"doctor  {verdict.script}", "bold")
    yield _text(words.machine(verdict), "dim")
    yield from (_text(note, "dim") for note in words.notes(verdict))
    if verdict.step_ms is not None:
        yield _step(verdict)
    if verdict.step_ms and (limits := words.ceilings(verdict)):
        texts = [f"{words.milliseconds(ms)} ({verdict.step_ms / ms:.2f}x) {assumption}" for ms, assumption in limits if ms]
        yield _text(f"CEILING {'; '.join(texts)}", "bold")
    yield from (_text(line) for line in words.late_for(verdict))
    shown = verdict.findings if everything else verdict.findings[:FINDINGS]
    if shown:
        yield Text()
        yield from [_table(shown)] if width >= NARROW else _list(shown)
    else:
        yield _text("no finding", "green")
    if rest := verdict.findings[len(shown) :]:
        dearest = "" if rest[0].ms is None else f", the dearest of them {words.price(rest[0])}"
        yield _text(f"{len(rest)} more{dearest} (--all lists them)")
    for line in (*words.together(verdict), *words.adds_up(verdict), *_harmless(verdict, everything), *verdict.unlocated):
        yield _text(line)
    yield from (_text(line, "dim") for line in words.without(verdict))
    if files:
        yield _text(f"written: {', '.join(files)}", "dim")


def brief(verdict: Verdict) -> list[str]:
    """Return the verdict in a few lines, for the end of a run that describes itself."""
    lines = [] if verdict.step_ms is None else [_step(verdict).plain]
    counted = [f"{verdict.counts[name]:.3g} {what}" for name, what in COUNTS.items() if name in verdict.counts]
    if counted:
        lines.append(f"a step has {' and '.join(counted)}")
    for number, finding in enumerate(verdict.findings, 1):
        lines.append(words.clean(f"{number}. {words.place_of(finding)}  {words.code_of(finding)}: {words.summary(finding)}"))
    if counted and not verdict.findings:
        lines.append("no finding")
    return [*lines, *words.without(verdict)]


def _text(text: str, style: str = "") -> Text:
    return Text(words.clean(text), style)


def _step(verdict: Verdict) -> Text:
    """Return one line: the step, and its shares in percent."""
    line, percentages = Text(), words.rounded(words.shares(verdict))
    line.append(f"STEP {words.milliseconds(verdict.step_ms or 0.0)}", "bold")
    for share, name in words.SHARES.items():
        if share in percentages:
            line.append(f"   {name} ").append(f"{percentages[share]:.0f}%", COLOURS.get(share, ""))
    if verdict.lead_ms is not None:
        line.append(f"   host ahead {words.milliseconds(verdict.lead_ms)}")
    return line


def _where(finding: Finding) -> Text:
    lines = [(words.place_of(finding), "bold"), (words.code_of(finding), ""), (words.through(finding), "dim")]
    return Text("\n").join(_text(text, style) for text, style in lines if text)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("ms/step", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("where", ratio=5, overflow="fold")
    table.add_column("fix", ratio=4, overflow="fold")
    for number, finding in enumerate(findings, 1):
        cost = "-" if finding.ms is None else words.milliseconds(finding.ms).removesuffix(" ms")
        kind = _text(f"{words.kind_of(finding)}\n{words.times(finding)}").append(f"\n{finding.certainty}", "dim")
        table.add_row(str(number), Text(cost, "bold"), kind, _where(finding), _fix(finding))
    return table


def _list(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    for number, finding in enumerate(findings, 1):
        head = f"{number}. {words.price(finding)}  {words.kind_of(finding)}, {words.times(finding)}, {finding.certainty}"
        yield _text(head, "bold")
        yield Padding(_where(finding), (0, 0, 0, 3))
        yield Padding(Text("fix: ").append_text(_fix(finding)), (0, 0, 0, 3))


def _fix(finding: Finding) -> Text:
    text = _text(finding.fix)
    return text.append("  [patch]", "green") if finding.patch else text


def _harmless(verdict: Verdict, everything: bool) -> Iterator[str]:
    shown = verdict.harmless if everything else verdict.harmless[:HARMLESS]
    for finding in shown:
        code = words.code_of(finding)
        yield f"harmless: {words.place_of(finding)}  {code}{', ' if code else ''}{words.times(finding)}, {words.price(finding)}"
    if rest := len(verdict.harmless) - len(shown):
        yield f"harmless: {rest} more (--all lists them)"
