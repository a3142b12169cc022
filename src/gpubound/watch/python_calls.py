"""Python calls that wait for a device or convert nothing, which no dispatched operation shows.

`listen` hears the calls that wait; `unchanged` counts `.to()` and its relatives that return what they were given.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import local
from typing import Any

import torch

from ..device import accelerator
from .events import SCALARS
from .ops import on_host
from .rows import LedgerRow
from .source_line import TORCH, Place, here, owner

Listener = Callable[[str, str], None]  # (what was called, device type)

_listeners: list[Listener] = []
_wrapped = ExitStack()
_lock = threading.Lock()


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Inside the block `make(original)` stands in the place of `owner`'s function `name`."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def announce(what: str, device_type: str) -> None:
    """Tell every listener that the calling thread is about to wait for the device. A listener may raise to forbid it."""
    for listener in dict.fromkeys(_listeners):  # nested guards listen with one function, which decides once
        listener(what, device_type)


def listen(listener: Listener) -> None:
    with _lock:
        if not _listeners:
            _install()
        _listeners.append(listener)


def leave(listener: Listener) -> None:
    with _lock:
        _listeners.remove(listener)
        if not _listeners:
            _wrapped.close()


def _install() -> None:
    calls = (
        (torch.cuda, "synchronize", lambda *_: announce("torch.cuda.synchronize", "cuda")),
        (torch.cuda.Stream, "synchronize", lambda *_: announce("stream.synchronize", "cuda")),
        (torch.cuda.Event, "synchronize", lambda *_: announce("event.synchronize", "cuda")),
        (torch.accelerator, "synchronize", _synchronized),
        (torch._tensor_str, "_str", _printed),
        (torch, "tensor", _built),
    )
    for module, name, before in calls:
        _wrapped.enter_context(replaced(module, name, functools.partial(_waiting, before)))


def _synchronized(*_) -> None:
    if (device := accelerator()) is not None:
        announce("torch.accelerator.synchronize", device.type)


def _printed(t: torch.Tensor, *_) -> None:
    if not on_host(t) and t.numel():
        announce("print", t.device.type)


def _built(data=None, *_) -> None:
    while isinstance(data, (list, tuple)) and data:
        if isinstance(data[0], torch.Tensor) and not on_host(data[0]):
            announce(SCALARS, data[0].device.type)
            return
        data = data[0]


def _waiting(before: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def waiting(*args, **kwargs):
        before(*args)
        return original(*args, **kwargs)

    return waiting


CONVERSIONS = ("to", "cuda", "float", "half", "bfloat16")


class _Inside(local):
    """The conversion of a module that this thread is in: whether any tensor of it has changed."""

    changed: bool | None = None


@contextmanager
def unchanged() -> Iterator[dict[tuple[str, Place], LedgerRow]]:
    """Inside, a row of kind "noop" for each line of the user's that converts what needs no conversion."""
    rows: dict[tuple[str, Place], LedgerRow] = {}
    inside = _Inside()
    with ExitStack() as stack:
        for name in CONVERSIONS:
            stack.enter_context(replaced(torch.Tensor, name, functools.partial(_of_tensors, name, rows, inside)))
            stack.enter_context(replaced(torch.nn.Module, name, functools.partial(_of_modules, name, rows, inside)))
        yield rows


def _of_tensors(name: str, rows: dict, inside: _Inside, original: Callable) -> Callable:
    @functools.wraps(original)
    def converted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(tensor, *args, **kwargs)
        took = time.perf_counter() - began
        if inside.changed is not None:
            inside.changed |= result is not tensor
        elif result is tensor:
            _add(rows, name, took)
        return result

    return converted


def _of_modules(name: str, rows: dict, inside: _Inside, original: Callable) -> Callable:
    @functools.wraps(original)
    def converted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer, inside.changed = inside.changed, False
        began = time.perf_counter()
        try:
            result = original(module, *args, **kwargs)
            took = time.perf_counter() - began
            if outer is None and not inside.changed:
                _add(rows, name, took)
        finally:
            inside.changed = None if outer is None else outer or inside.changed
        return result

    return converted


def _add(rows: dict, name: str, seconds: float) -> None:
    place = here()
    if place.site is None or (place.via is not None and owner(place.via.file) is not TORCH):
        return  # in a library, which the user cannot fix
    row = rows.setdefault((name, place), LedgerRow("noop", f".{name}()", place))
    row.count += 1
    row.ms += 1e3 * seconds
