"""Figures of a run's log, the gauges, totals and warnings, and line charts of them.

Charts are inline SVG: no script library, no network, readable in light and dark, values on hover.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, pairwise
from statistics import median, median_low
from typing import Any, NamedTuple

from ..formatting import duration, moment, number, quantity, readable
from .tape import RunTape

WIDTH, HEIGHT = 560, 230
LARGE, LARGE_LEFT = (560, 200), 48  # of the chart over the page's width, whose text is smaller in these units (style.css)
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 22, 44
LABEL = 8  # characters of the largest font that fit left of the y axis
EDGE = 24  # a label nearer to the right edge ends there, so that it is whole in the largest font
DOTS = 40  # up to this number points are drawn: a single one makes no line
LARGEST = 1e300  # the difference of two larger values may overflow
POINTS = 600  # more than the chart's width in pixels
SMOOTHED = 50  # of a line's points in the mean of a smoothed one, a fiftieth: the noise of single batches goes
DECADE = 10.0  # between the first and the last step: from there on a logarithmic axis shows more


@dataclass(frozen=True)
class Series:
    """A line, interrupted at each x in `begins`. `colour` counts from 0; `dash` 0 is a solid line, 1 and 2 are dashed."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    begins: Sequence[float] = ()
    colour: int = 0
    dash: int = 0
    kind: str = ""  # "raw" or "smooth", if the line has a smoothed one or is it

    @property
    def style(self) -> str:
        """The CSS classes."""
        return f"s{self.colour % 6}" + (f" d{self.dash % 3}" if self.dash % 3 else "") + (f" {self.kind}" if self.kind else "")


@dataclass(frozen=True)
class Axis:
    """The y axis: the format of its values, and bounds that it always includes."""

    style: str = "g"
    low: float | None = None
    high: float | None = None


def line_chart(
    title: str,
    series: Sequence[Series],
    axis: Axis = Axis(),
    marks: Sequence[tuple[float, str]] = (),
    x_range: tuple[float, float] | None = None,
    large: bool = False,
    log: bool = False,
) -> str:
    """Return a <figure> with a line for each series. `marks` are (x, name) of vertical lines. `x_range` is
    by default that of the lines. log: both axes are logarithmic, and values of 0 or less are left out"""
    thinned = [_thin(_positive(s) if log else s) for s in series]
    points = [(x, y) for s in thinned for x, y in zip(s.x, s.y)]
    if not points:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="soft">no finite value was measured</p></figure>'
    low, high = _window([y for _, y in points])
    size = (*LARGE, LARGE_LEFT) if large else (WIDTH, HEIGHT, LEFT)
    first, last = x_range or (min(x for x, _ in points), max(x for x, _ in points))
    if log:
        low, high = min(y for _, y in points), max(y for _, y in points)
        first, y_ticks = max(first, 1), _log_ticks(low, high)
        frame = Frame(first, max(last, first), low, high, *size, log=True)
    else:
        y_ticks = _ticks(
            low if axis.low is None else min(low, axis.low), high if axis.high is None else max(high, axis.high), 4
        )
        if axis.high is not None:
            y_ticks = [y for y in y_ticks if y <= max(high, axis.high)]
        frame = Frame(first, last, y_ticks[0], y_ticks[-1], *size)
    body = "".join(_grid(frame, y_ticks, axis.style)) + "".join(_x_axis(frame)) + "".join(_marks(frame, marks))
    body += "".join(_line(frame, s, axis.style) for s in thinned)
    named = [s for s in thinned if s.kind != "smooth"]
    keys = "".join(f'<span class="{s.style}"><i class="key"></i>{escape(s.name)}</span>' for s in named)
    axes = ", both axes logarithmic" if log else ""
    svg = f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(title)} by step{axes}">'
    caption = escape(title) + (f"<small>{keys}</small>" if len(named) > 1 else "")
    return f"<figure><figcaption>{caption}</figcaption>{svg}{body}</svg></figure>"


