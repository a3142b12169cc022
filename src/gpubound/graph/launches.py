"""Kernel launches that no dispatcher sees: Triton's, its interpreter's, and those of kernels compiled at run time."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..device import has_triton, interpreted


@contextlib.contextmanager
def patched(watch: Callable[[list[Tensor], Callable[[], Any]], Any]) -> Iterator[None]:
    """Inside the block every launch of this thread and of autograd's becomes `watch(tensors, launch)`, which must launch."""
    mine, changed = threading.get_ident(), []
    for owner, name in _launchers():
        original = getattr(owner, name)
        setattr(owner, name, _through(watch, original, mine))
        changed.append((owner, name, original))
    try:
        yield
    finally:
        for owner, name, original in changed:
            setattr(owner, name, original)


def _through(watch: Callable, original: Callable, mine: int) -> Callable:
    def launch(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != mine and torch._C._current_autograd_node() is None:
            return original(*args, **kwargs)
        return watch(list(_tensors((args[1:], kwargs))), lambda: original(*args, **kwargs))

    return launch


def _launchers() -> list[tuple[type, str]]:
    """The methods through which launches pass. Triton is imported here: the first watched call may be the first to launch."""
    doors: list[tuple[type, str]] = []
    if has_triton():
        doors.append((import_module("triton.runtime.jit").JITFunction, "run"))
    if has_triton() and interpreted():
        doors.append((import_module("triton.runtime.interpreter").InterpretedFunction, "run"))
    kernel = getattr(import_module("torch.cuda._utils"), "_CudaKernel", None)
    return [*doors, (kernel, "__call__")] if kernel is not None else doors


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor in a launch's arguments; a tensor descriptor carries its own as `base`."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
    elif isinstance(getattr(tree, "base", None), Tensor):
        yield tree.base
