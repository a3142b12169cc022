"""What an operation does: which arguments it writes, how the tensors begin that it makes, and why no graph can hold it.

A capture that fails says "operation not permitted when stream is capturing" and no more. So every operation of an eager call is
looked at first. The same rules hold on a CPU, so that a run without a GPU says what would fail on one.

Last the launches that no dispatcher sees: Triton's, its interpreter's, and those of kernels compiled at run time.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..device import has_triton, interpreted
from ..errors import GraphError
from ..watch import ops
from ..watch.events import DOWNLOAD, HOST_DATA, NUMBER, PRINT, READ, THROUGH, UPLOAD, WAIT, Cause, shape
from ..watch.python_calls import replaced
from ..watch.source_line import Place, Site, site_of_error

_NORM_STATISTICS = ("running_mean", "running_var")  # written by batch norms whose schemas do not say so
_CONSTANTS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # which argument is the value
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class Origin:
    """How a tensor began that the function made: filled with a value, uninitialised, or computed."""

    place: Place
    call: int
    fill: Any = None
    empty: bool = False


_PLAIN = frozenset({Tensor, nn.Parameter})
_NONE_INSIDE = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})  # nearly all of what is no tensor


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor with memory in the arguments of an operation or a launch.

    A wrapper (DTensor and its kin) has such tensors inside; a tensor descriptor carries its own as `base`.
    """
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    """A watched call asks this of 3,000 operations for 16 layers: what is common is asked for first."""
    kind = type(tree)
    if kind in _PLAIN:
        found.append(tree)
    elif kind in _NONE_INSIDE:
        return
    elif isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            _collect(item, found)
    elif is_traceable_wrapper_subclass(tree):
        for name in tree.__tensor_flatten__()[0]:
            _collect(getattr(tree, name), found)
    elif isinstance(tensor := tree if isinstance(tree, Tensor) else getattr(tree, "base", None), Tensor):
        found.append(tensor)


def written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The arguments that an operation writes: all of a collective's, whose schemas do not say which."""
    found: list[Tensor] = []
    if getattr(func, "namespace", "") == "c10d":
        _collect((args, kwargs), found)
    for position, name in _writes(func):
        _collect(args[position] if position < len(args) else kwargs.get(name), found)
    return found


