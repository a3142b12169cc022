"""A chart draws the data that it is given, between axes that can be read."""

import re
from itertools import pairwise

import pytest

from gpubound.monitor.figures import Axis, Series, large_chart, line_chart
from tests.messages import message


def test_the_chart_draws_the_data():
    """Of two points at the extremes, the line starts at the bottom left and ends at the top right."""
    svg = line_chart("speed", [Series("a", [0, 10], [0.0, 100.0])])
    (x0, y0), (x1, y1) = (tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', svg)[1].split())
    assert (x0, y0) == (72.0, 186.0) and (x1, y1) == (544.0, 22.0)


def test_many_points_are_averaged_not_sampled():
    spiky = [0.0, 2.0] * 3000  # taking every tenth point would show 0 or 2 only
    svg = line_chart("spikes", [Series("a", list(range(6000)), spiky)])
    assert svg.count("<circle") == 600 and svg.count(": 1</title></circle>") == 600, (
        "each point is the mean of the ten it stands for"
    )
    steps = re.findall(r"step ([\d,]+): ", svg)
    assert steps[0] == "9" and steps[-1] == "5,999", "and lies where the last of them does"


def test_a_few_values_far_off_do_not_set_the_scale():
    """The first steps of a run, say: the top 1 % of many values lies at the upper edge; of few, every one counts."""
    values = [1000.0, *(1.0 + i / 99 for i in range(99))]
    assert max(float(label) for label in ticks(line_chart("loss", [Series("a", list(range(100)), values)]))[0]) <= 3
    few = [1000.0, *values[-19:]]
    assert max(float(label) for label in ticks(line_chart("loss", [Series("a", list(range(20)), few)]))[0]) >= 1000


def test_a_single_point_is_a_dot():
    assert '<g class="s0 few">' in line_chart("held out", [Series("a", [7], [3.0])])
    assert '<g class="s0">' in line_chart("loss", [Series("a", list(range(100)), list(range(100)))])


def test_several_lines_have_a_key():
    chart = line_chart("loss", [Series("a", [0, 1], [0.0, 1.0]), Series("b", [0, 1], [1.0, 0.0], colour=1, dash=1)])
    assert message("monitor/chart:several_lines_have_a_key").within(chart)


def ticks(chart):
    """(y labels, x labels) of a chart."""
    found = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="\w+">([^<]*)</text>', chart)
    return [label for x, label in found if x == "66"], [label for x, label in found if x != "66"]


@pytest.mark.parametrize(
    ("xs", "ys", "axis", "wanted"),
    [
        ([31], [0.0], Axis(), ["31"]),
        ([1, 2, 3], [1.0, 2.0, 3.0], Axis(), ["1", "2", "3"]),
        ([12_340, 12_352], [0.991, 0.994], Axis(".0%"), ["12,340", "12,342", "12,344", "12,346", "12,348", "12,350", "12,352"]),
    ],
)
def test_labels_of_an_axis_differ_and_steps_are_whole(xs, ys, axis, wanted):
    y, x = ticks(line_chart("t", [Series("a", xs, ys)], axis))
    assert x == [*wanted, "step"], "the last is the axis' name"
    assert len(set(y)) == len(y) >= 3


def test_labels_of_values_that_hardly_differ():
    labels = ticks(line_chart("lr", [Series("a", [0, 100], [0.00012345, 0.00012385])], Axis(".2g")))[0]
    assert len(set(labels)) == len(labels) and labels[0] == "1.234e-4", "0.0001234 would not fit beside the axis"


def test_a_share_goes_from_none_to_all():
    chart = line_chart("busy", [Series("a", [0, 100], [0.991, 0.994])], Axis(".0%", low=0, high=1))
    assert ticks(chart)[0][:3] == ["0%", "50%", "100%"]


def lines_of(svg: str) -> dict[str, list[tuple[float, float]]]:
    """The points of each line, by its classes."""
    groups = re.findall(r'<g class="([^"]+)">(.*?)</g>', svg, re.DOTALL)
    return {
        classes: [tuple(map(float, p.split(","))) for points in re.findall(r'points="([^"]+)"', body) for p in points.split()]
        for classes, body in groups
    }


def test_a_smoothed_line_has_the_mean_of_its_neighbours_and_stays_within_its_piece():
    """Noise of one sign after the other goes, the trend and the step between two phases stay."""
    values = [10.0 - i / 100 + (0.5 if i % 2 else -0.5) - (3.0 if i >= 400 else 0.0) for i in range(600)]
    html = large_chart("loss", [Series("a", list(range(1, 601)), values, begins=[401])])
    linear = html.partition('<div class="logged">')[0]
    raw, smooth = lines_of(linear)["s0 raw"], lines_of(linear)["s0 smooth"]

    def jumps(points):
        return sorted(abs(b - a) for (_, a), (_, b) in pairwise(points))

    assert len(raw) == len(smooth) == 600
    assert jumps(smooth)[-9] < jumps(raw)[9] / 4, "but at the ends of the pieces, where there are few neighbours"
    assert jumps(smooth)[-1] > 10 * jumps(smooth)[-9], "the next phase begins at once"
    assert html.count('class="smooth-on" checked') == html.count('class="log-on"') == 1


def test_a_power_law_is_a_straight_line_on_logarithmic_axes():
    html = large_chart("loss", [Series("a", list(range(1, 101)), [8.0 * x**-0.5 for x in range(1, 101)])])
    (points,) = (points for name, points in lines_of(html.partition('<div class="logged">')[2]).items() if "smooth" not in name)
    (x0, y0), (x1, y1) = points[0], points[-1]
    assert all(abs(y - (y0 + (y1 - y0) * (x - x0) / (x1 - x0))) < 0.2 for x, y in points)
    assert "both axes logarithmic" in html


def test_a_chart_has_only_the_switches_that_it_needs():
    few = large_chart("loss", [Series("a", [1, 2, 3], [3.0, 2.0, 1.0])])
    assert "<input" not in few and few.count("<svg") == 1
    negative = large_chart("log-likelihood", [Series("a", list(range(1, 200)), [-1.0 / x for x in range(1, 200)])])
    assert "log-on" not in negative and "smooth-on" in negative
    one = large_chart("loss", [Series("a", list(range(1, 200)), [2.0] * 199)])
    assert one.count("<svg") == 2, "a constant loss has logarithmic axes too"
