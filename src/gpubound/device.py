"""Facts about this machine's devices, and the policy that chooses one.

    auto      a visible GPU that passes a real test; one that fails it is an error;
              without a visible GPU the CPU, with a warning
    require   a working GPU, or an error; never the CPU
    cpu       the CPU, by the user's own choice
    cuda[:n]  that GPU, or an error

A GPU that fails the test never becomes the CPU: a broken set-up that trains slowly looks like success for hours.
"""

import gc
import glob
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .errors import DeviceError
from .formatting import byte_count, readable
from .trace import notice

POLICIES = ("auto", "require", "cpu", "cuda")
MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # of a container that may use less than its machine has
PRETENDED = "simgpu"  # type of the pretend device (watch/pretend.py)
MOST_MEMORY = 1 << 50  # bytes, far above any GPU's


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def interpreted() -> bool:
    """True when Triton kernels run in its CPU interpreter (TRITON_INTERPRET=1, set before triton is imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def accelerator() -> torch.device | None:
    """Return the available accelerator, or None. Without the check torch returns the one that it was built for."""
    return torch.accelerator.current_accelerator(check_available=True)


def constant(function: Callable) -> Callable:
    """Let torch.compile call `function` while it traces and treat the result as a constant.

    This is the mark of torch.compiler.assume_constant_result, whose call imports dynamo and triton, 1.3 s."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Chip(NamedTuple):
    """Facts of a GPU that a launch plan depends on."""

    capability: int  # 90 is compute capability 9.0
    shared_bytes: int  # shared memory that one program may ask for
    sms: int  # multiprocessors
    name: str


# Triton's interpreter takes the plans of an H200, and runs programs sequentially.
INTERPRETED = Chip(90, 232_448, 2, "")


@constant
def chip(device: torch.device) -> Chip:
    """Return the GPU at `device`; on the CPU, the one that the interpreter imitates."""
    return _chip(device.index) if device.type == "cuda" else INTERPRETED


@cache
def _chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stubs leave it out
    return Chip(capability, shared, properties.multi_processor_count, properties.name)


@constant
def fast_bf16(device: torch.device) -> bool:
    """Return whether `device` multiplies matrices of bf16 faster than those of fp32.

    A GPU is asked for its compute capability. A CPU is timed once a process, for 50 ms at most: without units for bf16, as with
    AVX2 alone, torch multiplies it 20 to 50 times slower than fp32, and no flag says which of the two a build of torch does.
    """
    if device.type == "cuda":
        return torch.version.hip is not None or chip(device).capability >= 80
    return device.type != "cpu" or _cpu_is_faster_in_bf16()


@cache
def _cpu_is_faster_in_bf16() -> bool:
    """Compare the fastest of a few interleaved products: a busy machine slows down some of either kind, and not by a factor."""
    with _disable_current_modes(), torch.no_grad(), without_autocast(torch.device("cpu")):
        fp32, bf16 = (torch.ones(192, 192, device="cpu", dtype=kind) for kind in (torch.float32, torch.bfloat16))
        seconds: dict[torch.Tensor, list[float]] = {fp32: [], bf16: []}
        begun = perf_counter()
        for round in range(6):
            for matrix, samples in seconds.items():
                started = perf_counter()
                matrix @ matrix
                samples.append(perf_counter() - started)
            if round >= 2 and perf_counter() - begun > 0.03:
                break
    return min(seconds[bf16][1:]) < min(seconds[fp32][1:])  # the first call of a kind prepares its kernels


CONTEXT = int(0.6 * 2**30)  # assumption: CUDA's context and loaded kernels, outside of torch's allocator
_limit: int | None = None


def limit(memory: str | float | None) -> None:
    """Let this process use at most `memory` of its GPU, as on a smaller card: "24 GB", "22.5 GiB", or a number of GiB.

    Beyond it torch raises OutOfMemoryError. CUDA's context is counted. `--auto-batch`, `gpubound plan` for this machine and the
    choice between replicas and shards take the limit for the GPU's memory. None removes it.
    """
    global _limit
    size = None if memory is None else memory_size(memory)
    if size is not None and size <= CONTEXT:
        raise ValueError(f"memory: got {memory}, wanted more than the {readable(CONTEXT)} that CUDA itself takes of a GPU.")
    _limit = size
    if look().count:
        _apply_limit(resolve("cuda"))


