"""Discovery of a function's reads, its writes and its operations that no graph can hold, by watching eager calls.

Operations pass through a dispatch mode, which autograd carries into its own threads. Python's own reads (`tolist`, `numpy`)
pass through a function mode. Triton kernels and kernels compiled at run time pass through neither, so their launches are
patched while a call is watched. An extension's launches are not intercepted: tensors that they use must be named in `state=`.

Rules about operations say which arguments one writes, the first values of the tensors it creates, and why no graph can hold it.
A failed capture raises "operation not permitted when stream is capturing" without a line. So every operation of an eager call
is inspected first. The same rules hold on a CPU, so that a run without a GPU reports what would fail on one.

Launches that bypass the dispatcher are patched: those of Triton, of its interpreter, and of kernels compiled at run time.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..device import has_triton, interpreted
from ..errors import GraphError
from ..kernels.dispatch import OURS
from ..trace import hooked
from ..watch import ops
from ..watch.events import (
    DOWNLOAD,
    HOST_DATA,
    NUMBER,
    PRINT,
    READ,
    THROUGH,
    UPLOAD,
    WAIT,
    Cause,
    Origins,
    Place,
    Site,
    here,
    shape,
    site_of_error,
)
from ..watch.ops import OpMode
from .memory import ON_DEVICE, CopyBudget, Generators, Snapshot, StorageCopy, bytes_of, fingerprints
from .reachable import storage_key

_NORM_STATISTICS = ("running_mean", "running_var")  # written by batch norms, though their schemas do not declare it
_CONSTANTS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # which argument is the value
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class FirstValue:
    """First value of a tensor that the function created: a fill value, uninitialised, or computed."""

    place: Place
    call: int
    fill: Any = None
    empty: bool = False


_TENSOR_TYPES = frozenset({Tensor, nn.Parameter})
_OTHER_TYPES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})  # the common ones without a tensor


def tensors_in(tree: Any) -> list[Tensor]:
    """Return every tensor with memory in the arguments of an operation or a launch.

    A wrapper (DTensor, for example) has such tensors inside; a tensor descriptor has one as `base`.
    """
    tensors: list[Tensor] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Any, tensors: list[Tensor]) -> None:
    # A watched call of 16 layers has 3,000 operations, so common types are compared first.
    kind = type(tree)
    if kind in _TENSOR_TYPES:
        tensors.append(tree)
    elif kind in _OTHER_TYPES:
        return
    elif isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            _collect(item, tensors)
    elif is_traceable_wrapper_subclass(tree):
        for name in tree.__tensor_flatten__()[0]:
            _collect(getattr(tree, name), tensors)
    elif isinstance(tensor := tree if isinstance(tree, Tensor) else getattr(tree, "base", None), Tensor):
        tensors.append(tensor)


def written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the arguments that an operation writes; of a collective, whose schema does not declare them, all."""
    tensors: list[Tensor] = []
    if getattr(func, "namespace", "") == "c10d":
        _collect((args, kwargs), tensors)
    for position, name in _writes(func):
        _collect(args[position] if position < len(args) else kwargs.get(name), tensors)
    return tensors


