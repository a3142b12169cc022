"""Facts of this machine, which are printed with every figure, and the measurements of `ceilings`.

All data is random: products of zeros draw less power and run up to 13 % faster.
"""

import os
import platform
import re
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..device import free_bytes, products
from ..errors import MeasureError
from .timing import Timing, time

MIB = 1 << 20

Seconds = Callable[[Callable[[], Any]], float]  # of one call, measured


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    capability: str
    memory_bytes: int
    l2_bytes: int
    sms: int


def gpus() -> list[Gpu]:
    """Return the visible GPUs. This starts CUDA; call device.resolve before to check that it works."""
    result = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        result.append(Gpu(index, p.name, f"{p.major}.{p.minor}", p.total_memory, p.L2_cache_size, p.multi_processor_count))
    return result


def _triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return NVIDIA's driver version from the kernel module, else from NVML (containers may hide /proc), or None."""
    file = Path("/proc/driver/nvidia/version")
    if file.exists() and (match := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read_text())):
        return match.group()
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return None
    except pynvml.NVMLError:  # no driver library, or no permission
        return None
    driver = pynvml.nvmlSystemGetDriverVersion()
    pynvml.nvmlShutdown()
    return driver if isinstance(driver, str) else driver.decode()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists() and (match := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        return match.group(1).strip()
    return platform.processor() or platform.machine()


def _host_memory() -> int | None:
    is_known = "SC_PHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if is_known else None


@dataclass(frozen=True)
class Machine:
    """Versions and hardware. None: this machine has none."""

    system: str = field(default_factory=lambda: f"{platform.system()} {platform.release()} {platform.machine()}")
    python: str = field(default_factory=platform.python_version)
    torch: str = field(default_factory=lambda: torch.__version__)
    cuda: str | None = field(default_factory=lambda: torch.version.cuda)
    driver: str | None = field(default_factory=_driver)
    triton: str | None = field(default_factory=_triton)
    cpu: str = field(default_factory=_cpu_name)
    threads: int = field(default_factory=lambda: torch.get_num_threads())
    host_memory_bytes: int | None = field(default_factory=_host_memory)


def machine() -> Machine:
    return Machine()


def _timed(fn: Callable[[], Any], device: torch.device, runs: int, budget_s: float) -> Timing:
    """Time `runs` calls, or as many as fit into `budget_s`, but at least one after a warm-up call."""
    first = time(fn, warmup=1, runs=1, device=device)
    more = min(runs, int(budget_s / first.median_s)) - 1
    return time(fn, warmup=0, runs=more, device=device) if more > 1 else first


def of_gpu(device: torch.device, quick: bool = False) -> dict[str, Any]:
    """Return the fields of Ceilings that a GPU has. Medians: sustained clocks, as a training run sees them."""

    def median(fn: Callable[[], Any]) -> float:
        return _timed(fn, device, *((5, 0.2) if quick else (15, 0.5))).median_s

    try:
        with torch.cuda.device(device):
            result = _memory(_gpu_buffer_bytes(device, quick), device, median)
            result |= _gpu_products(device, 4096 if quick else 8192, median)
            result |= _transfers(device, 64 if quick else 256)
            return result | _gpu_host_costs(device, 500 if quick else 2000)
    except MeasureError:
        raise
    except RuntimeError as error:  # a figure is never guessed
        cause = str(error).strip().splitlines()[0]
        raise MeasureError(
            f"ceilings: measuring {device} failed: {cause}. Free the GPU, then run `gpubound env --refresh`."
        ) from error


def of_cpu(quick: bool = False) -> dict[str, Any]:
    """Return the fields of Ceilings that a CPU has. Lower quartiles: another process only makes a run slower."""
    cpu = torch.device("cpu")

    def best(fn: Callable[[], Any]) -> float:
        return _timed(fn, cpu, *((3, 0.15) if quick else (7, 0.5))).low_s

    result = _memory(_cpu_buffer_bytes(quick), cpu, best)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        result[f"{name}_flops_per_s"] = _product_rate(1024 if quick else 2048, dtype, cpu, best)
    return result | {"launch_us": _launch_us(cpu, 5_000)}


def _cpu_buffer_bytes(quick: bool) -> int:
    """Return twice the size of the last-level cache, so that memory is measured; at most 1/16 of the memory, or 1 GiB."""
    file = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    cache_kib = int(file.read_text().strip().removesuffix("K")) if file.exists() else 32 * 1024
    memory = machine().host_memory_bytes or 8 << 30
    return min(max(2 * cache_kib * 1024, 64 * MIB), memory // 16, 256 * MIB if quick else 1024 * MIB)


def _random_floats(size_bytes: int, device: torch.device) -> Tensor:
    """Return fp32 noise; on a CPU one MiB repeated, because drawing a GiB takes longer than measuring with it."""
    count = size_bytes // 4
    if device.type == "cuda":
        return torch.randn(count, device=device, dtype=torch.float32)
    return torch.randn(MIB // 4, device="cpu", dtype=torch.float32).repeat(max(1, count // (MIB // 4)))


def _gpu_buffer_bytes(device: torch.device, quick: bool) -> int:
    free = free_bytes(device)
    size = min(256 * MIB if quick else 1024 * MIB, free // 4)
    if size < 64 * MIB:
        raise MeasureError(f"ceilings: only {free // MIB} MiB are free on {device}, 256 are needed; stop what holds them.")
    return size


def _memory(size_bytes: int, device: torch.device, seconds: Seconds) -> dict[str, Any]:
    source = _random_floats(size_bytes, device)
    target = torch.empty_like(source)
    copy, read = seconds(lambda: target.copy_(source)), seconds(source.sum)
    return {"copy_bytes_per_s": 2 * source.nbytes / copy, "read_bytes_per_s": source.nbytes / read}


def _product_rate(most: int, dtype: torch.dtype, device: torch.device, seconds: Seconds) -> float:
    """Return the rate of square products of `most` rows, or of fewer if those take 50 ms and more.

    Eight products of 2048 rows in bf16 are 158 s on a CPU with AVX2 alone, and 0.5 s from 256 rows on.
    """
    size = min(256, most)
    while True:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        duration = seconds(partial(torch.matmul, a, b))
        if duration > 0.05 or size >= most:
            return 2 * size**3 / duration
        size *= 2


def _gpu_products(device: torch.device, size: int, seconds: Seconds) -> dict[str, Any]:
    """Measure square products of `size`; of half the size for fp32, which without tf32 is more than ten times slower."""
    result: dict[str, Any] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        result[f"{name}_flops_per_s"] = _product_rate(size, dtype, device, seconds)
    for name, mode in (("fp32", "ieee"), ("tf32", "tf32")):
        with products(mode):
            result[f"{name}_flops_per_s"] = _product_rate(size // 2, torch.float32, device, seconds)
    if torch.cuda.get_device_capability(device) < (8, 9):
        return result | {"missing": {"fp8_flops_per_s": "fp8 products need compute capability 8.9 or later"}}
    one = torch.ones((), device=device, dtype=torch.float32)
    a8, b8 = (torch.randn(size, size, device=device, dtype=torch.float32).to(torch.float8_e4m3fn) for _ in range(2))
    try:  # the second operand must be column-major
        fp8 = seconds(lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
    except (RuntimeError, TypeError) as error:  # a private function, whose requirements differ between builds
        return result | {"missing": {"fp8_flops_per_s": str(error).strip().splitlines()[0]}}
    return result | {"fp8_flops_per_s": 2 * size**3 / fp8}


def _transfers(device: torch.device, mib: int) -> dict[str, Any]:
    pageable = _random_floats(mib * MIB, torch.device("cpu"))
    pinned = pageable.pin_memory()
    target = torch.empty_like(pageable, device=device)
    slow = time(lambda: target.copy_(pageable), warmup=1, runs=5, device=device).median_s
    fast = time(lambda: target.copy_(pinned, non_blocking=True), warmup=1, runs=5, device=device).median_s
    return {"pageable_h2d_bytes_per_s": pageable.nbytes / slow, "pinned_h2d_bytes_per_s": pageable.nbytes / fast}


def _gpu_host_costs(device: torch.device, count: int) -> dict[str, Any]:
    x = torch.ones((), device=device, dtype=torch.float32)
    chain = 100  # nodes a call, so that the graph's start costs each of them under a nanosecond
    node = time(lambda: [x.add_(1) for _ in range(chain)], graph=True, runs=20, device=device).median_s / chain
    item = timeit.timeit("x.item()", "x.item()", number=count, globals={"x": x}) / count
    return {"launch_us": _launch_us(device, 2 * count), "graph_node_us": node * 1e6, "item_us": item * 1e6}


def _launch_us(device: torch.device, count: int) -> float:
    """Return the host time of a tiny in-place add: the best of five loops of `count`. A full queue would add device time."""
    names = {"x": torch.ones(16, device=device, dtype=torch.float32), "wait": partial(torch.cuda.synchronize, device)}
    loops = timeit.repeat("x.add_(1)", "wait()" if device.type == "cuda" else "pass", repeat=6, number=count, globals=names)
    return min(loops[1:]) / count * 1e6  # the first is the warm-up
