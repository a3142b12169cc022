"""Ops as they are dispatched: to a mode above CUDA, and to the pretend device from below; and waits that no op shows."""

from __future__ import annotations

import zlib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..device import accelerator
from . import ops, pretend
from .events import SCALARS, Place, here
from .sensors import Sensor

if TYPE_CHECKING:
    from .ledger import Ledger

SAMPLE = 65_536  # bytes sampled to notice that a buffer was rewritten without a change of its version counter
_COPIES = {"h2d_bytes", "h2d_copies", "d2h_bytes", "d2h_copies", "pageable_copies", "repeated_uploads", "dead_clones"}


class Uploads:
    """Remembers uploads, to notice that the same storage is uploaded again without a change.

    A version counter does not see writes through NumPy, as into a pinned ring, so a sample of the bytes must agree, too.
    """

    def __init__(self):
        self._uploaded: dict[tuple, tuple[StorageWeakRef, tuple]] = {}

    def again(self, t: torch.Tensor, device: torch.device) -> bool:
        reference = StorageWeakRef(t.untyped_storage())
        key = (reference.cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype, str(device))
        state = (None if t.is_inference() else t._version, _fingerprint(t))
        known = self._uploaded.get(key)
        if known is not None and known[1] == state and not known[0].expired():
            return True
        if len(self._uploaded) > 4096:
            self._uploaded = {k: v for k, v in self._uploaded.items() if not v[0].expired()}
        self._uploaded[key] = (reference, state)
        return False


