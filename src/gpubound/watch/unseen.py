"""Python calls that wait for the device without dispatching an op that a mode could see.

torch.cuda.synchronize and its kin go straight to the driver; printing a tensor, or building one from device scalars,
switches dispatch modes off. They are wrapped while somebody listens, and put back when the last listener leaves. The
pretend device announces its own.
"""

import functools
import threading
from collections.abc import Callable

import torch

from ..device import accelerator
from .events import SCALARS

Listener = Callable[[str, str], None]  # (what was called, device type)

_listeners: list[Listener] = []
_undo: list[Callable[[], None]] = []
_lock = threading.Lock()


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
            while _undo:
                _undo.pop()()


def _install() -> None:
    cuda = (
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cuda.Stream, "synchronize", "stream.synchronize"),
        (torch.cuda.Event, "synchronize", "event.synchronize"),
    )
    for owner, name, what in cuda:
        _wrap(owner, name, lambda *_, what=what: announce(what, "cuda"))
    _wrap(torch.accelerator, "synchronize", _synchronized)
    _wrap(torch._tensor_str, "_str", _printed)
    _wrap(torch, "tensor", _built)


def _synchronized(*_) -> None:
    if (found := accelerator()) is not None:
        announce("torch.accelerator.synchronize", found.type)


def _printed(t: torch.Tensor, *_) -> None:
    if t.device.type not in ("cpu", "meta") and t.numel():
        announce("print", t.device.type)


def _built(data=None, *_) -> None:
    while isinstance(data, (list, tuple)) and data:
        if isinstance(data[0], torch.Tensor) and data[0].device.type not in ("cpu", "meta"):
            announce(SCALARS, data[0].device.type)
            return
        data = data[0]


def _wrap(owner, name: str, before: Callable) -> None:
    original, own = getattr(owner, name), name in vars(owner)

    @functools.wraps(original)
    def waiting(*args, **kwargs):
        before(*args)
        return original(*args, **kwargs)

    setattr(owner, name, waiting)
    _undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))
