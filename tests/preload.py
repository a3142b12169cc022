"""Imports of the server that the suite's workers are forked from: it collects the tests, and rewrites their assertions."""

import gc
import io
import sys
from contextlib import redirect_stdout

import pytest
import torch

import tests.forked  # noqa: F401 - while this process is the server

threads = torch.get_num_threads()
torch.set_num_threads(1)  # a process with more cannot be forked
with redirect_stdout(io.StringIO()):  # a worker says what is wrong; -s: handlers of logs keep this process's stderr
    pytest.main(["--collect-only", "-qq", "-s", "-p", "no:cacheprovider", *sys.argv[1:]])
torch.set_num_threads(threads)
del sys.modules["tests.conftest"]  # it reads what kind of process it is in

gc.freeze()
