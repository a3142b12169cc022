"""Checks of an op's arguments, and its dispatch to a Triton kernel or to the reference.

Checked are dtype, shape, layout and device: no value of a device tensor is read. Values on the device (a label, an id, a
position) are checked in the kernel. The op's docstring says what an invalid one does: no access outside a tensor, and a NaN
where a wrong result would go unnoticed.

The kernel runs where it can launch and has agreed with the reference on this device and dtype. A reference call where a kernel
was expected is a fallback (trace.fallback: counted, printed, forbidden under strict). The reference is the regular path of CPU
tensors, and of tensors without elements, for which there is nothing to launch.

torch.compile traces ops whole. What dynamo cannot read (the self-test, the imports) sits in `_source`, which it calls once
while it traces and takes as a constant: compiled code counts its fallback then, not in every call.

`compile_ahead` compiles the kernels that a function launches, all in parallel, before it launches them. A decoding step's
kernels depend on the sizes of its weights and on its launch mode, so self-tests do not compile them. At their first launches
they were compiled one after the other: 14 s to the first token at 350m with an empty cache.
"""

import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..device import constant, entered, has_triton, interpreted
from ..errors import KernelError
from ..trace import fallback, hooked, timed
from . import selftest
from .registry import OPS, load

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTES = torch.uint8  # of ops that only move them
SIXTEEN_BITS = (torch.float16, torch.bfloat16)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes of ids and labels. torch hardly computes with the wider unsigned types."""

# Widest row that one program of a norm holds. At 16384 the backward's four fp32 rows (dy, x, weight, sum) fill a
# multiprocessor's 65536 registers: wider ones spill, which is slow but right.
WIDEST = 65536
TOO_WIDE = f"its kernel holds rows of up to {WIDEST} elements"


def can_launch(device: torch.device) -> bool:
    """Return True when a Triton kernel is expected to run on `device`: a GPU, or the CPU under the interpreter."""
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
    return device.type == "cuda"


def implementation(op: str, x: torch.Tensor, unable: str | None = None, shape: tuple = ()) -> Callable:
    """Return the function that computes `op` on the device of `x`.

    unable   the reason why no kernel can take this call; None: a kernel can
    shape    arguments of the op's example, so that the self-test compiles the kernels that this call will launch
    """
    device = x.device
    if torch.compiler.is_compiling():  # without a shape: dynamo's sizes may be symbols
        return load(_source(op, device, x.dtype, unable) if x.numel() else "reference", op)
    if not can_launch(device) or x.numel() == 0:
        return OPS[op].reference
    if transformed():
        unable = "torch.func and forward-mode transforms (vmap, grad, jvp) have no rule for its kernel"
    function = load(_source(op, device, x.dtype, unable, shape if x.is_cuda else ()), op)  # the interpreter compiles nothing
    if x.is_cuda and device.index != torch.cuda.current_device():
        return _on(device, function)
    return function


def transformed() -> bool:
    """Return whether torch.func (vmap, grad, jvp) or forward-mode AD transforms this call: neither sees into a kernel."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _on(device: torch.device, function: Callable) -> Callable:
    """Return `function` with `device` made current: Triton launches on the current device, not on its tensors' device."""

    def run(*arguments):
        with torch.cuda.device(device):
            return function(*arguments)

    return run


@constant
def _source(op: str, device: torch.device, dtype: torch.dtype, unable: str | None, shape: tuple = ()) -> str:
    if can_launch(device):
        why = unable or verdict(op, device, dtype, shape)
        if why is None:
            return "triton"
        if _untested.get():
            raise NoKernel(op)
        fallback(op, why)
    return "reference"


Call = tuple[str, tuple]  # an op and the `shape` that its caller passes to `implementation`


class Key(NamedTuple):
    """Arguments of `selftest.check`: a self-test, by what it is of."""

    op: str
    device: torch.device
    dtype: torch.dtype
    shape: tuple = ()
    forward: bool = False  # without backward


_early: dict[Key, Future] = {}
_verdicts: dict[Key, str | None] = {}
_untested: ContextVar[bool] = ContextVar("gpubound_untested", default=False)


