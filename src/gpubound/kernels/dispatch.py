"""Dispatch: the choice between an op's kernel and its reference, made here alone.

Triton where it can launch and has agreed with the reference on this device and dtype; else the reference. A reference call
where a kernel was expected is a fallback (trace.fallback: counted, printed, forbidden under strict). A CPU tensor on the
reference is simply the CPU's path, and so is a tensor without elements: there is nothing to launch.

torch.compile traces ops whole. What dynamo cannot read (the self-test, the imports) sits in `_source`, which it calls once
while it traces and takes as a constant: compiled code counts its fallback then, not in every call.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import cache

import torch
from torch.autograd import forward_ad

from ..device import can_launch, constant, has_triton
from ..errors import KernelError
from ..trace import fallback
from . import selftest
from .registry import load

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTES = torch.uint8  # of ops that only move them


def implementation(op: str, x: torch.Tensor, unable: str | None = None, shape: tuple = ()) -> Callable:
    """The function that computes `op` where `x` lies; `unable` says why no kernel can, `shape` is for its example."""
    if not torch.compiler.is_compiling() and transformed():
        unable = "torch.func and forward-mode transforms (vmap, grad, jvp) have no rule for its kernel"
    if not x.is_cuda or torch.compiler.is_compiling():  # the interpreter compiles nothing; dynamo's sizes may be symbols
        shape = ()
    function = load(_source(op, x.device, x.dtype, unable, shape) if x.numel() else "reference", op)
    if x.is_cuda and not torch.compiler.is_compiling() and x.device.index != torch.cuda.current_device():
        return _on(x.device, function)
    return function


def transformed() -> bool:
    """Return whether torch.func (vmap, grad, jvp) or forward-mode AD transforms this call: neither sees into a kernel."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _on(device: torch.device, function: Callable) -> Callable:
    """`function` with `device` current: Triton launches on the current device, whatever its tensors say."""

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


Call = tuple[str, tuple]  # an op, and the shape in which its caller will want it
Judged = tuple[str, torch.device, torch.dtype, tuple]

_early: dict[Judged, Future] = {}


def hasten(calls: Iterable[Call], device: torch.device, dtype: torch.dtype) -> None:
    """Start the self-tests of these calls in parallel with each other and with other work: compiling takes seconds.

    A shape must be the one that the op's door will pass on, or the kernels compiled are nobody's.
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


_verdicts: dict[Judged, str | None] = {}


def verdict(op: str, device: torch.device, dtype: torch.dtype, shape: tuple = ()) -> str | None:
    """None when the Triton kernel of `op` may run on `device` in `dtype`, else why not. Judged once a process and shape."""
    key = (op, device, dtype, shape)
    if key not in _verdicts:
        begun = _early.pop(key, None)
        # A self-test may ask for another op's verdict. If that one still waits for a thread, it would wait for this one's.
        if begun is None or begun.cancel():
            _verdicts[key] = _judge(op, device, dtype, shape)
        else:
            _verdicts[key] = begun.result()
    return _verdicts[key]


def runs(op: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the source that calls of `op` used so far, "triton" or "reference"; before the first, the one it would use.

    A test of its own, in no caller's shape, would compile kernels that nobody runs: 11 of 41 in a first training step.
    """
    known = _verdicts_of(op, device, dtype)
    if not known or not can_launch(device):
        return _source(op, device, dtype, None)
    return "reference" if any(known) else "triton"


def _verdicts_of(op: str, device: torch.device, dtype: torch.dtype) -> list[str | None]:
    """Return the results of the self-tests of `op` in any shape; tests that were begun early count."""
    for begun in [key for key in _early if key[:3] == (op, device, dtype)]:
        verdict(*begun)
    return [why for key, why in _verdicts.items() if key[:3] == (op, device, dtype)]


def _judge(op: str, device: torch.device, dtype: torch.dtype, shape: tuple) -> str | None:
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
    # A fresh thread has none of the caller's modes: no autocast, inference mode, default device, dynamo trace or saved-tensor
    # hooks (torch.utils.checkpoint would count a self-test's tensors among the block's, and miss them when it recomputes).
    # But it launches as the caller does (dependent_launch.py), or it compiles kernels that no caller uses.
    with ThreadPoolExecutor(1, thread_name_prefix="gpubound-selftest") as thread:
        return thread.submit(copy_context().run, selftest.check, op, device, dtype, shape).result()
