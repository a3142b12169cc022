"""What must be true at a call: its inputs are like those captured with, and all else that the graph uses is as it was.

The inputs have static buffers, and every later call is checked against them exactly.

Two kinds of change make a graph lie. A tensor moves (`.data =`, `.to()`, a resize): its address is compared at every call.
Another tensor takes its place (`layer.weight = ...`, `load_state_dict`, `zero_grad`): what fn names directly is compared at
every call; deeper places are walked when torch registers a parameter, buffer or module anywhere, and at every 256th call, which
catches what is written into a registry behind torch's back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter, getitem, is_
from typing import Any

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

    def check(self, given: Any) -> None:
        if (want := self.buffer) is None:
            self._check_constant(given)
            return
        if not isinstance(given, Tensor):
            raise self._other(repr(given), "a tensor", "pass a tensor, or capture again")
        if given.shape != want.shape:
            raise GraphError(
                f"{self.name}: got shape {tuple(given.shape)}, wanted {tuple(want.shape)} as captured; "
                "pad it to the captured shape, or capture once for each shape."
            )
        if given.dtype != want.dtype:
            raise self._other(given.dtype, want.dtype, "cast it before the call")
        if given.device != want.device:
            raise self._other(f"a tensor on {given.device}", want.device, "move it before the call")
        if given.layout != torch.strided:
            raise self._other(f"the layout {given.layout}", "dense", "pass its dense form")
        if given.numel() and given.data_ptr() == 0:
            raise GraphError(
                f"{self.name}: got a dead tensor, its memory has been freed; wanted {given.numel()} elements; pass a live one."
            )

    def _other(self, got: Any, wanted: Any, remedy: str) -> GraphError:
        return GraphError(f"{self.name}: got {got}, wanted {wanted} as captured; {remedy}.")

    def _check_constant(self, given: Any) -> None:
        if isinstance(given, Tensor):
            remedy = "pass the constant, or capture again with a tensor"
            raise self._other("a tensor", f"the constant {self.constant!r}", remedy)
        if not same(given, self.constant):
            raise GraphError(
                f"{self.name}: got the constant {given!r}, wanted {self.constant!r} as captured: constants are baked into the "
                "graph; pass it as a tensor, or capture again."
            )


class StaticInputs:
    """The static inputs of one captured function, in the nesting in which they were given."""

    def __init__(self, inputs: tuple) -> None:
        leaves, self.spec = tree_flatten_with_path(inputs)
        self.slots = [_input(_name(path), leaf) for path, leaf in leaves]
        self.flat = all(isinstance(value, Tensor) for value in inputs)
        self.buffers = [slot.buffer for slot in self.slots if slot.buffer is not None]
        self.names = [slot.name for slot in self.slots if slot.buffer is not None]  # of the buffers
        # A model or an optimizer among the inputs: what it holds is watched like the rest that fn reaches.
        self.objects = [(slot.name, slot.constant) for slot in self.slots if not isinstance(slot.constant, PRIMITIVES)]
        # Copies go into detached aliases, so that a buffer that requires grad stays a leaf.
        self._targets = [buffer.detach() for buffer in self.buffers]
        self._addresses = [buffer.data_ptr() for buffer in self.buffers]

    @property
    def static(self) -> tuple:
        """The static buffers and constants, nested like the inputs."""
        return self.fill(self.buffers)

    def fill(self, tensors: Sequence[Tensor]) -> tuple:
        """`tensors` in the nesting of the inputs, constants in their places."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if slot.buffer is not None else slot.constant for slot in self.slots], self.spec)

    def tensors(self, inputs: tuple) -> list[Tensor]:
        """The tensors among `inputs` after every leaf has been checked; GraphError says what differs from the capture."""
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
        """One copy each into the static buffers, none for a tensor that already lies there."""
        todo = [
            (target, given)
            for target, given, address in zip(self._targets, tensors, self._addresses)
            if given.data_ptr() != address or given.stride() != target.stride()
        ]
        if not todo:
            return
        with torch.no_grad():
            if len(todo) == 1:
                todo[0][0].copy_(todo[0][1])
            else:
                torch._foreach_copy_([target for target, _ in todo], [given for _, given in todo])