def large_chart(
    title: str,
    series: Sequence[Series],
    axis: Axis = Axis(),
    marks: Sequence[tuple[float, str]] = (),
    x_range: tuple[float, float] | None = None,
) -> str:
    """Return a chart over the page's width, with switches for smoothed lines and logarithmic axes, which need no script."""
    lines = [line for s in series for line in _with_smooth(s)]
    smooth = any(line.kind == "smooth" for line in lines)
    xs = [x for s in series for x in s.x if x > 0]
    log = bool(xs) and max(xs) >= DECADE * min(xs) and any(y > 0 for s in series for y in s.y)
    html = '<div class="large">'
    for name, label, defined, on in (("smooth", "smoothed", smooth, " checked"), ("log", "log axes", log, "")):
        if defined:
            html += f'<label class="switch"><input type="checkbox" class="{name}-on"{on}> {label}</label>'
    html += f'<div class="linear">{line_chart(title, lines, axis, marks, x_range, True)}</div>'
    html += f'<div class="logged">{line_chart(title, lines, axis, marks, x_range, True, True)}</div>' if log else ""
    return html + "</div>"


def _with_smooth(series: Series) -> list[Series]:
    """Return a line, and its smoothed one if it has enough points for it: the mean of those before and after, in each piece."""
    points = [(x, y) for x, y in zip(series.x, series.y) if abs(y) < LARGEST]
    half = len(points) // SMOOTHED // 2
    if half < 1 or len(points) <= 2 * DOTS:
        return [series]
    cuts = [bisect_right([x for x, _ in points], begin - 0.5) for begin in series.begins]
    means: list[float] = []
    for a, b in pairwise([0, *cuts, len(points)]):
        sums = [0.0, *accumulate(y for _, y in points[a:b])]
        for at in range(b - a):
            window = min(half, at, b - a - 1 - at)  # the same number on both sides, so that a trend is not shifted
            means.append((sums[at + window + 1] - sums[at - window]) / (2 * window + 1))
    smooth = replace(series, x=[x for x, _ in points], y=means, name=f"{series.name}, smoothed", kind="smooth")
    return [replace(series, kind="raw"), smooth]


def _positive(series: Series) -> Series:
    pairs = [(x, y) for x, y in zip(series.x, series.y) if x > 0 and y > 0]
    return replace(series, x=[x for x, _ in pairs], y=[y for _, y in pairs])


@dataclass(frozen=True)
class Frame:
    x0: float
    x1: float
    y0: float
    y1: float
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    log: bool = False

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = self._share(x, self.x0, self.x1)
        up = self._share(min(max(y, self.y0), self.y1), self.y0, self.y1)
        return self.left + across * (self.width - self.left - RIGHT), self.height - BOTTOM - up * (self.height - TOP - BOTTOM)

    def _share(self, value: float, low: float, high: float) -> float:
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return (value - low) / ((high - low) or 1)


def _window(values: list[float]) -> tuple[float, float]:
    """Return the y range without the top 1 %: the first steps of a run may be far off (a compile, a cold cache)."""
    ordered = sorted(values)
    top = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)] if len(ordered) > 20 else ordered[-1]
    return min(ordered[0], top), max(top, ordered[0])