def _fingerprint(t: torch.Tensor) -> int | None:
    if not t.is_contiguous() or t.numel() == 0:
        return None
    raw = t.detach().reshape(-1).view(torch.uint8)
    return zlib.crc32(raw[:: max(1, raw.numel() // SAMPLE)].contiguous().numpy().tobytes())


@dataclass(slots=True)
class _Candidate:
    source: StorageWeakRef
    place: Place
    bytes: int


class Clones:
    """Notices clones whose source is never used again and dies: the source itself would have sufficed.

    Only clones that repeat a whole storage, stride for stride, are candidates: a clone that changes the layout, or keeps a
    slice so that the rest can be freed, is useful.
    """

    LIMIT = 256  # candidates tracked at a time; the oldest are dropped

    def __init__(self):
        self._candidates: list[_Candidate] = []

    def used(self, args, kwargs) -> None:
        """Drop the candidates whose source this op uses: their clone was needed."""
        if self._candidates:
            touched = {t.untyped_storage()._cdata for t in ops.tensors((*args, *kwargs.values()))}
            self._candidates = [c for c in self._candidates if c.source.expired() or c.source.cdata not in touched]

    def cloned(self, source: torch.Tensor, place: Place) -> None:
        storage = source.untyped_storage()
        size = source.numel() * source.element_size()
        if size and size == storage.nbytes():
            self._candidates = [*self._candidates[-self.LIMIT + 1 :], _Candidate(StorageWeakRef(storage), place, size)]

    def dead(self) -> list[_Candidate]:
        """Return the candidates whose source has died since the last call."""
        dead_clones = [c for c in self._candidates if c.source.expired()]
        if dead_clones:
            self._candidates = [c for c in self._candidates if not c.source.expired()]
        return dead_clones


def repeats_layout(func, args, kwargs) -> bool:
    """Return whether a clone (or .contiguous(), .to(copy=True)) has the source's strides."""
    if func._opname not in ("clone", "_to_copy") or not ops.dense(source := args[0]):
        return False
    device, wanted = kwargs.get("device"), kwargs.get("memory_format")
    if device is not None and torch.device(device).type != source.device.type:
        return False
    if kwargs.get("dtype") not in (None, source.dtype):
        return False
    return wanted in (None, torch.preserve_format) or source.is_contiguous(memory_format=wanted)


class OpSensor(Sensor):
    """Sensor that adds the ops that it sees to the rows of the ledger."""

    beneath = False  # ops come from the pretend device, below composite kernels
    syncs = True  # nothing else counts syncs here

    def __init__(self, ledger: Ledger):
        super().__init__(ledger)
        self._uploads, self._clones = Uploads(), Clones()

    @property
    def counts(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(_COPIES | {"syncs"} | ({"launches"} if self.ledger.launches == "ops" else set()))

    def see(self, func, args, kwargs) -> str:
        """Record an op before it runs. Return its name."""
        ledger = self.ledger
        ledger.origins.note(func._opname)
        self._clones.used(args, kwargs)
        self.report_dead()
        device = ops.device_of(args, kwargs)
        moves = [move for move in ops.moves(func, args, kwargs, self.beneath) if ledger.wants(move.device)]
        for move in moves:
            self._moved(move)
        if device is not None and ops.on_host(device):
            # Work done on the CPU. Scalars are bookkeeping, such as an optimizer's step count.
            if not moves and not self.beneath and ops.launches(func) and any(t.numel() > 1 for t in ops.tensors(args)):
                ledger.record("cpu_op", func._opname, bytes=max(t.numel() * t.element_size() for t in ops.tensors(args)))
        elif device is not None and ledger.wants(device):
            if repeats_layout(func, args, kwargs):
                self._clones.cloned(args[0], here(ledger.origins))
            if func.namespace == "aten" and ledger.launches == "ops" and not moves and ops.launches(func):
                ledger.record("launch", func._opname)
        return moves[0].what if moves else func._opname

    def _moved(self, move: ops.Move) -> None:
        if move.kind != "sync":
            self.ledger.record(move.kind, move.what, bytes=move.bytes, detail=move.manner)
        if self.syncs and move.blocking:  # a wait for a value is blocking, too
            self.ledger.record("sync", move.what)
        if move.kind == "h2d" and move.source is not None and self._uploads.again(move.source, move.device):
            self.ledger.record("repeat", move.what, bytes=move.bytes)

    def report_dead(self) -> None:
        for candidate in self._clones.dead():
            self.ledger.record("clone", "clone", bytes=candidate.bytes, place=candidate.place)


class SimGpu(OpSensor):
    name = "simgpu"
    sees = "every op, copy and sync on the pretend device, in any thread"
    beneath = True

    def absent(self) -> str | None:
        if not self.ledger.wants_type(pretend.NAME):
            return f"device={str(self.ledger.device)!r} was asked for"
        if not pretend.ready():
            return "simgpu() was not called"
        wanted = self.ledger.wants(torch.device(pretend.NAME, 0))
        return None if wanted else f"device={str(self.ledger.device)!r} is not here"

    def start(self, ending: ExitStack) -> None:
        ending.callback(self.report_dead)
        pretend.observers.append(self.see)
        ending.callback(pretend.observers.remove, self.see)


class Dispatch(OpSensor):
    name = "dispatch"
    sees = "ops, copies and clones, and syncs where gputrace does not run, in the ledger's thread and its backward"
    blind = "other threads, compiled code and graph replays; a sync inside an op that its table does not list"

    @property
    def counts(self) -> frozenset[str]:  # type: ignore[override]
        return (super().counts if self.ledger.device_is_here else frozenset()) | {"cpu_ops"}

    def absent(self) -> str | None:
        if self.ledger.device_is_here or pretend.ready():
            return None
        return "no GPU and no pretend device" if accelerator() is None else f"device={str(self.ledger.device)!r} is not here"

    def start(self, ending: ExitStack) -> None:
        self.syncs = not (torch.cuda.is_available() and self.ledger.runs("gputrace"))
        ending.callback(self.report_dead)
        mode = ops.OpMode(self._run)
        mode.__enter__()
        ending.callback(_leave, mode)

    def _run(self, func, args, kwargs):
        if pretend.ready() and _pretended(args, kwargs):
            return func(*args, **kwargs)  # the device itself reports it
        with self.seeing(func, args, kwargs):
            return func(*args, **kwargs)

    @contextmanager
    def seeing(self, func, args, kwargs):
        """Record an op as it runs. A custom op counts as a launch unless Triton launched inside it."""
        now = self.ledger.now
        outer, before = now.op, now.triton
        now.op = self.see(func, args, kwargs)
        try:
            yield
        finally:
            now.op = outer
        alone = func.namespace not in ("aten", "prims") and self.ledger.launches == "ops" and before == now.triton
        if alone and (device := ops.device_of(args, kwargs)) and not ops.on_host(device) and self.ledger.wants(device):
            self.ledger.record("launch", f"{func.namespace}::{func._opname}")


def _leave(mode: ops.OpMode) -> None:
    """End the mode, and remove ended modes from this thread's stack.

    A ledger may end on another thread than it began on, for example if each step of a script runs in a new thread, or before
    one that began later. Its mode cannot be removed then: it passes ops on and records nothing.
    """
    mode.run = _hand_on
    while (stack := _get_current_dispatch_mode_stack()) and getattr(stack[-1], "run", None) is _hand_on:
        stack[-1].__exit__(None, None, None)


def _hand_on(func, args, kwargs):
    return func(*args, **kwargs)


def _pretended(args, kwargs) -> bool:
    devices = [torch.device(where) for where in (ops.device_of(args, kwargs), kwargs.get("device")) if where is not None]
    return any(device.type == pretend.NAME for device in devices)


class Calls(Sensor):
    name = "calls"
    counts = frozenset()  # it adds to the counts of dispatch and simgpu
    sees = "synchronize() of torch.cuda, streams and events, print(tensor)"
    blind = "a synchronize() that was imported by name before the ledger opened"

    def absent(self) -> str | None:
        return None if self.ledger.device_is_here or pretend.ready() else "no GPU and no pretend device"

    def start(self, ending: ExitStack) -> None:
        ops.listen(self._on_call)
        ending.callback(ops.leave, self._on_call)

    def _on_call(self, what: str, device_type: str) -> None:
        if what is SCALARS and device_type == pretend.NAME:
            return  # the device sees each scalar being read
        if self.ledger.wants_type(device_type) and not (device_type == "cuda" and self.ledger.runs("gputrace")):
            self.ledger.record("sync", what)