@cache
def _writes(func: Any) -> list[tuple[int, str]]:
    """The position and the name of each argument that an operation writes, by its schema."""
    schema = getattr(func, "_schema", None)
    return [
        (position, argument.name)
        for position, argument in enumerate(() if schema is None else schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in _NORM_STATISTICS
    ]


def began(op: Any, args: tuple, made: Tensor, place: Place, call: int) -> Origin:
    """How a tensor that `op` has made begins."""
    name = getattr(op, "_opname", "")
    if name in _EMPTY:
        return Origin(place, call, empty=True)
    if name in _CONSTANTS:
        return Origin(place, call, fill=_CONSTANTS[name])
    if name in _FILLED and len(args) > _FILLED[name] and isinstance(args[_FILLED[name]], (bool, int, float)):
        return Origin(place, call, fill=args[_FILLED[name]])
    if name == "lift_fresh" and made.numel() == 1 and made.device.type == "cpu":
        return Origin(place, call, fill=made.detach().numpy().item())
    return Origin(place, call)


HOST_WRITE = Cause("writes a CPU tensor, which a replay would not do again", "keep it on the device")

# What to write instead inside a graph, where that is more than outside.
_IN_A_GRAPH = {
    UPLOAD: "make it there, pass it as an input, or read from pinned memory that stays",
    DOWNLOAD: "return the tensor and read it after the replay",
    WAIT: "return the tensor and read it after the replay",
    PRINT: "return it and print after the replay",
    HOST_DATA: "make it before the capture, or from sizes alone (torch.full, torch.arange)",
}

# Calls of Python alone: they read the data without an operation that a dispatcher would see.
_CALLS = {"tolist": READ, "numpy": DOWNLOAD, "__array__": DOWNLOAD, "cpu": DOWNLOAD, "__repr__": PRINT, "__format__": PRINT}


@dataclass(frozen=True)
class Hazard:
    """One line that a graph cannot hold."""

    place: Place
    cause: Cause

    def __str__(self) -> str:
        cause = THROUGH.get(self.place.through, self.cause) if self.cause in (READ, HOST_WRITE) else self.cause
        what = f"{cause.does}; {_IN_A_GRAPH.get(cause, cause.remedy)}"
        if (line := self.place.line) is not None:
            return f"{_quoted(line)} {what}"
        if self.place.built is not None:
            return f"the backward of {_quoted(self.place.built)} {what}"
        return f"an operation of the backward pass {what}"


def _quoted(site: Site) -> str:
    """A line's text, cut to what fits a message, and where it stands."""
    return f"`{site.code if len(site.code) <= 90 else site.code[:87] + '...'}` at {site.at}"


def refuse(name: str, hazards: list[Hazard]) -> GraphError:
    """The error that lists them, a line of code once."""
    first, *others = lines = list(dict.fromkeys(map(str, hazards)))
    said = f": {first}." if not others else f", {len(lines)} places stop it:\n" + "\n".join(f"  {line}." for line in lines)
    error = GraphError(f"cannot capture {name}{said}")
    error.hazards = tuple(hazards)
    return error


def wrong_with_call(function: Callable, args: tuple, device: torch.device) -> Cause | None:
    """What is wrong with a call of torch's Python interface, if it reads `device` without an operation."""
    reads = bool(args) and isinstance(args[0], Tensor) and args[0].device == device
    return _CALLS.get(getattr(function, "__name__", "")) if reads else None


def wrong_with_operation(op: Any, args: tuple, kwargs: dict, device: torch.device, call: tuple) -> Cause | None:
    """What is wrong with an operation, if a graph cannot hold it. `call` is Python's (function, args) that it came from."""
    if _assigns_number(op, args, device, call):
        masked = "index" in op._opname and any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return None if masked else NUMBER  # torch turns x[mask] = number into masked_fill
    for move in ops.moves(op, args, kwargs, home=device):
        if not _holds(op, args, device, move):
            return move.cause
    reads, shapes = _depends(op)
    if reads and any(tensor.device == device for tensor in tensors_in(args)):
        return READ
    if shapes and not ops.decides(op):
        return shape("give it a fixed size, with a mask for what is not used")
    return None


@cache
def _depends(op: Any) -> tuple[bool, bool]:
    """Whether an operation's values, and its shapes, depend on what is in its tensors."""
    tags = getattr(op, "tags", ())
    return torch.Tag.data_dependent_output in tags, torch.Tag.dynamic_output_shape in tags


_ASSIGN = {"index_put": 2, "_index_put_impl": 2, "_unsafe_index_put": 2, "copy": 1, "_to_copy": 0}


def _assigns_number(op: Any, args: tuple, device: torch.device, call: tuple) -> bool:
    """Whether a Python number goes into a tensor: on a GPU it is still on the CPU, on a CPU only the call tells."""
    at = _assigned_at(op)
    if at is None:
        return False
    function, given = call
    item = getattr(function, "__name__", "") == "__setitem__"
    if not item and at < 2:
        return False  # a copy of its own
    value = args[at]
    return value.numel() == 1 and (value.device != device or (item and not isinstance(given[-1], Tensor)))


@cache
def _assigned_at(op: Any) -> int | None:
    """Which argument is the value of an operation that `x[...] = value` becomes; None for all others."""
    return _ASSIGN.get(getattr(op, "_opname", "").rstrip("_"))


def _holds(op: Any, args: tuple, device: torch.device, move: ops.Move) -> bool:
    """Whether a graph holds a move: a copy with pinned memory at the other end is one of its nodes, a number on the CPU is a
    constant. What is downloaded into memory of its own would be in no replay's reach."""
    if move.cause is HOST_DATA:
        return device.type == "cpu" and args[0].numel() == 1
    return move.pinned and not (move.kind == "d2h" and op._opname == "_to_copy")


# What CUDA and torch say when a capture breaks, and what that means. First match wins.
_FAILURES = (
    ("offset for a CUDA generator not in", "draws from a generator that the graph does not know; pass it in state="),
    ("capturable is False", "steps an optimizer that counts on the host; build it with capturable=True"),
    ("called a synchronizing CUDA operation", f"{WAIT.does}; {_IN_A_GRAPH[WAIT]}"),
    ("legacy stream", "works on the legacy default stream; use the current stream"),
    (
        "stream is capturing",
        "does what a capture forbids: a wait for the device, a blocking copy or an allocation outside the pool",
    ),
    ("capture", "breaks the capture: a wait for the device, a blocking copy, or work on a stream that does not join it"),
)


def broken_capture(name: str, error: BaseException) -> GraphError | None:
    """The GraphError for an exception whose reason is the capture; None for the function's own error."""
    text = str(error)
    for sign, meaning in _FAILURES:
        if sign in text:
            line = site_of_error(error)
            where = _quoted(line) if line is not None else "an operation of the backward pass"
            return GraphError(f"cannot capture {name}: {where} {meaning} ({text.strip().splitlines()[0]}).")
    return None


@contextlib.contextmanager
def patched(meet: Callable[[list[Tensor], Callable[[], Any]], Any]) -> Iterator[None]:
    """Inside the block every launch of this thread and of autograd's becomes `meet(tensors, launch)`, which must launch."""
    with contextlib.ExitStack() as doors:
        for owner, name in _launchers():
            doors.enter_context(replaced(owner, name, partial(_through, meet, threading.get_ident())))
        yield


def _through(meet: Callable, mine: int, original: Callable) -> Callable:
    def launch(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != mine and torch._C._current_autograd_node() is None:
            return original(*args, **kwargs)
        return meet(list(tensors_in((args[1:], kwargs))), lambda: original(*args, **kwargs))

    return launch


def _launchers() -> list[tuple[type, str]]:
    """The methods through which launches pass. Triton is imported here: the first watched call may be the first to launch."""
    doors: list[tuple[type, str]] = []
    if has_triton():
        doors.append((import_module("triton.runtime.jit").JITFunction, "run"))
    if has_triton() and interpreted():
        doors.append((import_module("triton.runtime.interpreter").InterpretedFunction, "run"))
    kernel = getattr(import_module("torch.cuda._utils"), "_CudaKernel", None)
    return [*doors, (kernel, "__call__")] if kernel is not None else doors
