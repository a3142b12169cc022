"""The pretend device, where no real one is: both in one process would contend for streams and pinned memory."""

import pytest
import torch

from gpubound.watch.pretend import simgpu


@pytest.fixture
def sim() -> torch.device:
    if torch.cuda.is_available():
        pytest.skip("the pretend device needs CUDA_VISIBLE_DEVICES= (test_gpu.py runs these tests so)")
    return simgpu()