def start_self_tests(
    calls: Iterable[Call], device: torch.device, dtype: torch.dtype, compile_first: bool = False, forward: bool = False
) -> None:
    """Start the self-tests of these calls in parallel, in the background: compiling takes seconds.

    A shape must equal the one that the op passes to `implementation`, or the call compiles other kernels again.

    compile_first  compile the kernels of all tests in parallel before, those of backward, too, to which a test alone comes when
                   it has run forward: placing 135m waited 0.45 s for its tests in place of 1.8. For ops that `compile_ahead`
                   can call: for none is a kernel's result an index of torch's
    forward        test without backward
    """
    if device.type != "cuda" or not has_triton() or dtype not in KERNEL_DTYPES:
        return
    keys = dict.fromkeys(Key(op, device, dtype, shape, forward) for op, shape in calls)
    new = [key for key in keys if key not in _verdicts and key not in _early]
    if not compile_first:
        for key in new:
            _early[key] = threads().submit(selftest.check, *key)
        return
    ready = [compile_ahead(partial(_run, key), device) for key in new]
    for key, loaded in zip(new, ready):  # in separate threads: a verdict takes a test out of a queue
        _early[key] = test = Future[Any]()
        test.set_running_or_notify_cancel()
        threading.Thread(target=_check, args=(key, loaded, test), name="gpubound-selftest").start()


@cache
def threads() -> ThreadPoolExecutor:
    """Return the threads that compile ahead, shared by all callers: compiling takes as many cores as there are threads.

    8 had up to 2.8 s of work waiting for them, as a first decoder's 25 kernels on 32 cores, and 16 still 0.9.
    """
    compile_once(import_module("triton.runtime.jit").JITFunction)
    initializer = partial(_begin, Lock(), Lock())
    return ThreadPoolExecutor(_at_a_time(), thread_name_prefix="gpubound-selftest", initializer=initializer)


def _at_a_time() -> int:
    return max(8, min(24, 2 * (os.cpu_count() or 1)))


def compile_once(jit: Any) -> None:
    """Let threads that need the same kernel at a time compile it once, in another process: 6 of a first step's 37 were compiled
    two or three times.

    jit  Triton's class of kernels, whose method is replaced
    """
    if (compile_kernel := getattr(jit, "_do_compile", None)) is None:
        return
    running, lock = dict[Any, Future](), Lock()

    def compile_or_wait(kernel: Any, key: Any, signature: Any, device: Any, *rest: Any, **options: Any) -> Any:
        with lock:
            first = (id(kernel), key, device) not in running
            compiled = running.setdefault((id(kernel), key, device), Future())
        if not first:
            return compiled.result()
        try:
            with timed(f"compilation of {kernel.fn.__name__}, or its reading from Triton's cache"):
                with _forking:
                    _compute_cache_keys(kernel)
                with suppress(Exception):  # what fails there fails again here, and is raised
                    _compile_apart(kernel, signature, device, *rest)
                compiled.set_result(compile_kernel(kernel, key, signature, device, *rest, **options))
        except BaseException as error:
            compiled.set_exception(error)
        with lock:
            del running[id(kernel), key, device]
        return compiled.result()

    jit._do_compile = compile_or_wait


OURS = __name__.partition(".")[0] + "."  # modules of this package: their kernels bump the versions of what they write
_forking = Lock()  # also acquired wherever Triton locks a kernel: a worker forked meanwhile would inherit that lock, locked
# Timeouts in seconds: of a worker's start, of one compilation, and of a worker that waits for the next kernel.
START_TIMEOUT, COMPILE_TIMEOUT, IDLE_TIMEOUT = 5, 120, 60
LARGEST_FORK = 8 << 30  # bytes of private memory: copying the page tables of more takes longer than it saves


def _compile_apart(kernel: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, *_: Any) -> None:
    """Compile one of our kernels in a worker process, which writes it to Triton's cache, unless the cache has it.

    Triton's front end is Python, which blocks all other threads for 65 ms a kernel, in decoding 115: a first token of 350m
    took 6.6 s, and 4.0 with 24 workers (H200).
    """
    if not kernel.__module__.startswith(OURS):
        return
    compiler, (_, _, target, backend, _) = import_module("triton.compiler.compiler"), kernel.device_caches[device]
    source = kernel.ASTSource(kernel, signature, constants, attributes)
    with _forking:
        key = compiler.get_cache_key(source, backend, options, compiler.get_cache_invalidating_env_vars())
        folder = compiler.get_cache_manager(sha256(key.encode()).hexdigest())
        if folder.get_file(f"{source.name[:150]}.json") is not None:
            return
        workers = _workers()
    specialized = signature, constants, attributes
    work = pickle.dumps((kernel.__module__, kernel.__name__, type(source), specialized, target, vars(options)))
    worker = workers.get()
    try:
        if worker is not None and worker.poll(START_TIMEOUT):
            worker.recv()  # it is ready
            worker.send_bytes(work)
            if worker.poll(COMPILE_TIMEOUT):
                return
        worker = None
    except (OSError, EOFError):  # it has exited
        worker = None
    finally:
        workers.put(worker)


