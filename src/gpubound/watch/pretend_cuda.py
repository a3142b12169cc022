"""The pretend device under the name "cuda", so that a script for CUDA runs unmodified on a machine without a GPU.

    with cuda_is_pretended():
        ...        # torch.cuda.is_available() is True, and "cuda" is the pretend device of pretend.py

Inside the block every spelling of the device works: strings, `torch.device("cuda")`, `.cuda()`, `torch.cuda.*`, autocast,
GradScaler, generators and pinned memory. `device` of a tensor there is cuda:0, and `is_cuda` is True. Files of gpubound see
neither (`_disguised`): their device is simgpu:0, for which they choose no kernel of CUDA.

torch.compile returns its argument, because compiled code would not pass its ops to the pretend device (backend="eager" does).
CUDA graphs are refused.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.library import Library
from torch.utils import _device
from torch.utils._pytree import tree_map

from .. import trace
from ..device import constant, pretending
from .pretend import FACTORIES, NAME, SimEvent, SimStream, SimTensor, own_device, simgpu

CUDA = torch.device("cuda", 0)
MEMORY = 80 << 30  # bytes
COMPILED = "torch.compile", "a dry run does not compile"

_blocks: list[object] = []
_libraries: list[Library] = []


@constant
def _disguised() -> bool:
    """Return whether the function that called the pretended one is to see CUDA: in a block, in any file but gpubound's."""
    return bool(_blocks) and sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] != "gpubound"


class CudaStream(SimStream):
    """Stream of the pretended torch.cuda. A wait for it is announced by the listeners' wrapper around torch.cuda (ops.py)."""

    device, stream_id, cuda_stream, priority = CUDA, 0, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any): ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or CudaEvent()

    def __enter__(self) -> CudaStream:
        return self

    def __exit__(self, *error: object) -> None: ...


class CudaEvent(SimEvent):
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False): ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class Generator(torch.Generator):
    """A generator of the pretend device: the CPU's, which the pretend device uses."""

    _cuda: bool

    def __new__(cls, device: Any = "cpu") -> Generator:
        self = super().__new__(cls, device="cpu")  # type: ignore[call-arg]
        self._cuda = torch.device(device).type == "cuda"
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA if self._cuda and _disguised() else torch.device("cpu")


