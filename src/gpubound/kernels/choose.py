"""Which implementation of an op runs for given tensors: the one decision behind every door.

Triton where it can launch and has agreed with the reference on this device; else the reference. A CUDA tensor on the reference
is a fallback (trace.fallback: counted, printed, forbidden under strict). A CPU tensor on the reference is simply the CPU's path.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch

from ..device import can_launch, has_triton
from ..errors import KernelError
from ..trace import fallback


def implementation(op: str, x: torch.Tensor) -> Callable:
    """The function that computes `op` where `x` lies. `op` is 'file' or 'file.function'."""
    if can_launch(x):
        if (why := _verdict(op, x.device)) is None:
            return load("triton", op)
        fallback(op, why)
    elif x.is_cuda:
        fallback(op, "Triton is not installed" if not has_triton() else "no Triton kernel can launch here")
    return load("reference", op)


@cache
def load(source: str, op: str) -> Callable:
    """`load('triton', 'rms_norm.add_rms_norm')` is that function of kernels/triton/rms_norm.py."""
    file, _, function = op.partition(".")
    return getattr(import_module(f"gpubound.kernels.{source}.{file}"), function or file)


_verdicts: dict[tuple[str, torch.device], str | None] = {}


@torch.compiler.assume_constant_result
def _verdict(op: str, device: torch.device) -> str | None:
    """None when the Triton kernel of `op` has agreed with its reference on `device`, else why not. Tested once a process and device."""
    key = (op, device)
    if key not in _verdicts:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise KernelError(
                f"{op}: its first call on {device} came inside a graph capture, where it cannot test itself; call it once before."
            )
        from .selftest import check  # selftest knows every op; importing it here keeps doors light

        _verdicts[key] = None  # the check itself goes through load(), never through this door
        _verdicts[key] = check(op, device)
    return _verdicts[key]
