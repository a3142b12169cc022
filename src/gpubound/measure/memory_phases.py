"""Peak memory of a process by phase of its work, and an out-of-memory error that names the phase and what holds the memory."""

import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..device import total_bytes
from ..errors import DeviceError
from ..formatting import byte_count, readable

PHASES = ("place", "make step", "first step", "steps")
SIZE = r"(\d+(?:\.\d+)? (?:[KMG]iB|bytes))"
AT_THE_ERROR = {  # what torch's message has of the moment of the error; where it is caught, temporary tensors are gone
    "asked": f"Tried to allocate {SIZE}",
    "process": f"this process has {SIZE} memory in use",
    "allocated": f"{SIZE} is allocated by PyTorch",
    "graphs": f"{SIZE} allocated in private pools",
    "cached": f"{SIZE} is reserved by PyTorch but unallocated",
}


class Peak(NamedTuple):
    """The most bytes that torch's allocator gave to tensors, and that it took of the GPU."""

    allocated: int
    reserved: int


class MemoryPhases:
    """Peaks of a GPU by phase. On a CPU nothing is measured.

    `known` are the bytes of what lasts from step to step, by name, for the message of an error; `predicted` those of each
    phase's peak.
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
            raise DeviceError(self._explain(phase, str(error))) from error
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

    def _explain(self, phase: str, error: str) -> str:
        matches = {name: re.search(pattern, error) for name, pattern in AT_THE_ERROR.items()}
        size = {name: byte_count(match[1].replace("bytes", "B")) or 0 for name, match in matches.items() if match is not None}
        allocated, cached = size.get("allocated", self.peaks[phase].allocated), size.get("cached", 0)
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        parts = Counter(self.known) | bytes_by_role(modules, self.device)
        parts["pools of graphs"] = size.get("graphs", 0)
        parts["activations and all else"] = max(allocated - parts.total(), 0)
        holders = ", ".join(f"{name} {readable(n)}" for name, n in parts.most_common() if n)
        about = [f"{readable(allocated)} were allocated of {readable(total_bytes(self.device))} ({holders})"]
        about += [f"{readable(size['asked'])} more were asked for"] if "asked" in size else []
        about += [f"{readable(cached)} are cached in blocks that are too small, or a graph's"] if cached else []
        if (outside := size.get("process", 0) - allocated - cached) > 0:
            about.append(f"CUDA's context and kernels hold {readable(outside)}")
        if phase in self.predicted:
            about.append(f"{readable(self.predicted[phase])} were predicted")
        return f"out of memory: {phase}: {'; '.join(about)}."


def bytes_by_role(modules: Iterable[nn.Module], device: torch.device) -> Counter[str]:
    """Return the bytes of the modules' storages: of weights that train, their gradients, and frozen weights with buffers."""
    sizes, counted = Counter[str](), set[int]()

    def count(name: str, tensor: Tensor | None) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor is None or tensor.device != device:
            return  # shards and other wrappers have their tensors elsewhere
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            sizes[name] += storage.nbytes()

    for module in modules:
        for parameter in [p for p in module._parameters.values() if p is not None]:
            count("weights" if parameter.requires_grad else "frozen weights", parameter)
            count("gradient", parameter.grad)
        for buffer in module._buffers.values():
            count("frozen weights", buffer)
    return sizes
