"""Imports of the server that ranks and programs are forked from: tests/processes.py."""

import gc
import os
from importlib import import_module
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports triton: definitions run there, and kernels are compiled

import torch._inductor.config  # torch.use_deterministic_algorithms imports it, in each rank for 0.45 s of CPU
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.profiler  # noqa: F401

import tests.forked  # noqa: F401 - while this process is the server
from tests.processes import import_all

# A rank unpickles a function of a test's module, and so imports it, with transformers and PEFT: 1.5 s of CPU in each.
TESTS = Path(__file__).parents[1]
for path in sorted(TESTS.rglob("test_*.py")):
    if "on_ranks" in path.read_text(encoding="utf-8"):
        import_module(".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts)))
import_all()

gc.freeze()  # a rank's own collections would read, and so copy, all that it shares with the server: 0.2 s of CPU each
