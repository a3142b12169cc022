"""What the machine says of itself while a run goes on: memory, and on NVIDIA power and the share of the SMs at work.

Read in the host loop, at most once a second: one reading costs the host a fraction of a millisecond, and the device nothing.
The SMs' activity comes from the counters of NVML's GPM (Hopper and later); the utilisation that nvidia-smi prints would say
100 % of a GPU on which one SM works.
"""

import resource
import sys
import time
from typing import Any

import torch

from ..trace import notice

PERIOD = 1.0  # seconds between two readings


class Gauges:
    """`with Gauges(device) as gauges: record |= gauges.read()`. What a machine does not have is left out."""

    def __init__(self, device: torch.device, period: float = PERIOD):
        self.device, self.period = device, period
        self._chip: _Chip | None = None
        self._last = float("-inf")

    def __enter__(self) -> "Gauges":
        if self.device.type == "cuda":
            self._chip = _open_chip(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._chip is not None:
            self._chip.close()

    def read(self) -> dict[str, float]:
        """The figures of this moment, or nothing when the last ones are younger than the period."""
        now = time.monotonic()
        if now - self._last < self.period:
            return {}
        self._last = now
        if self.device.type != "cuda":
            return {"memory_bytes": _resident_bytes()}
        found = {
            "memory_bytes": torch.cuda.max_memory_allocated(self.device),
            "memory_allocated_bytes": torch.cuda.memory_allocated(self.device),
            "memory_reserved_bytes": torch.cuda.memory_reserved(self.device),
        }
        return found | (self._chip.read() if self._chip is not None else {})


def _resident_bytes() -> int:
    """The most that this process has held. Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _open_chip(device: torch.device) -> "_Chip | None":
    try:
        import pynvml
    except ImportError:
        notice("power and SM activity are left out: pip install nvidia-ml-py.")
        return None
    try:
        pynvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES counts GPUs differently from NVML.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return _Chip(pynvml, handle)
    except pynvml.NVMLError as error:
        notice(f"power and SM activity are left out: NVML says {error}.")
        return None


class _Chip:
    """One GPU through NVML. The first reading that a GPU refuses (a slice of one, no permission) ends that gauge, aloud."""

    def __init__(self, nvml: Any, handle: Any):
        self.nvml, self.handle = nvml, handle
        self._gauges = {"power_w": self._power}
        self._samples: list[Any] = []
        if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            nvml.nvmlGpmSampleGet(handle, self._samples[0])
            self._gauges["sm_active"] = self._sm_active

    def read(self) -> dict[str, float]:
        found = {}
        for name, gauge in list(self._gauges.items()):
            try:
                found[name] = gauge()
            except self.nvml.NVMLError as error:
                notice(f"{name} is left out: NVML says {error}.")
                del self._gauges[name]
        return found

    def _power(self) -> float:
        return self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3

    def _sm_active(self) -> float:
        """The share of SMs that had work, averaged since the last reading."""
        nvml, (old, new) = self.nvml, self._samples
        nvml.nvmlGpmSampleGet(self.handle, new)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        asked.sample1, asked.sample2 = old, new
        asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        nvml.nvmlGpmMetricsGet(asked)
        self._samples = [new, old]
        return asked.metrics[0].value / 100

    def close(self) -> None:
        for sample in self._samples:
            self.nvml.nvmlGpmSampleFree(sample)
        self.nvml.nvmlShutdown()
