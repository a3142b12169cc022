"""Chart of the waits of ranks: a lane for each rank, darker where it waited longer. The slowest rank's lane is the palest."""

from collections.abc import Sequence
from html import escape
from statistics import median

from ..formatting import number
from .chart import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Frame, x_axis

CELLS = 120  # along the steps: the chart is 470 wide
MOST = 32  # lanes; of more ranks only the slowest are shown
TALLEST, ROOM = 24, 360  # a lane's height at most, and that of all lanes
NAME = 13  # the height of a lane that has room for its name


def lanes_chart(title: str, steps: Sequence[int], waited: Sequence[Sequence[float]]) -> str:
    """Return a <figure>. `waited` has the ms that each rank waited in each of `steps`."""
    usual = [median(ranks) for ranks in zip(*waited)]
    shown = sorted(sorted(range(len(usual)), key=usual.__getitem__)[:MOST])
    size = -(-len(steps) // CELLS)
    cells = [range(at, min(at + size, len(steps))) for at in range(0, len(steps), size)]
    means = {rank: [sum(waited[at][rank] for at in cell) / len(cell) for cell in cells] for rank in shown}
    darkest = sorted(mean for lane in means.values() for mean in lane)[int(0.99 * len(shown) * len(cells))] or 1.0
    tall = min(TALLEST, ROOM / len(shown))
    height = TOP + tall * len(shown)
    frame = Frame(steps[0] - 0.5, steps[-1] + 0.5, 0, 1)  # a cell reaches half a step to either side
    ranges = [(steps[cell[0]], steps[cell[-1]]) for cell in cells]
    lanes = "".join(
        _lane(frame, ranges, rank, [(mean, min(mean / darkest, 1)) for mean in means[rank]], TOP + place * tall, tall)
        for place, rank in enumerate(shown)
    )
    slowest = min(shown, key=usual.__getitem__)
    legend = f"darker: longer, up to {number(darkest, '.3g')} ms; "
    legend += f"rank {slowest} waited least, {number(usual[slowest], '.3g')} ms a step"
    legend += f"; the {MOST} slowest of {len(usual):,} ranks" if len(usual) > MOST else ""
    edge = f'<rect class="edge" x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{tall * len(shown):.1f}"/>'
    svg = f'<svg viewBox="0 0 {WIDTH} {height + BOTTOM:.0f}" role="img" aria-label="{escape(title)}" class="lanes s0">'
    body = edge + "".join(x_axis(frame, height + BOTTOM)) + lanes
    return f"<figure><figcaption>{escape(title)}<small>{legend}</small></figcaption>{svg}{body}</svg></figure>"


def _lane(
    frame: Frame, ranges: Sequence[tuple[int, int]], rank: int, cells: Sequence[tuple[float, float]], top: float, tall: float
) -> str:
    """Return the lane of a rank. `cells` are (mean wait in ms, opacity) for each of `ranges`, first and last step."""
    shapes = f'<text x="{LEFT - 6}" y="{top + tall / 2 + 4:.1f}" text-anchor="end">rank {rank}</text>' if tall >= NAME else ""
    for (first, last), (mean, dark) in zip(ranges, cells):
        left, right = (frame.at(step, 0)[0] for step in (first - 0.5, last + 0.5))
        hover = f"rank {rank} · step {first:,}{f' to {last:,}' if last > first else ''}: {number(mean, '.3g')} ms"
        place = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.2f}" height="{max(tall - 1.5, 1):.1f}"'
        shapes += f'<rect {place} fill-opacity="{dark:.3f}"><title>{hover}</title></rect>'
    return shapes