class CudaTensorType(type):
    """The type of torch.cuda.FloatTensor and its kind, which older scripts call, and pass to Tensor.type()."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        if all(isinstance(arg, int) for arg in args) or isinstance(args[0], torch.Size):
            return torch.empty(*args, dtype=cls.dtype, device=NAME)
        return getattr(torch, cls.__name__)(*args).to(NAME)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, SimTensor) and instance.dtype == cls.dtype


DTYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16, "Byte": torch.uint8,
    "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64, "Bool": torch.bool,
}  # fmt: skip
TYPES = {f"{name}Tensor": CudaTensorType(f"{name}Tensor", (), {"dtype": dtype}) for name, dtype in DTYPES.items()}


def _named_type(kind: Any) -> Any:
    """Return the type that a string such as "torch.cuda.FloatTensor" names; any other argument unchanged."""
    package, _, name = kind.rpartition(".") if isinstance(kind, str) else ("", "", "")
    return TYPES.get(name, kind) if package == "torch.cuda" else kind


def _type(original: Callable, self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    kind, on_device = _named_type(dtype), isinstance(self, SimTensor)
    if kind is None and on_device:
        return f"torch.cuda.{next(name for name, each in TYPES.items() if each.dtype == self.dtype)}"
    if isinstance(kind, CudaTensorType):
        return self.to(NAME, kind.dtype, non_blocking)
    if on_device and kind is not None and not isinstance(kind, torch.dtype):  # torch.FloatTensor is the CPU's
        self = self.to("cpu", non_blocking=non_blocking)
    return original(self, dtype, non_blocking, **kwargs)


def _default_type(original: Callable, kind: Any) -> None:
    if not isinstance(kind := _named_type(kind), CudaTensorType):
        return original(kind)
    torch.set_default_device(NAME)
    torch.set_default_dtype(kind.dtype)


class NoGraph:
    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError("the pretend device has no CUDA graphs")


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _block(*args: Any, **kwargs: Any) -> AbstractContextManager:
    return nullcontext()


PROPERTIES = SimpleNamespace(
    name=f"{NAME} (pretend device)", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, warp_size=32,
    shared_memory_per_block_optin=232_448, is_integrated=False, is_multi_gpu_board=False, gcnArchName="", uuid="",
    L2_cache_size=50 << 20, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65_536,
)  # fmt: skip

# Functions of torch.cuda by their names there: those that return a constant, and the others.
CONSTANTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (None, ("init", "_lazy_init", "set_device", "set_stream", "empty_cache", "ipc_collect", "set_per_process_memory_fraction",
            "synchronize",  # announced by the listeners' wrapper, as for a real GPU
            "manual_seed", "manual_seed_all", "seed", "seed_all",  # of the CPU's generator: torch.manual_seed sets it
            "reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
            "reset_max_memory_cached")),
    (0, ("_exchange_device", "_maybe_exchange_device", "current_device", "utilization", "memory_allocated", "memory_reserved",
         "memory_cached", "max_memory_allocated", "max_memory_reserved", "max_memory_cached")),
    (False, ("_is_in_bad_fork", "can_device_access_peer", "is_current_stream_capturing")),
    (True, ("is_bf16_supported", "is_tf32_supported")),
    (PROPERTIES.name, ("get_device_name",)),
    (PROPERTIES, ("get_device_properties",)),
    ((PROPERTIES.major, PROPERTIES.minor), ("get_device_capability",)),
    (["sm_90"], ("get_arch_list",)),
    ((MEMORY, MEMORY), ("mem_get_info",)),
    ("", ("memory_summary",)),
)  # fmt: skip
FUNCTIONS: dict[str, Any] = {name: _returns(value) for value, names in CONSTANTS for name in names} | {
    "is_available": lambda: _disguised(),
    "is_initialized": lambda: _disguised(),
    "device_count": lambda: int(_disguised()),
    "memory_stats": lambda device=None: defaultdict(int),
    "initial_seed": lambda: torch.initial_seed(),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
    "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    "Stream": CudaStream,
    "ExternalStream": CudaStream,
    "Event": CudaEvent,
    "current_stream": lambda device=None: CudaStream(),
    "default_stream": lambda device=None: CudaStream(),
    "stream": _block,
    **TYPES,
    "CUDAGraph": NoGraph,
    "graph": NoGraph,
    "make_graphed_callables": NoGraph,
}
MEMORY_FUNCTIONS = [name for name in FUNCTIONS if "mem" in name] + ["empty_cache"]
SEED_FUNCTIONS = [name for name in FUNCTIONS if "seed" in name or "rng_state" in name]

# Functions of torch whose first argument names a device.
AUTOCAST = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
# Functions that make tensors from host data on a device, or that are asked for pinned memory.
MADE = (
    "tensor", "as_tensor", "asarray", "sparse_coo_tensor", "empty", "zeros", "ones", "full", "rand", "randn", "empty_like",
    "zeros_like", "empty_strided",
)  # fmt: skip


@contextmanager
def cuda_is_pretended() -> Iterator[torch.device]:
    """Let "cuda" be the pretend device inside the block, for all files but gpubound's. Yield the pretend device."""
    device = simgpu()
    with ExitStack() as ending:
        _install(ending)
        _blocks.append(ending)
        ending.callback(_blocks.pop)
        ending.enter_context(pretending(device))
        yield device


