"""This machine's measured limits, and the shares of work in them.

Limits are measured once and cached in a file whose name contains the GPU, the driver, torch and CUDA. A busy machine only
measures too little, so the best value of all measurements counts, and a figure is measured again when some work exceeds it or
comes close to the value of a single measurement.

`machine` has facts that are printed with every figure. All data of a measurement is random: products of zeros draw less power
and run up to 13 % faster.
"""

import json
import os
import platform
import re
import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..device import free_bytes, products, resolve
from ..errors import DataError, MeasureError
from ..files import cache_folder, write_atomic
from ..trace import notice, say
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


MEASUREMENTS = 3  # work that exceeds the best of three is not bound by that figure
CLOSE = 0.9  # a share above this is less likely than a measurement on a busy machine

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
_PRECISION_OF = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


@dataclass(frozen=True)
class Ceilings:
    """The best rates of the device, in bytes, operations and microseconds. None: not on this device, or see `missing`."""

    device: str  # "cuda" or "cpu"
    name: str
    key: str
    date: str
    quick: bool
    copy_bytes_per_s: float
    """Device memory to device memory, bytes read plus bytes written."""
    read_bytes_per_s: float
    fp32_flops_per_s: float
    """Products of fp32 matrices with tf32 off."""
    bf16_flops_per_s: float
    launch_us: float
    """Host time of one eager launch of a tiny kernel (on a CPU: of one tiny operation)."""
    tf32_flops_per_s: float | None = None
    fp16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    pinned_h2d_bytes_per_s: float | None = None
    pageable_h2d_bytes_per_s: float | None = None
    graph_node_us: float | None = None
    """Device time of one tiny kernel inside a CUDA graph: the floor under a kernel's cost."""
    item_us: float | None = None
    """One `.item()`: the round trip in which the host waits and the device idles."""
    missing: dict[str, str] = field(default_factory=dict)
    """Figure -> why it could not be measured here."""
    measurements: int = 1
    """Each figure is the best of so many."""

    def flops_per_s(self, precision: str | torch.dtype) -> float:
        """Return the matrix rate in a dtype: 'bf16', torch.bfloat16 and so on. MeasureError if it was not measured."""
        short = _PRECISION_OF.get(precision, "") if isinstance(precision, torch.dtype) else precision
        if short not in PRECISIONS:
            raise ValueError(
                f"flops_per_s: got {precision!r}, wanted one of {', '.join(PRECISIONS)} or a floating torch.dtype."
            )
        figure = getattr(self, f"{short}_flops_per_s")
        if figure is None:
            why = self.missing.get(f"{short}_flops_per_s", f"it is not measured on a {self.device} device")
            raise MeasureError(f"no {short} matrix rate for {self.name}: {why}.")
        return figure

    def as_dict(self) -> dict:
        return asdict(self)


_unsaved: dict[tuple[str, bool], Ceilings] = {}  # (key, quick) -> ceilings that could not be written to a file


def ceilings(device: str | torch.device = "auto", *, refresh: bool = False, quick: bool = False) -> Ceilings:
    """Return the limits of `device`: from the cache, or measured now, within about 5 s. `quick` takes 2: fewer runs, less data.

    A line on stderr reports a measurement. Every figure has a time limit: a slow machine makes fewer runs of smaller products.
    `quick` uses full figures if the cache has them. `refresh` always measures again, and keeps the better value of each
    figure. Delete the cache's file to discard them.
    """
    device = resolve(device)
    key = _key(device)
    if not refresh:
        for is_quick in (False, True) if quick else (False,):
            if (cached := _read(cache_file(key, is_quick)) or _unsaved.get((key, is_quick))) is not None:
                return cached
    result = _measure(device, key, quick)
    if refresh and (cached := _read(cache_file(key, quick))) is not None:
        result = replace(_better(cached, result), measurements=1)
    _write(result)
    return result


def share(achieved: float, figure: str, device: str | torch.device = "auto") -> float | None:
    """Return `achieved` as a fraction of the ceiling named `figure` ("read_bytes_per_s", say). Never above 1.

    If `achieved` exceeds the ceiling, the ceiling was measured on a busy machine: measure it again and keep the better value,
    as for a ceiling that was measured once and is nearly reached. If `achieved` exceeds the new value too, return None with a
    notice: this ceiling does not bind such work, as memory does not bind a model that fits into the cache.
    """
    limits = ceilings(device, quick=True)
    while _is_doubtful(achieved / getattr(limits, figure), limits.measurements):
        limits = _better(limits, _measure(resolve(device), limits.key, limits.quick))
        _write(limits)
    if achieved > (limit := getattr(limits, figure)):
        notice(
            f"no share of {figure}: this work reaches {achieved:.3g}, and the best of {limits.measurements} measurements here "
            f"is {limit:.3g}. It is not bound by that figure (a small model is read from a cache), or the machine was busy "
            "each time: then run `gpubound env --refresh` on an idle one."
        )
        return None
    return achieved / limit


