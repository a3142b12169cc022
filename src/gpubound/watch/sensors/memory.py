"""The caching allocator's own statistics: what went past the cache to the driver, which stops the device."""

import linecache
import time

import torch

from ..site import USER, Place, Site, owner
from .base import Sensor

DEVICE_COUNTERS = {"num_device_alloc": "alloc", "num_device_free": "free", "num_alloc_retries": "retry"}
ENTRIES = 100_000  # allocations remembered with their stacks; a malloc older than that loses its line


class Allocator(Sensor):
    name = "allocator"
    counts = frozenset({"allocations", "frees", "alloc_retries", "pinned_allocations"})
    sees = "cudaMalloc and its line, cudaFree, retries after a failed one, pinned allocations"
    blind = "the lines of frees and of pinned allocations"

    def absent(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA GPU"

    def start(self) -> None:
        self._recording = not torch._C._cuda_isHistoryEnabled()  # else the user records, and we read theirs
        if self._recording:
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=ENTRIES)
        self._began = time.time_ns() // 1000
        self._before = statistics()

    def stop(self) -> None:
        after = statistics()
        changed = {kind: after[kind] - self._before[kind] for kind in after}
        located = 0
        if changed["alloc"] > 0:  # reading the history builds it as Python objects: only when there is something to find
            located = self._locate(torch.cuda.memory._snapshot()["device_traces"])
        if self._recording:
            torch.cuda.memory._record_memory_history(None)
        changed["alloc"] -= located
        for kind, times in changed.items():
            if times > 0:
                self.ledger.record(kind, WHAT[kind], count=times, lost=True)

    def _locate(self, traces: list[list[dict]]) -> int:
        located = 0
        for event in (event for device in traces for event in device):
            if event["action"] in ("segment_alloc", "segment_map") and event.get("time_us", self._began) >= self._began:
                place = Place(site_in(event.get("frames", [])))
                self.ledger.record("alloc", WHAT["alloc"], bytes=event["size"], place=place)
                located += 1
        return located


WHAT = {"alloc": "cudaMalloc", "free": "cudaFree", "retry": "retry after a failed cudaMalloc", "pin": "pinned allocation"}


def statistics() -> dict[str, int]:
    """How often the allocators went to the driver so far, over all GPUs."""
    totals = dict.fromkeys((*DEVICE_COUNTERS.values(), "pin"), 0)
    for index in range(torch.cuda.device_count()):
        now = torch.cuda.memory_stats(index)
        for counter, kind in DEVICE_COUNTERS.items():
            totals[kind] += now.get(counter, 0)
    totals["pin"] = torch.cuda.host_memory_stats().get("num_host_alloc", 0)
    return totals


def site_in(frames: list[dict]) -> Site | None:
    """The user's line among a recorded stack's frames, innermost first."""
    for frame in frames:
        file, line = frame["filename"], frame["line"]
        if file != "??" and owner(file) is USER:
            return Site(file, line, frame["name"], linecache.getline(file, line).strip(), line)
    return None
