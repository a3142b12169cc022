import pytest
import torch

from gpubound.decode.runner import RING


@pytest.fixture(autouse=True)
def kernels_path(monkeypatch):
    """The way that a GPU takes, through the kernels' references; test_host.py is about a CPU's own."""
    monkeypatch.setattr("gpubound.decode.cpu_step.fits", lambda device: False)
    monkeypatch.setattr("gpubound.decode.runner.ON_CPU", RING)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products this small only lose by being shared out: test_static* take 6 s on two busy cores, and 95 with two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
