"""The run report: one self-contained HTML page with charts, made from run logs. Several runs share the charts.

Variants of a run are compared from their logs: held-out loss and its spread over seeds, speed, size. The others are compared
with the first variant for each seed: two runs of one seed read the same rows in the same order, so their difference has less
noise than the losses.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from ..formatting import quantity
from ..pages import check_page, environment, write_page
from .figures import GAUGES, Figures, Gauge, Series, large_chart, line_chart
from .tape import RunTape

TILES = ("loss", "held_out", "reward", "eval_reward", "tokens_per_s", "mfu", "gpu_busy", "syncs")
LARGE = '<div class="large"'  # how a chart of the page's width begins
DEPTH = 8  # of nested settings, so that a malicious file cannot recurse without end


def write_report(
    runs: Sequence[str | Path | RunTape],
    out: str | Path | None = None,
    lead: str = "",
    colours: Sequence[int] | None = None,
) -> Path:
    """Write the page for one run, or for several compared; return its path.

    `lead` is a printed table at the top of the page. `colours` are the numbers of the runs' colours, if runs share them.
    """
    if not runs:
        raise ValueError("write_report: got no run; give at least one run folder.")
    tapes = [run if isinstance(run, RunTape) else RunTape.open(run) for run in runs]
    out = tapes[0].path / "report.html" if out is None else Path(out)
    check_page(out)
    all_figures, called = [Figures(tape) for tape in tapes], names(tapes)
    colours = range(len(tapes)) if colours is None else colours
    markups = [Markup(chart) for chart in charts(called, all_figures, colours)]  # charts escape what they are given
    large = [chart for chart in markups if chart.startswith(LARGE)]
    above = dict(tiles(all_figures[0])) if len(all_figures) == 1 else {}
    gauges = [{what: text for what, text in figures.gauges().items() if what not in above} for figures in all_figures]
    page = template().render(
        title=" against ".join(called) if len(called) <= 3 else f"{len(called)} runs side by side",
        lead=lead,
        runs=[{"name": name, "figures": run, "colour": colour} for name, run, colour in zip(called, all_figures, colours)],
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


def charts(called: Sequence[str], runs: Sequence[Figures], colours: Sequence[int]) -> list[str]:
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
        if series := [s for nth, g in enumerate(gauges) for s in _series(called, runs, colours, g, nth)]:
            draw = large_chart if gauge.key == "loss" else line_chart
            html.append(draw(gauge.title, series, gauge.axis, marks=marks, x_range=x_range))
    return html


def _series(called: Sequence[str], runs: Sequence[Figures], colours: Sequence[int], gauge: Gauge, nth: int) -> list[Series]:
    """Return each run's line of the nth gauge of a chart. Colours distinguish runs, or the gauges of a single run."""
    series = []
    for run, name, figures in zip(colours, called, runs):
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


RESULT = "compared"  # key in run.json: the result of a finished run of a comparison
PACE = next(gauge for gauge in GAUGES if gauge.key == "tokens_per_s")

# Student's t, two sides, 95 %, by the number of seeds: with three seeds an interval is 4.3 standard errors to each side.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
    2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
MOST_SEEDS = len(T_95) + 1


@dataclass(frozen=True)
class LossDifference:
    """The mean over seeds of (a variant's loss - the first's), and half of its 95 % interval; None for a single seed."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, pairs: Sequence[float]) -> "LossDifference":
        count = len(pairs)
        return cls(fmean(pairs), T_95[count - 2] * stdev(pairs) / math.sqrt(count) if count > 1 else None)

    @property
    def shown(self) -> bool:
        """True if the difference is larger than those between seeds."""
        return self.half is not None and abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + (f" ± {self.half:.4f}" if self.half is not None else "")


class Variant:
    """The results of one variant, a log for each seed."""

    def __init__(self, name: str, tapes: Sequence[RunTape]):
        self.name, self.tapes = name, tapes
        self.results = [tape.about[RESULT] for tape in tapes]
        self.parameters: int = self.results[0]["parameters"]
        paces = [pace for tape in tapes if (pace := Figures(tape).value(PACE)) is not None]
        self.pace = fmean(paces) if paces else None

    @property
    def failed(self) -> int:
        return sum(result["failed"] for result in self.results)

    @cached_property
    def losses(self) -> dict[int, float]:
        """Seed -> final held-out loss, of the runs that did not fail."""
        return {result["seed"]: result["held_out"] for result in self.results if not result["failed"]}

    @property
    def loss(self) -> str:
        """The mean, and the standard deviation over seeds."""
        losses = list(self.losses.values())
        if not losses:
            return "none"
        return f"{fmean(losses):.4f}" + (f" ± {stdev(losses):.4f}" if len(losses) > 1 else "")

    def against(self, first: "Variant") -> LossDifference | None:
        """Return the difference to the first variant; None if no seed succeeded in both."""
        pairs = [loss - first.losses[seed] for seed, loss in self.losses.items() if seed in first.losses]
        return LossDifference.of(pairs) if pairs else None

    def speed(self, first: "Variant") -> float | None:
        """Return the speed relative to the first variant's."""
        return self.pace / first.pace if self.pace is not None and first.pace else None