def _input(name: str, leaf: Any) -> Input:
    if isinstance(leaf, Tensor):
        return Input(name, static_copy(name, leaf))
    if not isinstance(leaf == leaf, bool):  # a NumPy array compares elementwise: it is data, not a constant
        raise ValueError(f"{name}: got {type(leaf).__name__}, wanted a tensor or a constant; convert it with torch.as_tensor.")
    check_open(name, leaf)
    return Input(name, None, leaf)


def check_open(name: str, leaf: Any) -> None:
    """Refuse a dataclass or a mapping with tensors, which torch's pytrees do not look into: no copy would reach them."""
    if isinstance(leaf, Mapping):
        parts = list(leaf.values())
    elif is_dataclass(leaf) and not isinstance(leaf, type):
        parts = [getattr(leaf, field.name, None) for field in fields(leaf)]
    else:
        return
    if any(isinstance(part, Tensor) for part in tree_leaves(parts)):
        raise ValueError(f"{name}: got a {type(leaf).__name__} that holds tensors, wanted them in dicts, lists or tuples.")


def static_copy(name: str, given: Tensor) -> Tensor:
    """A buffer of the graph's own like `given`, with its strides where they are dense."""
    if given.layout != torch.strided:
        raise ValueError(f"{name}: got the layout {given.layout}, wanted dense; pass its dense parts as inputs.")
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be written by later calls
        buffer = torch.empty_like(given, memory_format=torch.preserve_format, requires_grad=False)
        buffer.copy_(given.detach())
    return buffer.requires_grad_(given.requires_grad)


def _name(path: tuple) -> str:
    """'input 0' or "input 1['ids'][2]": the position, then the way inside it."""
    return f"input {path[0].idx}{keystr(path[1:])}"


def _shape_of(value: Any) -> str:
    """The nesting in words: (tensor, {'ids': tensor, 'scale': float}). A dict, tuple or list of another class is named."""
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
DIRECT = 32  # places compared at every call, beside the addresses of all tensors
GRADIENTS = 8  # zero_grad(set_to_none=True) drops all of them together

_gradient = attrgetter("grad")


@cache
def _registrations() -> list[int]:
    """How many parameters, buffers and modules this process has registered since the first capture: one number, counted up."""
    total = [0]

    def registered(module: torch.nn.Module, name: str, value: Any) -> None:
        total[0] += 1

    nn_module.register_module_parameter_registration_hook(registered)
    nn_module.register_module_buffer_registration_hook(registered)
    nn_module.register_module_module_registration_hook(registered)
    return total


