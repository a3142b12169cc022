"""Live figures of a run: gauges of the machine, the live line, and other loggers.

The gauges are read in the host loop, at most once a second; a reading costs the host a fraction of a millisecond. The activity
of the SMs comes from the counters of NVML's GPM (Hopper and later); the utilisation of nvidia-smi is 100 % for a GPU on which
one SM works.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.text import Text

from ..formatting import quantity, readable
from ..trace import bar, notice, printable
from .figures import Throughput

if TYPE_CHECKING:
    import torch  # `gpubound report` needs none, and would wait 2 s for it

PERIOD = 1.0  # seconds between two readings


class Gauges:
    """`with Gauges(device) as gauges: record |= gauges.read()`. Gauges that the machine does not have are left out."""

    def __init__(self, device: "torch.device", period: float = PERIOD):
        self.device, self.period = device, period
        self._last = float("-inf")

    def __enter__(self) -> "Gauges":
        self._chip = _open_chip(self.device) if self.device.type == "cuda" else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._chip is not None:
            self._chip.close()

    def read(self) -> dict[str, float]:
        """Return the current figures, or {} within a period after the last ones."""
        now = time.monotonic()
        if now - self._last < self.period:
            return {}
        self._last = now
        if self.device.type != "cuda":
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB, macOS in bytes
            return {"memory_bytes": most * (1 if sys.platform == "darwin" else 1024)}
        import torch

        from ..device import uncounted_bytes

        uncounted = uncounted_bytes(self.device)
        values = {
            "memory_bytes": torch.cuda.max_memory_allocated(self.device) + uncounted,
            "memory_allocated_bytes": torch.cuda.memory_allocated(self.device) + uncounted,
            "memory_reserved_bytes": torch.cuda.memory_reserved(self.device) + uncounted,
        }
        return values | (self._chip.read() if self._chip is not None else {})


def _open_chip(device: "torch.device") -> "_Chip | None":
    import torch

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
    """One GPU through NVML. The first reading that a GPU refuses (a slice of one, no permission) ends its gauge."""

    def __init__(self, nvml: Any, handle: Any):
        self.nvml, self.handle = nvml, handle
        self._gauges = {"power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3}
        self._samples: list[Any] = []
        if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            nvml.nvmlGpmSampleGet(handle, self._samples[0])
            self._gauges["sm_active"] = self._sm_active

    def read(self) -> dict[str, float]:
        values = {}
        for name, gauge in list(self._gauges.items()):
            try:
                values[name] = gauge()
            except self.nvml.NVMLError as error:
                notice(f"{name} is left out: NVML says {error}.")
                del self._gauges[name]
        return values

    def _sm_active(self) -> float:
        """Return the fraction of active SMs, averaged since the last reading."""
        nvml, (old, new) = self.nvml, self._samples
        nvml.nvmlGpmSampleGet(self.handle, new)
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        request.sample1, request.sample2 = old, new
        request.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        nvml.nvmlGpmMetricsGet(request)
        self._samples = [new, old]
        return request.metrics[0].value / 100

    def close(self) -> None:
        for sample in self._samples:
            self.nvml.nvmlGpmSampleFree(sample)
        self.nvml.nvmlShutdown()


LINES = 10  # a run without a terminal (a log file, CI)
SELDOM = ("held_out", "eval_reward", "syncs", "power_w", "memory_bytes")  # the line shows the last figure of those

# The figures of a line, in this order.
PARTS: dict[str, Callable[[Any], str]] = {
    "phase": printable,
    "loss": lambda loss: f"loss {float(loss):.3f}",
    "held_out": "held out {:.3f}".format,
    "reward": "reward {:.3f}".format,
    "eval_reward": "held-out reward {:.3f}".format,
    "length": "{:.0f} tokens an answer".format,
    "entropy": "entropy {:.2f}".format,
    "kl": "KL {:.3f}".format,
    "gap": "log-probability gap {:.4f}".format,
    "no_signal": lambda share: f"{share:.0%} without signal" if share else "",
    "tokens_per_s": lambda pace: quantity(pace, " tok/s"),
    "slow": lambda block: f"SLOW, was {quantity(block.best, ' tok/s')}",
    "mfu": "{:.1%} MFU".format,
    "sampled_per_s": lambda pace: quantity(pace, " tok/s sampled"),
    "sample_share": "sampling {:.0%}".format,
    "gpu_busy": "GPU busy {:.0%}".format,
    "syncs": "{:g} syncs/step".format,
    "sums_share": "collectives {:.1%}".format,
    "slowest_rank": "rank {} slowest".format,
    "held_up_ms": "others wait {:.1f} ms".format,
    "power_w": "{:.0f} W".format,
    "memory_bytes": readable,
    "skipped": lambda count: f"{count} skipped" if count else "",
}


def describe(record: dict[str, Any]) -> str:
    """Return the figures of a step in a line."""
    parts = (show(record[key]) for key, show in PARTS.items() if key in record)
    return "  ".join(part for part in parts if part)


class LiveLine:
    """`with LiveLine(steps) as live: live.show(record)`. A bar on a terminal, plain lines elsewhere."""

    def __init__(self, steps: int, title: str = "train", console: Console | None = None):
        self.steps, self.title = steps, printable(title)
        self.console = console or Console(file=sys.stderr)
        self._every, self._shown = max(1, steps // LINES), False
        self._bar: Any = None
        self._seldom: dict[str, Any] = {}
        self._phase: str | None = None
        self._throughput = Throughput()

    def __enter__(self) -> "LiveLine":
        if self.console.is_terminal:
            self._bar = bar(self.console, self.title, self.steps, MofNCompleteColumn(), TimeRemainingColumn())
        return self

    def show(self, record: dict[str, Any]) -> None:
        if record.get("phase") != self._phase:
            self._phase = record.get("phase")
            self._seldom.pop("held_out", None)  # of other data
        self._seldom |= {key: record[key] for key in SELDOM if key in record}
        record = self._seldom | record
        slowed = self._throughput.add(record)
        if self._throughput.slow is not None:
            record |= {"slow": self._throughput.slow}
        if self._bar:
            self._bar.update(0, completed=record["step"], line=describe(record))
        elif record["step"] % self._every == 0 or record["step"] == self.steps or slowed or not self._shown:
            line = f"{self.title} {record['step']}/{self.steps}  {describe(record)}"
            self.console.print(Text(line), highlight=False, soft_wrap=True)
        self._shown = True

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()


LOGGERS = ("tensorboard", "wandb", "trackio")


def check_log(kind: str | None) -> None:
    """Raise ValueError for a logger that cannot be opened, before the training."""
    if kind is None:
        return
    if kind not in LOGGERS:
        raise ValueError(f"log: got {kind!r}, wanted one of {', '.join(LOGGERS)}.")
    try:
        import_module(kind)
    except ImportError as error:
        raise ValueError(f"log: {kind} is not installed; pip install {kind}, or leave --log out.") from error


@contextmanager
def open_log(kind: str | None, folder: Path, name: str, config: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Open a logger and yield the function that takes each record; for None one that does nothing."""
    check_log(kind)
    if kind is None:
        yield lambda record: None
    elif kind == "tensorboard":
        library = import_module("torch.utils.tensorboard")
        with closing(library.SummaryWriter(str(folder / "tensorboard"))) as writer:
            yield lambda record: [writer.add_scalar(*scalar, record["step"]) for scalar in _figures(record).items()]
    else:
        library = import_module(kind)  # trackio has the interface of Weights & Biases
        folder_option = {"dir": str(folder)} if kind == "wandb" else {}
        with redirect_stdout(sys.stderr):  # --json has stdout
            library.init(project="gpubound", name=name, config=config, **folder_option)
        try:
            yield lambda record: library.log(_figures(record), step=record["step"])
        finally:
            with redirect_stdout(sys.stderr):
                library.finish()


def _figures(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "step" and isinstance(value, int | float)}
