"""Discovery of a function's reads, its writes and its operations that no graph can hold, by watching eager calls.

Operations pass through a dispatch mode, which autograd carries into its own threads. Python's own reads (`tolist`, `numpy`)
pass through a function mode. Triton kernels and kernels compiled at run time pass through neither, so their launches are
patched while a call is watched. An extension's launches are not intercepted: tensors that they use must be named in `state=`.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..watch.events import Cause
from ..watch.ops import OpMode
from ..watch.source_line import Origins, Place, here
from .memory import Generators, Memory, Snapshot
from .operations import (
    HOST_WRITE,
    Hazard,
    Origin,
    began,
    patched,
    tensors_in,
    written,
    wrong_with_call,
    wrong_with_operation,
)
from .reachable import storage_key

# A kernel may write all its tensor arguments. Weights and anything larger than this count as written when their bytes change.
LARGE = 256 << 20


@dataclass
class Seen:
    """A tensor from outside that the function uses, where it was first read, and whether it was written."""

    tensor: Tensor
    read: Place
    call: int  # in which watched call, counted from 1
    is_written: bool = False

    def describe(self) -> str:
        kind = f"the {str(self.tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(self.tensor.shape)}"
        line = self.read.line
        return f"{kind} used at {line.at}" if line is not None else f"{kind} used in the backward pass"


class _Midst(threading.local):
    """State of this thread: the kind of work in progress."""

    ourselves = False  # our own work, and the inside of a launch, are not the function's
    operation = False  # what an operation (a custom op, say) allocates within itself is not seen: unknown tensors are its own


class Discovery:
    """Results of the watched calls of one function. A tensor is copied into `snapshot` before its first write."""

    def __init__(self, device: torch.device, inputs: list[Tensor], snapshot: Snapshot, generators: Generators) -> None:
        self.device, self.snapshot, self.generators = device, snapshot, generators
        self.inputs = {storage_key(tensor): index for index, tensor in enumerate(inputs)}
        self.external: dict[int, Seen] = {}
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}  # those that want gradients, with the one they had at first
        self._spots: set[tuple] = set()
        self.calls = 0
        self.written_inputs: dict[int, Place] = {}
        self.hazards: list[Hazard] = []
        self.made_before: dict[int, Origin] = {}
        self._made: dict[int, Origin] = {}
        self.origins = Origins()
        self.midst = _Midst()
        self.call: tuple = (None, ())  # the Python call that the current operation belongs to

    def run(self, call: Callable[[], Any]) -> Any:
        """Watch one call. Tensors that earlier calls made and this call uses count as external: see `survivors`."""
        self.calls += 1
        self.made_before.update(self._made)
        self.hazards, self._made = [], {}
        try:
            with _without_compiler(), patched(self.launch), _Calls(self), _Operations(self._operation):
                return call()
        finally:
            for key in [*self.external]:
                self._outside(key)

    def survivors(self) -> dict[int, Origin]:
        """Return tensors that an earlier call made and a later call used, with their first values."""
        return {key: self.made_before[key] for key in self.external if key in self.made_before}

    def moves(self, key: int) -> bool:
        """Return whether a call after the first made the tensor and the next call read it. The first may make tables."""
        made, seen = self.made_before[key].call, self.external[key].call
        return made > 1 and seen == made + 1

    def leaf(self, tensor: Tensor, certain: bool = False) -> None:
        """Note a tensor that may be given a gradient. One from the backward pass may be an alias of one noted before."""
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self.leaves:
            spot = (tensor.data_ptr(), tensor.shape)
            if certain or spot not in self._spots:
                self.leaves[id(tensor)] = (tensor, tensor.grad)
                self._spots.add(spot)

    @contextlib.contextmanager
    def in_the_midst(self, what: str) -> Iterator[None]:
        """Mark that this thread is in our own work, or inside an operation: see `_Midst`."""
        before = getattr(self.midst, what)
        setattr(self.midst, what, True)
        try:
            yield
        finally:
            setattr(self.midst, what, before)

    def _outside(self, key: int) -> bool:
        """Return whether the memory is external. A tensor that was moved since, such as a weight moved into a stacked buffer,
        frees its old address for new tensors: the old entry is removed here."""
        if key in self.external and storage_key(self.external[key].tensor) != key:
            del self.external[key]
        return key in self.external

    def see(self, tensor: Tensor, place: Place) -> None:
        key = storage_key(tensor)
        if not key or key in self._made or key in self.inputs:
            return
        if not self._outside(key):
            self.external[key] = Seen(tensor, place, self.calls)
        self.leaf(tensor)

    def before_write(self, tensor: Tensor, place: Place) -> None:
        key = storage_key(tensor)
        if not key or key in self._made:
            return
        if key in self.inputs:
            self.written_inputs.setdefault(self.inputs[key], place)
            return
        self.see(tensor, place)
        self.external[key].is_written = True
        if key not in self.made_before:
            self.snapshot.add(tensor)

    def made(self, tensor: Tensor, op: Any, args: tuple, place: Place, given: set[int]) -> None:
        """Note a result that is no view of an argument. Freed memory may be taken again: the newest origin counts."""
        key = storage_key(tensor)
        if key and key not in given and key not in self.inputs and not self._outside(key):
            self._made[key] = began(op, args, tensor, place, self.calls)

    def refill(self, tensor: Tensor, value: Any) -> None:
        """`zero_()` or `fill_(value)` right after `empty()` is a filled tensor."""
        key = storage_key(tensor)
        if (made := self._made.get(key)) is not None and made.empty:
            self._made[key] = Origin(made.place, self.calls, fill=value)

    def hazard(self, cause: Cause) -> None:
        self.hazards.append(Hazard(here(self.origins), cause))

    def launch(self, tensors: list[Tensor], launch: Callable[[], Any]) -> Any:
        """Record a kernel launch that bypasses the dispatcher. It may write any of its tensor arguments."""
        place, doubtful = here(), {}
        with self.in_the_midst("ourselves"):
            for tensor in tensors:
                key = storage_key(tensor)
                if key not in self.inputs and self.midst.operation and not self._outside(key):
                    self._made.setdefault(key, Origin(place, self.calls, empty=True))
                self.see(tensor, place)
                if not key or key in self._made or key in doubtful:
                    continue
                weight = isinstance(tensor, nn.Parameter) or tensor.untyped_storage().nbytes() > LARGE
                if key in self.inputs or (weight and not self.external[key].is_written):
                    doubtful[key] = (tensor, Memory(tensor, "", self.snapshot.room))
                else:
                    self.before_write(tensor, place)
            result = launch()
            for key, (tensor, memory) in doubtful.items():
                if memory.changed():
                    if key not in self.inputs and key not in self.made_before:
                        self.snapshot.memories.setdefault(key, memory)
                    self.before_write(tensor, place)
                else:
                    self.snapshot.room.give_back(memory.kept)
        return result

    def _operation(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation, and inspect its arguments before and its results after."""
        if self.midst.ourselves:
            return func(*args, **kwargs)
        self.origins.note(getattr(func, "_opname", "") or str(func))
        place = here()
        if func is torch.ops.aten.lift_fresh.default:  # made from host data out of our sight just now
            self.made(args[0], func, args, place, set())
        given = tensors_in((args, kwargs))
        for tensor in given:
            self.see(tensor, place)
        if changed := written(func, args, kwargs):
            with self.in_the_midst("ourselves"):
                for tensor in changed:
                    self.before_write(tensor, place)
                    self._check_host_write(func, tensor, args)
        for value in kwargs.values():
            if isinstance(value, torch.Generator):
                self.generators.add(value)
        if (cause := wrong_with_operation(func, args, kwargs, self.device, self.call)) is not None:
            self.hazard(cause)
        if func in (torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar):
            self.refill(args[0], args[1] if len(args) > 1 else 0)
        with self.in_the_midst("operation"):
            out = func(*args, **kwargs)
        keys = {storage_key(tensor) for tensor in given}  # what set_() was given lies elsewhere now
        for tensor in tensors_in(out):
            self.made(tensor, func, args, place, keys)
        return out

    def _check_host_write(self, func: Any, tensor: Tensor, args: tuple) -> None:
        """A CPU tensor from outside that a GPU's function writes: the graph would not. A copy into pinned memory is a node."""
        if tensor.device.type != "cpu" or self.device.type == "cpu" or not self._outside(storage_key(tensor)):
            return
        if func is torch.ops.aten.copy_.default and args[1].device == self.device and tensor.is_pinned():
            return
        self.hazard(HOST_WRITE)


def _without_compiler() -> contextlib.AbstractContextManager:
    """A compiled function runs its plain form while watched: a compiler refuses to work under our modes."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


class _Calls(TorchFunctionMode):
    """Calls of torch's Python interface."""

    def __init__(self, discovery: Discovery) -> None:
        super().__init__()
        self.discovery = discovery

    def __torch_function__(self, func, types, args=(), kwargs=None):
        discovery = self.discovery
        if discovery.midst.ourselves:
            return func(*args, **(kwargs or {}))
        if (cause := wrong_with_call(func, args, discovery.device)) is not None:
            discovery.hazard(cause)
        outer, discovery.call = discovery.call, (func, args)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            discovery.call = outer


class _Operations(OpMode):
    """Operations below autograd, forward and backward."""

    supports_higher_order_operators = True
