"""Static inputs, and the guards of a captured graph: conditions that are checked at every call.

The inputs have static buffers, and every later call is checked against them exactly.

Two kinds of change make a replay wrong. A tensor moves (`.data =`, `.to()`, a resize): its address is compared at every call.
Another tensor replaces it (`layer.weight = ...`, `load_state_dict`, `zero_grad`): what fn names directly is compared at every
call. Deeper paths are walked when torch registers a parameter, buffer or module anywhere, and at every 256th call, which also
sees a direct write into a registry, of which torch has no hook.

Objects with memory of their model, such as a decoder or a step, take one caller at a time, and no copies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter, getitem, is_
from threading import Lock
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from ..errors import GraphError
from .reachable import MISSING, PRIMITIVES, Reachable, Values, same


@dataclass(frozen=True)
class Input:
    """One leaf of the inputs: a tensor with a static buffer, or a constant that the graph has baked in."""

    name: str
    buffer: Tensor | None
    constant: Any = None

    def check(self, value: Any) -> None:
        if (want := self.buffer) is None:
            if isinstance(value, Tensor):
                remedy = "pass the constant, or capture again with a tensor"
                raise self._error("a tensor", f"the constant {self.constant!r}", remedy)
            if not same(value, self.constant):
                raise GraphError(
                    f"{self.name}: got the constant {value!r}, wanted {self.constant!r} as captured: constants are baked into "
                    "the graph; pass it as a tensor, or capture again."
                )
            return
        if not isinstance(value, Tensor):
            raise self._error(repr(value), "a tensor", "pass a tensor, or capture again")
        if value.shape != want.shape:
            raise GraphError(
                f"{self.name}: got shape {tuple(value.shape)}, wanted {tuple(want.shape)} as captured; "
                "pad it to the captured shape, or capture once for each shape."
            )
        if value.dtype != want.dtype:
            raise self._error(value.dtype, want.dtype, "cast it before the call")
        if value.device != want.device:
            raise self._error(f"a tensor on {value.device}", want.device, "move it before the call")
        if value.layout != torch.strided:
            raise self._error(f"the layout {value.layout}", "dense", "pass its dense form")
        if value.numel() and value.data_ptr() == 0:
            raise GraphError(
                f"{self.name}: got a dead tensor, its memory has been freed; wanted {value.numel()} elements; pass a live one."
            )

    def _error(self, got: Any, wanted: Any, remedy: str) -> GraphError:
        return GraphError(f"{self.name}: got {got}, wanted {wanted} as captured; {remedy}.")


class StaticInputs:
    """Static inputs of a captured function, in the nesting of its arguments."""

    def __init__(self, inputs: tuple) -> None:
        leaves, self.spec = tree_flatten_with_path(inputs)
        self.slots = [_input(_name(path), leaf) for path, leaf in leaves]
        self.flat = all(isinstance(value, Tensor) for value in inputs)
        self.buffers = [slot.buffer for slot in self.slots if slot.buffer is not None]
        self.names = [slot.name for slot in self.slots if slot.buffer is not None]  # of the buffers
        # Tensors inside a model or an optimizer among the inputs are guarded like all others that fn reaches.
        self.objects = [(slot.name, slot.constant) for slot in self.slots if not isinstance(slot.constant, PRIMITIVES)]
        # Copies go into detached aliases, so that a buffer that requires grad stays a leaf.
        self._targets = [buffer.detach() for buffer in self.buffers]
        self._addresses = [buffer.data_ptr() for buffer in self.buffers]

    @property
    def static(self) -> tuple:
        """The static buffers and constants, nested like the inputs."""
        return self.fill(self.buffers)

    def fill(self, tensors: Sequence[Tensor]) -> tuple:
        """Return `tensors` and the constants in the nesting of the inputs."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if slot.buffer is not None else slot.constant for slot in self.slots], self.spec)

    def tensors(self, inputs: tuple) -> list[Tensor]:
        """Return the tensors among `inputs`; raise GraphError for a leaf that differs from the capture."""
        if self.flat and len(inputs) == len(self.slots):
            leaves: Sequence[Any] = inputs
        else:
            leaves, spec = tree_flatten(inputs)
            if spec != self.spec:
                raise GraphError(
                    f"inputs: got {_shape_of(inputs)}, wanted {_shape_of(self.static)} as captured; "
                    "pass the same nesting, or capture again."
                )
        for slot, leaf in zip(self.slots, leaves):
            slot.check(leaf)
        return [leaf for slot, leaf in zip(self.slots, leaves) if slot.buffer is not None]

    def copy_in(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the static buffers, except those that are the buffers."""
        copies = [
            (target, tensor)
            for target, tensor, address in zip(self._targets, tensors, self._addresses)
            if tensor.data_ptr() != address or tensor.stride() != target.stride()
        ]
        if not copies:
            return
        with torch.no_grad():
            if len(copies) == 1:
                copies[0][0].copy_(copies[0][1])
            else:
                torch._foreach_copy_([target for target, _ in copies], [tensor for _, tensor in copies])


def _input(name: str, leaf: Any) -> Input:
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided:
            raise ValueError(f"{name}: got the layout {leaf.layout}, wanted dense; pass its dense parts as inputs.")
        with torch.inference_mode(False), torch.no_grad():  # later calls could not write to an inference tensor
            buffer = torch.empty_like(leaf, memory_format=torch.preserve_format, requires_grad=False)
            buffer.copy_(leaf.detach())
        return Input(name, buffer.requires_grad_(leaf.requires_grad))
    if not isinstance(leaf == leaf, bool):  # a NumPy array compares elementwise: it is data, not a constant
        raise ValueError(f"{name}: got {type(leaf).__name__}, wanted a tensor or a constant; convert it with torch.as_tensor.")
    check_open(name, leaf)
    return Input(name, None, leaf)


def check_open(name: str, leaf: Any) -> None:
    """Refuse a dataclass or a mapping with tensors: torch's pytrees do not traverse it, so its tensors would not be copied."""
    if isinstance(leaf, Mapping):
        parts = list(leaf.values())
    elif is_dataclass(leaf) and not isinstance(leaf, type):
        parts = [getattr(leaf, field.name, None) for field in fields(leaf)]
    else:
        return
    if any(isinstance(part, Tensor) for part in tree_leaves(parts)):
        raise ValueError(f"{name}: got a {type(leaf).__name__} that holds tensors, wanted them in dicts, lists or tuples.")


def _name(path: tuple) -> str:
    """Return 'input 0' or "input 1['ids'][2]": the position, then the path inside it."""
    return f"input {path[0].idx}{keystr(path[1:])}"


def _shape_of(value: Any) -> str:
    """Describe the nesting: (tensor, {'ids': tensor, 'scale': float}). A subclass of dict, tuple or list is named."""
    if isinstance(value, Tensor):
        return "tensor"
    kind = type(value).__name__
    name = "" if type(value) in (dict, tuple, list) else kind
    if isinstance(value, dict):
        return name + "{" + ", ".join(f"{key!r}: {_shape_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(_shape_of, value))
        return f"{name}[{inside}]" if isinstance(value, list) else f"{name}({inside})"
    return kind


WALK_EVERY = 256
MAX_PATHS = 32  # compared at every call, in addition to the addresses of all tensors
MAX_GRADIENTS = 8  # compared at every call: zero_grad(set_to_none=True) drops all of them together

_gradient = attrgetter("grad")


@cache
def _registrations() -> list[int]:
    """Return the count, kept up to date by hooks, of the parameters, buffers and modules registered since the first capture."""
    total = [0]

    def registered(module: torch.nn.Module, name: str, value: Any) -> None:
        total[0] += 1

    nn_module.register_module_parameter_registration_hook(registered)
    nn_module.register_module_buffer_registration_hook(registered)
    nn_module.register_module_module_registration_hook(registered)
    return total


class CaptureGuards:
    """Guards checked before every replay.

    tensors    the tensors that the graph uses, with their names
    reachable  the paths on which fn reaches them
    plain      Python values that fn names directly and does not change
    gradients  (name, leaf, gradient) of those that the graph writes
    """

    def __init__(
        self,
        tensors: list[tuple[str, Tensor]],
        reachable: Reachable,
        plain: Values,
        gradients: list[tuple[str, Tensor, Tensor]],
    ) -> None:
        self._registered, self._calls = _registrations(), 0
        self.names = [name for name, _ in tensors]
        self._tensors = [tensor for _, tensor in tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._same_addresses = address_check(self._tensors, self._addresses)
        # Aliases keep the old memory alive after `.data =`: a stale graph must not write into memory allocated to others.
        self._aliases = [tensor.detach() for tensor in self._tensors]
        ids = {id(tensor) for tensor in self._tensors}
        self._paths = [(path, tensor) for path, tensor in reachable.tensors if id(tensor) in ids]
        self._gradients = gradients
        steady, all_plain = {path.name for path, _ in plain}, {path.name for path, _ in reachable.plain}
        self._root_paths = [path for path in reachable.roots if path.name in steady or path.name not in all_plain]
        self._optimizers = reachable.optimizers
        self._values = reachable.constants + reachable.modes + plain
        on_gpu = any(tensor.is_cuda for tensor in self._tensors)
        # A node of the graph reads or writes pinned memory at every replay; other CPU tensors were read once.
        baked = [(name, t) for name, t in tensors if on_gpu and t.device.type == "cpu" and not t.is_pinned()]
        self._versions = [(name, tensor, tensor._version) for name, tensor in baked if not tensor.is_inference()]
        self._prepare()

    def check(self) -> None:
        """Raise GraphError for the first condition that no longer holds."""
        self._calls += 1
        if not self._same_addresses():
            self._raise_for_moved()
        if self._last_registered != self._registered[0] or self._calls % WALK_EVERY == 0 or not self._unchanged():
            self._walk()
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise GraphError(
                    f"{name}: got a CPU tensor written after capture, wanted its captured value: the graph has baked it in; "
                    "keep it on the GPU, or call captured.recapture()."
                )

    def _prepare(self) -> None:
        """Collect the objects compared at every call in flat lists of containers and keys, for a loop in C."""
        paths = [path for path, _ in self._paths if not path.in_registry][:MAX_PATHS]
        paths += [path for path, _ in self._values if len(path.steps) == 1 or ("attribute", "param_groups") in path.steps]
        slots = [slot for path in paths if (slot := path.slot())]
        slots += [(vars(optimizer), part) for optimizer in self._optimizers for part in ("state", "param_groups")]
        self._slots = ([c for c, _ in slots], [k for _, k in slots], [c[k] for c, k in slots])
        first = self._gradients[:MAX_GRADIENTS]
        self._leaves = ([leaf for _, leaf, _ in first], [gradient for _, _, gradient in first])
        self._roots = [(path.root, path.find()) for path in self._root_paths]
        self._last_registered = self._registered[0]

    def _unchanged(self) -> bool:
        """Return whether everything compared at every call is the same object; if not, the walk compares values."""
        containers, keys, wanted = self._slots
        leaves, gradients = self._leaves
        try:
            if not all(map(is_, map(getitem, containers, keys), wanted)):
                return False
            return all(map(is_, map(_gradient, leaves), gradients)) and all(root() is node for root, node in self._roots)
        except (KeyError, IndexError, ValueError):  # an object was deleted: the walk names it
            return False

    def _walk(self) -> None:
        """Follow every path again, and raise GraphError for another object at its end."""
        for name, leaf, gradient in self._gradients:
            if leaf.grad is not gradient:
                raise GraphError(
                    f"{name}: got another gradient (or None) in its place, wanted the one that the graph writes; "
                    "zero it inside the captured function, or with zero_grad(set_to_none=False)."
                )
        for path, tensor in self._paths:
            if (now := path.find()) is not tensor:
                got = "another tensor" if isinstance(now, Tensor) else "another object"
                got = "nothing" if now is MISSING or now is None else got
                raise GraphError(
                    f"{path.name}: got {got} in its place, wanted the one that was captured: the graph still uses the old; "
                    "write into it with copy_(), or call captured.recapture()."
                )
        for path, value in self._values:
            if not same(now := path.find(), value):
                got = "a tensor" if isinstance(now, Tensor) else "nothing" if now is MISSING else repr(now)
                raise GraphError(
                    f"{path.name}: got {got}, wanted {value!r} as captured: a Python value is baked into the graph; "
                    "make it a tensor on the device and write it with fill_(), or call captured.recapture()."
                )
        self._prepare()

    def _raise_for_moved(self) -> None:
        for name, tensor, address in zip(self.names, self._tensors, self._addresses):
            if (now := tensor.data_ptr()) == address:
                continue
            if now == 0:
                raise GraphError(
                    f"{name}: got freed memory, wanted the tensor that was captured: the graph would read other data there; "
                    "load it again, then call captured.recapture()."
                )
            raise GraphError(
                f"{name}: got other memory than captured (`.data =`, `.to()` and resharding move a tensor), wanted the same: "
                "the graph still reads the old; write in place with copy_(), or call captured.recapture()."
            )


def address_check(tensors: list[Tensor], addresses: list[int]) -> Callable[[], bool]:
    """Return a function that compares every tensor's address, the fastest that this build of torch has.

    CUDA builds have a loop in C++ for their own graphs. It is used if it answers correctly here; else a loop over `data_ptr`.
    """
    native = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    indices = list(range(len(tensors)))
    if native is not None and tensors:
        wrong = [*addresses[:-1], addresses[-1] + 1]
        if native(tensors, addresses, indices) is True and native(tensors, wrong, indices) is False:
            return lambda: native(tensors, addresses, indices)
    data_ptr = Tensor.data_ptr
    return lambda: list(map(data_ptr, tensors)) == addresses


class ReentryGuard:
    """Context manager that raises `busy` when another caller is inside, in this thread or another.

    A generator may enter it in one thread and leave it in another.
    """

    def __init__(self, busy: type[Exception], sentence: str) -> None:
        self._lock, self._busy, self._sentence = Lock(), busy, sentence

    @property
    def taken(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise self._busy(self._sentence)

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


class NotCopyable:
    """Base of objects with addresses and graphs, which a copy would share. `INSTEAD` is the advice of the error."""

    INSTEAD: str

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # which copy, deepcopy, pickle and torch.save ask for
        raise TypeError(
            f"{type(self).__name__}: it reads its model's own memory, so it can be neither copied nor pickled; {self.INSTEAD}."
        )
