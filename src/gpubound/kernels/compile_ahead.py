"""Compilation of the kernels that a function launches, all in parallel, before it launches them.

A decoding step's kernels depend on the sizes of its weights and on its launch mode, so self-tests do not compile them. At their
first launches they were compiled one after the other: 14 s to the first token at 350m with an empty cache.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..device import entered, has_triton, interpreted
from ..trace import hooked
from . import dispatch


def compile_ahead(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Compile and load the kernels of `call` in the background. Return a function that waits until they are there.

    call  runs at once, up to an op that has no kernel, without launching any, and begins the self-tests that it needs instead
          of waiting for them: no decision may depend on its results, nor may they be an index
    """
    if device.type != "cuda" or not has_triton() or interpreted():
        return lambda: None
    launches: dict[Any, Callable[[], Any]] = {}
    caller = threading.get_ident()

    def note(run: Callable, kernel: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != caller:
            return run(kernel, *arguments, **options)
        named = dict(zip((parameter.name for parameter in kernel.params), arguments)) | options
        constant = {parameter.name: parameter.is_constexpr for parameter in kernel.params}
        signature = ((name, _kind(value, constant.get(name, True))) for name, value in named.items() if name != "grid")
        key = kernel, *sorted(signature, key=lambda kind: kind[0])
        launches.setdefault(key, partial(run, kernel, *arguments, **options | {"warmup": True}))
        return None

    with hooked(import_module("triton.runtime.jit").JITFunction, "run", note), dispatch.untested():
        call()
    return partial(wait, [dispatch.threads().submit(_load, device, compiled) for compiled in launches.values()])


def test_ahead(calls: Iterable[dispatch.Call], device: torch.device, dtype: torch.dtype) -> None:
    """Begin self-tests as `hasten` does, and compile their kernels in parallel first, those of backward, too.

    A test alone comes to these when it has run forward. Placing 135m waited 0.45 s for its tests in place of 1.8. The ops must
    be such as `compile_ahead` can call: for none is a kernel's result an index of torch's.
    """
    keys = dispatch.not_begun(calls, device, dtype)
    ready = [compile_ahead(partial(_run, key), device) for key in keys]
    for key, loaded in zip(keys, ready):  # in separate threads: a verdict takes a test out of a queue
        dispatch._early[key] = test = Future[Any]()
        test.set_running_or_notify_cancel()
        threading.Thread(target=_check, args=(key, loaded, test), name="gpubound-selftest").start()


def _run(key: dispatch.Key) -> None:
    with suppress(Exception):  # the test will raise it, too, and tell
        dispatch.selftest.run("triton", *key)


def _check(key: dispatch.Key, loaded: Callable[[], Any], test: Future) -> None:
    try:
        loaded()
        test.set_result(dispatch.selftest.check(*key))
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
