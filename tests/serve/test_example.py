"""examples/train_two_adapters.py: both adapters learn, through a service."""

import runpy
from pathlib import Path

import pytest

from gpubound.serve import Policies

from .conftest import LENGTH, base
from .test_server import serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_two_adapters.py"


@pytest.mark.slow
def test_two_adapters_learn_opposite_tasks(tmp_path):
    model = base()
    for p in model.parameters():
        p.data.mul_(6)  # a head that tells tokens apart
    with serving(Policies(model, max_length=LENGTH, max_batch=24), tmp_path) as server:
        rewards = runpy.run_path(str(EXAMPLE))["main"](server.address, steps=10)
    assert rewards["even"] > 0.7 and rewards["odd"] > 0.7
