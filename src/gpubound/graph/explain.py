"""What a graph cannot hold, and what to write instead.

A capture that fails says "operation not permitted when stream is capturing" and no more. So every operation of an eager call is
looked at first: reads of the device from the host, results whose shape depends on values, data built on the host. The same
rules hold on a CPU, so that a run without a GPU says what would fail on one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import GraphError
from .operations import tensors_in
from .places import Place, from_traceback

aten = torch.ops.aten

READ = "reads the device from the host; keep the value on the device (torch.where, masks)"
SHAPE = "makes a shape that depends on the values"
HOST_DATA = "builds a tensor from host data; make it before the capture, or from sizes alone (torch.full, torch.arange)"
UPLOAD = "copies a CPU tensor to the device; make it there, pass it as an input, or read from pinned memory that stays"
NUMBER = "copies a Python number from the host into one place; write x[i : i + 1] = number, or use index_fill_"
DOWNLOAD = "copies the device to the host; return the tensor and read it after the replay"
WAIT = "waits for the device; return the tensor and read it after the replay"
HOST_WRITE = "writes a CPU tensor, which a replay would not do again; keep it on {device}"

REMEDIES = {
    "torch/optim/": "reads the optimizer's step from the host; build the optimizer with capturable=True (on a CPU: fused=True)",
    "torch/amp/grad_scaler": "reads the scaler's found_inf from the host; train in bf16 without a GradScaler",
    "torch/nn/utils/clip_grad": "reads the gradient norm from the host; pass error_if_nonfinite=False",
}

# Results whose shape depends on values, with what to write instead.
_SHAPES = {
    "nonzero": "use torch.where(condition, a, b), or torch.nonzero_static with a fixed size",
    "masked_select": "use torch.where, or multiply by the mask",
    "index": "use torch.where or multiply by the mask instead of indexing with it",
    "index_put": "use torch.where(mask, values, x) instead of assigning through the mask",
    "_unique2": "count with scatter_add into a tensor of fixed size",
    "unique_dim": "count with scatter_add into a tensor of fixed size",
    "unique_consecutive": "count with scatter_add into a tensor of fixed size",
    "bincount": "use scatter_add into torch.zeros(bins)",
    "repeat_interleave": "pass output_size=",
}

# Calls of Python alone: they read the data without an operation that a dispatcher would see.
_CALLS = {
    "tolist": READ,
    "numpy": DOWNLOAD,
    "__array__": DOWNLOAD,
    "cpu": DOWNLOAD,
    "__repr__": "prints a tensor, which reads the device from the host; return it and print after the replay",
    "__format__": "prints a tensor, which reads the device from the host; return it and print after the replay",
}


@dataclass(frozen=True)
class Hazard:
    """One line that a graph cannot hold."""

    place: Place | None
    what: str
    backward_of: bool = False  # `place` is the forward line of an autograd node

    def __str__(self) -> str:
        if self.place is None:
            return f"an operation of the backward pass {self.what}"
        owner = "the backward of " if self.backward_of else ""
        host = self.what == READ or self.what.startswith("writes a CPU tensor")
        what = REMEDIES.get(self.place.culprit or "", self.what) if host else self.what
        return f"{owner}`{self.place.source}` at {self.place} {what}"


def refuse(name: str, hazards: list[Hazard]) -> GraphError:
    """The error that lists them, a line of code once."""
    lines = list(dict.fromkeys(map(str, hazards)))
    if len(lines) == 1:
        return GraphError(f"cannot capture {name}: {lines[0]}.")
    return GraphError(f"cannot capture {name}, {len(lines)} places stop it:\n" + "\n".join(f"  {line}." for line in lines))


def of_call(function: Callable, args: tuple, device: torch.device) -> str | None:
    """What is wrong with a call of torch's Python interface, if it reads `device` without an operation."""
    what = _CALLS.get(getattr(function, "__name__", ""))
    if what and args and isinstance(args[0], Tensor) and args[0].device == device:
        return what
    return None


