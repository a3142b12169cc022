"""Timing and comparisons on a pretended clock, so that every figure and ratio is known; on a GPU the ruler laid again."""

import doctest
import subprocess
import sys

import pytest
import torch

from gpubound import formatting, measure
from gpubound.errors import DeviceError
from gpubound.measure import Prepared, Timing, ceiling
from tests.messages import message, refusals


@pytest.mark.parametrize("module", [ceiling, formatting], ids=lambda m: m.__name__)
def test_docstring_examples(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


def test_time_is_the_median_of_the_runs_after_the_warm_up(clock):
    costs = iter([100.0, 90.0, 80.0, 1.0, 2.0, 3.0, 4.0, 50.0])
    found = measure.time(lambda: clock(next(costs)), warmup=3, runs=5, device="cpu")
    assert found == Timing(median_s=3.0, low_s=2.0, high_s=4.0, runs=5, clock="perf_counter")
    assert found.spread == pytest.approx(2 / 3)


def test_one_run_has_no_spread(clock):
    assert measure.time(lambda: clock(2.0), warmup=0, runs=1, device="cpu") == Timing(2.0, 2.0, 2.0, 1, "perf_counter")


def test_preparation_goes_before_every_run_and_is_not_timed(clock):
    given = []

    def prepare():
        clock(1000.0)
        return len(given)

    def run(number):
        given.append(number)
        clock(0.5)

    found = measure.time(Prepared(prepare, run), warmup=2, runs=3, device="cpu")
    assert given == [0, 1, 2, 3, 4]
    assert (found.median_s, found.high_s) == (0.5, 0.5)


def test_timing_reads_as_text(clock):
    assert str(measure.time(lambda: clock(0.00123), runs=4, device="cpu")) == message("measure/timing:timing_reads_as_text")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5, "2.5 s"),
        (3600.0, "3600 s"),
        (0.25, "250 ms"),
        (1.5e-3, "1.5 ms"),
        (2e-5, "20 µs"),
        (3.2e-8, "32 ns"),
        (0.0, "0 ns"),
    ],
)
def test_seconds_in_words(seconds, text):
    assert measure.in_words(seconds) == text


def nothing():
    pass


def test_bad_input():
    two = {"a": nothing, "b": nothing}
    refusals(
        "measure/timing:bad_input",
        lambda: measure.time(nothing, runs=0),
        lambda: measure.time(nothing, warmup=-1),
        lambda: measure.time(nothing, runs=2.5),
        lambda: measure.time(nothing, cold_l2=True, device="cpu"),
        lambda: measure.time(nothing, graph=True, device="cpu"),
        lambda: measure.compare(two, graph=True, device="cpu"),
        lambda: measure.compare({"ours": nothing}),
        lambda: measure.compare(two, rounds=2),
        lambda: measure.compare(two, host_ahead=True, device="cpu"),
        lambda: measure.compare_samples({"ours": [1.0, 2.0], "peer": [1.0]}),
        lambda: measure.compare_samples({n: [1.0, 1.0] for n in ("ours", "a", "b")}).ratio,
        lambda: measure.mfu(1e5, 1e9, 0.0),
    )


def test_the_name_of_a_gpu_is_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for device in ("cuda", "cuda:3", torch.device("cuda", 0)):
        with pytest.raises(DeviceError, check=message("measure/timing:the_name_of_a_gpu_is_no")):
            measure.time(lambda: None, device=device)
    with pytest.raises(ValueError, check=message("measure/timing:the_name_of_a_gpu_is_no.2")):
        measure.compare({"a": lambda: None, "b": lambda: None}, device="gpu")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("options", [{}, {"cold_l2": True, "host_ahead": True}, {"graph": True}], ids=str)
def test_the_ruler_on_a_known_length(options):
    """A spin of twice the cycles takes twice as long, by each way of timing it."""
    found = []
    for _ in range(5):
        short, long = (
            measure.time(lambda n=n: torch.cuda._sleep(n), runs=20, device="cuda", **options).median_s
            for n in (1_000_000, 2_000_000)
        )
        found.append(long / short)
        if abs(found[-1] - 2.0) <= 0.1:
            return
    pytest.fail(f"none of five tries came to 2.0: {found}")


@pytest.mark.gpu
@pytest.mark.alone
def test_graphs_beside_each_other():
    """A spin of twice the cycles takes twice as long as the other, and each as long as `time` says."""
    works = {name: lambda n=n: torch.cuda._sleep(n) for name, n in (("ours", 1_000_000), ("peer", 2_000_000))}
    found = []
    for _ in range(5):
        both = measure.compare(works, graph=True, device="cuda")
        alone = measure.time(works["ours"], graph=True, device="cuda").median_s
        found.append((both.ratio, both.timings["ours"].median_s / alone))
        if abs(found[-1][0] - 2.0) <= 0.1 and abs(found[-1][1] - 1.0) <= 0.1:
            return
    pytest.fail(f"none of five tries came to 2.0 and 1.0: {found}")


@pytest.mark.gpu
@pytest.mark.alone
def test_host_ahead_leaves_launch_gaps_out():
    """Thirty tiny kernels behind a slow host: the events see the host's pauses unless the device was kept waiting for it."""
    from time import sleep

    x = torch.ones(16, device="cuda")

    def work():
        for _ in range(3):
            sleep(1e-3)
            x.add_(1)

    with_gaps = measure.time(work, runs=5, device="cuda").median_s
    without = measure.time(work, runs=5, device="cuda", host_ahead=True).median_s
    assert with_gaps > 2e-3 > without


@pytest.mark.gpu
def test_work_that_cannot_be_captured():
    """In a process of its own: a capture that breaks off can leave CUDA's random generator unusable."""
    script = (
        "import torch; from gpubound import measure; x = torch.ones(4, device='cuda')\n"
        "try: measure.time(lambda: x.sum().item(), graph=True)\n"
        "except measure.timing.MeasureError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip()
    assert said.startswith("time: graph=True, but this work cannot be captured: CUDA error: ")
    assert said.endswith(". Time it without graph.")


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