def _is_doubtful(share: float, measurements: int) -> bool:
    return measurements < (MEASUREMENTS if share > 1 else 2 if share > CLOSE else 1)


def _better(one: Ceilings, other: Ceilings) -> Ceilings:
    """Return the better value of each figure."""
    figures: dict[str, Any] = {}
    for name in [f.name for f in fields(Ceilings) if f.name.endswith(("_per_s", "_us"))]:
        measured = [figure for figure in (getattr(one, name), getattr(other, name)) if figure is not None]
        figures[name] = min(measured, default=None) if name.endswith("_us") else max(measured, default=None)
    missing = {name: why for name, why in other.missing.items() if figures[name] is None}
    return replace(other, **figures, missing=missing, measurements=one.measurements + 1)


def cache_file(key: str, quick: bool = False) -> Path | None:
    """Return the file of the figures; None for a user who may write to no folder."""
    folder = cache_folder()
    return folder and folder / f"ceilings-{key}{'-quick' if quick else ''}.json"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine().cpu


def _key(device: torch.device) -> str:
    facts = machine()
    if device.type == "cuda":
        parts = [_name(device), f"driver {facts.driver}", f"torch {facts.torch}", f"cuda {facts.cuda}"]
    else:
        parts = [_name(device), f"{facts.threads} threads", f"torch {facts.torch}"]
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(parts).lower()).strip("-")


def _measure(device: torch.device, key: str, quick: bool) -> Ceilings:
    say(f"measuring the limits of {_name(device)} ({'about 2 s' if quick else 'about 5 s'}; once a machine)")
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # of no run's numbers
        measured = of_gpu(device, quick) if device.type == "cuda" else of_cpu(quick)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Ceilings(device=device.type, name=_name(device), key=key, date=date, quick=quick, **measured)


def _read(path: Path | None) -> Ceilings | None:
    """Return the file's figures; None when it does not exist or, with a notice, was not written by this version."""
    try:
        return None if path is None or not path.exists() else _checked(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:  # OSError: also of a folder without permission
        notice(f"{path} is not readable as measured ceilings ({getattr(error, 'strerror', error)}): measuring again.")
        return None


def _checked(row: object) -> Ceilings:
    names = {f.name for f in fields(Ceilings)}
    if not isinstance(row, dict) or set(row) != names:
        differing = sorted(set(row) ^ names) if isinstance(row, dict) else [type(row).__name__]
        raise ValueError(f"its fields are not this version's: {', '.join(differing)}")
    for name, figure in row.items():
        if name.endswith(("_per_s", "_us")) and not (figure is None or (isinstance(figure, float) and figure > 0)):
            raise ValueError(f"{name} is {figure!r}")
    return Ceilings(**row)


def _write(result: Ceilings) -> None:
    """Write the cache. On a full disk, or without a folder, the figures last as long as this process."""
    _unsaved[result.key, result.quick] = result
    path = cache_file(result.key, result.quick)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(result.as_dict(), indent=1) + "\n")
        del _unsaved[result.key, result.quick]
    except (OSError, DataError) as error:
        why = getattr(error.__cause__ or error, "strerror", error)
        notice(f"the measured ceilings cannot be kept in {path} ({why}): the next process measures them again.")


def train_flops_per_token(params_in_products: int, layers: int, hidden: int, seq: int) -> int:
    """Return the operations to train a decoder on one token: 6·P + 6·layers·seq·hidden.

    P counts the weights of every matrix product for a token: all linear layers and the output head, not the embedding's lookup
    (tied weights count once, for the head). Each costs a multiply and an add in forward, and twice that in backward.
    Attention's two products cost 4·seq·hidden per layer in forward over the full square, and 12 with backward. A causal mask
    needs half of that, so half is counted. `hidden` is query heads · head size where that differs from the model's width.

    >>> train_flops_per_token(1_000_000, layers=2, hidden=64, seq=128)
    6098304
    """
    return 6 * params_in_products + 6 * layers * seq * hidden


def mfu(tokens_per_s: float, flops_per_token: float, flops_per_s: float) -> float:
    """Return the model FLOPs utilisation: the fraction of `flops_per_s` that useful work reaches. State whether the peak is
    from a datasheet or measured on this machine.

    >>> mfu(tokens_per_s=100_000, flops_per_token=4e9, flops_per_s=800e12)
    0.5
    """
    if not flops_per_s > 0:
        raise ValueError(f"mfu: flops_per_s must be positive, got {flops_per_s}; take it from measure.ceilings().")
    return tokens_per_s * flops_per_token / flops_per_s
