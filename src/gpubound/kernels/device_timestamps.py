"""Timestamps that a device writes when it reaches a point of its work.

The device writes them in the order of its stream. So they work inside a CUDA graph, too, and a later reader gets the times of
each step: an event that a graph records holds those of the newest replay alone.
"""

import time
from importlib import import_module

import torch

from . import triton  # the package: its files, which import triton itself, are imported when called for
from .dispatch import can_launch


def can_stamp(device: torch.device) -> bool:
    """Return whether `Stamps` work on that device: on a CPU, and on a GPU where kernels can be launched."""
    return device.type == "cpu" or can_launch(device)


class Stamps:
    """`times`, int64 (places,) on the device, in ns. Those of one device may be subtracted; two devices' clocks differ."""

    def __init__(self, device: torch.device, places: int):
        self.times = torch.zeros(places, dtype=torch.int64, device=device)
        # Past torch: to a step that is being recorded, a number that the host writes would be a mistake.
        self._here = self.times.numpy() if device.type == "cpu" else None

    def put(self, place: int) -> None:
        """times[place] = the time when the device comes here."""
        if self._here is None:
            import_module(f"{triton.__name__}._device_timestamps").stamp(self.times, place)
        else:
            self._here[place] = time.perf_counter_ns()
