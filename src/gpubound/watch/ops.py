"""Waits and copies between host and device that an aten op causes, and Python calls that wait without a dispatched op.

The ledger, the guard, the pretend device and the watched calls before a capture use it. Their dispatch mode is above composite
kernels, so a kernel that reads from the device inside (a boolean mask calls nonzero) shows as one op, and events.py needs a
line for it. `tests/watch/test_gpu.py` compares both with CUDA's behaviour. `listen` registers a callback for the Python calls.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

from ..device import accelerator
from ..trace import hooked
from .events import (
    BINNING,
    BOUNDS,
    DEVIATION,
    DOWNLOAD,
    DRAWING,
    FILL_VALUE,
    FILLING,
    HOST_DATA,
    MASK,
    MASK_PUT,
    MASKING,
    NUMBER,
    READ,
    SCALARS,
    UPLOAD,
    WAITING_OPS,
    Cause,
)

UP, DOWN = "copy to device", "copy to host"

# Ops that start nothing on the device. Views are recognised by their schema.
LAUNCHLESS = {
    "_local_scalar_dense", "_pin_memory", "_unsafe_view", "detach_", "empty", "empty_like", "empty_strided", "is_pinned",
    "is_same_size", "new_empty", "new_empty_strided", "record_stream", "resize_", "set_",
}  # fmt: skip

# Ops that take CPU tensors with dimensions beside those of the device: memory to view, and the lengths of sequences.
MIXED = {"set_", "_pack_padded_sequence", "_pack_padded_sequence_backward"}


@dataclass(slots=True)
class Move:
    """A wait or copy that an op causes. kind: "sync" (wait for a value), "h2d" or "d2h" (a copy)."""

    kind: str
    what: str
    device: torch.device
    cause: Cause
    bytes: int = 0
    pinned: bool = False
    blocking: bool = True
    source: torch.Tensor | None = None  # host tensor of an upload

    @property
    def stalls(self) -> bool:
        """True if the copy stalls. A pageable one does with non_blocking=True, too: the driver stages it in pinned memory."""
        return self.blocking or not self.pinned

    @property
    def manner(self) -> str:
        return f"{'pinned' if self.pinned else 'pageable'}, {'blocking' if self.blocking else 'non_blocking'}"


def on_host(where: torch.Tensor | torch.device) -> bool:
    device = where.device if isinstance(where, torch.Tensor) else where
    return device.type in ("cpu", "meta")


def tensors(values) -> Iterator[torch.Tensor]:
    """Yield every tensor among an op's arguments; aten nests them one list deep."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for inner in value:
                if isinstance(inner, torch.Tensor):
                    yield inner


def device_of(args, kwargs) -> torch.device | None:
    """Return the device of an op: the first among its tensors that is not the host, else its device argument, else the host."""
    device = None
    for t in tensors((*args, *kwargs.values())):
        device = t.device
        if not on_host(t):
            return device
    if device is None and kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
    return device


@cache
def composite(func) -> bool:
    """Return whether `func` consists of other ops. In inference mode such an op is dispatched before its parts."""
    return isinstance(func, OpOverload) and func._can_decompose()


