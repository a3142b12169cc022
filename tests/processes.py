"""The environment of processes that tests start, and the imports of those that are forked."""

import multiprocessing
import os
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, set_executable
from multiprocessing.context import BaseContext
from pkgutil import walk_packages

import torch

import gpubound

from . import forked


def plain_environment() -> dict[str, str]:
    """Return this environment without Triton's interpreter: definitions run there, as for a user without a GPU."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def forking() -> BaseContext:
    """Return the context whose processes are forked from the server of `forked.python()`, the programs' and the ranks' alike.

    What has asked for a GPU cannot be forked, and where there is one, tests/footing.py has asked: they are spawned there."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    if context.get_start_method() == "forkserver":
        resource_tracker.ensure_running()
        set_executable(forked.python())
        forkserver.ensure_running()  # a program of that server, which has imported all
        set_executable(sys.executable)
    return context


def import_all() -> None:
    """Import gpubound whole, with what it imports when it is first used: 0.6 s of CPU in each process otherwise."""
    for module in walk_packages(gpubound.__path__, "gpubound."):
        if ".triton" not in module.name and not module.name.endswith(("__main__", "pytest_plugin")):
            import_module(module.name)
    for name in ("peft", "transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral"):
        with suppress(ImportError):
            import_module(name)
