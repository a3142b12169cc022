"""Records go to a logger through its own library; one that is missing is named with the package to install."""

import sys
import types

import pytest

from gpubound.monitor.logs import open_log

RECORD = {"step": 7, "loss": 2.5, "lr": 1e-3}


def library(name, **functions):
    module = types.ModuleType(name)
    for function, does in functions.items():
        setattr(module, function, does)
    return module


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_trackers_get_the_config_and_each_record(tmp_path, monkeypatch, capsys, kind):
    calls = []
    note = lambda what: lambda *a, **k: (calls.append((what, a, k)), what == "log" or print(what))  # noqa: E731
    monkeypatch.setitem(sys.modules, kind, library(kind, init=note("init"), log=note("log"), finish=note("finish")))
    with open_log(kind, tmp_path, "first", {"lr": 1e-3}) as log:
        log.write(RECORD)
    where = {"dir": str(tmp_path)} if kind == "wandb" else {}
    assert calls == [
        ("init", (), {"project": "gpubound", "name": "first", "config": {"lr": 1e-3}, **where}),
        ("log", ({"loss": 2.5, "lr": 1e-3},), {"step": 7}),
        ("finish", (), {}),
    ]
    assert capsys.readouterr() == ("", "init\nfinish\n"), "stdout is for --json"


def test_tensorboard_gets_scalars(tmp_path, monkeypatch):
    written, closed = [], []

    class SummaryWriter:
        def __init__(self, folder):
            assert folder == str(tmp_path / "tensorboard")

        def add_scalar(self, *scalar):
            written.append(scalar)

        def close(self):
            closed.append(True)

    monkeypatch.setitem(sys.modules, "tensorboard", library("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library("torch.utils.tensorboard", SummaryWriter=SummaryWriter))
    with open_log("tensorboard", tmp_path, "first", {}) as log:
        log.write(RECORD)
    assert written == [("loss", 2.5, 7), ("lr", 1e-3, 7)] and closed == [True]


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_a_missing_library_is_named(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ValueError) as error:
        open_log(kind, tmp_path, "first", {})
    assert str(error.value) == f"log: {kind} is not installed; pip install {kind}, or leave --log out."


def test_no_logger_is_none():
    with open_log(None, "anywhere", "first", {}) as log:
        log.write(RECORD)
