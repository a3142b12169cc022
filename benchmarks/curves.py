"""The picture of decoding in docs/figures.md: tokens a second over the rows of a batch, ours, a peer's and the roofline's.

Two SVG files, for a light and for a dark page. Both axes are logarithmic, so a speed that doubles with the rows is a straight
line upwards.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .results import Line
from .svg import THEMES, Colours, file, text
from .tables import name_of

CASE = re.compile(r"(\S+) batch (\d+)")
PEER, ROOFLINE = "graph", "roofline"
LEAST = 4  # batch sizes of a model, or there is nothing to see

PANEL, HEIGHT, LEFT, TOP, SIDE, FOOT = 500, 320, 70, 34, 14, 58  # a panel, and the room around its lines, in pixels
LEGEND = 0, 110, 340  # where the names of the lines begin, behind LEFT
ROOM = 1.25  # above the fastest and below the slowest


@dataclass(frozen=True)
class Curves:
    """A model's speed by rows: {who: {rows: tokens a second}}, "gpubound" first."""

    name: str
    lines: dict[str, dict[int, float]]


def curves(lines: Sequence[Line]) -> list[Curves]:
    """Those models of `lines`, the newest of one GPU, that were measured at enough batch sizes beside the peer."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for line in lines:
        case = CASE.fullmatch(line.case)
        if case is None or line.bench != "decode" or line.peer_name not in (PEER, ROOFLINE):
            continue
        by_who = found.setdefault(case[1], {"gpubound": {}, name_of(PEER): {}, ROOFLINE: {}})
        rows = int(case[2])
        by_who[ROOFLINE if line.peer_name == ROOFLINE else name_of(PEER)][rows] = line.peer
        if line.peer_name == PEER:
            by_who["gpubound"][rows] = line.ours
    return [Curves(name, by_who) for name, by_who in found.items() if len(by_who["gpubound"]) >= LEAST]


def told(found: Sequence[Curves]) -> str:
    """The same for readers who do not see the picture."""
    said = []
    for curve in found:
        speeds = {who: [f"{rows}: {round(speed):,}" for rows, speed in sorted(of.items())] for who, of in curve.lines.items()}
        every = "; ".join(f"{who} {', '.join(points)}" for who, points in speeds.items())
        said.append(f"Decoding, {curve.name}, tokens a second by rows of a batch: {every}.")
    return " ".join(said)


def picture(found: Sequence[Curves], theme: str) -> str:
    body = [part for number, curve in enumerate(found) for part in _panel(curve, number * PANEL, THEMES[theme])]
    return file(PANEL * len(found), HEIGHT, told(found), body, 12)


def _panel(curve: Curves, left: int, colours: Colours) -> list[str]:
    rows = sorted({count for points in curve.lines.values() for count in points})
    speeds = [speed for points in curve.lines.values() for speed in points.values()]
    low, high = math.log10(min(speeds) / ROOM), math.log10(max(speeds) * ROOM)
    bottom, inner = HEIGHT - FOOT, PANEL - LEFT - SIDE

    def x(count: int) -> float:
        return left + LEFT + inner * math.log2(count / rows[0]) / math.log2(rows[-1] / rows[0])

    def y(speed: float) -> float:
        return bottom - (bottom - TOP) * (math.log10(speed) - low) / (high - low)

    body = [text(left + LEFT, 18, f"Decoding, {curve.name}: tokens a second by rows of a batch", colours.text, bold=True)]
    for power in range(math.ceil(low), math.floor(high) + 1):
        at = y(10**power)
        body.append(f'<path d="M{left + LEFT} {at:.1f}H{left + PANEL - SIDE}" stroke="{colours.peer}" stroke-opacity="0.35"/>')
        body.append(text(left + LEFT - 8, at + 4, f"{10**power:,}", colours.quiet, anchor="end"))
    body += [text(x(count), bottom + 18, str(count), colours.quiet, anchor="middle") for count in rows]
    looks = zip(curve.lines.items(), ((colours.ours, ""), (colours.peer, ""), (colours.quiet, "4 4")))
    for number, ((who, points), (colour, dashes)) in enumerate(looks):
        path = "L".join(f"{x(count):.1f} {y(speed):.1f}" for count, speed in sorted(points.items()))
        body.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        body += [f'<circle cx="{x(c):.1f}" cy="{y(s):.1f}" r="3" fill="{colour}"/>' for c, s in points.items() if not dashes]
        start = left + LEFT + LEGEND[number]
        body.append(f'<path d="M{start} {HEIGHT - 14}h16" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        body.append(text(start + 22, HEIGHT - 10, who, colours.text if not number else colours.quiet, bold=not number))
    return body