def of_operation(op: Any, args: tuple, kwargs: dict, device: torch.device, call: tuple) -> str | None:
    """What is wrong with an operation, if a graph cannot hold it. `call` is Python's (function, args) that it came from."""
    packet = getattr(op, "overloadpacket", None)
    name = getattr(packet, "__name__", "").rstrip("_")
    if name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl"):
        return _of_index(name, args, device, call)
    if name == "repeat_interleave":
        unknown = op is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        return f"{SHAPE}; {_SHAPES[name]}" if unknown else None
    if name in ("_to_copy", "copy"):
        return _of_copy(name, args, kwargs, device, call)
    if name == "lift_fresh":
        return _of_lift(args[0], device)
    if name == "_linalg_check_errors":
        return "checks a factorisation from the host; use the _ex form (torch.linalg.inv_ex, solve_ex, cholesky_ex)"
    tags = getattr(op, "tags", ())
    if torch.Tag.data_dependent_output in tags and _any_on(args, device):
        return READ
    if torch.Tag.dynamic_output_shape in tags:
        return f"{SHAPE}; {_SHAPES.get(name, 'give it a fixed size, with a mask for what is not used')}"
    return None


def _of_index(name: str, args: tuple, device: torch.device, call: tuple) -> str | None:
    """Indexing with tensors: by integers it is static, by a mask it is not, unless a number is assigned through the mask."""
    masked = any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if "put" not in name:
        return f"{SHAPE}; {_SHAPES['index']}" if masked else None
    if _is_number(args[2], device, call):
        return None if masked else NUMBER  # torch turns x[mask] = number into masked_fill
    return f"{SHAPE}; {_SHAPES['index_put']}" if masked else None


def _is_number(value: Tensor, device: torch.device, call: tuple) -> bool:
    """Whether an assigned value comes from Python: on a GPU it is still on the CPU, on a CPU only the call tells."""
    function, given = call
    number = getattr(function, "__name__", "") == "__setitem__" and not isinstance(given[-1], Tensor)
    return value.numel() == 1 and (number or value.device != device)


def _of_copy(name: str, args: tuple, kwargs: dict, device: torch.device, call: tuple) -> str | None:
    """A copy between the host and a GPU. Pinned memory at the other end makes it a node of the graph."""
    source, target = (args[1], args[0]) if name == "copy" else (args[0], None)
    if getattr(call[0], "__name__", "") == "__setitem__" and _is_number(source, device, call):
        return NUMBER
    to = target.device if target is not None else torch.device(kwargs.get("device") or source.device)
    if device.type == "cpu" or source.device.type == to.type:
        return None
    if to.type == "cpu":
        return None if target is not None and target.is_pinned() else DOWNLOAD
    return None if source.is_pinned() else UPLOAD


def _of_lift(made: Tensor, device: torch.device) -> str | None:
    """A tensor built from Python numbers or NumPy. One number on the CPU is a constant; more would be an upload."""
    if made.device != device or (made.numel() == 1 and device.type == "cpu"):
        return None
    return HOST_DATA


def _any_on(args: Any, device: torch.device) -> bool:
    return any(tensor.device == device for tensor in tensors_in(args))


# What CUDA and torch say when a capture breaks, and what that means. First match wins.
_FAILURES = (
    (
        "offset for a CUDA generator not in capture mode",
        "draws from a generator that the graph does not know; pass it in state=",
    ),
    ("capturable is False", "steps an optimizer that counts on the host; build it with capturable=True"),
    ("called a synchronizing CUDA operation", WAIT),
    ("legacy stream", "works on the legacy default stream; use the current stream"),
    (
        "stream is capturing",
        "does what a capture forbids: a wait for the device, a blocking copy or an allocation outside the pool",
    ),
    ("capture", "breaks the capture: a wait for the device, a blocking copy, or work on a stream that does not join it"),
)


def failed(name: str, error: BaseException) -> GraphError | None:
    """The GraphError for an exception whose reason is the capture; None for the function's own error."""
    text = str(error)
    for sign, meaning in _FAILURES:
        if sign in text:
            place = from_traceback(error.__traceback__)
            where = f"`{place.source}` at {place}" if place else "an operation of the backward pass"
            return GraphError(f"cannot capture {name}: {where} {meaning} ({text.strip().splitlines()[0]}).")
    return None