@cache
def _writes(func: Any) -> list[tuple[int, str]]:
    """Return the position and name of each argument that an operation writes according to its schema."""
    schema = getattr(func, "_schema", None)
    return [
        (position, argument.name)
        for position, argument in enumerate(() if schema is None else schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in _NORM_STATISTICS
    ]


def first_value(op: Any, args: tuple, created: Tensor, place: Place, call: int) -> FirstValue:
    """Return the first value of a tensor that `op` has created."""
    name = getattr(op, "_opname", "")
    if name in _EMPTY:
        return FirstValue(place, call, empty=True)
    if name in _CONSTANTS:
        return FirstValue(place, call, fill=_CONSTANTS[name])
    if name in _FILLED and len(args) > _FILLED[name] and isinstance(args[_FILLED[name]], (bool, int, float)):
        return FirstValue(place, call, fill=args[_FILLED[name]])
    if name == "lift_fresh" and created.numel() == 1 and created.device.type == "cpu":
        return FirstValue(place, call, fill=created.detach().numpy().item())
    return FirstValue(place, call)


HOST_WRITE = Cause("writes a CPU tensor, which a replay would not do again", "keep it on the device")

# Remedies that differ inside a graph.
_GRAPH_REMEDIES = {
    UPLOAD: "make it there, pass it as an input, or read from pinned memory that stays",
    DOWNLOAD: "return the tensor and read it after the replay",
    WAIT: "return the tensor and read it after the replay",
    PRINT: "return it and print after the replay",
    HOST_DATA: "make it before the capture, or from sizes alone (torch.full, torch.arange)",
}

# Python calls that read the data without an operation that a dispatcher would see.
_CALLS = {"tolist": READ, "numpy": DOWNLOAD, "__array__": DOWNLOAD, "cpu": DOWNLOAD, "__repr__": PRINT, "__format__": PRINT}


@dataclass(frozen=True)
class Hazard:
    """One line that a graph cannot hold."""

    place: Place
    cause: Cause

    def __str__(self) -> str:
        cause = THROUGH.get(self.place.through, self.cause) if self.cause in (READ, HOST_WRITE) else self.cause
        what = f"{cause.does}; {_GRAPH_REMEDIES.get(cause, cause.remedy)}"
        if (line := self.place.line) is not None:
            return f"{_quoted(line)} {what}"
        if self.place.built is not None:
            return f"the backward of {_quoted(self.place.built)} {what}"
        return f"an operation of the backward pass {what}"


def _quoted(site: Site) -> str:
    """Return a line's text, truncated to 90 characters, and its location."""
    return f"`{site.code if len(site.code) <= 90 else site.code[:87] + '...'}` at {site.at}"


def refuse(name: str, hazards: list[Hazard]) -> GraphError:
    """Return the error that lists each line of code once."""
    first, *others = lines = list(dict.fromkeys(map(str, hazards)))
    text = f": {first}." if not others else f", {len(lines)} places stop it:\n" + "\n".join(f"  {line}." for line in lines)
    error = GraphError(f"cannot capture {name}{text}")
    error.hazards = tuple(hazards)
    return error


def cause_in_call(function: Callable, args: tuple, device: torch.device) -> Cause | None:
    """Return the cause if a call of torch's Python interface reads `device` without an operation."""
    reads = bool(args) and isinstance(args[0], Tensor) and args[0].device == device
    return _CALLS.get(getattr(function, "__name__", "")) if reads else None


def cause_in_operation(op: Any, args: tuple, kwargs: dict, device: torch.device, call: tuple) -> Cause | None:
    """Return why a graph cannot hold an operation, or None. `call` is the Python call (function, args) that it belongs to."""
    if _assigns_number(op, args, device, call):
        masked = "index" in op._opname and any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return None if masked else NUMBER  # torch turns x[mask] = number into masked_fill
    for move in ops.moves(op, args, kwargs, home=device):
        if not _graph_holds(op, args, device, move):
            return move.cause
    reads, shapes = _data_dependent(op)
    if reads and any(tensor.device == device for tensor in tensors_in(args)):
        return READ
    if shapes and not ops.decides(op):
        return shape("give it a fixed size, with a mask for the unused part")
    return None


@cache
def _data_dependent(op: Any) -> tuple[bool, bool]:
    """Return whether an operation reads its tensors' values on the host, and whether its shapes depend on them."""
    tags = getattr(op, "tags", ())
    return torch.Tag.data_dependent_output in tags, torch.Tag.dynamic_output_shape in tags


# The argument that is the value of an operation that `x[...] = value` becomes.
_ASSIGNED = {"index_put": 2, "_index_put_impl": 2, "_unsafe_index_put": 2, "copy": 1, "_to_copy": 0}


def _assigns_number(op: Any, args: tuple, device: torch.device, call: tuple) -> bool:
    """Return whether a Python number is written into a tensor: on a GPU it is a CPU tensor, on a CPU only `call` shows it."""
    position = _assigned_position(op)
    if position is None:
        return False
    function, call_args = call
    is_assignment = getattr(function, "__name__", "") == "__setitem__"
    if not is_assignment and position < 2:
        return False  # a plain copy
    value = args[position]
    return value.numel() == 1 and (value.device != device or (is_assignment and not isinstance(call_args[-1], Tensor)))


@cache
def _assigned_position(op: Any) -> int | None:
    return _ASSIGNED.get(getattr(op, "_opname", "").rstrip("_"))


def _graph_holds(op: Any, args: tuple, device: torch.device, move: ops.Move) -> bool:
    """Return whether a graph holds a move: a copy to or from pinned memory is a node, a single number on the CPU a constant.

    A download into new memory is refused: no replay would write to the memory that the caller reads.
    """
    if move.cause is HOST_DATA:
        return device.type == "cpu" and args[0].numel() == 1
    return move.pinned and not (move.kind == "d2h" and op._opname == "_to_copy")


# Parts of CUDA's and torch's errors when a capture breaks, and their meanings. The first match wins.
_FAILURES = (
    ("offset for a CUDA generator not in", "draws from a generator that the graph does not know; pass it in state="),
    ("capturable is False", "steps an optimizer that counts on the host; build it with capturable=True"),
    ("called a synchronizing CUDA operation", f"{WAIT.does}; {_GRAPH_REMEDIES[WAIT]}"),
    ("legacy stream", "works on the legacy default stream; use the current stream"),
    (
        "stream is capturing",
        "does what a capture forbids: a wait for the device, a blocking copy or an allocation outside the pool",
    ),
    ("capture", "breaks the capture: a wait for the device, a blocking copy, or work on a stream that does not join it"),
)


def broken_capture(name: str, error: BaseException) -> GraphError | None:
    """Return the GraphError for an exception that the capture caused; None for the function's own error."""
    text = str(error)
    for sign, meaning in _FAILURES:
        if sign in text:
            line = site_of_error(error)
            where = _quoted(line) if line is not None else "an operation of the backward pass"
            return GraphError(f"cannot capture {name}: {where} {meaning} ({text.strip().splitlines()[0]}).")
    return None


@contextlib.contextmanager
def launches_passed_to(callback: Callable[[Any, list[Tensor], Callable[[], Any]], Any]) -> Iterator[None]:
    """Replace launches of this thread and of autograd's threads by `callback(kernel, tensors, launch)`, which must launch."""
    caller = threading.get_ident()

    def launch(original: Callable, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != caller and torch._C._current_autograd_node() is None:
            return original(*args, **kwargs)
        return callback(args[0], tensors_in((args[1:], kwargs)), lambda: original(*args, **kwargs))

    with contextlib.ExitStack() as patches:
        for owner, name in _launchers():
            patches.enter_context(hooked(owner, name, launch))
        yield


def _launchers() -> list[tuple[type, str]]:
    """Return the methods that launch kernels. Triton is imported here: the first watched call may be the first to launch."""
    launchers: list[tuple[type, str]] = []
    if has_triton():
        launchers.append((import_module("triton.runtime.jit").JITFunction, "run"))
    if has_triton() and interpreted():
        launchers.append((import_module("triton.runtime.interpreter").InterpretedFunction, "run"))
    kernel = getattr(import_module("torch.cuda._utils"), "_CudaKernel", None)
    return [*launchers, (kernel, "__call__")] if kernel is not None else launchers


# A kernel may write all its tensor arguments. Weights and larger tensors count as written only if their bytes change.
LARGE = 256 << 20


@dataclass
class ExternalTensor:
    """A tensor from outside that the function uses, where it was first read, and whether it was written."""

    tensor: Tensor
    read: Place
    call: int  # in which watched call, counted from 1
    is_written: bool = False

    def describe(self) -> str:
        kind = f"the {str(self.tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(self.tensor.shape)}"
        line = self.read.line
        return f"{kind} used at {line.at}" if line is not None else f"{kind} used in the backward pass"


class _ThreadState(threading.local):
    internal = False  # this module's work, and the inside of a launch, are not the function's
    in_operation = False  # tensors that an operation (a custom op, say) allocates inside are not seen


class Discovery:
    """Results of the watched calls of one function. A tensor is copied into `snapshot` before its first write.

    frozen   keys of the storages in which frozen weights are
    weights  the weights that are not known to be written
    reads    those of them that our kernels do not write
    """

    def __init__(
        self,
        device: torch.device,
        inputs: list[Tensor],
        snapshot: Snapshot,
        generators: Generators,
        frozen: Set[int] = frozenset(),
        weights: Iterable[Tensor] = (),
        reads: Sequence[Tensor] = (),
    ) -> None:
        self.device, self.snapshot, self.generators, self.frozen = device, snapshot, generators, frozen
        self.passing = CopyBudget(device, passing=True)
        parts = [tensor for tensor in tensors_in([*weights]) if tensor.device == device]
        self.weights = {key: tensor for tensor in parts if (key := storage_key(tensor))}
        # The storages of weights that are compared when fn has been captured, with their fingerprints.
        self.fingerprints: dict[int, tuple[Tensor, int]] = {}
        self._take_fingerprints(reads)
        self.reads = {*self.fingerprints}
        # Arguments of our kernels that a launch left as they were, with that weight and its version: ops bump what they write.
        # Further weights there are compared by fingerprints: a copy for each launch took 0.9 s at 8B with adapters.
        self._left: dict[tuple[int, int, int], tuple[Tensor, int]] = {}
        self.inputs = {storage_key(tensor): index for index, tensor in enumerate(inputs)}
        self.external: dict[int, ExternalTensor] = {}
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}  # each tensor that requires a gradient, with its first one
        self._leaf_aliases: set[tuple] = set()
        self.calls = 0
        self.written_inputs: dict[int, Place] = {}
        self.hazards: list[Hazard] = []
        self.created_before: dict[int, FirstValue] = {}  # by earlier calls
        self._created: dict[int, FirstValue] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # of what the last call created
        self.origins = Origins()
        self.thread = _ThreadState()
        self.call: tuple = (None, ())  # the Python call that the current operation belongs to

    def run(self, call: Callable[[], Any]) -> Any:
        """Watch one call. Tensors that earlier calls created and this call uses count as external: see `survivors`."""
        self.calls += 1
        self.created_before.update(self._created)
        self.hazards, self._created, self._storages = [], {}, {}
        # A compiled function runs uncompiled while it is watched: a compiler refuses to work under these modes.
        uncompiled = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
        try:
            with uncompiled, launches_passed_to(self.launch), _Calls(self), _Operations(self._operation):
                return call()
        finally:
            for key in [*self.external]:
                self._is_external(key)

    def survivors(self) -> dict[int, FirstValue]:
        """Return tensors that an earlier call created and a later call used, with their first values."""
        return {key: self.created_before[key] for key in self.external if key in self.created_before}

    def created_and_written(self) -> dict[int, Tensor]:
        """Return survivors that began as computed values and may have been written since, as a table that a kernel gets."""
        written = ((key, first) for key, first in self.survivors().items() if self.external[key].is_written)
        return {key: self.external[key].tensor for key, first in written if first.fill is None and not first.empty}

    def live_tables(self) -> dict[int, Tensor]:
        """Return the bytes of small storages that the last call created as computed values, and that are still there."""
        tables = dict[int, Tensor]()
        for key, first in self._created.items():
            if key in self._storages and first.fill is None and not first.empty:
                storage = torch.UntypedStorage._new_with_weak_ptr(self._storages[key].cdata)
                if storage is not None and storage.nbytes() <= ON_DEVICE:
                    tables[key] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return tables

    def has_settled(self, unaltered: Set[int]) -> bool:
        """Return whether the second call kept no tensor that it created, and altered no table of the first: then a further one
        sees what the second saw."""
        all_freed = all(storage.expired() for storage in self._storages.values())
        return all_freed and not self.hazards and self.created_and_written().keys() <= unaltered

    def moves(self, key: int) -> bool:
        """Return whether a call after the first created the tensor and the next call read it. The first may create tables."""
        created, read = self.created_before[key].call, self.external[key].call
        return created > 1 and read == created + 1

    def leaf(self, tensor: Tensor, certain: bool = False) -> None:
        """Note a tensor that may be given a gradient. One from the backward pass may be an alias of one noted before."""
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self.leaves:
            alias = (tensor.data_ptr(), tensor.shape)
            if certain or alias not in self._leaf_aliases:
                self.leaves[id(tensor)] = (tensor, tensor.grad)
                self._leaf_aliases.add(alias)

    @contextlib.contextmanager
    def _thread_flag(self, name: str) -> Iterator[None]:
        before = getattr(self.thread, name)
        setattr(self.thread, name, True)
        try:
            yield
        finally:
            setattr(self.thread, name, before)

    def _is_external(self, key: int) -> bool:
        """Return whether the memory is external. A tensor that has moved since, such as a weight moved into a stacked buffer,
        leaves its address to new tensors, so its entry is removed."""
        if key in self.external and storage_key(self.external[key].tensor) != key:
            del self.external[key]
        return key in self.external

    def see(self, tensor: Tensor, place: Place, key: int | None = None) -> None:
        key = storage_key(tensor) if key is None else key
        if not key or key in self._created or key in self.inputs:
            return
        if not self._is_external(key):
            self.external[key] = ExternalTensor(tensor, place, self.calls)
        self.leaf(tensor)

    def before_write(self, tensor: Tensor, place: Place) -> None:
        key = storage_key(tensor)
        if not key or key in self._created:
            return
        if key in self.inputs:
            self.written_inputs.setdefault(self.inputs[key], place)
            return
        self.see(tensor, place)
        self.external[key].is_written = True
        if key not in self.created_before:
            self.snapshot.add(tensor)

    def _add_created(self, tensor: Tensor, op: Any, args: tuple, place: Place, arguments: Set[int]) -> None:
        """Note a result that is no view of an argument. Freed memory may be allocated again: the newest entry counts."""
        key = storage_key(tensor)
        if key and key not in arguments and key not in self.inputs and not self._is_external(key):
            self._created[key] = first_value(op, args, tensor, place, self.calls)
            self._storages[key] = StorageWeakRef(tensor.untyped_storage())

    def _hazard(self, cause: Cause) -> None:
        self.hazards.append(Hazard(here(self.origins), cause))

    def launch(self, kernel: Any, tensors: list[Tensor], launch: Callable[[], Any]) -> Any:
        """Record a kernel launch that bypasses the dispatcher. It may write any of its tensor arguments."""
        place, doubtful, ours = here(), {}, getattr(getattr(kernel, "fn", None), "__module__", "").startswith(OURS)
        with self._thread_flag("internal"):
            for position, tensor in enumerate(tensors):
                key, argument = storage_key(tensor), (id(kernel), position, len(tensors))
                if key not in self.inputs and self.thread.in_operation and not self._is_external(key):
                    self._created.setdefault(key, FirstValue(place, self.calls, empty=True))
                    self._storages[key] = StorageWeakRef(tensor.untyped_storage())
                self.see(tensor, place)
                if not key or key in self._created or key in doubtful:
                    continue
                use = self.external.get(key)  # None of an input
                if ours and use is not None and not use.is_written and key in self.weights and self._reads(key, argument):
                    continue
                weight = isinstance(tensor, nn.Parameter) or key in self.frozen
                large = tensor.untyped_storage().nbytes() > LARGE
                doubted = (weight or large) and key not in self.reads
                if key in self.inputs or (doubted and not self.external[key].is_written):
                    version = None if tensor.is_inference() or not weight else tensor._version
                    doubtful[key] = (tensor, StorageCopy(tensor, "", self.passing), argument, version)
                else:
                    self.before_write(tensor, place)
            result = launch()
            for key, (tensor, copy, argument, version) in doubtful.items():
                if copy.changed():
                    if key not in self.inputs and key not in self.created_before:
                        self.snapshot.copies.setdefault(key, copy)
                    self.before_write(tensor, place)
                    continue
                self.passing.release(copy.saved)
                if ours and version is not None:
                    self._left[argument] = tensor, version
        return result

    def _reads(self, key: int, argument: tuple[int, int, int]) -> bool:
        """Return whether a kernel of ours reads a weight as this argument. Before the first such launch all weights get
        fingerprints."""
        tensor, version = self._left.get(argument, (None, 0))
        if key not in self.reads and (tensor is None or tensor._version != version):
            return False
        if key not in self.fingerprints:
            self._take_fingerprints(self.weights.values())
        return True

    def _take_fingerprints(self, tensors: Iterable[Tensor]) -> None:
        new = {key: bytes_of(tensor) for tensor in tensors if (key := storage_key(tensor))}
        for key in [key for key in new if key in self.fingerprints or key in self.snapshot.copies]:
            del new[key]
        self.fingerprints |= dict(zip(new, zip(new.values(), fingerprints([*new.values()]))))

    def _operation(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation, and inspect its arguments before and its results after."""
        if self.thread.internal:
            return func(*args, **kwargs)
        self.origins.note(getattr(func, "_opname", "") or str(func))
        place = here()
        if func is torch.ops.aten.lift_fresh.default:  # its argument was created from host data without an operation
            self._add_created(args[0], func, args, place, set())
        arguments = tensors_in((args, kwargs))
        keys = [*map(storage_key, arguments)]  # once: a step with adapters of 30 layers has 12,000 operations
        for tensor, key in zip(arguments, keys):
            self.see(tensor, place, key)
        if changed := written(func, args, kwargs):
            with self._thread_flag("internal"):
                for tensor in changed:
                    self.before_write(tensor, place)
                    self._check_host_write(func, tensor, args)
        for value in kwargs.values():
            if isinstance(value, torch.Generator):
                self.generators.add(value)
        if (cause := cause_in_operation(func, args, kwargs, self.device, self.call)) is not None:
            self._hazard(cause)
        if func in (torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar):
            created = self._created.get(key := storage_key(args[0]))
            if created is not None and created.empty:  # filled right after empty()
                self._created[key] = FirstValue(created.place, self.calls, fill=args[1] if len(args) > 1 else 0)
        thread, before = self.thread, self.thread.in_operation
        thread.in_operation = True
        try:
            out = func(*args, **kwargs)
        finally:
            thread.in_operation = before
        known = {*map(storage_key, arguments)} if changed else {*keys}  # set_() changes its argument's storage
        for tensor in tensors_in(out):
            self._add_created(tensor, func, args, place, known)
        return out

    def _check_host_write(self, func: Any, tensor: Tensor, args: tuple) -> None:
        """Note an external CPU tensor that a GPU's function writes: a replay would not. A copy into pinned memory is a node."""
        if tensor.device.type != "cpu" or self.device.type == "cpu" or not self._is_external(storage_key(tensor)):
            return
        if func is torch.ops.aten.copy_.default and args[1].device == self.device and tensor.is_pinned():
            return
        self._hazard(HOST_WRITE)


class _Calls(TorchFunctionMode):
    """Calls of torch's Python interface."""

    def __init__(self, discovery: Discovery) -> None:
        super().__init__()
        self.discovery = discovery

    def __torch_function__(self, func, types, args=(), kwargs=None):
        discovery = self.discovery
        if discovery.thread.internal:
            return func(*args, **(kwargs or {}))
        if (cause := cause_in_call(func, args, discovery.device)) is not None:
            discovery._hazard(cause)
        outer, discovery.call = discovery.call, (func, args)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            discovery.call = outer


class _Operations(OpMode):
    """Operations below autograd, forward and backward."""

    supports_higher_order_operators = True
