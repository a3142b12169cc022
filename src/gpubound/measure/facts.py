"""What this machine is: the facts that stand beside every figure. Nothing here is measured; ceilings.py does that."""

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    capability: str
    memory_bytes: int
    l2_bytes: int
    sms: int


@dataclass(frozen=True)
class Machine:
    """Versions and hardware by name. None where this machine has no such thing."""

    system: str
    python: str
    torch: str
    cuda: str | None
    driver: str | None
    triton: str | None
    cpu: str
    threads: int
    host_memory_bytes: int | None


def machine() -> Machine:
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=_driver(),
        triton=_installed("triton"),
        cpu=_cpu_name(),
        threads=torch.get_num_threads(),
        host_memory_bytes=_host_memory(),
    )


def gpus() -> list[Gpu]:
    """The GPUs that CUDA shows. It starts CUDA: ask device.resolve first whether that works."""
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        found.append(Gpu(index, p.name, f"{p.major}.{p.minor}", p.total_memory, p.L2_cache_size, p.multi_processor_count))
    return found


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """NVIDIA's driver version from the kernel module, else from NVML (containers may hide /proc); None without a driver."""
    stated = Path("/proc/driver/nvidia/version")
    if stated.exists() and (found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", stated.read_text())):
        return found.group()
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return None
    except pynvml.NVMLError:  # no driver library, or no permission to ask it
        return None
    answer = pynvml.nvmlSystemGetDriverVersion()
    pynvml.nvmlShutdown()
    return answer if isinstance(answer, str) else answer.decode()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        return found.group(1).strip()
    return platform.processor() or platform.machine()


def _host_memory() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
