"""Fixtures: the library's CPU mode and a real recording, so that each test of behaviour runs on both."""

import pytest
import torch

from gpubound.graph import recording

from .tape import TapeRunner


@pytest.fixture
def tape(monkeypatch):
    """capture() records a tape instead of calling the function anew."""
    monkeypatch.setattr(recording, "runner_for", lambda device, pool: TapeRunner())


@pytest.fixture(params=["eager", "tape"])
def runner(request, monkeypatch):
    """Each test twice: in the library's CPU mode, and on the tape."""
    if request.param == "tape":
        monkeypatch.setattr(recording, "runner_for", lambda device, pool: TapeRunner())
    return request.param


@pytest.fixture(autouse=True)
def plain_empty(request, poisoned_empty):
    """On a GPU the NaN fill of torch.empty would become part of every graph, and cuBLAS would warn of every product."""
    if request.node.get_closest_marker("gpu"):
        torch.use_deterministic_algorithms(False)
