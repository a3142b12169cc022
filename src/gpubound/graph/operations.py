"""What an operation does to its arguments, as far as its schema tells; and how the tensors begin that it makes.

Last the launches that no dispatcher sees: Triton's, its interpreter's, and those of kernels compiled at run time.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..device import has_triton, interpreted
from ..watch.site import Place

_NORM_STATISTICS = ("running_mean", "running_var")  # written by batch norms whose schemas do not say so
_CONSTANTS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # which argument is the value
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class Origin:
    """How a tensor began that the function made: filled with a value, uninitialised, or computed."""

    place: Place
    call: int
    fill: Any = None
    empty: bool = False


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in the arguments of an operation or a launch; a tensor descriptor carries its own as `base`."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(getattr(tree, "base", None), Tensor):
        yield tree.base


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory inside a wrapper (DTensor and its kin), or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))


def written(func: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """The arguments that an operation writes."""
    positions, names, every = _writes(func)
    if every:
        yield from tensors_in((args, kwargs))
        return
    for position in positions:
        if position < len(args):
            yield from tensors_in(args[position])
    for name in names:
        if name in kwargs:
            yield from tensors_in(kwargs[name])


@cache
def _writes(func: Any) -> tuple[tuple[int, ...], tuple[str, ...], bool]:
    """Which arguments an operation writes, by its schema; all of them for a collective, whose schemas do not say."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return (), (), False
    if schema.name.startswith("c10d::"):
        return (), (), True
    hit = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in _NORM_STATISTICS
    ]
    return tuple(position for position, _ in hit), tuple(name for _, name in hit), False


def began(op: Any, args: tuple, made: Tensor, place: Place, call: int) -> Origin:
    """How a tensor that `op` has made begins."""
    name = getattr(getattr(op, "overloadpacket", None), "__name__", "")
    if name in _EMPTY:
        return Origin(place, call, empty=True)
    if name in _CONSTANTS:
        return Origin(place, call, fill=_CONSTANTS[name])
    if name in _FILLED and len(args) > _FILLED[name] and isinstance(args[_FILLED[name]], (bool, int, float)):
        return Origin(place, call, fill=args[_FILLED[name]])
    if name == "lift_fresh" and made.numel() == 1 and made.device.type == "cpu":
        return Origin(place, call, fill=made.detach().numpy().item())
    return Origin(place, call)


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
        return watch(list(tensors_in((args[1:], kwargs))), lambda: original(*args, **kwargs))

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
