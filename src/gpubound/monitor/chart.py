"""Line charts as inline SVG: no script library, no network, readable in light and dark, values on hover."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 200
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 26
DOTS = 40  # so few points are shown as such: a single one would be no line at all
POINTS = 600  # more than the chart is wide: beyond it a long run only makes the page heavy


@dataclass(frozen=True)
class Series:
    """A line, drawn anew from each x in `begins`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    begins: Sequence[float] = ()


def line_chart(title: str, series: Sequence[Series], style: str = "g", x_label: str = "step") -> str:
    """A <figure> with one line a series. `style` formats the y values: 'g', '.0%', or 'si' for 12.3k."""
    drawn = [_thin(s) for s in series]
    points = [(x, y) for s in drawn for x, y in zip(s.x, s.y)]
    if not points:
        return f"<figure><figcaption>{escape(title)}</figcaption><p class=none>not measured</p></figure>"
    x_ticks = _ticks(min(p[0] for p in points), max(p[0] for p in points), 6)
    y_ticks = _ticks(*_window([y for _, y in points]), 4)
    frame = _Frame(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    body = "".join(_grid(frame, x_ticks, y_ticks, style))
    body += "".join(_line(frame, i, s, style) for i, s in enumerate(drawn))
    keys = "".join(f'<span class="s{i % 6}"><i class=key></i>{escape(s.name)}</span>' for i, s in enumerate(drawn))
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} by {escape(x_label)}">'
    caption = escape(title) + (f"<small>{keys}</small>" if len(drawn) > 1 else "")
    return f"<figure><figcaption>{caption}</figcaption>{svg}{body}</svg></figure>"


def number(value: float, style: str) -> str:
    if style != "si":
        return format(value, style)
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class _Frame:
    x0: float
    x1: float
    y0: float
    y1: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x0) / ((self.x1 - self.x0) or 1)
        up = (min(max(y, self.y0), self.y1) - self.y0) / ((self.y1 - self.y0) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def _window(values: list[float]) -> tuple[float, float]:
    """The y range. The first steps of a run may be far off (a compile, a cold cache): the top 1 % does not set the scale."""
    ordered = sorted(values)
    top = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)] if len(ordered) > 20 else ordered[-1]
    return min(ordered[0], top), max(top, ordered[0])


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round values that span [low, high]."""
    if high <= low:
        low, high = low - abs(low) * 0.1, high + (abs(high) * 0.1 or 1)  # a constant gets room around it; zero only above
    raw = (high - low) / wanted
    step = next(m * 10 ** math.floor(math.log10(raw)) for m in (1, 2, 5, 10) if m * 10 ** math.floor(math.log10(raw)) >= raw)
    first = math.floor(low / step)
    return [round(i * step, 12) for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def _grid(frame: _Frame, x_ticks: list[float], y_ticks: list[float], style: str):
    for y in y_ticks:
        _, at = frame.at(frame.x0, y)
        yield f'<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x={LEFT - 6} y="{at + 3.5:.1f}" text-anchor=end>{number(y, style)}</text>'
    for x in x_ticks:
        at, _ = frame.at(x, frame.y0)
        yield f'<text x="{at:.1f}" y={HEIGHT - 8} text-anchor=middle>{number(x, "si")}</text>'


def _line(frame: _Frame, index: int, series: Series, style: str) -> str:
    pieces: list[list[str]] = [[] for _ in range(len(series.begins) + 1)]
    for x, y in zip(series.x, series.y):
        pieces[sum(x >= begin for begin in series.begins)].append("{:.1f},{:.1f}".format(*frame.at(x, y)))
    if not series.y:  # nothing of it was finite
        return ""
    label = f"{escape(series.name)}: last {number(series.y[-1], style)}"
    marks = "".join(
        f'<circle cx="{frame.at(x, y)[0]:.1f}" cy="{frame.at(x, y)[1]:.1f}" r=5>'
        f"<title>{escape(series.name)} · {number(x, 'g')}: {number(y, style)}</title></circle>"
        for x, y in zip(series.x, series.y)
    )
    few = " few" if len(series.x) <= DOTS else ""
    lines = "".join(f'<polyline points="{" ".join(p)}"><title>{label}</title></polyline>' for p in pieces if p)
    return f'<g class="s{index % 6}{few}">{lines}{marks}</g>'


def _thin(series: Series) -> Series:
    """At most POINTS points; each kept point is the mean of those it stands for, so that noise is not sampled away."""
    pairs = [(x, y) for x, y in zip(series.x, series.y) if math.isfinite(y)]
    group = max(1, math.ceil(len(pairs) / POINTS))
    means = [pairs[i : i + group] for i in range(0, len(pairs), group)]
    return Series(series.name, [g[-1][0] for g in means], [sum(y for _, y in g) / len(g) for g in means], series.begins)
