"""The run report: one self-contained HTML page with charts, made from run logs. Several runs share the charts."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from ..pages import check_page, environment, write_page
from .figures import GAUGES, Figures, Gauge, Series, large_chart, line_chart
from .tape import RunTape

TILES = ("loss", "held_out", "reward", "eval_reward", "tokens_per_s", "mfu", "gpu_busy", "syncs")
LARGE = '<div class="large"'  # how a chart of the page's width begins
DEPTH = 8  # of nested settings, so that a malicious file cannot recurse without end


def write_report(runs: Sequence[str | Path | RunTape], out: str | Path | None = None) -> Path:
    """Write the page for one run, or for several compared; return its path."""
    if not runs:
        raise ValueError("write_report: got no run; give at least one run folder.")
    tapes = [run if isinstance(run, RunTape) else RunTape.open(run) for run in runs]
    out = tapes[0].path / "report.html" if out is None else Path(out)
    check_page(out)
    all_figures, called = [Figures(tape) for tape in tapes], names(tapes)
    markups = [Markup(chart) for chart in charts(called, all_figures)]  # charts escape what they are given
    large = [chart for chart in markups if chart.startswith(LARGE)]
    above = dict(tiles(all_figures[0])) if len(all_figures) == 1 else {}
    gauges = [{what: text for what, text in figures.gauges().items() if what not in above} for figures in all_figures]
    page = template().render(
        title=" against ".join(called) if len(called) <= 3 else f"{len(called)} runs side by side",
        runs=[{"name": name, "figures": run} for name, run in zip(called, all_figures)],
        tiles=list(above.items()),
        facts=rows([figures.facts() for figures in all_figures]),
        measured=rows(gauges),
        large=large,
        charts=[chart for chart in markups if chart not in large],
    )
    write_page(out, page)
    return out


@cache
def template() -> Template:
    return environment("gpubound.monitor", settings=settings, table=table).get_template("report.html.j2")


def names(tapes: Sequence[RunTape]) -> list[str]:
    """Return the titles of the runs: their names, or folders if two names are equal."""
    titles = [str(t.about.get("name") or t.path.resolve().name) for t in tapes]
    return titles if len(set(titles)) == len(titles) else [str(t.path) for t in tapes]


def tiles(figures: Figures) -> list[tuple[str, str]]:
    """Return (name, figure) of the most important gauges."""
    measured = figures.gauges()
    return [(gauge.label, measured[gauge.label]) for gauge in GAUGES if gauge.key in TILES and gauge.label in measured]


def rows(columns: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Return (name, [text of each run])."""
    whats = dict.fromkeys(what for texts in columns for what in texts)
    return [(what, [texts.get(what, "not measured") for texts in columns]) for what in whats]


def charts(called: Sequence[str], runs: Sequence[Figures]) -> list[str]:
    """Return a chart for each gauge that a run measured; some gauges share a chart."""
    html = []
    phases = [figures.phases for figures in runs]
    marks = phases[0] if all(others == phases[0] for others in phases) else []  # different phases would overlap
    steps = [record["step"] for figures in runs for record in (*figures.records[:1], *figures.records[-1:])]
    x_range = (min(steps), max(steps)) if steps else None
    for gauge in (g for g in GAUGES if not g.chart):
        if gauge.key == "skipped" and not any(value for figures in runs for _, value in figures.points("skipped")):
            continue
        gauges = [gauge, *(g for g in GAUGES if g.chart == gauge.key)]
        if series := [s for nth, g in enumerate(gauges) for s in _series(called, runs, g, nth)]:
            draw = large_chart if gauge.key == "loss" else line_chart
            html.append(draw(gauge.title, series, gauge.axis, marks=marks, x_range=x_range))
    return html


def _series(called: Sequence[str], runs: Sequence[Figures], gauge: Gauge, nth: int) -> list[Series]:
    """Return each run's line of the nth gauge of a chart. Colours distinguish runs, or the gauges of a single run."""
    series = []
    for run, (name, figures) in enumerate(zip(called, runs)):
        if points := figures.points(gauge.key):
            steps, values = zip(*points)
            title = f"{name}, {gauge.title.removesuffix(', bytes')}" if gauge.chart else name
            colour, dash = (nth, 0) if len(runs) == 1 else (run, nth)
            series.append(Series(title, steps, values, [step for step, _ in figures.phases[1:]], colour, dash))
    return series


def table(text: str) -> dict[str, Any]:
    """Parse a table printed for a terminal into cells and other lines. The first line has the columns.

    >>> table("module   why\\nlm_head  as it was\\n2 swapped.")
    {'head': ['module', 'why'], 'rows': [['lm_head', 'as it was']], 'rest': '2 swapped.'}
    """
    head, *lines = text.splitlines() or [""]
    at = [match.start() for match in re.finditer(r"(?<!\S)\S+(?: \S+)*", head)]
    inside = [line for line in lines if len(at) > 1 and all(line[i - 2 : i] == "  " for i in at[1:])]
    if not inside:
        return {"head": [], "rows": [], "rest": text}
    cells = [[line[i:j].strip() for i, j in zip(at, [*at[1:], None])] for line in (head, *inside)]
    return {"head": cells[0], "rows": cells[1:], "rest": "\n".join(line for line in lines if line not in inside)}


def settings(value: Any, depth: int = 0) -> str:
    """Format a setting.

    >>> settings([{"name": "books", "data": ["a/", "b/"], "steps": 300}])
    'books: data a/ b/, steps 300'
    """
    if depth > DEPTH:
        return "…"
    if isinstance(value, dict):
        inner = ", ".join(f"{key} {settings(what, depth + 1)}" for key, what in value.items() if key != "name")
        return f"{value['name']}: {inner}" if "name" in value else inner
    if isinstance(value, list | tuple):
        between = "; " if any(isinstance(part, dict) for part in value) else " "
        return between.join(settings(part, depth + 1) for part in value)
    return str(value)