def _install(ending: ExitStack) -> None:
    if not _libraries:
        _libraries.append(_factories())

    def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        if hasattr(owner, name):
            ending.enter_context(trace.replaced(owner, name, make))

    def hook(owner: Any, name: str, call: Callable[..., Any]) -> None:
        if hasattr(owner, name):
            ending.enter_context(trace.hooked(owner, name, call))

    for name, pretended in FUNCTIONS.items():
        put(torch.cuda, name, _returns(pretended))
    for module, names in ((torch.cuda.memory, MEMORY_FUNCTIONS), (torch.cuda.random, SEED_FUNCTIONS)):
        for name in names:
            put(module, name, _returns(FUNCTIONS[name]))
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        put(torch.cuda.nvtx, name, _returns(_returns(0)))
    put(torch.cuda.nvtx, "range", _returns(_block))
    put(torch.backends.cudnn, "is_acceptable", _returns(_returns(False)))
    _device._device_constructors()  # a cached list of functions of torch, some of which are replaced below
    hook(_device.DeviceContext, "__init__", lambda init, context, device: init(context, own_device(device)))
    put(torch.accelerator, "current_accelerator", _current)
    put(torch.accelerator, "_get_device_index", _returns(_returns(0)))  # it compares types
    hook(torch.amp.autocast_mode.autocast, "__init__", _autocast)
    for name in AUTOCAST:
        hook(torch, name, _of_autocast)
    put(torch, "get_autocast_gpu_dtype", _returns(lambda: torch.get_autocast_dtype("cuda")))
    put(torch, "set_autocast_gpu_dtype", _returns(lambda dtype: torch.set_autocast_dtype("cuda", dtype)))
    put(torch, "Generator", _returns(Generator))
    hook(torch, "load", _load)
    hook(torch, "compile", _compile)
    put(torch.nn.Module, "compile", _returns(lambda module, *args, **kwargs: trace.fallback(*COMPILED)))
    hook(torch.Tensor, "to", _to)
    hook(torch.Tensor, "cuda", _cuda)
    hook(torch.Tensor, "type", _type)
    hook(torch, "set_default_tensor_type", _default_type)
    for name in MADE:
        hook(torch, name, _make)
    put(sys.modules["torch.nn.parallel.data_parallel"], "scatter_kwargs", _returns(_scatter))
    before = torch.get_autocast_dtype(NAME)
    torch.set_autocast_dtype(NAME, torch.float16)  # CUDA's default
    ending.callback(torch.set_autocast_dtype, NAME, before)
    for name, attribute in TENSOR.items():
        ending.enter_context(trace.replaced(SimTensor, name, _returns(attribute)))


def _factories() -> Library:
    """Register what makes a tensor on "cuda". Torch starts CUDA once a process, at the first of them: so each
    asks for an open block."""
    getattr(torch._C, "_ensureCUDADeviceGuardSet", _returns(None))()
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # a CUDA build has kernels for these
        for name, kernel in FACTORIES.items():
            library.impl(name, _within(kernel), "CUDA", allow_override=True)
    return library


def _within(kernel: Any) -> Callable:
    @functools.wraps(kernel)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if not _blocks:
            raise RuntimeError("No CUDA GPUs are available")
        return kernel(*args, **kwargs)

    return factory


def _current(original: Callable) -> Callable:
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return torch.device("cuda") if _disguised() else original(check_available)

    return current_accelerator


def _autocast(init: Callable, self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    init(self, NAME if device_type == "cuda" else device_type, *args, **kwargs)


def _of_autocast(original: Callable, device_type: str = "cuda", *args: Any) -> Any:
    """Pass "cuda" on as the pretend device; `torch.is_autocast_enabled()` without a device means CUDA."""
    return original(NAME if device_type == "cuda" else device_type, *args)


def _load(load: Callable, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    to = own_device(map_location)
    if to is map_location:
        return load(f, map_location, *args, **kwargs)
    content = load(f, "cpu", *args, **kwargs)
    return tree_map(lambda value: value.to(to) if isinstance(value, (torch.Tensor, torch.nn.Module)) else value, content)


def _compile(compile: Callable, model: Any = None, **kwargs: Any) -> Any:
    if kwargs.get("backend") == "eager":  # it runs ops as they are, and recompiles as any other
        return compile(model, **kwargs)
    trace.fallback(*COMPILED)
    return (lambda function: function) if model is None else model


def _make(original: Callable, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """Pass the pretend device on, and pin afterwards: torch has no allocator for a pretend device's pinned memory."""
    if "device" in kwargs:
        kwargs["device"] = own_device(kwargs["device"])
    return original(*args, **kwargs).pin_memory() if pin_memory else original(*args, **kwargs)


def _scatter(inputs: Any, kwargs: Any, devices: Any, dim: int = 0) -> tuple[tuple, tuple]:
    """Move what DataParallel gives its one device; torch has a function for it in CUDA builds alone."""
    moved = tree_map(lambda value: value.to(NAME) if isinstance(value, torch.Tensor) else value, (inputs, kwargs or {}))
    return moved[:1], moved[1:]


def _to(original: Callable, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return original(self, *map(own_device, args), **{name: own_device(value) for name, value in kwargs.items()})


def _cuda(
    original: Callable, self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> torch.Tensor:
    return self.to(torch.device(NAME, 0), non_blocking=non_blocking, **kwargs)


_real_device = torch.Tensor.device.__get__  # type: ignore[attr-defined]

# Attributes of tensors on the pretend device.
TENSOR: dict[str, Any] = {
    "device": property(lambda self: CUDA if _disguised() else _real_device(self)),
    "is_cuda": property(lambda self: _disguised()),
    "record_stream": lambda self, stream: None,
}
