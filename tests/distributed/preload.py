"""Imports that the server of tests/distributed/processes.py makes once, for all ranks that it forks."""

import gc
from importlib import import_module
from pathlib import Path

import torch._inductor.config  # torch.use_deterministic_algorithms imports it, in each rank for 0.45 s of CPU
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

import tests.conftest  # noqa: F401 - Triton's interpreter, before anything imports triton
from tests.processes import import_all

# A rank unpickles a function of a test's module, and so imports it, with transformers and PEFT: 1.5 s of CPU in each.
TESTS = Path(__file__).parents[1]
for path in sorted(TESTS.rglob("test_*.py")):
    if "on_ranks" in path.read_text(encoding="utf-8"):
        import_module(".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts)))
import_all()

gc.freeze()  # a rank's own collections would read, and so copy, all that it shares with the server: 0.2 s of CPU each
