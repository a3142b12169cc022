"""Lanes of ranks: the palest is the slowest rank's, and many ranks and many steps still make a page that can be read."""

import re

from gpubound.monitor.lanes import CELLS, MOST, lanes_chart
from tests.messages import message


def cells(chart: str) -> list[tuple[str, float, float]]:
    """(what a cell says, its opacity, its width), in the order of the page."""
    found = re.findall(r'width="([\d.]+)" height="[\d.]+" fill-opacity="([\d.]+)"><title>([^<]*)', chart)
    return [(said, float(opacity), float(width)) for width, opacity, said in found]


def test_a_cell_is_as_dark_as_its_rank_waited():
    chart = lanes_chart("waits", [1, 2], [[10.0, 0.0], [5.0, 0.5]])
    drawn = cells(chart)
    assert [opacity for _, opacity, _ in drawn] == [1.0, 0.5, 0.0, 0.05]
    assert [said for said, _, _ in drawn][:2] == [
        message("monitor/lanes:a_cell_is_as_dark_as_its"),
        message("monitor/lanes:a_cell_is_as_dark_as_its.2"),
    ]
    assert message("monitor/lanes:a_cell_is_as_dark_as_its.3").within(chart) and ">rank 0</text>" in chart
    assert len({width for _, _, width in drawn}) == 1 and abs(2 * drawn[0][2] - 472) < 0.1, "the cells fill the chart"


def test_many_steps_are_averaged_and_of_many_ranks_the_slowest_are_shown():
    waited = [[float(rank % 50) + step % 2 for rank in range(100)] for step in range(1000)]
    chart = lanes_chart("waits", list(range(1000)), waited)
    drawn = cells(chart)
    lanes = list(dict.fromkeys(said.split(" · ")[0] for said, _, _ in drawn))
    assert len(lanes) == MOST and lanes[:2] == ["rank 0", "rank 1"] and lanes[-1] == "rank 65"
    assert len(drawn) // MOST <= CELLS and drawn[0][0] == message("monitor/lanes:many_steps_are_averaged")
    assert message("monitor/lanes:many_steps_are_averaged.2", MOST).within(chart)


def test_ranks_that_never_waited_and_names_that_are_markup():
    chart = lanes_chart("<b>", [7], [[0.0, 0.0]])
    assert [opacity for _, opacity, _ in cells(chart)] == [0.0, 0.0] and "<b>" not in chart
