"""`gpubound bench steps`: a dry run trains a model as eager PyTorch does."""

import pytest

from benchmarks import bench_steps
from benchmarks.step_models import TASKS
from gpubound.cli import guarded


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gnn", "world"])
def test_a_dry_run(name, capsys):
    assert guarded("bench", bench_steps.main, ["--dry", "--only", name]) == 0
    assert f"{name} fp32" in capsys.readouterr().out


def test_losses_that_differ_are_not_timed(monkeypatch, capsys):
    task = TASKS["gnn"]
    calls = []

    def drifting(model, batch):
        calls.append(model)
        return task.loss(model, batch) * (1 + len(calls))

    monkeypatch.setitem(bench_steps.TASKS, "gnn", task._replace(loss=drifting))
    assert guarded("bench", bench_steps.main, ["--dry", "--only", "gnn"]) == 1
    assert "not timed" in capsys.readouterr().err
