"""Count, or forbid, what makes the GPU wait for the host.

    with watch() as ledger: ...      counts syncs, copies, launches, allocations, ... each with the user's line
    with no_stall(): ...             raises at the line where the host would wait
    pretend.simgpu()                 a pretend GPU, so that both work in CI on a machine without one
    pytest_plugin                    the fixture host_budget

The names below are imported when they are first used: pytest loads this package as a plugin before anyone chose how torch
and Triton start.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .forbid import no_stall
    from .ledger import Ledger, watch
    from .rows import Row

__all__ = ["Ledger", "Row", "no_stall", "watch"]

_HOMES = {"Ledger": "ledger", "Row": "rows", "watch": "ledger", "no_stall": "forbid"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


class _Callable(ModuleType):
    """For users `gpubound.watch` is a function; for Python, once anything in it is imported, a package. Both can be called."""

    def __call__(self, **options):
        return import_module(".ledger", __name__).watch(**options)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Callable
