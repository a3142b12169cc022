"""What tests run on: the interpreter where there is no GPU, NaN in every uninitialised tensor, `gpu` tests skipped there."""

import os
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    import triton

    from tests import interpreter

    triton.knobs.runtime.interpret = True  # also of kernel files that a test imports while the variable is unset
    interpreter.hasten()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS warns while the NaN fill below is on


def stay_open(file) -> None:
    """What os.fsync is in tests: files reach the disk when the system likes, which does not go down within a test. The 4,000
    waits of 6 ms were 10 s of `make test`. A file that is closed is an error, as it is to os.fsync."""
    os.fstat(file if isinstance(file, int) else file.fileno())


os.fsync = stay_open
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # of 5 s, which a worker that is gone or hangs is waited for


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup(item):
    """Run kernels in Triton's interpreter in tests of kernels and tests marked `interpreted`, and their definitions in all
    others: those are 10 to 40 times faster, and what calls a kernel is the same."""
    if not torch.cuda.is_available():
        if "kernels" in item.path.relative_to(TESTS).parts or item.get_closest_marker("interpreted"):
            os.environ["TRITON_INTERPRET"] = "1"
        else:
            os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(autouse=True)
def poisoned_empty():
    """torch.empty() and its kin hold NaN, so that a kernel which leaves something unwritten is seen."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # without dynamo, which the public function imports: 2 s
    yield
    torch._C._set_deterministic_algorithms(False)


def single_thread():
    """Two threads on products this small wait for each other longer than they work, the more so beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


one_thread = pytest.fixture(single_thread, name="one_thread")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def sim() -> torch.device:
    """The pretend device, where no real one is: both in one process would contend for streams and pinned memory."""
    if torch.cuda.is_available():
        pytest.skip("the pretend device needs CUDA_VISIBLE_DEVICES= (tests/watch/test_gpu.py runs these tests so)")
    from gpubound.watch.pretend import simgpu

    return simgpu()


@pytest.fixture
def said(monkeypatch, capsys):
    """What the library prints, each line again although this process may have printed it before."""
    from gpubound import trace

    monkeypatch.setattr(trace, "_printed", set())
    return lambda: capsys.readouterr().err


@pytest.fixture
def forked_workers(monkeypatch):
    """Processes of `sys.executable` are forked from the server that has imported all: each imports for 4 s of CPU otherwise."""
    from tests import forked

    monkeypatch.setattr("sys.executable", forked.python())


# In a test every warning is an error, except these. They are marks of each test and no ini setting: that one would also
# turn what other people's plugins say while pytest starts into errors (pytest-benchmark does, beside xdist).
WARNINGS = [
    "error",
    # torch says this of every op without a deterministic form while the NaN fill is on
    "ignore:.*does not have a deterministic implementation.*:UserWarning",
    # and this of every attention backward, once
    "ignore:.*defaults to a non-deterministic algorithm.*:UserWarning",
    # torch.cuda.set_sync_debug_mode, which a few gpu tests use beside the ledger
    "ignore:Synchronization debug mode is a prototype feature:UserWarning",
    # and this once, where the first thing that autograd's thread does in a process is a product
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
]


def pytest_collection_modifyitems(config, items):
    """Skip what is marked `gpu` without a GPU. With one, whatever runs on `device` runs there, and is marked so too."""
    there = torch.cuda.is_available()
    for item in items:
        item.add_marker(pytest.mark.filterwarnings(*WARNINGS), append=False)  # a test's own marks come later, and win
        if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        if there and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        elif not there and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
