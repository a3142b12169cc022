"""Programmatic dependent launch (PDL; decode_product.py explains it) for all kernels of a decoding step.

Ops of a step that are called one by one take `dependent`. A step of many ops, some of which serve training too, says it once:
inside `chained`, every kernel that can begins while the launch before it still runs, and others are launched as ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ..device import constant
from .decode_product import AHEAD, EARLY

FIRST = (9, 0)  # the first compute capability whose launches can

_mode: ContextVar[int] = ContextVar("gpubound_chained", default=0)


@contextmanager
def chained(device: torch.device, mode: int = EARLY) -> Iterator[None]:
    """Inside, kernels on `device` are launched so, where it can."""
    before = _mode.set(mode if can_chain(device) else 0)
    try:
        yield
    finally:
        _mode.reset(before)


@contextmanager
def ahead() -> Iterator[None]:
    """Inside, kernels of a chain read before they wait: what they read was there before the last fence."""
    before = _mode.set(AHEAD if _mode.get() else 0)
    try:
        yield
    finally:
        _mode.reset(before)


def chain_mode() -> int:
    """Return the PDL mode of a kernel that is launched now: a value of `dependent`."""
    return 0 if torch.compiler.is_compiling() else _mode.get()


@constant
def can_chain(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST
