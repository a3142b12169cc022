"""The fixture host_budget, from this suite and from a project of its own."""

from importlib.metadata import entry_points

import pytest
import torch

from gpubound.errors import BudgetError
from tests.messages import message

# Run from the source tree, as on a machine that holds its own torch, nothing has registered the plugin.
PLUGIN = () if entry_points(group="pytest11", name="gpubound") else ("gpubound.watch.pytest_plugin",)

pytest_plugins = ("pytester", *PLUGIN)


def test_within_budget(host_budget, sim):
    x = torch.ones(3, device=sim)
    with host_budget(syncs=1, h2d_bytes=0) as ledger:
        x.sum().item()
    assert ledger.totals["syncs"] == 1


def test_over_budget(host_budget, sim):
    x = torch.ones(3, device=sim)
    with pytest.raises(BudgetError, check=message("watch/plugin:over_budget")), host_budget(syncs=0):
        x.sum().item()


def test_an_error_inside_is_not_hidden(host_budget, sim):
    with pytest.raises(ZeroDivisionError), host_budget(syncs=0):
        torch.ones(3, device=sim).sum().item()
        _ = 1 / 0


def test_bad_limits_are_refused_before_the_step_runs(host_budget):
    with pytest.raises(ValueError, check=message("watch/plugin:bad_limits_are_refused_b")), host_budget(sync=0):
        raise AssertionError("not reached")


def test_a_project_s_own_suite(pytester, sim):
    pytester.makepyfile(
        """
        import torch
        from gpubound.watch.pretend import simgpu

        def test_clean(host_budget):
            x = torch.ones(3, device=simgpu())
            with host_budget(syncs=0):
                x.mul_(2)

        def test_stalls(host_budget):
            x = torch.ones(3, device=simgpu())
            with host_budget(syncs=0):
                float(x.sum())
        """
    )
    result = pytester.runpytest("-p", "no:cacheprovider", *(word for name in PLUGIN for word in ("-p", name)))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*over budget: syncs 1 (allowed 0).", "*test_a_project_s_own_suite.py:*in test_stalls*float(x.sum())"]
    )


def test_the_package_can_be_called_like_the_function():
    import gpubound.watch

    with gpubound.watch(without="gc") as ledger:
        pass
    assert ledger.absent["gc"] == "left out"
    assert not hasattr(gpubound.watch, "watches")