def memory_size(memory: str | float) -> int:
    """Return the bytes of "24 GB", of "22.5 GiB", or of a number of GiB.

    >>> memory_size("24 GB"), memory_size("1.5GiB"), memory_size(2)
    (24000000000, 1610612736, 2147483648)
    """
    text = str(memory).strip()
    size = byte_count(f"{text} GiB" if text[-1:].isdigit() else text)
    if size is None or not 0 < size <= MOST_MEMORY:
        raise ValueError(f"memory: got {text}, wanted a size such as 24 GB, 22.5 GiB or 22.5, which are GiB.")
    return size


def _apply_limit(device: torch.device) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = 1.0 if _limit is None or _limit >= total else (_limit - CONTEXT) / total
    if fraction < 1:  # QLoRA of 8B ended at 8.9 GiB of 10.6 in plain segments, between whose blocks 1.7 were free
        grow_segments(device)
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def total_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's memory, or of the `limit` of this process."""
    total = torch.cuda.get_device_properties(device).total_memory
    return total if _limit is None else min(_limit, total)


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, or those that a limit leaves to this process."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - torch.cuda.memory_reserved(device)
    return min(free, allowed)


def usable_bytes(device: torch.device) -> int:
    """Return the bytes that this process may still allocate on a GPU: free ones, and unused ones of torch's cache. Unused bytes
    of a graph's pool are not counted: only that graph can use them."""
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == device.index and not any(s["segment_pool_id"])]
    return free_bytes(device) + sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


