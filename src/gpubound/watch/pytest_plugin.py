"""The pytest fixture `host_budget`: a test that fails, with the lines, when the host made the GPU wait.

    def test_step_never_waits(host_budget):
        step(batch)                                  # warm up: compilation and first allocations are not the question
        with host_budget(syncs=0, h2d_bytes=0):
            step(batch)

It is registered by installing gpubound. Nothing but pytest is imported until a test asks for it.
"""

from contextlib import contextmanager

import pytest


@pytest.fixture
def host_budget():
    """Return host_budget(syncs=0, ...), a context manager that raises BudgetError at its end if a limit was exceeded.

    The limits are those of `Ledger.assert_within`; device, gputrace, launches and without go to `watch`. It yields the ledger.
    """

    @contextmanager
    def within(*, device=None, gputrace=None, launches="ops", without=(), **limits):
        from .ledger import check_limits, watch

        check_limits("host_budget", limits)
        with watch(device=device, gputrace=gputrace, launches=launches, without=without) as ledger:
            yield ledger
        ledger.assert_within(**limits)

    return within
