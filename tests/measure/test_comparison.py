"""Things beside each other on a pretended clock, so that every ratio is known."""

import pytest
import torch

from gpubound import measure
from tests.messages import message


def test_compare_takes_the_ratio_inside_each_round(clock):
    """The machine slows down threefold while it is measured; the ratio stays what it is."""
    slow = [1.0]

    def cost(seconds):
        clock(seconds * slow[0])
        slow[0] *= 1.02

    found = measure.compare({"ours": lambda: cost(2.0), "peer": lambda: cost(3.0)}, rounds=30, warmup=1, device="cpu")
    assert found.ratio == pytest.approx(1.5, rel=0.021)  # within one step of the drift
    assert found.timings["ours"].spread > 0.3  # which the timings themselves show


def test_compare_of_exact_costs(clock):
    works = {"ours": lambda: clock(2e-3), "eager": lambda: clock(3e-3), "liger": lambda: clock(1e-3)}
    found = measure.compare(works, rounds=5, device="cpu")
    assert {name: (r.value, r.low, r.high, r.spread) for name, r in found.ratios.items()} == {
        "eager": pytest.approx((1.5, 1.5, 1.5, 0.0)),
        "liger": pytest.approx((0.5, 0.5, 0.5, 0.0)),
    }
    assert str(found) == message("measure/comparison:compare_of_exact_costs")


def test_compare_runs_everyone_once_a_round_in_changing_order(clock):
    called = []
    works = {name: lambda name=name: (called.append(name), clock(1.0)) for name in "abc"}
    measure.compare(works, rounds=20, warmup=0, device="cpu", seed=1)
    rounds = [tuple(called[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 3
    again = list(called)
    called.clear()
    measure.compare(works, rounds=20, warmup=0, device="cpu", seed=1)
    assert called == again


def test_the_interval_covers_the_median_and_is_reproducible():
    generator = torch.Generator().manual_seed(0)
    ours = (1 + 0.1 * torch.rand(40, generator=generator)).tolist()
    peer = (2 + 0.2 * torch.rand(40, generator=generator)).tolist()
    ratio = measure.compare_samples({"ours": ours, "peer": peer}).ratios["peer"]
    assert ratio.low < ratio.value < ratio.high
    assert ratio.low > 1.9 and ratio.high < 2.1
    assert ratio == measure.compare_samples({"ours": ours, "peer": peer}).ratios["peer"]


def test_an_error_names_the_work_that_raised_it():
    def broken():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError) as error:
        measure.compare({"ours": lambda: None, "liger": broken}, device="cpu")
    assert error.value.__notes__ == ["compare: raised by 'liger'"]