class OpMode(TorchDispatchMode):
    """Dispatch mode that passes every op of this thread, and of its backward passes, to `run(func, args, kwargs)`, which calls
    it.

    It is above CUDA. Autograd's device threads take over the modes of the thread that called backward.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile would run eagerly inside a ledger or a guard

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return self.run(func, args, kwargs)


@cache
def launches(func) -> bool:
    """Return whether dispatching `func` starts work on the device."""
    return not func.is_view and func._opname not in LAUNCHLESS


def moves(func, args, kwargs, beneath: bool = False, home: torch.device | None = None) -> tuple[Move, ...]:
    """Return the waits and copies of `func`.

    beneath  True if the device itself calls this, not a mode above composite kernels
    home     the device whose waits count, if a CPU imitates a GPU; by default every device but the host
    """
    look = _look(func)
    if look is None or (beneath and look is _lifted):
        return ()
    return look(func, args, kwargs, home)


@cache
def _look(func) -> Callable[..., tuple[Move, ...]] | None:
    """Return the function that lists the moves of `func`; None for ops outside aten."""
    if getattr(func, "namespace", "") != "aten":
        return None
    name = func._opname.rstrip("_")
    if name == "repeat_interleave" and func._overloadname != "Tensor":
        return None  # it consists of other ops
    return _LOOKS.get(name, _waits if name in WAITING_OPS else None)


def decides(func) -> bool:
    """Return whether the arguments of an op decide if it waits: then `moves` is complete."""
    return _look(func) in (_indexes, _repeats)


@cache
def mixes(func) -> bool:
    """Return whether a CPU tensor with dimensions may be mixed with device tensors in an op; CUDA refuses it in any other."""
    return _look(func) in (_indexes, _converted, _copied) or func._opname in MIXED


def _counts(device: torch.device, home: torch.device | None) -> bool:
    return not on_host(device) if home is None else device == home


def _waits(func, args, kwargs, home) -> tuple[Move, ...]:
    device = device_of(args, kwargs)
    what, cause = WAITING_OPS[func._opname.rstrip("_")]
    return () if device is None or not _counts(device, home) else (Move("sync", what, device, cause),)


def _repeats(func, args, kwargs, home) -> tuple[Move, ...]:
    """Return the wait of repeat_interleave, which sums its counts on the device unless the caller passes the sum."""
    size = kwargs.get("output_size", args[1] if len(args) > 1 else None)
    return () if size is not None else _waits(func, args[:1], {}, home)


def _indexes(func, args, kwargs, home) -> tuple[Move, ...]:
    """Return the wait of a boolean mask for nonzero, and the uploads of index tensors and of a number on the host."""
    target, indices, *rest = args
    if not _counts(target.device, home):
        return ()

    def elsewhere(t: torch.Tensor) -> bool:
        return on_host(t) and not _counts(t.device, home)

    index_tensors = [i for i in indices if isinstance(i, torch.Tensor)]
    host = [i for i in index_tensors if elsewhere(i) and i.numel()]
    masks = [i for i in index_tensors if _is_mask(i) and not elsewhere(i)]
    numbers = [value for value in rest[:1] if elsewhere(value) and value.dim() == 0]
    adds = bool(rest[1] if len(rest) > 1 else kwargs.get("accumulate"))
    if numbers and not adds and len(index_tensors) == len(masks) == 1:
        return ()  # x[mask] = number: torch turns it into masked_fill
    moves = [Move("h2d", UP, target.device, UPLOAD, i.nbytes, source=i) for i in host if not _is_mask(i)]
    # Torch finds the places of a mask on the host, in pinned memory.
    moves += [Move("h2d", UP, target.device, UPLOAD, i.nbytes, True, False, i) for i in host if _is_mask(i)]
    moves += [Move("h2d", UP, target.device, NUMBER, number.nbytes) for number in numbers]
    moves += [Move("sync", MASKING, target.device, MASK_PUT if rest else MASK) for _ in masks[:1]]
    return tuple(moves)


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _filled(func, args, kwargs, home) -> tuple[Move, ...]:
    """Return the read of a fill value that is a tensor on the device: the kernel wants it as a number."""
    target, value = args[0], args[-1]
    if not isinstance(value, torch.Tensor) or not _counts(target.device, home) or not _counts(value.device, home):
        return ()
    return (Move("sync", FILLING, target.device, FILL_VALUE),)


def _drawn(func, args, kwargs, home) -> tuple[Move, ...]:
    """Return the read of torch.normal, which checks that no standard deviation is negative."""
    std = args[1] if len(args) > 1 else kwargs.get("std")
    if not isinstance(std, torch.Tensor) or not _counts(std.device, home) or not std.numel():
        return ()
    return (Move("sync", DRAWING, std.device, DEVIATION),)


def _binned(func, args, kwargs, home) -> tuple[Move, ...]:
    """Return the read of torch.histc, which looks for the smallest and largest value unless it is given bounds."""
    low, high = args[2:4] if len(args) > 3 else (kwargs.get("min", 0), kwargs.get("max", 0))
    return () if low != high or not _counts(args[0].device, home) else (Move("sync", BINNING, args[0].device, BOUNDS),)


def _spaced(func, args, kwargs, home) -> tuple[Move, ...]:
    """Return the reads of the ends of a torch.linspace that are tensors on the device."""
    ends = [t for t in args[:2] if isinstance(t, torch.Tensor) and _counts(t.device, home)]
    return tuple(Move("sync", "item", t.device, READ) for t in ends)


def _chosen(func, args, kwargs, home) -> tuple[Move, ...]:
    """Return the uploads of CPU scalars that torch.where chooses from. A Python number becomes a tensor on the device."""
    device = device_of(args, kwargs)
    if device is None or not _counts(device, home):
        return ()
    scalars = [t for t in args if isinstance(t, torch.Tensor) and on_host(t) and not _counts(t.device, home)]
    return tuple(Move("h2d", UP, device, UPLOAD, t.nbytes, source=t) for t in scalars)


def _converted(func, args, kwargs, home) -> tuple[Move, ...]:
    source, later = args[0], bool(kwargs.get("non_blocking"))
    device, dtype = torch.device(kwargs.get("device") or source.device), kwargs.get("dtype") or source.dtype
    return _copy(source, device, dtype, source.numel(), later)


def _copied(func, args, kwargs, home) -> tuple[Move, ...]:
    later = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    pairs = zip(args[0], args[1]) if isinstance(args[0], (list, tuple)) else ((args[0], args[1]),)
    return tuple(move for to, source in pairs for move in _copy(source, to.device, to.dtype, to.numel(), later, to))


def _copy(source, device, dtype, count: int, later: bool, to: torch.Tensor | None = None) -> tuple[Move, ...]:
    """Return the copy of `count` elements into `to`, or into memory that torch allocates: pinned on the host for
    non_blocking=True.

    If the dtype changes, torch converts on the device for non_blocking=True, and otherwise on the host, in pageable memory.
    """
    up = on_host(source)
    if count == 0 or up == on_host(device) or "meta" in (source.device.type, device.type):
        return ()
    carried = source.dtype if up == later else dtype
    if up:
        return (Move("h2d", UP, device, UPLOAD, count * carried.itemsize, pinned(source, carried), not later, source),)
    lands = later if to is None else pinned(to, carried)
    return (Move("d2h", DOWN, source.device, DOWNLOAD, count * carried.itemsize, lands, not later),)


def _lifted(func, args, kwargs, home) -> tuple[Move, ...]:
    """Return the upload of torch.tensor(value, device=...), which modes see only as the finished tensor being lifted."""
    first = args[0]
    if not _counts(first.device, home) or first.numel() == 0:
        return ()
    return (Move("h2d", UP, first.device, HOST_DATA, first.numel() * first.element_size()),)


def pinned(t: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the copy engine can read `t` in place: torch stages a tensor with gaps or another dtype in pageable
    memory."""
    return t.dtype == dtype and t.is_pinned() and dense(t)


