"""What the tests of choosing an implementation share."""

from collections import Counter

import pytest
import torch

from gpubound import trace
from gpubound.kernels import dispatch

from .cases import draw


@pytest.fixture
def fresh(monkeypatch):
    """No verdicts, no fallbacks, nothing said yet; all restored afterwards."""
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setattr(trace, "fallbacks", Counter())
    monkeypatch.setattr(trace, "_printed", set())


@pytest.fixture
def x(device):
    return draw(device, torch.float32, 3, 40)
