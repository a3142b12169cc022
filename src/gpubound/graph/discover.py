"""Discovery of a function's reads, its writes and its operations that no graph can hold, by watching eager calls.

Operations pass through a dispatch mode, which autograd carries into its own threads. Python's own reads (`tolist`, `numpy`)
pass through a function mode. Triton kernels and kernels compiled at run time pass through neither, so their launches are
patched while a call is watched. An extension's launches are not intercepted: tensors that they use must be named in `state=`.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..watch.events import Cause
from ..watch.ops import OpMode
from ..watch.source_line import Origins, Place, here
from .memory import CopyBudget, Generators, Snapshot, StorageCopy
from .operations import (
    HOST_WRITE,
    FirstValue,
    Hazard,
    cause_in_call,
    cause_in_operation,
    first_value,
    launches_passed_to,
    tensors_in,
    written,
)
from .reachable import storage_key

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

    frozen  keys of the storages in which frozen weights are
    """

    def __init__(
        self,
        device: torch.device,
        inputs: list[Tensor],
        snapshot: Snapshot,
        generators: Generators,
        frozen: Set[int] = frozenset(),
    ) -> None:
        self.device, self.snapshot, self.generators, self.frozen = device, snapshot, generators, frozen
        self.passing = CopyBudget(device, passing=True)
        self.inputs = {storage_key(tensor): index for index, tensor in enumerate(inputs)}
        self.external: dict[int, ExternalTensor] = {}
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}  # each tensor that requires a gradient, with its first one
        self._leaf_aliases: set[tuple] = set()
        self.calls = 0
        self.written_inputs: dict[int, Place] = {}
        self.hazards: list[Hazard] = []
        self.created_before: dict[int, FirstValue] = {}  # by earlier calls
        self._created: dict[int, FirstValue] = {}
        self.origins = Origins()
        self.thread = _ThreadState()
        self.call: tuple = (None, ())  # the Python call that the current operation belongs to

    def run(self, call: Callable[[], Any]) -> Any:
        """Watch one call. Tensors that earlier calls created and this call uses count as external: see `survivors`."""
        self.calls += 1
        self.created_before.update(self._created)
        self.hazards, self._created = [], {}
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

    def see(self, tensor: Tensor, place: Place) -> None:
        key = storage_key(tensor)
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

    def _add_created(self, tensor: Tensor, op: Any, args: tuple, place: Place, arguments: set[int]) -> None:
        """Note a result that is no view of an argument. Freed memory may be allocated again: the newest entry counts."""
        key = storage_key(tensor)
        if key and key not in arguments and key not in self.inputs and not self._is_external(key):
            self._created[key] = first_value(op, args, tensor, place, self.calls)

    def _hazard(self, cause: Cause) -> None:
        self.hazards.append(Hazard(here(self.origins), cause))

    def launch(self, tensors: list[Tensor], launch: Callable[[], Any]) -> Any:
        """Record a kernel launch that bypasses the dispatcher. It may write any of its tensor arguments."""
        place, doubtful = here(), {}
        with self._thread_flag("internal"):
            for tensor in tensors:
                key = storage_key(tensor)
                if key not in self.inputs and self.thread.in_operation and not self._is_external(key):
                    self._created.setdefault(key, FirstValue(place, self.calls, empty=True))
                self.see(tensor, place)
                if not key or key in self._created or key in doubtful:
                    continue
                weight = isinstance(tensor, nn.Parameter) or key in self.frozen or tensor.untyped_storage().nbytes() > LARGE
                if key in self.inputs or (weight and not self.external[key].is_written):
                    doubtful[key] = (tensor, StorageCopy(tensor, "", self.passing))
                else:
                    self.before_write(tensor, place)
            result = launch()
            for key, (tensor, copy) in doubtful.items():
                if copy.changed():
                    if key not in self.inputs and key not in self.created_before:
                        self.snapshot.copies.setdefault(key, copy)
                    self.before_write(tensor, place)
                else:
                    self.passing.release(copy.saved)
        return result

    def _operation(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation, and inspect its arguments before and its results after."""
        if self.thread.internal:
            return func(*args, **kwargs)
        self.origins.note(getattr(func, "_opname", "") or str(func))
        place = here()
        if func is torch.ops.aten.lift_fresh.default:  # its argument was created from host data without an operation
            self._add_created(args[0], func, args, place, set())
        arguments = tensors_in((args, kwargs))
        for tensor in arguments:
            self.see(tensor, place)
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
        with self._thread_flag("in_operation"):
            out = func(*args, **kwargs)
        keys = {storage_key(tensor) for tensor in arguments}  # after the call: set_() changes its argument's storage
        for tensor in tensors_in(out):
            self._add_created(tensor, func, args, place, keys)
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
