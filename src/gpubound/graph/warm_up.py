"""Eager warm-up calls before a capture. They show the tensors that a function uses, and reject what no graph can hold.

The calls change the function's state. It is restored bit for bit before the capture, also after an error.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GraphError
from ..trace import notice
from ..watch.events import WAIT
from ..watch.source_line import Place
from .discover import Discovery
from .guards import StaticInputs
from .memory import Generators, Snapshot, whole
from .operations import Hazard, Origin, refuse
from .reachable import Reachable, same, storage_key
from .runner import Runner


@dataclass
class Leaf:
    """A tensor that may be given a gradient: the one it had at first, the one a capture starts from, the one a graph writes."""

    name: str
    tensor: Tensor
    old: Tensor | None
    start: Tensor | None
    bound: Tensor | None = None


class WarmUp:
    """Watched calls of one function: `perform` makes them, `settle` restores what they changed.

    `before` is what fn reached at first, `reach` what it reaches now: a first call makes moments, caches, gradients.
    """

    def __init__(
        self, name: str, fn: Callable, inputs: StaticInputs, before: Reachable, runner: Runner, device: torch.device
    ) -> None:
        self.name, self.fn, self.inputs, self.runner, self.device = name, fn, inputs, runner, device
        self.before = self.reachable = before
        self.snapshot = Snapshot(device)
        self.generators = Generators(device)
        for generator in before.generators:
            self.generators.add(generator)
        self.discovery = Discovery(device, inputs.buffers, self.snapshot, self.generators)
        for way, tensor in before.of_state:
            self._take_state(way.name, tensor)
        for _, tensor in before.tensors:
            self.discovery.leaf(tensor, certain=True)

    def call(self) -> Any:
        return self.fn(*self.inputs.static)

    def perform(self, calls: int) -> None:
        """Every call before the capture. Where copies of the state left no memory for one, they leave the device first."""
        if not self._fits(calls):
            full = "the device has no memory for fn beside copies of its state; they are moved to the host."
            notice(f"capture({self.name}): {full}")
            gc.collect()  # what the broken call held
            self._fits(calls)

    def name_of(self, tensor: Tensor) -> str:
        """Return a tensor's name for messages: its access path, else the line that uses it."""
        if (name := self.reachable.name(tensor)) is not None:
            return name
        for leaf, _ in self.discovery.leaves.values():
            if leaf.grad is not None and storage_key(leaf.grad) == storage_key(tensor):
                return f"{self.reachable.name(leaf) or 'an unnamed leaf'}.grad"
        return self.discovery.external[storage_key(tensor)].describe()

    def leaves(self) -> list[Leaf]:
        """The tensors that may be given gradients."""
        found = []
        for tensor, old in self.discovery.leaves.values():
            # Accumulated into from call to call: the capture must find it. Made anew at every call: it must not.
            kept = tensor.grad is not None and storage_key(tensor.grad) in self.discovery.external
            found.append(Leaf(f"{self.name_of(tensor)}.grad", tensor, old, tensor.grad if kept else old))
        return found

    def settle(self) -> None:
        """The state as it was. What the first call made, an optimizer's moments say, goes back to what it began as."""
        self._put_back()
        gradients = {storage_key(leaf.grad) for leaf, _ in self.discovery.leaves.values() if leaf.grad is not None}
        for key, origin in self.discovery.survivors().items():
            seen = self.discovery.external[key]
            if key in gradients:
                whole(seen.tensor).zero_()
            elif not seen.is_written:
                if self.discovery.moves(key):
                    raise self._moving(seen.tensor, origin)
                continue  # a table made once and only read
            elif origin.fill is not None:
                whole(seen.tensor).fill_(origin.fill)
            elif not origin.empty:
                if self.discovery.moves(key) or self._altered(seen.tensor):
                    raise self._moving(seen.tensor, origin)
                continue  # a table that Triton kernels read: what a kernel is given counts as written until it is tried
            self.snapshot.add(seen.tensor)
        for key, memory in self.snapshot.memories.items():
            memory.name = self.name_of(self.discovery.external[key].tensor) if key in self.discovery.external else memory.name

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Whatever is raised inside leaves the state as it was before the first call."""
        try:
            yield
        except BaseException:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the broken call's kernels still run
            self._put_back()
            for leaf, old in self.discovery.leaves.values():
                leaf.grad = old
            raise

    def _put_back(self) -> None:
        self.snapshot.restore()
        self.generators.rewind()

    def _take_state(self, name: str, tensor: Tensor) -> None:
        """A tensor given in `state=` counts as used, and unless it is a frozen weight as written: by what we cannot see."""
        self.discovery.see(tensor, Place())
        if not (isinstance(tensor, nn.Parameter) and not tensor.requires_grad):
            self.snapshot.add(tensor, name)
            if (seen := self.discovery.external.get(storage_key(tensor))) is not None:
                seen.is_written = True  # or each kernel that gets it would be tried with a copy of it

    def _fits(self, calls: int) -> bool:
        """All calls. False when there was no memory for them, but is now: copies have left the device."""
        try:
            with self.undone_on_error():
                for _ in range(calls):  # several: state that only a first call makes is to be made, used, and seen settled
                    self.runner.run(lambda: self.discovery.run(self.call))
                self._refuse()
                if found := self.runner.waits(self.call):  # on a GPU: also a wait inside an operation, that nothing showed
                    raise refuse(self.name, [Hazard(place, WAIT) for place in found])
        except torch.OutOfMemoryError:
            if not self.snapshot.leave_device():
                raise
            return False
        return True

    def _refuse(self) -> None:
        """Raise for whatever the last call showed that a graph cannot hold or repeat."""
        if self.discovery.hazards:
            raise refuse(self.name, self.discovery.hazards)
        self._refuse_changed_inputs()
        for seen in self.discovery.external.values():
            there = seen.tensor.device
            if there != self.device and there.type != "cpu":
                raise GraphError(
                    f"{self.name_of(seen.tensor)}: got a tensor on {there}, wanted {self.device}, where fn's inputs lie; "
                    "capture one graph for each device."
                )
        for way, value in self.before.constants:
            if not same(now := way.find(), value):
                raise GraphError(
                    f"{way.name}: fn changes this Python value ({value!r} became {now!r}), which a replay would not do again; "
                    "keep it in a tensor on the device and update it in place."
                )

    def _refuse_changed_inputs(self) -> None:
        """Raise if fn writes to an input: the write would reach only the graph's copy."""
        names = self.inputs.names
        for index, place in self.discovery.written_inputs.items():
            at = f" at {place.line.at}" if place.line is not None else ""
            raise GraphError(
                f"{names[index]}: fn writes into it{at}, which would reach only the graph's own copy; "
                "pass the tensor in state= and use it directly, or write into a new tensor."
            )
        for name, buffer in zip(names, self.inputs.buffers):
            if buffer.grad is not None:
                raise GraphError(
                    f"{name}: fn leaves a gradient on it, which would reach only the graph's own copy; "
                    "return torch.autograd.grad(loss, input) instead."
                )

    def _altered(self, tensor: Tensor) -> bool:
        """Return whether another call changes `tensor`, and restore the state."""
        before = whole(tensor).clone()
        self.runner.run(self.call)
        self._put_back()
        return not torch.equal(before, whole(tensor))

    def _moving(self, tensor: Tensor, origin: Origin) -> GraphError:
        line = origin.place.line
        made = f"made at {line.at}" if line is not None else "made in the backward pass"
        if self.discovery.moves(storage_key(tensor)):
            return GraphError(
                f"{self.name_of(tensor)}: {made} by one call and read by the next, so it lies elsewhere each time; "
                "make it before the capture and write into it with copy_()."
            )
        return GraphError(
            f"{self.name_of(tensor)}: {made} by the first call and updated by later ones, so what it began as is lost; "
            f"call {self.name} once yourself before capture()."
        )