def host_bytes() -> int | None:
    """Return the bytes of host memory that this process may still allocate; None where the system does not report them."""
    lines = [line.split() for line in MEMORY.read_text().splitlines()] if MEMORY.exists() else []
    free = [int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"]
    files = [GROUP / "memory.max", GROUP / "memory.current"]
    texts = [file.read_text().strip() if file.exists() else "" for file in files]
    if all(text.isdecimal() for text in texts):  # "max" where the group has no limit
        free.append(max(0, int(texts[0]) - int(texts[1])))
    return min(free, default=None)


def share_of_cores(processes: int) -> str:
    """Return OMP_NUM_THREADS for each of `processes`: by default each would start a thread for every core."""
    return str(max(1, len(os.sched_getaffinity(0)) // processes))


_growing = False


def grow_segments(device: torch.device) -> None:
    """Let torch's allocator take further memory in expandable segments, unless PYTORCH_ALLOC_CONF sets it.

    FSDP's streams free gathered weights in one size and allocate them in another. 8 layers of a sharded 8b model on two H200s
    had 38.2 GiB in use at their peak, of 58.6 that were reserved in plain segments and of 45.9 in growing ones. The first
    step of 350m, 16 x 1,024 tokens, had 17.12 in use, of 17.74 and of 17.30, at the same speed.
    """
    _set_growing(device, True)


@contextmanager
def growing_segments(device: torch.device) -> Iterator[None]:
    """Grow segments inside, and later only if they did so before."""
    before = _growing
    _set_growing(device, True)
    try:
        yield
    finally:
        _set_growing(device, before)


def _set_growing(device: torch.device, growing: bool) -> None:
    global _growing
    settings = ",".join(os.environ[name] for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if os.environ.get(name))
    asked = "expandable_segments" in settings or "cudaMallocAsync" in settings
    if device.type == "cuda" and growing != _growing and not asked:
        set_allocator(f"{settings},expandable_segments:{growing}".lstrip(","))
        _growing = growing


def release_cached(device: torch.device, most: int) -> None:
    """Return to the GPU what torch's allocator has reserved and no tensor uses, where that is more than `most` bytes."""
    if device.type == "cuda" and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > most:
        torch.cuda.empty_cache()


def set_allocator(settings: str) -> None:
    """Change the allocator's settings, for which torch has no public function."""
    torch._C._accelerator_setAllocatorSettings(settings)


_UNCOUNTED: "WeakKeyDictionary[Any, tuple[int | None, int]]" = WeakKeyDictionary()


def count_memory(owner: Any, device: torch.device, size: int) -> None:
    """Count `size` bytes of a GPU that `owner` allocated outside of torch's allocator, for the lifetime of `owner`."""
    _UNCOUNTED[owner] = device.index, size


def uncounted_bytes(device: torch.device) -> int:
    """Return the counted bytes that torch.cuda.memory_reserved() does not show, without those of CUDA and NCCL."""
    own = torch.cuda.current_device() if device.index is None else device.index
    return sum(size for index, size in _UNCOUNTED.values() if index == own)


def _hidden(name: str) -> str | None:
    """Return a message when the variable `name` hides every GPU: CUDA reads it up to the first entry that is no GPU."""
    value = os.environ.get(name)
    if value is not None and value.split(",")[0].strip().lower() in ("", "-1", "none", "void"):
        return f"{name}={value!r} hides every GPU"
    return None


def _failure(attempt: Callable[[], object]) -> str | None:
    """Return the first line of the error that CUDA raises in `attempt`, or None."""
    try:
        attempt()
    except (RuntimeError, AssertionError, OSError) as error:
        return str(error).strip().partition("\n")[0] or repr(error)
    return None


def _none_visible() -> str:
    """Explain why CUDA shows no GPU where the hardware exists: its start raises the cause, such as a driver that is too old."""
    cause = _failure(torch.cuda.init) or "it started, with no device"
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"no GPU is visible to CUDA ({cause.rstrip('.')}{'' if asked is None else f'; CUDA_VISIBLE_DEVICES={asked!r}'})"


def _hardware_present() -> bool:
    """Return True when an NVIDIA device file exists, also where this build of torch cannot use the GPU."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


@dataclass(frozen=True)
class Sight:
    """Number of visible GPUs, found without touching one, or the reason why there are none."""

    count: int
    why: str
    broken: bool = False  # the hardware exists, but torch cannot use it


def look() -> Sight:
    if hidden := _hidden("CUDA_VISIBLE_DEVICES"):
        return Sight(0, hidden)
    if torch.version.cuda is None and torch.version.hip is None:
        return Sight(0, f"torch {torch.__version__} is a CPU build", broken=_hardware_present())
    if count := torch.cuda.device_count():
        return Sight(count, f"{count} visible")
    # A container's variable only explains why there is none: "void" is also set where GPUs are passed in otherwise.
    if hidden := _hidden("NVIDIA_VISIBLE_DEVICES"):
        return Sight(0, hidden)
    broken = _hardware_present()
    return Sight(0, _none_visible() if broken else "no GPU is visible to CUDA", broken)


# Pattern in an error of CUDA or torch -> what the user can do about it. The first match counts.
CURES = {
    "out of memory": "another process holds its memory: stop it (nvidia-smi lists it) or choose another GPU with cuda:<index>",
    "no kernel image": "this build of torch has no code for this GPU: install a torch whose CUDA version supports it",
    "driver version is insufficient|driver on your system is too old": (
        "update the NVIDIA driver, or install a torch built for an older CUDA"
    ),
    "libcu|undefined symbol": (
        "two CUDA builds are mixed: reinstall torch with its own nvidia-* packages in a fresh environment"
    ),
    "exclusive": "the GPU is in exclusive mode and another process holds it: stop that process",
    "CUDA_VISIBLE_DEVICES=": "let CUDA_VISIBLE_DEVICES name GPUs that nvidia-smi lists, counted from 0, or unset it",
    "CPU build": "install a CUDA build of torch (see the selector on pytorch.org)",
    "no GPU is visible to CUDA": (
        "check that nvidia-smi lists the GPU here; in a container, start it with the GPU passed through"
    ),
    "": "check driver, CUDA and torch against each other (python -m torch.utils.collect_env), or pass device='cpu'",
}


def cure(cause: str) -> str:
    """Return what to do about the error `cause` of CUDA or torch."""
    return next(fix for signs, fix in CURES.items() if re.search(signs, cause, re.IGNORECASE))


def exercise(device: torch.device) -> None:
    """Allocate, launch, run a small product forward and backward, read it back and compare. Raises whatever goes wrong.

    Modes of the caller have no effect: no_grad, inference_mode, autocast, a default device or dtype.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    with plainly(device):
        x, w = (torch.randn(n, 48, generator=generator, device="cpu", dtype=torch.float32) for n in (64, 32))
        pairs = [[t.to(device).detach().requires_grad_() for t in (x, w)], [t.double().requires_grad_() for t in (x, w)]]
        on_device, on_cpu = (torch.autograd.grad((a @ b.t()).square().sum(), (a, b)) for a, b in pairs)
    for name, got, want in zip(("input", "weight"), on_device, on_cpu):
        error = ((got.double().cpu() - want).norm() / want.norm()).item()
        if not error < 1e-2:  # tf32 products land near 3e-4; a wrong or NaN result lands far above
            raise DeviceError(f"a small product's {name} gradient on {device} is off by {error:.3g} relative to the CPU's")


@cache
def _tested(index: int) -> str | None:
    """Return the error of `exercise` on GPU `index`, or None. Tested once a process."""
    return _failure(lambda: exercise(torch.device("cuda", index)))


_pretended: list[torch.device] = []


@contextmanager
def pretending(device: torch.device) -> Iterator[None]:
    """Let `device`, a pretend one, be what `resolve` returns for a GPU inside the block (watch/pretend_cuda.py)."""
    _pretended.append(device)
    try:
        yield
    finally:
        _pretended.pop()


def resolve(spec: str | torch.device = "auto") -> torch.device:
    """Return the device that `spec` means on this machine, after it has passed a real test.

    >>> resolve("cpu")
    device(type='cpu')
    """
    name, colon, number = str(spec).partition(":")
    if _pretended and name in ("auto", "require", "cuda", _pretended[-1].type):
        return _pretended[-1]
    if name not in POLICIES or (colon and (name != "cuda" or not number.isdecimal())):
        raise ValueError(f"device: got {str(spec)!r}, wanted one of {', '.join(POLICIES)}, cuda:<index>.")
    if name == "cpu":
        return torch.device("cpu")
    sight = look()
    if sight.broken:
        raise DeviceError(f"an NVIDIA GPU is here but cannot be used: {sight.why}. What to do: {cure(sight.why)}.")
    if sight.count == 0:
        if name != "auto":
            raise DeviceError(
                f"device={str(spec)!r} needs a GPU: {sight.why}. What to do: make one visible, or pass device='cpu'."
            )
        notice(f"NO GPU: running on the CPU ({sight.why}).", logging.WARNING)
        return torch.device("cpu")
    if number and int(number) >= sight.count:
        raise DeviceError(f"device={str(spec)!r}: there is no GPU {int(number)}: {sight.count} visible, counted from 0.")
    # current_device() starts CUDA, and a failing start must end in the error below.
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else _local_rank(sight.count)
    index = int(number) if number else current
    if cause := _tested(index):
        raise DeviceError(f"GPU {index} is visible but does not work: {cause}. What to do: {cure(cause)}.")
    device = torch.device("cuda", index)
    if _limit is not None:
        _apply_limit(device)
    return device


def _local_rank(count: int) -> int:
    """Return the index of the GPU that torchrun assigns to this process; 0 where each process sees a single GPU."""
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if local.isdecimal() and int(local) < count else 0


def entered(device: torch.device) -> AbstractContextManager:
    """Make `device` CUDA's current device inside the block, where kernels are launched; do nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """Leave the caller's inference_mode, whose tensors autograd cannot save and no later call can write, and its autocast on
    `device`, which computes in another dtype. Gradients are enabled inside."""
    with torch.inference_mode(False), without_autocast(device):
        yield


@contextmanager
def collecting_new_objects(device: torch.device) -> Iterator[None]:
    """Let Python's collector look at the objects that are made inside alone, on a GPU, unless the caller has frozen others.

    With transformers imported it takes 0.3 s to look at all, which a first step with adapters did three times. Where more than
    half of the GPU is allocated it does so once before: an earlier model, which nothing uses, may be in a cycle.
    """
    frozen = device.type != "cuda" or gc.get_freeze_count() > 0  # to count a million objects takes 20 ms
    if not frozen:
        if torch.cuda.memory_allocated(device) > total_bytes(device) // 2:
            gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def without_autocast(device: torch.device) -> AbstractContextManager:
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@contextmanager
def products(mode: str | None) -> Iterator[None]:
    """Compute fp32 products and convolutions on the GPU in "ieee" or "tf32" inside the block; None changes nothing."""
    owners = (torch.backends.cuda.matmul, torch.backends.cudnn.conv) if mode is not None else ()  # type: ignore[attr-defined]
    before = [owner.fp32_precision for owner in owners]
    try:
        for owner in owners:
            owner.fp32_precision = mode
        yield
    finally:
        for owner, old in zip(owners, before):
            owner.fp32_precision = old


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Leave cuDNN's attention out: it compiles each shape, for 0.5 to 1 s, also one that is run a single time."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def label(device: torch.device) -> str:
    """Return a description of the device: 'NVIDIA H200 (cuda:0)' or 'CPU (2 threads)'."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    if device.type == "cpu":
        return f"CPU ({torch.get_num_threads()} threads)"
    return str(device)
