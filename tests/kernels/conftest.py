"""What the tests of choosing an implementation share."""

from collections import Counter

import pytest
import torch

from gpubound import trace
from gpubound.kernels import dispatch
from gpubound.kernels.registry import every, load

from .cases import draw

# Import all kernels while TRITON_INTERPRET is set: tests of other folders unset it, and kernels imported there are compiled.
for op in every():
    load("triton", op)


@pytest.fixture
def fresh(monkeypatch):
    """No verdicts, no fallbacks, nothing said yet; all restored afterwards."""
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setattr(trace, "fallbacks", Counter())
    monkeypatch.setattr(trace, "_printed", set())


@pytest.fixture
def x(device):
    return draw(device, torch.float32, 3, 40)
