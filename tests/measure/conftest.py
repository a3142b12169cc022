"""A clock that a test moves."""

import pytest

from gpubound.measure import timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock(seconds)` moves."""
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])

    def work(seconds):
        now[0] += seconds

    return work
