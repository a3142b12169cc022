"""Ops as they are dispatched: to a mode above CUDA, and to the pretend device from below."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...device import accelerator
from .. import ops, pretend
from ..opbook import OpBook
from .base import Sensor

_COPIES = {"h2d_bytes", "h2d_copies", "d2h_bytes", "d2h_copies", "pageable_copies", "repeated_uploads", "dead_clones"}


class SimGpu(Sensor):
    name = "simgpu"
    sees = "every op, copy and sync on the pretend device, in any thread"
    blind = ""

    @property
    def counts(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(_COPIES | {"syncs"} | ({"launches"} if self.ledger.launches == "ops" else set()))

    def absent(self) -> str | None:
        if not self.ledger.wants_type(pretend.NAME):
            return f"device={str(self.ledger.device)!r} was asked for"
        return None if pretend.ready() else "simgpu() was not called"

    def start(self) -> None:
        self._book = OpBook(self.ledger, beneath=True, syncs=True)
        pretend.observers.append(self._book.see)

    def stop(self) -> None:
        pretend.observers.remove(self._book.see)
        self._book.close()


class Dispatch(Sensor):
    name = "dispatch"
    sees = "ops, copies and clones, and syncs where gputrace does not run, in the ledger's thread and its backward"
    blind = "other threads, compiled code and graph replays; a sync inside an op that its table does not list"

    @property
    def counts(self) -> frozenset[str]:  # type: ignore[override]
        found = {"cpu_ops"}
        if self.ledger.device_is_here:
            found |= _COPIES | {"syncs"} | ({"launches"} if self.ledger.launches == "ops" else set())
        return frozenset(found)

    def absent(self) -> str | None:
        if self.ledger.device_is_here or pretend.ready():
            return None
        return "no GPU and no pretend device" if accelerator() is None else f"device={str(self.ledger.device)!r} is not here"

    def start(self) -> None:
        heard = torch.cuda.is_available() and self.ledger.runs("gputrace")
        self._book = OpBook(self.ledger, beneath=False, syncs=not heard)
        self._mode = _Mode(self._book)
        self._mode.__enter__()

    def stop(self) -> None:
        self._mode.__exit__(None, None, None)
        self._book.close()


class _Mode(TorchDispatchMode):
    def __init__(self, book: OpBook):
        super().__init__()
        self.book = book

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile would run eagerly wherever a ledger is open

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if ops.composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if pretend.ready() and _pretended(args, kwargs):
            return func(*args, **kwargs)  # the device itself reports it
        with self.book.seeing(func, args, kwargs):
            return func(*args, **kwargs)


def _pretended(args, kwargs) -> bool:
    device = ops.device_of(args, kwargs)
    if device is not None and device.type == pretend.NAME:
        return True
    target = kwargs.get("device")
    return target is not None and torch.device(target).type == pretend.NAME