def _compute_cache_keys(function: Any) -> None:
    """Hash the functions that a kernel calls, then the kernel.

    Triton 3.6's cache key of a kernel depends on which of them were hashed before it. Threads hash in another order in each
    run, so that a filled cache did not have some kernels.
    """
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if getattr(called, "hash", "") is None and called is not function:
            _compute_cache_keys(called)
    _ = function.cache_key


@cache
def _workers() -> SimpleQueue[Connection | None]:
    """Fork the workers. Return connections to those that are free, and None for each that has exited or was not forked.

    Workers use no lock that a thread of this process may have, and not the GPU. With ranks, on fewer than four cores and
    where much memory is private there are none.
    """
    free, cores = SimpleQueue[Connection | None](), os.cpu_count() or 1
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if cores < 4 or sys.platform != "linux" or ranks or _private_bytes() > LARGEST_FORK:
        free.put(None)
        return free
    pairs = [Pipe() for _ in range(_at_a_time())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own, of forks beside threads
        if not (first := os.fork()):
            try:
                gc.disable()  # what it frees may be on a GPU
                ends = [end for _, end in pairs]
                while len(ends) > 1:  # each worker forks half of the others: one after the other, 16 took 0.5 s
                    half = len(ends) // 2
                    ends = ends[:half] if os.fork() else ends[half:]
                _compile_requests(ends[0])
            finally:
                os._exit(0)
    threading.Thread(target=_reap, args=(first,), daemon=True).start()
    for worker, end in pairs:
        end.close()
        free.put(worker)
    return free


def _reap(process: int) -> None:
    with suppress(ChildProcessError):  # a signal handler has reaped it
        os.waitpid(process, 0)


def _private_bytes() -> int:
    """Return the bytes of anonymous memory, whose page tables a fork copies."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) << 10


def _compile_requests(requests: Connection) -> None:
    """Compile received kernels into Triton's cache, until none has arrived for IDLE_TIMEOUT or the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != requests.fileno():  # an open file of the GPU would keep its memory after the parent's exit
            with suppress(OSError):
                os.close(number)
    compiler = import_module("triton.compiler")
    with suppress(EOFError, OSError):
        requests.send(None)
        while requests.poll(IDLE_TIMEOUT):
            module, name, source, specialized, target, options = pickle.loads(requests.recv_bytes())
            with suppress(Exception):  # the parent compiles it again, and raises
                _compute_cache_keys(kernel := getattr(import_module(module), name))
                compiler.compile(source(kernel, *specialized), target, options)
            requests.send(None)


def _begin(hashing: Lock, building: Lock) -> None:
    """Hash Triton's own 400 MB, for the names in its cache, in the first thread, while another builds its driver with gcc.

    Each of the others would do both again: with a filled cache seven self-tests hashed for 0.5 to 0.6 s beside that thread.
    """
    with suppress(Exception):  # a self-test tells what is wrong
        if hash_all := getattr(import_module("triton.runtime.cache"), "triton_key", None):
            if not hashing.acquire(blocking=False):
                with building, suppress(Exception):
                    import_module("triton.runtime.driver").driver.active.get_current_device()
                hashing.acquire()
            try:
                hash_all()
            finally:
                hashing.release()


def verdict(op: str, device: torch.device, dtype: torch.dtype, shape: tuple = ()) -> str | None:
    """Return None when the kernel of `op` may run on `device` in `dtype`, else the reason. Tested once a process and shape.

    Without gradients forward alone is tested, unless a whole test was begun: a first token's tests compiled six kernels of
    backward, each after the one before it.
    """
    key = Key(op, device, dtype, shape)
    return _verdict(key if torch.is_grad_enabled() or key in _verdicts or key in _early else key._replace(forward=True))


def _verdict(key: Key) -> str | None:
    if key not in _verdicts:
        if _untested.get():
            start_self_tests([(key.op, key.shape)], key.device, key.dtype, forward=key.forward)
            return None
        early = _early.pop(key, None)
        # A self-test may ask for another op's verdict. If that test still waits for a thread, it would wait for this one.
        with timed(f"wait for the self-test of {key.op} {key.shape}"):
            _verdicts[key] = _test(*key) if early is None or early.cancel() else early.result()
    return _verdicts[key]


class NoKernel(Exception):
    """An op in a block of `untested` takes its reference, which would compute."""


@contextmanager
def untested() -> Iterator[None]:
    """Choose kernels without waiting for their self-tests, which begin, in a block that launches none.

    The block ends at an op that has no kernel: its reference would write, by numbers that no kernel has computed.
    """
    before = _untested.set(True)
    try:
        with suppress(NoKernel):
            yield
    finally:
        _untested.reset(before)


def runs(op: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the source that calls of `op` used so far, "triton" or "reference"; before the first, the one it would use.

    A self-test without a caller's shape would compile unused kernels: 11 of 41 in a first training step.
    """
    results = _verdicts_of(op, device, dtype)
    if not results or not can_launch(device):
        return _source(op, device, dtype, None)
    return "reference" if any(results) else "triton"


def _verdicts_of(op: str, device: torch.device, dtype: torch.dtype, gradients: bool = False) -> list[str | None]:
    """Return the results of the self-tests of `op` in any shape, those that `start_self_tests` started included.

    gradients: of those that compared gradients, too
    """
    # Copies: tests in other threads ask for verdicts of the ops that they call, and add them meanwhile.
    for key in [key for key in [*_early] if key[:3] == (op, device, dtype)]:
        _verdict(key)
    found = [(key, why) for key, why in [*_verdicts.items()] if key[:3] == (op, device, dtype)]
    return [why for key, why in found if not (gradients and key.forward)]


def _test(op: str, device: torch.device, dtype: torch.dtype, shape: tuple, forward: bool = False) -> str | None:
    if not has_triton():
        return "Triton is not installed"
    if dtype not in (*KERNEL_DTYPES, BYTES):
        return f"no kernel takes {dtype}: they compute in fp32"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if others := _verdicts_of(op, device, dtype, gradients=not forward):
            return next((why for why in others if why is not None), None)
        raise KernelError(
            f"{op}: its first call in {dtype} on {device} came inside a graph capture, where it cannot test itself; "
            f"call it once before."
        )
    # A new thread has none of the caller's modes: no autocast, inference mode, default device, dynamo trace or saved-tensor
    # hooks (torch.utils.checkpoint would count a self-test's tensors among the block's, and miss them when it recomputes).
    # The context is copied: its PDL mode (decode_product.py) selects the kernels that the caller uses.
    with ThreadPoolExecutor(1, thread_name_prefix="gpubound-selftest") as thread:
        return thread.submit(copy_context().run, selftest.check, op, device, dtype, shape, forward).result()


def require(
    op: str,
    name: str,
    t: Tensor,
    dtype: torch.dtype | None,
    shape: Sequence[int | str],
    device: torch.device,
    why: str = "make it once, and change it in place",
) -> None:
    """Raise ValueError unless `t` is contiguous, of `dtype` (None: floating point) and `shape`, and on `device`.

    A name in `shape` matches any size from 1; "S", the stop tokens, also matches 0.
    """
    if (
        (t.is_floating_point() if dtype is None else t.dtype == dtype)
        and t.dim() == len(shape)
        and (t.shape == shape or matches(t, shape))
        and t.is_contiguous()
        and t.device == device
    ):
        return
    sizes = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    wanted, got = f"{dtype or 'floating-point tensor'} {sizes}", f"{t.dtype} {tuple(t.shape)}"
    if not t.is_contiguous():
        got += ", not contiguous"
    if t.device != device:
        wanted, got = f"{wanted} on {device}", f"{got} on {t.device}"
    raise ValueError(f"{op}: {name} must be a contiguous {wanted}, got {got}; {why}.")


def matches(t: Tensor, shape: Sequence[int | str]) -> bool:
    """Return True when `t` has the sizes of `shape`, in which a name is any size from 1, and "S" any size."""
    for got, want in zip(t.shape, shape):  # noqa: SIM110 - a generator is entered once an element
        if got != want if isinstance(want, int) else got == 0 and want != "S":
            return False
    return True


def require_last(op: str, name: str, t: Tensor, dimensions: str) -> None:
    """Raise ValueError unless `t` has a floating dtype and at least one dimension; `dimensions` describes the wanted ones."""
    if t.dim() == 0 or not t.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be a floating-point tensor {dimensions}, got {t.dtype} {tuple(t.shape)}; "
            f"cast it before the call."
        )


def require_rows(op: str, x: Tensor, **per_column: Tensor | None) -> None:
    """Raise ValueError unless x holds rows of floats, and each of `per_column` one value for each of x's columns."""
    if not x.is_floating_point():
        raise ValueError(f"{op}: x must be a floating-point tensor, got {x.dtype}; cast it before the call.")
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar; reshape it to (1,).")
    wanted = x.shape[-1:]
    for name, t in per_column.items():
        if t is not None and (t.shape != wanted or t.device != x.device):
            require_columns(op, x, wanted, "last dimension", **{name: t})


def require_columns(op: str, x: Tensor, wanted: tuple[int, ...], dimension: str, **per_column: Tensor | None) -> None:
    """Raise ValueError unless each of `per_column` has the shape `wanted` and is on x's device."""
    for name, t in per_column.items():
        if t is not None and t.shape != wanted:
            raise ValueError(
                f"{op}: {name} must have shape {tuple(wanted)} to match x, got {tuple(t.shape)}; "
                f"it needs one value for each of x's {dimension}."
            )
    require_device(op, x, **per_column)


def require_residual(op: str, residual: Tensor, x: Tensor, rounded: bool = False) -> None:
    """Raise ValueError unless the residual can be added to x. rounded: it may have 16 bits where x has fp32."""
    fits = residual.dtype == x.dtype or (rounded and x.dtype == torch.float32 and residual.dtype in SIXTEEN_BITS)
    if residual.shape != x.shape or not fits:
        raise ValueError(
            f"{op}: residual must match x, {tuple(x.shape)} {x.dtype}, "
            f"got {tuple(residual.shape)} {residual.dtype}; cast or reshape it before the call."
        )
    if residual.device != x.device:
        require_device(op, x, residual=residual)


def require_device(op: str, x: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless each of `others` is on x's device."""
    for name, t in others.items():
        if t is not None and t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device}, x on {x.device}; move one of them to the other's device.")


def compile_ahead(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Compile and load the kernels of `call` in the background. Return a function that waits until they are there.

    call  runs at once, up to an op that has no kernel, without launching any, and begins the self-tests that it needs instead
          of waiting for them: no decision may depend on its results, nor may they be an index
    """
    if device.type != "cuda" or not has_triton() or interpreted():
        return lambda: None
    loads: dict[Any, Future] = {}  # begun while `call` runs on: the first kernels of 24 layers waited 0.4 s for its end
    caller = threading.get_ident()

    def note(run: Callable, kernel: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != caller:
            return run(kernel, *arguments, **options)
        named = dict(zip((parameter.name for parameter in kernel.params), arguments)) | options
        constant = {parameter.name: parameter.is_constexpr for parameter in kernel.params}
        signature = ((name, _kind(value, constant.get(name, True))) for name, value in named.items() if name != "grid")
        key = kernel, *sorted(signature, key=lambda kind: kind[0])
        if key not in loads:
            loads[key] = threads().submit(_load, device, partial(run, kernel, *arguments, **options | {"warmup": True}))
        return None

    with hooked(import_module("triton.runtime.jit").JITFunction, "run", note), untested():
        call()
    return partial(wait, [*loads.values()])


def _run(key: Key) -> None:
    with suppress(Exception):  # the test will raise it, too, and tell
        selftest.run("triton", *key)


def _check(key: Key, loaded: Callable[[], Any], test: Future) -> None:
    try:
        loaded()
        test.set_result(selftest.check(*key))
    except BaseException as error:  # raised where the result is asked for
        test.set_exception(error)


def _load(device: torch.device, compiled: Callable[[], Any]) -> None:
    """Compile, build the launcher and load the code. What fails here fails again at the launch, which knows what to do."""
    with entered(device):
        _ = compiled().run


def _kind(value: Any, constant: bool) -> Any:
    """Return what Triton compiles a kernel for: a constant's value, a tensor's dtype and alignment, an integer's alignment."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if (shape := getattr(value, "block_shape", None)) is not None:  # of a descriptor
        return value.base.dtype, *shape
    if not constant and isinstance(value, int | float):
        return type(value), value == 1, value % 16 == 0, isinstance(value, int) and value.bit_length() > 31
    return type(value), value