def _ticks(low: float, high: float, wanted: int, least: float = 0.0) -> list[float]:
    """Return round values around [low, high], at least `least` apart."""
    if high <= low:
        low, high = low - abs(low) * 0.1, high + (abs(high) * 0.1 or 1)  # a constant is centred; zero is at the bottom
    nearest = max(abs(low), abs(high)) * 1e-14  # two floats of this size
    raw = max((high - low) / wanted, least, nearest, 1e-300)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next((m * size for m in (1, 2, 5, 10) if m * size >= raw), raw)
    return [i * step for i in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 of each power of ten in [low, high], or powers alone if they are many; else round values."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = (1, 2, 5) if len(powers) < 6 else (1,)
    ticks = [m * 10.0**p for p in powers[:: max(1, len(powers) // 8)] for m in marks]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside if len(inside) > 2 else [tick for tick in _ticks(low, high, 4) if low <= tick <= high] or [low]


def _labels(values: Sequence[float], style: str) -> list[str]:
    """Return distinct labels: in `style` if they differ, else with more digits; such as 2e-5 if those are too long."""
    share = style.endswith("%")
    styles = [f".{digits}%" for digits in range(9)] if share else [style, *(f",.{digits}g" for digits in range(4, 16))]
    for texts in ([number(value, finer) for value in values] for finer in styles):
        if len(set(texts)) == len(values):
            break
    powers = [re.sub(r"\.?0*e([+-])0*", r"e\1", f"{value:.3e}") if value else "0" for value in values]
    return texts if max(map(len, texts)) <= LABEL or max(map(len, powers)) > LABEL else powers


def _grid(frame: Frame, ticks: list[float], style: str) -> Iterator[str]:
    for y, label in zip(ticks, _labels(ticks, style)):
        _, at = frame.at(frame.x0, y)
        yield f'<line class="grid" x1="{frame.left}" x2="{frame.width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{frame.left - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'


def _x_axis(frame: Frame) -> Iterator[str]:
    """Yield the x axis, with integers as ticks."""
    every = _log_ticks(frame.x0, frame.x1) if frame.log else _ticks(frame.x0, frame.x1, 6, least=1)
    ticks = [x for x in every if frame.x0 <= x <= frame.x1] or [frame.x0]
    for x, label in zip(ticks, _labels(ticks, "si")):
        at, _ = frame.at(x, frame.y0)
        anchor = "end" if at > frame.width - RIGHT - EDGE else "middle"
        at = frame.width - RIGHT if anchor == "end" else at
        yield f'<text x="{at:.1f}" y="{frame.height - BOTTOM + 17}" text-anchor="{anchor}">{label}</text>'
    yield f'<text x="{(frame.left + frame.width - RIGHT) // 2}" y="{frame.height - 6}" text-anchor="middle">step</text>'


def _marks(frame: Frame, marks: Sequence[tuple[float, str]]) -> Iterator[str]:
    """Yield a dashed line for each mark, and its name above, shortened if the next mark is close."""
    ends = [*(x for x, _ in marks[1:]), frame.x1]
    for (x, name), end in zip(marks, ends):
        (at, _), (until, _) = frame.at(max(x, frame.x0), frame.y0), frame.at(end, frame.y0)
        if x > frame.x0:
            yield f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 12}" y2="{frame.height - BOTTOM}"/>'
        room = int((until - at) / 8)  # characters of the largest font
        text = name if len(name) <= room else name[: max(room - 1, 0)] + "…" if room > 1 else ""
        yield f'<text class="mark" x="{at + 4:.1f}" y="{TOP - 6}">{escape(text)}<title>{escape(name)}</title></text>'


def _line(frame: Frame, series: Series, style: str) -> str:
    if not series.y:  # no finite value
        return ""
    points = [frame.at(x, y) for x, y in zip(series.x, series.y)]
    cuts = [bisect_right(series.x, begin - 0.5) for begin in series.begins]
    pieces = [points[a:b] for a, b in pairwise([0, *cuts, len(points)])]
    label = f"{escape(series.name)}: last {number(series.y[-1], style)}"
    polylines = (" ".join(f"{x:.1f},{y:.1f}" for x, y in piece) for piece in pieces if piece)
    lines = "".join(f'<polyline points="{piece}"><title>{label}</title></polyline>' for piece in polylines)
    circles = "".join(
        f'<circle cx="{at:.1f}" cy="{up:.1f}" r="5">'
        f"<title>{escape(series.name)} · step {number(x, ',.0f')}: {number(y, style)}</title></circle>"
        for (at, up), x, y in zip(points, series.x, series.y)
    )
    dots = " few" if len(points) <= DOTS else ""
    return f'<g class="{series.style}{dots}">{lines}{circles}</g>'


def _thin(series: Series) -> Series:
    """Return at most POINTS points, each the mean of a group."""
    pairs = [(x, y) for x, y in zip(series.x, series.y) if abs(y) < LARGEST]
    group = max(1, math.ceil(len(pairs) / POINTS))
    means = [pairs[i : i + group] for i in range(0, len(pairs), group)]
    return replace(series, x=[g[-1][0] for g in means], y=[sum(y for _, y in g) / len(g) for g in means])


Record = dict[str, Any]
BLOCK_STEPS, BLOCK_S = 20, 20.0  # of a block of throughput: both at least, so that a short pause is no slow-down
RISE = 0.1  # of the loss, from the first to the last tenth of a run; noise is less
WORSE = 0.02  # of the held-out loss above its best; the choice of batches changes it by less than 1 %


class Gauge(NamedTuple):
    key: str
    title: str
    axis: Axis
    summed_up: str = "median"  # or "last"
    chart: str = ""  # key of the gauge whose chart it joins

    @property
    def label(self) -> str:
        """The row of a table; memory needs no aggregation in its name."""
        return self.title if self.key.startswith("memory") else f"{self.title}, {self.summed_up}"


SHARE, WHOLE_SHARE = Axis(".1%", low=0), Axis(".1%", low=0, high=1)
BYTES = Axis("si", low=0)

GAUGES = (
    Gauge("loss", "loss", Axis(".4g"), "last"),
    Gauge("held_out", "held-out loss", Axis(".4g"), "last", chart="loss"),
    Gauge("reward", "reward", Axis(".3g"), "last"),
    Gauge("eval_reward", "held-out reward", Axis(".3g"), "last", chart="reward"),
    Gauge("length", "tokens an answer", Axis(".3g", low=0), "last"),
    Gauge("entropy", "entropy of a token", Axis(".3g", low=0), "last"),
    Gauge("kl", "KL divergence from the reference", Axis(".3g", low=0), "last"),
    Gauge("gap", "log-probability, sampler against trainer", Axis(".2g", low=0)),
    Gauge("no_signal", "prompts without a signal", WHOLE_SHARE),
    Gauge("sampled_per_s", "tokens per second in sampling", Axis("si", low=0)),
    Gauge("sample_share", "time in sampling", WHOLE_SHARE),
    Gauge("reward_share", "time in rewards", WHOLE_SHARE, chart="sample_share"),
    Gauge("learn_share", "time in learning", WHOLE_SHARE, chart="sample_share"),
    Gauge("tokens_per_s", "tokens per second", Axis("si", low=0)),
    Gauge("mfu", "MFU", SHARE),
    Gauge("gpu_busy", "GPU busy", WHOLE_SHARE),
    Gauge("sm_active", "SMs at work", WHOLE_SHARE),
    Gauge("power_w", "power, W", Axis(".3g", low=0)),
    Gauge("host_lead_ms", "host lead over the GPU, ms", Axis(".3g", low=0)),
    Gauge("syncs", "host syncs per step", Axis("g", low=0)),
    Gauge("h2d_bytes", "bytes from the host per step", BYTES),
    Gauge("sums_share", "time in collectives", SHARE),
    Gauge("held_up_ms", "waiting for the slowest rank, ms", Axis(".3g", low=0)),
    Gauge("grad_norm", "gradient norm", Axis(".3g"), "last"),
    Gauge("lr", "learning rate", Axis(".2g", low=0), "last"),
    Gauge("memory_bytes", "peak memory, bytes", BYTES, "last"),
    Gauge("memory_allocated_bytes", "allocated memory, bytes", BYTES, "last", chart="memory_bytes"),
    Gauge("memory_reserved_bytes", "reserved memory, bytes", BYTES, "last", chart="memory_bytes"),
    Gauge("skipped", "skipped steps, not finite", Axis("g", low=0), "last"),
)


class Figures:
    """Figures of one run, from its log."""

    def __init__(self, tape: RunTape):
        self.about, self.records = tape.about, tape.steps()
        self.warnings = warnings(self.records)

    def points(self, key: str) -> list[tuple[int, float]]:
        return _series(self.records, key)

    def value(self, gauge: Gauge) -> float | None:
        """Return the gauge's last value or the median of the finite ones; None if it was not measured."""
        values = [value for _, value in self.points(gauge.key)]
        if not values or gauge.summed_up == "last":
            return values[-1] if values else None
        finite = [value for value in values if math.isfinite(value)]
        return median_low(finite) if finite else values[-1]

    @property
    def steps(self) -> int:
        """The number of steps taken: a record of step 0 is an evaluation before the first."""
        return sum(record["step"] > 0 for record in self.records)

    @property
    def tokens(self) -> int:
        return int(sum(count for _, count in self.points("tokens") if math.isfinite(count)))

    @property
    def seconds(self) -> float | None:
        """The training time of all starts together."""
        values = [seconds for _, seconds in self.points("elapsed_s") if math.isfinite(seconds)]
        return values[-1] if values else None

    @property
    def phases(self) -> list[tuple[int, str]]:
        """(first step, name) of each; none for a run without phases."""
        named = [(0, None), *((r["step"], r.get("phase") or "") for r in self.records)]
        begins = [(step, str(name)) for (_, before), (step, name) in pairwise(named) if name != before]
        return begins if any(name for _, name in begins) else []

    def facts(self) -> dict[str, str]:
        """Return start, command and duration."""
        starts = self.about.get("starts") or []
        rows = {"started": moment(starts[0]["date"]), "command": str(starts[-1]["command"])} if starts else {}
        if len(starts) > 1:
            rows["resumed"] = ", ".join(moment(start["date"]) for start in starts[1:])
        if self.seconds is not None:
            rows["trained for"] = duration(self.seconds)
        rows["steps"] = f"{self.steps:,}"
        rows |= {"tokens": f"{self.tokens:,}"} if self.tokens else {}
        return rows | {f"peak memory, {row['phase']}": _memory(row) for row in self.about.get("memory") or []}

    def gauges(self) -> dict[str, str]:
        values = {gauge: self.value(gauge) for gauge in GAUGES if gauge.key != "skipped"}
        rows = {gauge.label: number(value, gauge.axis.style) for gauge, value in values.items() if value is not None}
        count = sum(count for _, count in skipped(self.records))
        return rows | ({"skipped steps": f"{count:,}"} if count else {})

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers under their names in the log; values that are not finite are None."""
        starts = self.about.get("starts") or [{}]
        result = {"name": self.about.get("name"), "finished": self.about.get("finished") is True}
        result |= {"verdict": self.about.get("verdict")}
        result |= {"warnings": self.warnings, "started": starts[0].get("date"), "command": starts[-1].get("command")}
        result |= {"steps": self.steps, "tokens": self.tokens, "elapsed_s": self.seconds}
        values = {gauge.key: self.value(gauge) for gauge in GAUGES}
        result |= {key: value if math.isfinite(value) else None for key, value in values.items() if value is not None}
        return result | {"skipped": sum(count for _, count in skipped(self.records))}


def _memory(row: dict[str, Any]) -> str:
    predicted = f" (predicted {readable(row['predicted'])})" if row["predicted"] else ""
    return f"{readable(row['allocated'])} allocated, {readable(row['reserved'])} reserved{predicted}"


class SlowBlock(NamedTuple):
    """A block of steps that ran at half the speed of the fastest block before it, or slower."""

    first: int
    last: int
    tokens_per_s: float
    best: float  # tokens per second of the fastest earlier block

    def __str__(self) -> str:
        return f"tokens per second fell from {quantity(self.best)} to {quantity(self.tokens_per_s)}"


class Throughput:
    """Median tokens per second of each block of steps, fed record by record.

    A median leaves out evaluations, checkpoints and compilation in the first steps. A phase may have other data or
    another sequence length, so every phase is compared separately.
    """

    def __init__(self) -> None:
        self.slow: SlowBlock | None = None  # the newest block, if it was slow
        self.worst: SlowBlock | None = None
        self._phase: object = None
        self._best = 0.0
        self._steps: list[int] = []
        self._paces: list[float] = []
        self._seconds = 0.0

    def add(self, record: Record) -> bool:
        """Return True if this record completes a slow block that follows a fast one."""
        if record.get("phase") != self._phase:
            self._phase, self._best, self.slow = record.get("phase"), 0.0, None
            self._restart()
        pace = float(record.get("tokens_per_s") or math.nan)
        if not 0 < pace < math.inf:
            return False
        self._steps.append(record["step"])
        self._paces.append(pace)
        self._seconds += float(record.get("seconds") or record.get("tokens", pace) / pace)
        if len(self._paces) < BLOCK_STEPS or self._seconds < BLOCK_S:
            return False
        pace, before = median(self._paces), self.slow
        self.slow = SlowBlock(self._steps[0], self._steps[-1], pace, self._best) if pace <= 0.5 * self._best else None
        if self.slow and (self.worst is None or pace / self._best < self.worst.tokens_per_s / self.worst.best):
            self.worst = self.slow
        self._best = max(self._best, pace)
        self._restart()
        return before is None and self.slow is not None

    def _restart(self) -> None:
        self._steps, self._paces, self._seconds = [], [], 0.0


def warnings(records: Sequence[Record]) -> list[str]:
    """Return a sentence each for a run that diverged, slowed down, skipped steps, or trained on after its best step."""
    return [text for text in (_divergence(records), _slowdown(records), _skips(records), _overfit(records)) if text]


def _slowdown(records: Sequence[Record]) -> str | None:
    throughput = Throughput()
    for record in records:
        throughput.add(record)
    worst = throughput.worst
    return None if worst is None else f"{worst} (steps {worst.first:,} to {worst.last:,})"


def _divergence(records: Sequence[Record]) -> str | None:
    losses = _series(records, "loss")
    if losses and not math.isfinite(losses[-1][1]):
        last = next((step for step, loss in reversed(losses) if math.isfinite(loss)), None)
        return "the loss was never finite" if last is None else f"the loss was not finite after step {last:,}"
    losses = _of_last_phase(records, "loss")
    tenth = len(losses) // 10
    if tenth < 2:  # a rise of so few steps is noise
        return None
    begin, end = (median(loss for _, loss in part) for part in (losses[:tenth], losses[-tenth:]))
    return f"the loss rose from {begin:.3f} to {end:.3f}" if end > begin + RISE * abs(begin) else None


def _skips(records: Sequence[Record]) -> str | None:
    skips = skipped(records)
    if not skips:
        return None
    count = sum(count for _, count in skips)
    steps = f"step {skips[0][0]:,} was skipped" if count == 1 else f"{count:,} of {len(records):,} steps were skipped"
    since = "" if count == 1 else f", the first at step {skips[0][0]:,}"
    return f"{steps}{since}: the loss or the gradient was not finite"


def _overfit(records: Sequence[Record]) -> str | None:
    losses = _of_last_phase(records, "held_out")
    if not losses:
        return None
    (step, best), (_, last) = min(losses, key=lambda point: point[1]), losses[-1]
    if last <= best + WORSE * abs(best):
        return None
    return f"the held-out loss was lowest at step {step:,} ({best:.3f}) and {last:.3f} at the end"


def skipped(records: Sequence[Record]) -> list[tuple[int, int]]:
    """Return (step, steps skipped since the previous record). The log counts from 0 in each phase and start."""
    counted = [(r["step"], float(r["skipped"]), r.get("phase")) for r in records if r.get("skipped") is not None]
    counts = [(0, 0, None), *((step, int(count), phase) for step, count, phase in counted if math.isfinite(count))]
    new = [(step, b - a if was == phase and b >= a else b) for (_, a, was), (step, b, phase) in pairwise(counts)]
    return [(step, count) for step, count in new if count]


def _series(records: Sequence[Record], key: str) -> list[tuple[int, float]]:
    return [(r["step"], float(r[key])) for r in records if r.get(key) is not None]


def _of_last_phase(records: Sequence[Record], key: str) -> list[tuple[int, float]]:
    last = [r for r in records if r.get("phase") == records[-1].get("phase")]
    return [(step, value) for step, value in _series(last, key) if math.isfinite(value)]
