"""The suite's footing: hooks of every process; `footing.py` has those of the processes that run tests."""

import gc
import os
import re
import sys
from pathlib import Path

import pytest

GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
WORKER = "PYTEST_XDIST_WORKER" in os.environ

if GPUS > 1 and WORKER:  # a GPU each, in turn, before the driver is asked for them
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % GPUS))

# The process of `-n 3` that distributes the tests starts the workers 2 s sooner without torch. Imported only in
# pytest_configure, the plugin was too late for tests of kernels in the interpreter.
RUNS_TESTS = WORKER or "--pdb" in sys.argv or re.search(r"\s-n\s*[1-9al]", " ".join(sys.argv)) is None
pytest_plugins = ["tests.footing"] if RUNS_TESTS else []


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Fork the workers from one process that has imported the tests, and have them share the server of programs and ranks: 13 s
    of CPU in each otherwise. What has asked for a GPU cannot be forked."""
    if not (GPUS or Path("/dev/dxg").exists()) and hasattr(os, "pidfd_open"):
        from tests import forked

        os.environ["FORKED_PYTHON"] = forked.served("tests.distributed.preload")
        executable = forked.served("tests.preload", *config.args)
        for spec in specs:
            if spec.popen:
                spec.python = executable


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
    if WORKER:
        return
    if report.when == "call" and (file := os.environ.get("TEST_DURATIONS")):
        with open(file, "a", encoding="utf-8") as durations:
            durations.write(f"{report.duration:.2f} {report.nodeid}\n")
    if report.failed:
        by = getattr(report, "node", None)
        print(f"\n{report.nodeid} failed in {report.when}{f', {by.gateway.id}' if by is not None else ''}")
        print("\n".join(report.longreprtext.splitlines()[-25:]), flush=True)
