"""Turns the ops that a sensor sees into rows of the ledger."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from . import ops
from .copies import Clones, Uploads, repeats_layout

if TYPE_CHECKING:
    from .ledger import Ledger


class OpBook:
    """`beneath`: ops come from the pretend device, below composite kernels. `syncs`: nothing else counts syncs here."""

    def __init__(self, ledger: Ledger, beneath: bool, syncs: bool):
        self.ledger, self.beneath, self.syncs = ledger, beneath, syncs
        self._uploads, self._clones = Uploads(), Clones()

    def see(self, func, args, kwargs) -> str:
        """Called before an op runs. Returns what to call it."""
        ledger = self.ledger
        ledger.origins.note(func._opname)
        device = ops.device_of(args, kwargs)
        self._clones.used(args, kwargs)
        self._report_dead()
        found = [move for move in ops.moves(func, args, kwargs, self.beneath) if ledger.wants(move.device)]
        for move in found:
            self._moved(move)
        if device is None:
            pass
        elif ops.on_host(device):
            self._on_host(func, args, found)
        elif ledger.wants(device):
            if repeats_layout(func, args, kwargs):
                self._clones.cloned(args[0], ledger.here())
            if func.namespace == "aten" and ledger.launches == "ops" and not found and ops.launches(func):
                ledger.record("launch", func._opname)
        return found[0].what if found else func._opname

    @contextmanager
    def seeing(self, func, args, kwargs):
        """Around an op as it runs. A custom op is a launch of its own unless Triton launches were heard inside."""
        before = self.ledger.enter_op(self.see(func, args, kwargs))
        try:
            yield
        finally:
            after = self.ledger.leave_op()
        if func.namespace not in ("aten", "prims") and self.ledger.launches == "ops" and before == after:
            device = ops.device_of(args, kwargs)
            if device is not None and not ops.on_host(device) and self.ledger.wants(device):
                self.ledger.record("launch", f"{func.namespace}::{func._opname}")

    def close(self) -> None:
        self._report_dead()

    def _moved(self, move: ops.Move) -> None:
        if move.kind == "sync":
            if self.syncs:
                self.ledger.record("sync", move.what)
            return
        self.ledger.record(move.kind, move.what, bytes=move.bytes, detail=move.manner)
        if self.syncs and move.blocking:
            self.ledger.record("sync", move.what)
        if move.kind == "h2d" and move.source is not None and self._uploads.again(move.source, move.device):
            self.ledger.record("repeat", move.what, bytes=move.bytes)

    def _on_host(self, func, args, found) -> None:
        """Work done on the CPU. Scalars are bookkeeping, such as an optimizer's step count."""
        if not found and not self.beneath and ops.launches(func) and any(t.numel() > 1 for t in ops.tensors(args)):
            self.ledger.record("cpu_op", func._opname)

    def _report_dead(self) -> None:
        for candidate in self._clones.dead():
            self.ledger.record("clone", "clone", bytes=candidate.bytes, place=candidate.place)
