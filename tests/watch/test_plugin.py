"""The fixture host_budget, from this suite and a project of its own; and examples/assert_no_sync.py."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from gpubound.errors import BudgetError
from tests.messages import message

from .. import forked

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


EXAMPLE = Path(__file__).parents[2] / "examples" / "assert_no_sync.py"


@pytest.mark.slow
def test_assert_no_sync():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # PYTHONPATH=src would lead nowhere from the example's folder
    done = subprocess.run(
        [forked.python(), str(EXAMPLE)], capture_output=True, text=True, timeout=120, cwd=EXAMPLE.parent, env=env
    )
    assert done.returncode == 0, done.stderr
    (line,) = [n for n, text in enumerate(EXAMPLE.read_text().splitlines(), 1) if "loss.item()" in text]
    careful, careless, guarded = done.stdout.strip().split("\n\n")
    assert careful == message("watch/example:assert_no_sync")
    assert careless.startswith("the careless step: over budget: syncs 1 (allowed 0).\n")
    assert message("watch/example:assert_no_sync.2", line).within(careless)
    assert guarded.startswith(
        f"under the guard: assert_no_sync.py:{line} in step: `best = min(best, loss.item())` makes the host wait"
    )
    assert len(EXAMPLE.read_text().splitlines()) < 50