def dense(t: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory, in any order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


_LOOKS: dict[str, Callable[..., tuple[Move, ...]]] = {
    "repeat_interleave": _repeats,
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"), _indexes),
    "_to_copy": _converted,
    **dict.fromkeys(("copy", "_foreach_copy"), _copied),
    "lift_fresh": _lifted,
    **dict.fromkeys(("masked_fill", "index_fill"), _filled),
    "normal": _drawn,
    "where": _chosen,
    "histc": _binned,
    **dict.fromkeys(("linspace", "logspace"), _spaced),
}


Listener = Callable[[str, str], None]  # (what was called, device type)

_listeners: list[Listener] = []
_wrapped = ExitStack()
_lock = threading.Lock()


def announce(what: str, device_type: str) -> None:
    """Call every listener: the calling thread is about to wait for the device. A listener may raise to forbid it."""
    for listener in dict.fromkeys(_listeners):  # nested guards register one function, which is called once
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
    _device._device_constructors()  # torch caches the functions that `with torch.device(...)` knows: not those put here
    calls = (
        (torch.cuda, "synchronize", lambda *_: announce("torch.cuda.synchronize", "cuda")),
        (torch.cuda.Stream, "synchronize", lambda *_: announce("stream.synchronize", "cuda")),
        (torch.cuda.Event, "synchronize", lambda *_: announce("event.synchronize", "cuda")),
        (torch.accelerator, "synchronize", _synchronized),
        (torch._tensor_str, "_str", _printed),
        (torch, "tensor", _built),
    )
    for module, name, before in calls:
        _wrapped.enter_context(hooked(module, name, functools.partial(_waiting, before)))


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


def _waiting(before: Callable, original: Callable, *args, **kwargs):
    before(*args)
    return original(*args, **kwargs)
