"""The environment of processes that tests start, and the imports of those that are forked."""

import os
from contextlib import suppress
from importlib import import_module
from pkgutil import walk_packages

import gpubound


def plain_environment() -> dict[str, str]:
    """Return this environment without Triton's interpreter: definitions run there, as for a user without a GPU."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def import_all() -> None:
    """Import gpubound whole, with what it imports when it is first used: 0.6 s of CPU in each process otherwise."""
    for module in walk_packages(gpubound.__path__, "gpubound."):
        if ".triton" not in module.name and not module.name.endswith(("__main__", "pytest_plugin")):
            import_module(module.name)
    for name in ("peft", "transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral"):
        with suppress(ImportError):
            import_module(name)
