"""Schedules: every value against formulas written out here, what a step really used, and what a step costs the host."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch

from gpubound.data import Corpus
from gpubound.models import PRESETS, Decoder
from gpubound.train import AdamW, Schedule, TrainStep
from gpubound.train.schedule import MOST_STEPS
from gpubound.watch import watch
from tests.messages import message, refusals

from .conftest import draw, named, small, summed
from .runs import build_corpus


def oracle(shape: str, t: int) -> float:
    """20 updates, 4 of them warm-up, down to a tenth; wsd falls over the last half of all 20. t counts from 1."""
    if t <= 4:
        return t / 4
    x = min(t - 5, 16) / 16
    if shape == "constant":
        return 1.0
    if shape == "linear":
        return 1.0 - 0.9 * x
    if shape == "cosine":
        return 0.1 + 0.45 * (1 + math.cos(math.pi * x))
    return 1.0 if t <= 10 else 1.0 - 0.9 * min(t - 10, 11) / 11


def test_wsd_falls_over_its_fraction_of_all_steps():
    schedule = Schedule("wsd", steps=1000, warmup=500, final=0.1, decay=0.2)
    assert [schedule.factor(t) for t in (500, 501, 800)] == [1.0, 1.0, 1.0]
    want = [1 - 0.9 * part / 201 for part in (1, 100, 200, 201)]  # the last update is still above `final`
    assert [schedule.factor(t) for t in (801, 900, 1000, 1001)] == pytest.approx(want)


def test_wsd_falls_from_the_warm_up_on_where_that_leaves_less():
    schedule = Schedule("wsd", steps=100, warmup=90, final=0.0, decay=0.5)
    assert [schedule.factor(t) for t in (90, 91, 95, 100)] == pytest.approx([1.0, 10 / 11, 6 / 11, 1 / 11])
    assert Schedule("wsd", steps=100, warmup=100, decay=0.5).factor(101) == 1.0  # no update is left to fall in


@pytest.mark.parametrize("warmup", [4, 0.2])
@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
def test_every_value(shape, warmup):
    schedule = Schedule(shape, steps=20, warmup=warmup, final=0.1, decay=0.5)
    assert [schedule.factor(t) for t in range(1, 30)] == pytest.approx([oracle(shape, t) for t in range(1, 30)], abs=1e-12)
    table = schedule.table(0.5)
    length = 5 if shape == "constant" else 21  # the last one holds
    assert table.dtype == torch.float64
    assert table.tolist() == pytest.approx([0.5 * oracle(shape, t) for t in range(1, length + 1)])


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd", lambda t: 1 / t])
def test_the_table_has_the_bits_of_each_factor(shape, decay):
    schedule = Schedule(shape, steps=1000, warmup=0 if callable(shape) else 7, final=0.1, decay=decay)
    table = schedule.table(3e-4).tolist()
    assert table == [3e-4 * schedule.factor(t) for t in range(1, len(table) + 1)]


@pytest.mark.parametrize("shape", ["cosine", lambda t: 1 / t])
def test_the_step_uses_them(shape):
    schedule = Schedule(shape, steps=6, warmup=0 if callable(shape) else 2)
    step = TrainStep(small(), summed, AdamW(lr=0.01), precision="fp32", graph="off", schedule=schedule)

    def want(t):
        if callable(shape):
            return 1 / min(t, 7)
        return t / 2 if t <= 2 else 0.5 * (1 + math.cos(math.pi * min(t - 3, 4) / 4))

    used = [step(draw(2)).read().lr for _ in range(9)]
    assert used == pytest.approx([0.01 * want(t) for t in range(1, 10)], abs=1e-15)


def test_constant_needs_no_steps_and_warms_up():
    schedule = Schedule(warmup=3)
    assert schedule.table(1.0).tolist() == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert Schedule().table(0.3).tolist() == [0.3]


def test_errors():
    linear, nan = {"shape": "linear", "steps": 5}, float("nan")
    wrong = [
        {"shape": "cosin"}, {"shape": "cosine"}, {"warmup": 0.1}, linear | {"steps": 0}, linear | {"steps": 10**11},
        linear | {"steps": 1e3}, linear | {"warmup": 6}, linear | {"warmup": -1}, linear | {"warmup": nan},
        {"warmup": float("inf")}, {"warmup": "3"}, {"warmup": 1e9}, linear | {"final": nan}, linear | {"final": 2},
        {"shape": "wsd", "steps": 5, "decay": -1},
    ]  # fmt: skip
    refusals("train/schedule:errors", *(partial(Schedule, **options) for options in wrong))


@pytest.mark.parametrize("given", [float("nan"), float("inf"), -0.5, None, "1"], ids=repr)
def test_a_function_that_gives_no_rate_is_refused_before_weights_move(given):
    model = small()
    before = named(model)
    with pytest.raises(ValueError) as error:
        TrainStep(model, summed, schedule=Schedule(lambda update: given if update == 3 else 1.0, steps=5))
    assert str(error.value) == message("train/schedule:a_function_that_gives_no", repr(given))
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    TrainStep(model, summed, graph="off")  # the refused one has let the model go


def test_a_function_may_give_numpys_and_torchs_numbers():
    assert Schedule(lambda t: np.float32(0.5) * t, steps=2).table(1.0).tolist() == [0.5, 1.0, 1.5]
    assert Schedule(lambda t: torch.tensor(0.5), steps=1).table(1.0).tolist() == [0.5, 0.5]
    assert Schedule("constant", steps=MOST_STEPS).table(0.1).tolist() == [0.1]


@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["require", "off"])
def test_a_window_of_eight_from_a_resident_corpus(tmp_path, graph):
    """No wait, no byte from the host, and no more than one deferred read a step, which is none while the step runs."""
    torch.use_deterministic_algorithms(False)
    cuda = torch.device("cuda", 0)
    corpus = Corpus.open(build_corpus(tmp_path / "corpus"))
    model = Decoder(dataclasses.replace(PRESETS["tiny"], vocabulary=320), device=cuda).train()
    feed = corpus.batches(32, 4, cuda)
    schedule = Schedule("cosine", steps=50, warmup=0.1)
    step = TrainStep(model, "next_token", AdamW(1e-3), accumulate=8, clip=1.0, schedule=schedule, graph=graph)
    for _ in range(3):
        step(feed)
    with watch() as ledger:
        results = [step(feed) for _ in range(5)]
    ledger.assert_within(syncs=0, h2d_bytes=0, h2d_copies=0, fallbacks=0, d2h_copies=len(results))
    assert bool(step.captured) == (graph == "require")
    assert [result.read().updates for result in results] == [4, 5, 6, 7, 8] and results[-1].read().tokens == 8 * 4 * 32
