"""The run report: one self-contained HTML page with charts, made from tapes alone. Two runs are drawn over each other."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from .chart import Series, line_chart, number
from .tape import Tape


class Gauge(NamedTuple):
    key: str
    title: str
    style: str
    summed_up: str = "median"  # or "last"; "" is the last, too, where the title says it
    beside: str = ""  # drawn in the chart of this gauge


GAUGES = (
    Gauge("loss", "loss", ".4g", "last"),
    Gauge("held_out", "held-out loss", ".4g", "last", beside="loss"),
    Gauge("tokens_per_s", "tokens per second", "si"),
    Gauge("mfu", "share of this machine's matrix rate", ".1%"),
    Gauge("gpu_busy", "GPU busy", ".0%"),
    Gauge("sm_active", "SMs at work", ".0%"),
    Gauge("power_w", "power, W", ".3g"),
    Gauge("host_lead_ms", "host lead over the GPU, ms", ".3g"),
    Gauge("syncs", "host syncs per step", "g"),
    Gauge("h2d_bytes", "bytes from the host per step", "si"),
    Gauge("grad_norm", "gradient norm", ".3g", "last"),
    Gauge("lr", "learning rate", ".2g", "last"),
    Gauge("memory_bytes", "peak memory, bytes", "si", ""),
    Gauge("memory_allocated_bytes", "allocated memory, bytes", "si", "", beside="memory_bytes"),
    Gauge("memory_reserved_bytes", "reserved memory, bytes", "si", "", beside="memory_bytes"),
    Gauge("skipped", "skipped steps, not finite", "g", ""),
)


def write_report(runs: Sequence[str | Path | Tape], out: str | Path | None = None) -> Path:
    """Write the page for one run, or for several compared; returns where it lies."""
    if not runs:
        raise ValueError("write_report: got no run; give at least one run folder.")
    tapes = [run if isinstance(run, Tape) else Tape.open(run) for run in runs]
    out = Path(out) if out else tapes[0].path / "report.html"
    # Always: select_autoescape() goes by a template's last suffix, and .j2 is none of those that it escapes.
    environment = Environment(loader=PackageLoader("gpubound.monitor"), autoescape=True)
    environment.filters["words"] = words
    called = names(tapes)
    page = environment.get_template("report.html.j2").render(
        title=" against ".join(called),
        runs=[{"name": name, "about": t.about, "index": i} for i, (name, t) in enumerate(zip(called, tapes))],
        summary=summary(tapes),
        charts=[Markup(chart) for chart in charts(tapes)],  # line_chart escapes what it is given
    )
    out.write_text(page, encoding="utf-8", errors="replace")  # a name may hold half a surrogate pair
    return out


def words(value: Any) -> str:
    """A setting as a reader would write it.

    >>> words([{"name": "books", "data": ["a/", "b/"], "steps": 300}])
    'books: data a/ b/, steps 300'
    """
    if isinstance(value, dict):
        settings = ", ".join(f"{key} {words(what)}" for key, what in value.items() if key != "name")
        return f"{value['name']}: {settings}" if "name" in value else settings
    if isinstance(value, list | tuple):
        return ("; " if any(isinstance(part, dict) for part in value) else " ").join(map(words, value))
    return str(value)


def names(tapes: Sequence[Tape]) -> list[str]:
    """What to call each run: its name, or where two have the same, its folder."""
    given = [str(t.about.get("name") or t.path.resolve().name) for t in tapes]
    return given if len(set(given)) == len(given) else [str(t.path) for t in tapes]


def charts(tapes: Sequence[Tape]) -> list[str]:
    """One chart a gauge that any run measured; a gauge that belongs beside another is drawn there."""
    runs = list(zip(names(tapes), (t.steps() for t in tapes)))
    drawn = []
    for gauge in (g for g in GAUGES if not g.beside):
        if gauge.key == "skipped" and not any(r.get("skipped") for _, records in runs for r in records):
            continue
        series = _series(runs, gauge.key, "")
        for other in (g for g in GAUGES if g.beside == gauge.key):
            series += _series(runs, other.key, f", {other.title.removesuffix(', bytes')}")
        if series:
            drawn.append(line_chart(gauge.title, series, gauge.style))
    return drawn


def _series(runs: list[tuple[str, list[dict[str, Any]]]], key: str, suffix: str) -> list[Series]:
    drawn = []
    for name, records in runs:
        if points := _points(records, key):
            steps, values = zip(*points)
            drawn.append(Series(name + suffix, steps, values, _begins(records)))
    return drawn


def _begins(records: list[dict[str, Any]]) -> list[float]:
    """The first steps of all phases but the first."""
    return [b["step"] for a, b in pairwise(records) if a.get("phase") != b.get("phase")]


def summary(tapes: Sequence[Tape]) -> list[tuple[str, list[str]]]:
    """(what, [figure of each run]): last value or median over the run, and the total of what was skipped."""
    rows: list[tuple[str, list[str]]] = [("steps", [str(len(t.steps())) for t in tapes])]
    for gauge in GAUGES:
        figures = [_figure(t.steps(), gauge) for t in tapes]
        if any(f != "not measured" for f in figures):
            rows.append((gauge.title + (f", {gauge.summed_up}" if gauge.summed_up else ""), figures))
    return rows


def _points(records: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(r["step"], float(r[key])) for r in records if r.get(key) is not None]


def _figure(records: list[dict[str, Any]], gauge: Gauge) -> str:
    values = [y for _, y in _points(records, gauge.key)]
    if not values:
        return "not measured"
    return number(sorted(values)[len(values) // 2] if gauge.summed_up == "median" else values[-1], gauge.style)
