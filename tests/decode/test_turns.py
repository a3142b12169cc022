"""The interpreter's switch interval is short while requests run, and what it was afterwards."""

import sys

import pytest

from gpubound.decode.running import INTERVAL_S, short_switch_interval

from . import cases


@pytest.fixture(autouse=True)
def interval():
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_short_while_a_request_runs(interval):
    stream = cases.shared("Llama").stream(cases.prompts(5), max_new_tokens=4)
    next(stream)
    assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)
    stream.close()
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_the_last_of_several_sets_it_back(interval):
    first, second = short_switch_interval(), short_switch_interval()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_a_shorter_one_and_one_set_meanwhile_stay():
    sys.setswitchinterval(2e-5)
    with short_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(2e-5)
    assert sys.getswitchinterval() == pytest.approx(2e-5)
    with short_switch_interval():
        sys.setswitchinterval(3e-3)
    assert sys.getswitchinterval() == pytest.approx(3e-3)
