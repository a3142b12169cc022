"""The search for plans of whole steps: its neighbours, its way to the best, its limits. What it finds, only a GPU can say."""

import math
import sys
import time

import pytest
import torch

from benchmarks import tune_steps
from benchmarks.candidates import candidates
from gpubound.kernels import plans
from gpubound.kernels.plans.types import AttentionPlan, MatrixPlan
from tests import messages

LIKE = torch.zeros(1, dtype=torch.bfloat16)
DOWN = plans.job_of("product", "add", (1000, 8192, 1000), LIKE)
ATTENTION = plans.job_of("decode_attention", "", (4, 32, 8, 2), LIKE)


def test_neighbours_differ_in_one_number():
    assert set(tune_steps.neighbours(ATTENTION, AttentionPlan(64, 3, 4))) == {
        AttentionPlan(32, 3, 4),
        AttentionPlan(128, 3, 4),
        AttentionPlan(64, 2, 4),
        AttentionPlan(64, 4, 4),
        AttentionPlan(64, 3, 2),
        AttentionPlan(64, 3, 8),
    }
    assert all(plan in candidates(DOWN) for plan in tune_steps.neighbours(DOWN, MatrixPlan(2, 1024, 4)))


def away(plan, best):
    return sum(abs(math.log2(a / b)) for a, b in zip(plan, best))


def test_it_goes_to_the_best_plans_and_leaves_none_in_place():
    """A step takes the longer the further both plans lie from the best ones; the second job's best depends on the first's."""
    before = plans.plan_for(DOWN), plans.plan_for(ATTENTION)
    best = MatrixPlan(2, 2048, 4)

    def us():
        down, attention = plans.plan_for(DOWN), plans.plan_for(ATTENTION)
        wanted = AttentionPlan(128, 2, 8) if down == best else AttentionPlan(32, 4, 2)
        return 100 + 10 * away(down, best) + away(attention, wanted)

    found = tune_steps.search_all(us, [ATTENTION, DOWN], 60)
    assert (found.won[DOWN], found.won[ATTENTION]) == (best, AttentionPlan(128, 2, 8))
    assert (plans.plan_for(DOWN), plans.plan_for(ATTENTION)) == before
    with tune_steps.in_place(found.won):
        assert us() == 100
    assert not found.broken


def test_a_plan_that_cannot_run_is_told_and_passed_over():
    today = plans.plan_for(DOWN)

    def us():
        if plans.plan_for(DOWN) != today:
            raise RuntimeError("out of resources")
        return 100.0

    found = tune_steps.search_all(us, [DOWN], 60)
    assert not found.won
    assert len(found.broken) == len(list(tune_steps.neighbours(DOWN, today))) and "RuntimeError" in found.broken[0]


def test_a_gain_within_the_scatter_moves_nothing():
    times = iter([100.0, *[99.9] * 1000])
    assert not tune_steps.search_all(lambda: next(times), [DOWN], 60).won


def test_the_time_limit(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def us():
        clock[0] += 1
        return 100 - clock[0]

    assert len(tune_steps.search_all(us, [DOWN], 3).known) == 3


@pytest.mark.parametrize("rows, adapters", [(1, 0), (2, 2)])
def test_steps_are_timed(rows, adapters, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # a step takes seconds in it
    monkeypatch.setattr(tune_steps, "NEW", 5)
    steps = tune_steps.Steps("tiny", rows, 40, None, adapters)
    assert steps.us(steps.model(torch.device("cpu"))) > 0


def test_lines_are_those_of_the_table():
    assert tune_steps.line(DOWN, MatrixPlan(2, 1024, 4)) == messages.message("kernels/tune_steps:lines_are_those_of_the_t")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--ops", "norm"],
            "--ops: got norm, wanted some of product, packed_product, tiled_product, split_product, decode_attention",
        ),
        (["--behind", "9000"], "--behind: got 9000, wanted 1 to 8063"),
        ([], "no GPU is visible: steps are timed on one"),
    ],
)
def test_refusals(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tune_steps.py", *arguments])
    with pytest.raises(SystemExit, match=r"^2$"):
        tune_steps.main()
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)
