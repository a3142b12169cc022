"""The inputs of a captured function: their static buffers, and the exact check of every later call against them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from ..errors import GraphError


@dataclass(frozen=True)
class Input:
    """One leaf of the inputs: a tensor with a static buffer, or a constant that the graph has baked in."""

    name: str
    buffer: Tensor | None
    constant: Any = None

    def check(self, given: Any) -> None:
        if self.buffer is None:
            self._check_constant(given)
            return
        want = self.buffer
        if not isinstance(given, Tensor):
            raise GraphError(f"{self.name}: got {given!r}, wanted a tensor as captured; pass a tensor, or capture again.")
        if given.shape != want.shape:
            raise GraphError(
                f"{self.name}: got shape {tuple(given.shape)}, wanted {tuple(want.shape)} as captured; "
                "pad it to the captured shape, or capture once for each shape."
            )
        if given.dtype != want.dtype:
            raise GraphError(f"{self.name}: got {given.dtype}, wanted {want.dtype} as captured; cast it before the call.")
        if given.device != want.device:
            raise GraphError(
                f"{self.name}: got a tensor on {given.device}, wanted {want.device} as captured; move it before the call."
            )
        if given.numel() and given.data_ptr() == 0:
            raise GraphError(
                f"{self.name}: got a dead tensor, its memory has been freed; wanted {given.numel()} elements; pass a live one."
            )

    def _check_constant(self, given: Any) -> None:
        if isinstance(given, Tensor):
            raise GraphError(
                f"{self.name}: got a tensor, wanted the constant {self.constant!r} as captured; "
                "pass the constant, or capture again with a tensor."
            )
        if type(given) is not type(self.constant) or (given is not self.constant and given != self.constant):
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
    return Input(name, None, leaf)


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
    """The nesting in words: (tensor, {'ids': tensor, 'scale': float})."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_shape_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(_shape_of, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return type(value).__name__
