"""Line charts as inline SVG: no script library, no network, readable in light and dark, values on hover."""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from ..formatting import number

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 22, 44
LABEL = 8  # characters of the largest font that fit left of the y axis
EDGE = 24  # a label nearer to the right edge ends there, so that it is whole in the largest font
DOTS = 40  # up to this number points are drawn: a single one makes no line
LARGEST = 1e300  # the difference of two larger values may overflow
POINTS = 600  # more than the chart's width in pixels


@dataclass(frozen=True)
class Series:
    """A line, interrupted at each x in `begins`. `colour` counts from 0; `dash` 0 is a solid line, 1 and 2 are dashed."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    begins: Sequence[float] = ()
    colour: int = 0
    dash: int = 0

    @property
    def style(self) -> str:
        """The CSS classes."""
        return f"s{self.colour % 6}" + (f" d{self.dash % 3}" if self.dash % 3 else "")


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
) -> str:
    """Return a <figure> with a line for each series. `marks` are (x, name) of vertical lines. `x_range` is
    by default that of the lines."""
    thinned = [_thin(s) for s in series]
    points = [(x, y) for s in thinned for x, y in zip(s.x, s.y)]
    if not points:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="soft">no finite value was measured</p></figure>'
    low, high = _window([y for _, y in points])
    y_ticks = _ticks(low if axis.low is None else min(low, axis.low), high if axis.high is None else max(high, axis.high), 4)
    if axis.high is not None:
        y_ticks = [y for y in y_ticks if y <= max(high, axis.high)]
    first, last = x_range or (min(x for x, _ in points), max(x for x, _ in points))
    frame = Frame(first, last, y_ticks[0], y_ticks[-1])
    body = "".join(_grid(frame, y_ticks, axis.style)) + "".join(_x_axis(frame)) + "".join(_marks(frame, marks))
    body += "".join(_line(frame, s, axis.style) for s in thinned)
    keys = "".join(f'<span class="{s.style}"><i class="key"></i>{escape(s.name)}</span>' for s in thinned)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} by step">'
    caption = escape(title) + (f"<small>{keys}</small>" if len(thinned) > 1 else "")
    return f"<figure><figcaption>{caption}</figcaption>{svg}{body}</svg></figure>"


@dataclass(frozen=True)
class Frame:
    x0: float
    x1: float
    y0: float
    y1: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x0) / ((self.x1 - self.x0) or 1)
        up = (min(max(y, self.y0), self.y1) - self.y0) / ((self.y1 - self.y0) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


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
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'


def _x_axis(frame: Frame) -> Iterator[str]:
    """Yield the x axis, with integers as ticks."""
    ticks = [x for x in _ticks(frame.x0, frame.x1, 6, least=1) if frame.x0 <= x <= frame.x1] or [frame.x0]
    for x, label in zip(ticks, _labels(ticks, "si")):
        at, _ = frame.at(x, frame.y0)
        anchor = "end" if at > WIDTH - RIGHT - EDGE else "middle"
        at = WIDTH - RIGHT if anchor == "end" else at
        yield f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="{anchor}">{label}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) // 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>'


def _marks(frame: Frame, marks: Sequence[tuple[float, str]]) -> Iterator[str]:
    """Yield a dashed line for each mark, and its name above, shortened if the next mark is close."""
    ends = [*(x for x, _ in marks[1:]), frame.x1]
    for (x, name), end in zip(marks, ends):
        (at, _), (until, _) = frame.at(max(x, frame.x0), frame.y0), frame.at(end, frame.y0)
        if x > frame.x0:
            yield f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 12}" y2="{HEIGHT - BOTTOM}"/>'
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
