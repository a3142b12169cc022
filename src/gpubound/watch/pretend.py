"""A pretend GPU, so that a project can assert "this step has no host sync" in CI on a machine without one.

    from gpubound.watch.pretend import simgpu

    device = simgpu()                     # torch.device("simgpu:0")
    model.to(device); batch.to(device)    # the values are right; the speed says nothing

Tensors there hold a CPU tensor and compute with it, but torch treats them as tensors of another device: mixing them
with CPU tensors is refused, reading a value needs a copy, and backward runs on a device thread, as on CUDA (on the calling
thread, if this process ran a backward before it called `simgpu()`). `observers` are called before every op.

Not pretended: streams (work runs in order), a separate generator (the CPU's is used), `torch.empty(pin_memory=True)`
(`.pin_memory()` works), resizing in place, torch.compile, fused LSTM cells, DLPack. Tensors are saved as CPU tensors.
"""

import atexit
import functools
import time

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils, backend_registration

from ..errors import DeviceError
from .python_calls import announce
from .simtensor import KERNELS, NAME, SimTensor as SimTensor, is_pinned, observers as observers, pin_memory

# Seconds. The device's thread in autograd calls Python once more after the backward that it ran, to leave the device. A
# program that ended just then had no interpreter for it, and was aborted: 7 of 81 starts of `gpubound doctor --dry-run` on a
# script of one line, three at a time on two cores.
SETTLE = 0.05


class SimStream:
    """Work on the pretend device is done when it is asked for, so a stream has nothing to order."""

    def synchronize(self) -> None:
        announce("stream.synchronize", NAME)

    def wait_stream(self, stream) -> None: ...

    def wait_event(self, event) -> None: ...


class SimEvent:
    def __init__(self, enable_timing: bool = False): ...

    def record(self, stream=None) -> None: ...

    def wait(self, stream=None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        announce("event.synchronize", NAME)


class SimModule(getattr(backend_registration, "_DummyBackendModule", object)):  # type: ignore[misc]
    """The module `torch.simgpu`: torch's own stand-in for one device that always exists, and what that leaves out."""

    Stream = SimStream
    Event = SimEvent

    def set_device(self, device) -> None: ...

    def current_stream(self, device=None):
        return SimStream()

    def synchronize(self, device=None) -> None:
        announce("torch.simgpu.synchronize", NAME)

    def manual_seed(self, seed: int) -> None: ...

    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device=None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_pending: list[BaseException] = []
_raise_pending = functools.partial(int)  # any call that the interpreter does not inline


def _device_guard():
    class DeviceGuard(torch._C._acc.DeviceGuard):
        def type_(self):
            """The device type; also asked as an exception leaves a hook on an autograd thread (torch 2.11 to 2.13 at least).

            An answer with that exception pending would end the process. A call makes Python wrap it in a SystemError, which
            we catch and keep; `_engine` raises it again where backward was called.
            """
            try:
                _raise_pending()
            except SystemError as error:
                if error.__cause__ is not None:
                    _pending.append(error.__cause__)
            return torch._C._autograd.DeviceType.PrivateUse1

    frames = torch._C._dynamo.eval_frame  # torch.compile would otherwise trace into type_, from any compiled function
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(DeviceGuard.type_.__code__, skip)
    return DeviceGuard()


def _has_thread() -> bool:
    """Return whether autograd has a thread for the pretend device; they are made at the process's first backward."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), device=NAME, dtype=torch.float32).requires_grad_()
        try:
            torch.autograd.grad(x * 2, x)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            return False
    return True


def _engine(run_backward, threaded: bool):
    """`run_backward`, on the calling thread where the device has none, and with the exceptions that `type_` above has kept."""

    @functools.wraps(run_backward)
    def _engine_run_backward(*args, **kwargs):
        try:
            with torch.autograd.set_multithreading_enabled(threaded and torch._C._is_multithreading_enabled()):
                return run_backward(*args, **kwargs)
        except SystemError:
            if not _pending:
                raise
            error, _pending[:] = _pending[0], ()
            raise error from None

    return _engine_run_backward


# What torch.accelerator asks of a device; of a Python backend torch knows neither, and fails.


def _synchronized(device_index: int) -> None:
    """Work is done when it is asked for. Who counts waits has heard of this one from the call above it (python_calls.py)."""


def _no_allocator() -> bool:
    """Then figures of memory are 0, and empty_cache has nothing to do."""
    return False


def _no_statistics(device_index: int) -> None:
    """Peaks of an allocator that there is not. torch 2.11 asks without looking."""


def _register() -> list[object]:
    """Put all this into torch. Returns what must be kept alive."""
    guard = _device_guard()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=SimModule(), device_guard=guard)
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
    library.impl("_pin_memory", pin_memory, "CPU")
    library.impl("is_pinned", is_pinned, "CPU")
    references = [library, guard, *_autocast(library)]
    together: tuple[list, ...] = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    for types in together:
        types.append(SimTensor)  # as on CUDA: an optimizer and clipping take all tensors at once, not one after another
    torch._C._accelerator_synchronizeDevice = _synchronized
    torch._C._accelerator_isAllocatorInitialized = _no_allocator
    torch._C._accelerator_resetPeakStats = torch._C._accelerator_resetAccumulatedStats = _no_statistics
    atexit.register(time.sleep, SETTLE)
    torch.autograd._engine_run_backward = _engine(torch.autograd._engine_run_backward, _has_thread())
    return references


# The same ops in 16 bits, and the same kept in fp32, as CUDA's autocast has for transformers.
_LOWER = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv1d", "conv2d", "scaled_dot_product_attention")
_FP32 = (
    "layer_norm", "native_layer_norm", "group_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss", "nll_loss",
    "mse_loss", "exp", "log", "pow.Tensor_Scalar", "rsqrt", "sum", "sum.dim_IntList", "norm.Scalar", "cumsum",
)  # fmt: skip


def _autocast(library: torch.library.Library) -> list[torch.library.Library]:
    """Make torch.autocast work on the pretend device. Returns what must be kept alive."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in (*_LOWER, *_FP32):
        library.impl(name, _casting(name, torch.float32 if name in _FP32 else None), "AutocastPrivateUse1")
    return [rest]


def _casting(name: str, dtype: torch.dtype | None):
    base, _, overload = name.partition(".")
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
    op = getattr(getattr(torch.ops.aten, base), overload or "default")

    def kernel(*args, **kwargs):
        to = dtype or torch.get_autocast_dtype(NAME)

        def cast(value):
            castable = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(to) if castable else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel


_registered: list[object] = []  # torch keeps no reference to a Python backend's parts


def simgpu() -> torch.device:
    """Make the pretend device usable in this process, and return it. Calling it again changes nothing."""
    if _registered:
        return torch.device(NAME, 0)
    backend_name = torch._C._get_privateuse1_backend_name()
    if backend_name != "privateuseone":
        raise DeviceError(
            f"simgpu: this process already has the backend {backend_name!r} in torch's one free place (PrivateUse1), "
            "which can be named once; run the pretend device in a separate process."
        )
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        raise DeviceError(
            f"simgpu: torch {torch.__version__} has no Python backends; the pretend device needs torch 2.11 or newer."
        )
    if torch.cuda.is_available():
        raise DeviceError(
            "simgpu: a CUDA GPU is visible, and a second accelerator would take over its streams and pinned memory in this "
            "process; start it with CUDA_VISIBLE_DEVICES= (empty) to hide the GPU, or watch the GPU itself."
        )
    _registered.extend(_register())
    return torch.device(NAME, 0)


def ready() -> bool:
    """True when `simgpu()` has been called in this process."""
    return bool(_registered)
