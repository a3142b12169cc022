"""The parts of the pretend device that torch asks for: the module `torch.simgpu`, the device guard, kernels, pinned memory."""

import functools

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import simcast
from .calls import announce
from .simgpu import NAME, SimTensor


class Stream:
    """Work on the pretend device is done when it is asked for, so a stream has nothing to order."""

    def synchronize(self) -> None:
        announce("stream.synchronize", NAME)

    def wait_stream(self, stream) -> None: ...

    def wait_event(self, event) -> None: ...


class Event:
    def __init__(self, enable_timing: bool = False): ...

    def record(self, stream=None) -> None: ...

    def wait(self, stream=None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        announce("event.synchronize", NAME)


class Module:
    """What `torch.simgpu` is."""

    Stream = Stream
    Event = Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device) -> None: ...

    def current_stream(self, device=None):
        return Stream()

    def synchronize(self, device=None) -> None:
        announce("torch.simgpu.synchronize", NAME)

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device=None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_pending: list[BaseException] = []
_raise_pending = functools.partial(int)  # any call that the interpreter does not inline


def _device_guard():
    class Guard(torch._C._acc.DeviceGuard):
        def type_(self):
            """The device type; also asked as an exception leaves a hook on an autograd thread (torch 2.11 to 2.13 at least).

            Answering with that exception still pending would end the process. A call makes Python wrap it in a SystemError,
            which we can catch and keep; `_engine` raises it again where backward was called.
            """
            try:
                _raise_pending()
            except SystemError as error:
                if error.__cause__ is not None:
                    _pending.append(error.__cause__)
            return torch._C._autograd.DeviceType.PrivateUse1

    frames = torch._C._dynamo.eval_frame  # torch.compile would otherwise trace into type_, from any compiled function
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(Guard.type_.__code__, skip)
    return Guard()


def _has_thread() -> bool:
    """Whether autograd has a thread for the pretend device. It makes one for each device at the process's first backward."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), device=NAME).requires_grad_()
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


def register() -> list[object]:
    """Put all this into torch. Returns what must be kept alive."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    guard = _device_guard()
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module(), device_guard=guard)
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
    library.impl("_pin_memory", _pin_memory, "CPU")
    library.impl("is_pinned", _is_pinned, "CPU")
    kept = [library, guard, *simcast.register(library)]
    torch.autograd._engine_run_backward = _engine(torch.autograd._engine_run_backward, _has_thread())
    return kept


# Kernels for calls that reach the device without passing SimTensor: factories, and torch.tensor(), which switches
# Python dispatch off.


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return SimTensor(torch.ops.aten.empty.memory_format(size, dtype=dtype, device="cpu", memory_format=memory_format))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return SimTensor(torch.ops.aten.empty_strided.default(size, stride, dtype=dtype, device="cpu"))


def _copy_(self, source, non_blocking=False):
    return SimTensor.__torch_dispatch__(torch.ops.aten.copy_.default, (), (self, source, non_blocking))


def _local_scalar_dense(self):
    return SimTensor.__torch_dispatch__(torch.ops.aten._local_scalar_dense.default, (), (self,))


_KERNELS = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "copy_": _copy_,
    "_local_scalar_dense": _local_scalar_dense,
}

_pinned: dict[int, StorageWeakRef] = {}  # CPU storages that we call pinned


def _pin_memory(self, device=None):
    twin = torch.empty_like(self).copy_(self)
    for key in [key for key, storage in _pinned.items() if storage.expired()]:
        del _pinned[key]
    reference = StorageWeakRef(twin.untyped_storage())
    _pinned[reference.cdata] = reference
    return twin


def _is_pinned(self, device=None) -> bool:
    reference = _pinned.get(self.untyped_storage()._cdata)
    return reference is not None and not reference.expired()
