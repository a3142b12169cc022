"""Dispatch of every op: to its Triton kernel or to its reference.

The kernel runs where it can launch and has agreed with the reference on this device and dtype. A reference call where a kernel
was expected is a fallback (trace.fallback: counted, printed, forbidden under strict). The reference is the regular path of CPU
tensors, and of tensors without elements, for which there is nothing to launch.

torch.compile traces ops whole. What dynamo cannot read (the self-test, the imports) sits in `_source`, which it calls once
while it traces and takes as a constant: compiled code counts its fallback then, not in every call.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import cache

import torch
from torch.autograd import forward_ad

from ..device import constant, has_triton
from ..errors import KernelError
from ..trace import fallback
from . import selftest
from .registry import OPS, load

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTES = torch.uint8  # of ops that only move them


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
        fallback(op, why)
    return "reference"


Call = tuple[str, tuple]  # an op and the `shape` that its caller passes to `implementation`
Key = tuple[str, torch.device, torch.dtype, tuple]

_early: dict[Key, Future] = {}
_verdicts: dict[Key, str | None] = {}


def hasten(calls: Iterable[Call], device: torch.device, dtype: torch.dtype) -> None:
    """Start the self-tests of these calls in parallel, in the background: compiling takes seconds.

    A shape must equal the one that the op passes to `implementation`, or the call compiles other kernels again.
    """
    if device.type != "cuda" or not has_triton() or dtype not in KERNEL_DTYPES:
        return
    for op, shape in dict.fromkeys(calls):
        key = (op, device, dtype, shape)
        if key not in _verdicts and key not in _early:
            _early[key] = _threads().submit(selftest.check, op, device, dtype, shape)


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that compile ahead, shared by all callers: compiling takes as many cores as there are threads."""
    return ThreadPoolExecutor(8, thread_name_prefix="gpubound-selftest")


def verdict(op: str, device: torch.device, dtype: torch.dtype, shape: tuple = ()) -> str | None:
    """Return None when the kernel of `op` may run on `device` in `dtype`, else the reason. Tested once a process and shape."""
    key = (op, device, dtype, shape)
    if key not in _verdicts:
        early = _early.pop(key, None)
        # A self-test may ask for another op's verdict. If that test still waits for a thread, it would wait for this one.
        if early is None or early.cancel():
            _verdicts[key] = _test(op, device, dtype, shape)
        else:
            _verdicts[key] = early.result()
    return _verdicts[key]


def runs(op: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the source that calls of `op` used so far, "triton" or "reference"; before the first, the one it would use.

    A self-test without a caller's shape would compile unused kernels: 11 of 41 in a first training step.
    """
    results = _verdicts_of(op, device, dtype)
    if not results or not can_launch(device):
        return _source(op, device, dtype, None)
    return "reference" if any(results) else "triton"


def _verdicts_of(op: str, device: torch.device, dtype: torch.dtype) -> list[str | None]:
    """Return the results of the self-tests of `op` in any shape, those that `hasten` started included."""
    for key in [key for key in _early if key[:3] == (op, device, dtype)]:
        verdict(*key)
    return [why for key, why in _verdicts.items() if key[:3] == (op, device, dtype)]


def _test(op: str, device: torch.device, dtype: torch.dtype, shape: tuple) -> str | None:
    if not has_triton():
        return "Triton is not installed"
    if dtype not in (*KERNEL_DTYPES, BYTES):
        return f"no kernel takes {dtype}: they compute in fp32"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if others := _verdicts_of(op, device, dtype):
            return next((why for why in others if why is not None), None)
        raise KernelError(
            f"{op}: its first call in {dtype} on {device} came inside a graph capture, where it cannot test itself; "
            f"call it once before."
        )
    # A new thread has none of the caller's modes: no autocast, inference mode, default device, dynamo trace or saved-tensor
    # hooks (torch.utils.checkpoint would count a self-test's tensors among the block's, and miss them when it recomputes).
    # The context is copied: its PDL mode (decode_product.py) selects the kernels that the caller uses.
    with ThreadPoolExecutor(1, thread_name_prefix="gpubound-selftest") as thread:
        return thread.submit(copy_context().run, selftest.check, op, device, dtype, shape).result()
