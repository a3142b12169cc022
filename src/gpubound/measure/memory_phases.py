"""Peak memory of a process by phase of its work, and an out-of-memory error that names the phase and what holds the memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..device import total_bytes
from ..errors import DeviceError
from ..formatting import readable

PHASES = ("place", "make step", "first step", "steps")


class Peak(NamedTuple):
    """The most bytes that torch's allocator gave to tensors, and that it took of the GPU."""

    allocated: int
    reserved: int


class MemoryPhases:
    """Peaks of a GPU by phase. On a CPU nothing is measured.

    `known` are the bytes that are known to last, by name, for the message of an error; `predicted` those of each phase's peak.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, Peak] = {}
        self.predicted: dict[str, int] = {}
        self.known: dict[str, int] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure the block's peak; of several blocks of one phase the largest. DeviceError where memory runs out."""
        if self.device.type != "cuda":
            yield
            return
        if torch.cuda.is_initialized():  # before, torch refuses it, and there is no peak
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._measure(phase)
            raise DeviceError(self._explain(phase)) from error
        self._measure(phase)

    def rows(self) -> list[dict[str, str | int]]:
        """Return the phases as entries of a run's log."""
        return [
            {"phase": phase, "allocated": peak.allocated, "reserved": peak.reserved, "predicted": self.predicted.get(phase, 0)}
            for phase, peak in sorted(self.peaks.items(), key=lambda it: PHASES.index(it[0]))
        ]

    def _measure(self, phase: str) -> None:
        now = Peak(torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device))
        self.peaks[phase] = Peak(*map(max, now, self.peaks.get(phase, now)))
        torch.cuda.reset_peak_memory_stats(self.device)  # of a phase that goes on around this one

    def _explain(self, phase: str) -> str:
        allocated = self.peaks[phase].allocated
        parts = self.known | {"activations and all else": max(allocated - sum(self.known.values()), 0)}
        holders = ", ".join(f"{name} {readable(size)}" for name, size in sorted(parts.items(), key=lambda it: -it[1]) if size)
        return (
            f"out of memory: {phase}: {readable(allocated)} were allocated of {readable(total_bytes(self.device))} ({holders})."
        )
