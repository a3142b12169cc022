import pytest
import torch

from gpubound.decode import weight_view
from gpubound.decode.runner import RING
from gpubound.kernels import dispatch
from gpubound.watch.pretend import simgpu
from tests.footing import single_thread


@pytest.fixture(autouse=True)
def kernels_path(monkeypatch):
    """The way that a GPU takes, through the kernels' references; test_host.py is about a CPU's own."""
    monkeypatch.setattr("gpubound.decode.cpu_step.fits", lambda device: False)
    monkeypatch.setattr("gpubound.decode.runner.ON_CPU", RING)


# On two busy cores, tests of other models' own forward took 95 s with two threads, and 6 with one.
one_thread = pytest.fixture(single_thread, name="one_thread", autouse=True, scope="module")


@pytest.fixture
def sim(monkeypatch) -> torch.device:
    """The pretend device. Its weights are no plain nn.Parameters, which the fused kernels would refuse."""
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one; gpu tests have the real one's")
    monkeypatch.setattr(weight_view, "_unreadable", lambda model, spread: None)
    return simgpu()


@pytest.fixture
def interpret(monkeypatch):
    """interpret() -> kernels run in Triton's interpreter from there on, unjudged: self-tests are tests/kernels' subject."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter replaces compiled kernels for a whole process")

    def begin() -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(dispatch, "verdict", lambda *_: None)

    return begin
