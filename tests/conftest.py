"""The suite's footing: the interpreter where there is no GPU, NaN in every uninitialised tensor, `gpu` tests skipped there."""

import gc
import os
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))

if GPUS > 1 and "PYTEST_XDIST_WORKER" in os.environ:  # a GPU each, in turn, before the driver is asked for them
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % GPUS))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    import triton

    from tests import interpreter

    triton.knobs.runtime.interpret = True  # also of kernel files that a test imports while the variable is unset
    interpreter.hasten()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS warns while the NaN fill below is on


def pytest_configure(config):
    config.add_cleanup(gc.unfreeze)  # after pytest's last collection; or nanobind reports at exit that its types leak


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep torch and all modules from the garbage collector, which is then 5 % of the time and not 10, and have it look at what
    tests leave every 10,000 objects and not every 700: 2 %."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


def pytest_runtest_logreport(report):
    """Print a failure at once, with the end of its traceback: a run on a GPU that is cut off has then shown why it failed.

    TEST_DURATIONS names a file that gets the seconds of each call at once, which --durations prints at the end alone.
    """
    if os.environ.get("PYTEST_XDIST_WORKER") is not None:
        return
    if report.when == "call" and (file := os.environ.get("TEST_DURATIONS")):
        with open(file, "a", encoding="utf-8") as durations:
            durations.write(f"{report.duration:.2f} {report.nodeid}\n")
    if report.failed:
        by = getattr(report, "node", None)
        print(f"\n{report.nodeid} failed in {report.when}{f', {by.gateway.id}' if by is not None else ''}")
        print("\n".join(report.longreprtext.splitlines()[-25:]), flush=True)


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
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_thread():
    """Two threads on products this small wait for each other longer than they work, the more so beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