class Variants:
    """Variants of a comparison. `str` is the table and a sentence for each variant but the first."""

    def __init__(self, runs: dict[str, list[RunTape]]):
        self.variants = [Variant(name, tapes) for name, tapes in runs.items()]
        self.first, *self.others = self.variants

    @property
    def failed(self) -> bool:
        return any(variant.failed for variant in self.variants)

    def __str__(self) -> str:
        return "\n".join((self.table(), *self.sentences()))

    def table(self) -> str:
        first = self.first
        lines = [("variant", "parameters", "held-out loss", f"minus {first.name}'s", "tokens/s", "pace")]
        for variant in self.variants:
            difference = variant.against(first) if variant is not first else None
            speed = variant.speed(first) if variant is not first else None
            lines.append((
                variant.name, quantity(variant.parameters), variant.loss, str(difference or "-"),
                "not measured" if variant.pace is None else quantity(variant.pace), f"{speed:.2f}x" if speed else "-",
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines)

    def sentences(self) -> list[str]:
        """Return the conclusions from the losses."""
        lines = [
            f"{variant.name}: {variant.failed} of {len(variant.results)} runs failed and are left out."
            for variant in self.variants
            if variant.failed
        ]
        for variant in self.others:
            difference = variant.against(self.first)
            lines.append(f"{variant.name}: {self._verdict(difference)}")
        return [*lines, "Every variant trained with the options of the recipe; none was tuned for one variant."]

    def _verdict(self, difference: LossDifference | None) -> str:
        if difference is None:
            return f"no seed was sound both here and in {self.first.name}, so the losses cannot be compared."
        relation = f"{abs(difference.mean):.4f} {'above' if difference.mean > 0 else 'below'} {self.first.name}"
        if not difference.mean:
            relation = f"as low as {self.first.name}"
        if difference.half is None:
            return f"{relation} with one seed, which shows no spread: whether this is chance is not known; take more --seeds."
        interval = f"{difference.mean - difference.half:+.4f} to {difference.mean + difference.half:+.4f}"
        if not difference.shown:
            return f"{relation}, 95 % interval {interval}: no more than seeds do, so no difference is shown."
        return f"{relation}, 95 % interval {interval}: {'worse' if difference.mean > 0 else 'better'} by more than seeds do."

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers of all variants and runs."""
        rows = []
        for variant in self.variants:
            row = {"name": variant.name, "parameters": variant.parameters, "runs": variant.results, "failed": variant.failed}
            row |= {"tokens_per_s": variant.pace, "speed": variant.speed(self.first)}
            losses = list(variant.losses.values())
            row |= {"held_out": fmean(losses) if losses else None, "spread": stdev(losses) if len(losses) > 1 else None}
            if variant is not self.first and (difference := variant.against(self.first)):
                row |= {"difference": difference.mean, "interval_95": difference.half, "shown": difference.shown}
            rows.append(row)
        return {"variants": rows, "sentences": self.sentences()}

    def report(self, out: Path) -> Path:
        """Write the page with the table and the curves of every run, a colour for each variant."""
        tapes = [(tape, colour) for colour, variant in enumerate(self.variants) for tape in variant.tapes]
        return write_report([tape for tape, _ in tapes], out, lead=str(self), colours=[colour for _, colour in tapes])
