"""Python calls that wait for the device without dispatching an op that a mode could see.

torch.cuda.synchronize and its kin go straight to the driver; printing a tensor, or building one from device scalars, switches
dispatch modes off. They are wrapped while somebody listens. The pretend device announces its own.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..device import accelerator
from .events import SCALARS
from .ops import on_host

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
    for owner, name, before in calls:
        _wrapped.enter_context(replaced(owner, name, functools.partial(_waiting, before)))


def _synchronized(*_) -> None:
    if (found := accelerator()) is not None:
        announce("torch.accelerator.synchronize", found.type)


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