class CaptureGuards:
    """Checked before every replay. `held` are the tensors with their names, `reach` tells how fn comes to them.

    `plain` are the Python values that fn names directly and does not change itself, `gradients` those that the graph writes.
    """

    def __init__(
        self, held: list[tuple[str, Tensor]], reachable: Reachable, plain: Values, gradients: list[tuple[str, Tensor, Tensor]]
    ) -> None:
        self._registered, self._calls = _registrations(), 0
        self.names = [name for name, _ in held]
        self._tensors = [tensor for _, tensor in held]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._same_addresses = address_check(self._tensors, self._addresses)
        # An alias of each keeps the old memory alive after `.data =`: a stale graph must never write into someone else's.
        self._alive = [tensor.detach() for tensor in self._tensors]
        mine = {id(tensor) for tensor in self._tensors}
        self._places = [(way, tensor) for way, tensor in reachable.tensors if id(tensor) in mine]
        self._gradients = gradients
        steady, loose = {way.name for way, _ in plain}, {way.name for way, _ in reachable.plain}
        self._root_ways = [way for way in reachable.roots if way.name in steady or way.name not in loose]
        self._optimizers = reachable.optimizers
        self._values = reachable.constants + reachable.modes + plain
        on_gpu = any(tensor.is_cuda for tensor in self._tensors)
        # Pinned memory is read, or written, by a node of the graph at every replay; other CPU tensors were read once.
        baked = [(name, t) for name, t in held if on_gpu and t.device.type == "cpu" and not t.is_pinned()]
        self._versions = [(name, tensor, tensor._version) for name, tensor in baked if not tensor.is_inference()]
        self._prepare()

    def check(self) -> None:
        """Raise GraphError for the first thing that is no longer as captured."""
        self._calls += 1
        if not self._same_addresses():
            self._name_the_moved()
        if self._seen != self._registered[0] or self._calls % WALK_EVERY == 0 or not self._stands():
            self._walk()
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise GraphError(
                    f"{name}: got a CPU tensor written after capture, wanted its captured value: the graph has baked it in; "
                    "keep it on the GPU, or call captured.recapture()."
                )

    def _prepare(self) -> None:
        """The places and values compared at every call, as flat lists: a loop in C over (container, key) pairs is cheap."""
        ways = [way for way, _ in self._places if not way.in_registry][:DIRECT]
        ways += [way for way, _ in self._values if len(way.steps) == 1 or ("attribute", "param_groups") in way.steps]
        slots = [slot for way in ways if (slot := way.slot())]
        slots += [(vars(optimizer), part) for optimizer in self._optimizers for part in ("state", "param_groups")]
        self._slots = ([c for c, _ in slots], [k for _, k in slots], [c[k] for c, k in slots])
        few = self._gradients[:GRADIENTS]
        self._few = ([leaf for _, leaf, _ in few], [gradient for _, _, gradient in few])
        self._roots = [(way.root, way.find()) for way in self._root_ways]
        self._seen = self._registered[0]

    def _stands(self) -> bool:
        """Whether everything compared at every call is the same object still; the walk then sees whether another is as good."""
        containers, keys, wanted = self._slots
        leaves, gradients = self._few
        try:
            kept = all(map(is_, map(getitem, containers, keys), wanted)) and all(map(is_, map(_gradient, leaves), gradients))
            return kept and all(root() is node for root, node in self._roots)
        except (KeyError, IndexError, ValueError):  # something was deleted: the walk names it
            return False

    def _walk(self) -> None:
        """Go every way again, and name what stands there instead."""
        for name, leaf, gradient in self._gradients:
            if leaf.grad is not gradient:
                raise GraphError(
                    f"{name}: got another gradient (or None) in its place, wanted the one that the graph writes; "
                    "zero it inside the captured function, or with zero_grad(set_to_none=False)."
                )
        for way, tensor in self._places:
            if (now := way.find()) is not tensor:
                nothing = now is MISSING or now is None
                got = "another tensor" if isinstance(now, Tensor) else "nothing" if nothing else "another object"
                raise GraphError(
                    f"{way.name}: got {got} in its place, wanted the one that was captured: the graph still uses the old; "
                    "write into it with copy_(), or call captured.recapture()."
                )
        for way, value in self._values:
            if not same(now := way.find(), value):
                got = "a tensor" if isinstance(now, Tensor) else "nothing" if now is MISSING else repr(now)
                raise GraphError(
                    f"{way.name}: got {got}, wanted {value!r} as captured: a Python value is baked into the graph; "
                    "make it a tensor on the device and write it with fill_(), or call captured.recapture()."
                )
        self._prepare()

    def _name_the_moved(self) -> None:
        for name, tensor, address in zip(self.names, self._tensors, self._addresses):
            if (now := tensor.data_ptr()) == address:
                continue
            if now == 0:
                raise GraphError(
                    f"{name}: got freed memory, wanted the tensor that was captured: the graph would read whatever lies there "
                    "now; load it again, then call captured.recapture()."
                )
            raise GraphError(
                f"{name}: got other memory than captured (`.data =`, `.to()` and resharding move a tensor), wanted the same: "
                "the graph still reads the old; write in place with copy_(), or call captured.recapture()."
            )


def address_check(tensors: list[Tensor], addresses: list[int]) -> Callable[[], bool]:
    """A function that says whether every tensor still lies at its address, as fast as this build of torch allows.

    CUDA builds have a loop in C++ for their own graphs. It is used when it answers right here; else a loop over `data_ptr`.
    """
    native = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    indices = list(range(len(tensors)))
    if native is not None and tensors:
        wrong = [*addresses[:-1], addresses[-1] + 1]
        if native(tensors, addresses, indices) is True and native(tensors, wrong, indices) is False:
            return lambda: native(tensors, addresses, indices)
    data_ptr = Tensor.data_ptr
    return lambda: list(map(data_ptr, tensors)) == addresses
