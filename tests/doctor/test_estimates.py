"""Prices that a rule estimates, beside what the same program gains when the change is made: tapes whose truth is known."""

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gpubound.doctor.price.prices import Prices
from gpubound.doctor.record.tape import Span
from gpubound.doctor.rules.compute import ADDED, ALIGNED_GAIN, FUSED, MATH_GAIN, TF32_GAIN

from .evidences import seen
from .programs import length
from .tapes import MAIN, Synthetic

quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
runs, hosts = st.integers(5, 400).map(float), st.integers(2, 40).map(float)


def loop(steps: int, run: float, host: float, product: float = 0.0, extra: int = 0, cpu: float = 0.0):
    """A step: 20 launches; `extra` short ones; one work of `product` µs; an op of `cpu` µs on the host, behind a wait."""
    made = Synthetic()
    for _ in range(steps):
        made.launch(run=run, host=host, times=20).launch(run=1.0, host=host, times=extra)
        if product:
            made.launch(run=product, host=host, name="product")
        if cpu:
            made.sync()
            start = made.clock[MAIN]
            made.think(cpu)
            made.spans.append(Span("aten::mul", "op", MAIN, start, made.clock[MAIN]))
        made.launch(run=run, host=host, times=20).step()
    return made


def gained(before: dict, after: dict) -> float:
    """Milliseconds a step, of many steps."""
    return (length(loop(40, **before)) - length(loop(40, **after))) / 40e3


@pytest.mark.slow
@quick
@given(runs, hosts, runs, st.sampled_from([TF32_GAIN, ALIGNED_GAIN, FUSED]))
def test_a_share_of_a_work_is_never_said_to_save_more_than_it_does(run, host, product, gain):
    """What a step gains grows ever more slowly, as the host becomes what holds it up; on a device that is behind it is all."""
    made = loop(5, run=run, host=host, product=product)
    prices = Prices(seen(made))
    calls = [n for n, work in enumerate(made.tape().work) if work.name == "product"]
    told = prices.without_work(calls, gain)
    true = gained({"run": run, "host": host, "product": product}, {"run": run, "host": host, "product": product * (1 - gain)})
    assert told <= true + 0.003
    if run > 2 * host:
        assert told == pytest.approx(true, rel=0.05, abs=0.003)


@pytest.mark.parametrize("gain", [MATH_GAIN, ADDED])
def test_several_times_a_work_is_what_as_much_more_of_it_takes(gain):
    """Of a forward whose backward has twice as much to do, and of a fill that an addition follows; never more than a step."""
    made = loop(5, run=60.0, host=4.0, product=100.0)
    calls = [n for n, work in enumerate(made.tape().work) if work.name == "product"]
    prices = Prices(seen(made))
    more = {"run": 60.0, "host": 4.0}
    true = gained(more | {"product": gain * 100.0}, more)
    assert prices.without_work(calls, gain) == pytest.approx(true, rel=0.05)
    assert prices.without_work(calls, 1000.0) == prices.step_ms


@pytest.mark.slow
@quick
@given(st.sampled_from([2.0, 200.0]), st.integers(4, 12).map(float), st.integers(8, 60))
def test_launches_cost_what_they_hold_up(run, host, extra):
    """All of the host's time where the device waits for it; nothing where it is behind."""
    made = loop(5, run=run, host=host, extra=extra)
    told = Prices(seen(made)).of_launches(extra)
    more = {"run": run, "host": host}
    true = gained(more | {"extra": extra}, more)
    if run < host:
        assert told == pytest.approx(true, rel=0.15, abs=0.01)
    else:
        assert told <= 0.01


@quick
@given(runs, st.integers(100, 900).map(float))
def test_an_op_on_the_host_costs_what_the_device_waits_in_it(run, cpu):
    """Behind a wait the device is dry: it waits for all of the op, but for what the host would have waited anyway."""
    told = Prices(seen(loop(5, run=run, host=4.0, cpu=cpu))).idle_in(lambda span: span.name == "aten::mul")
    assert told == pytest.approx(cpu / 1e3, rel=0.1, abs=0.012)
    ahead = loop(5, run=run + 600, host=4.0)
    ahead.spans.append(Span("aten::mul", "op", MAIN, ahead.steps[2][0], ahead.steps[2][0] + 100))
    assert Prices(seen(ahead)).idle_in(lambda span: span.name == "aten::mul") == pytest.approx(0.0, abs=0.003)
