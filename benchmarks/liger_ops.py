"""Liger's functions in one of its implementations: Triton, or, by a copy of the module that has them, CuTe DSL or cuTile.

LIGER_KERNEL_IMPL chooses one for a process; here several stand beside each other.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

FUNCTIONS = "liger_kernel.transformers.functional"
# The doors whose kernels an implementation has for compute capability 9.0. Liger takes its Triton kernels for all others.
DOORS = {
    "liger-cutedsl": ("rms_norm", "rope", "swiglu", "cross_entropy"),
    "liger-cutile": (
        "rms_norm", "add_rms_norm", "layer_norm", "dynamic_tanh", "rope", "swiglu", "geglu", "cross_entropy",
        "linear_cross_entropy",
    ),
}  # fmt: skip

_chosen = ""


@contextmanager
def implementation(peer: str) -> Iterator[None]:
    """Inside, `function` returns those of `peer`, a key of DOORS; "liger" is Triton."""
    global _chosen
    before, _chosen = _chosen, peer.removeprefix("liger").removeprefix("-")
    try:
        yield
    finally:
        _chosen = before


def through(peer: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` in the implementation of `peer`."""

    def run(*arguments: Any) -> Any:
        with implementation(peer):
            return call(*arguments)

    return run


def function(name: str) -> Callable[..., Any]:
    return getattr(_functions(_chosen), name)


@cache
def _functions(name: str) -> ModuleType:
    module = importlib.import_module(FUNCTIONS)
    if not name:
        return module
    spec = importlib.util.find_spec(FUNCTIONS)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    ops = importlib.import_module(f"liger_kernel.ops.{name}.ops")
    for op in ops.__all__:
        setattr(copy, op, getattr(ops, op))
    return copy
