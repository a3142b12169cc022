"""From a function to a graph: watch it, refuse what no graph can hold, put the state back, capture, put it back again."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GraphError
from ..trace import notice
from ..watch.site import Place
from . import explain
from .discover import Watch
from .held import Held, same
from .inputs import StaticInputs
from .memory import Generators, Snapshot, allocating_in, whole
from .poison import fill_results, scribble
from .reach import Found, Reach, Way, storage_key
from .runner import runner_for


class Preparation:
    """One capture under way, and what it leaves: `runner`, `outputs`, `guard`."""

    def __init__(self, name: str, fn: Callable, layout: StaticInputs, state: Any, pool: Any, warmup: int) -> None:
        self.name, self.fn, self.layout, self.state = name, fn, layout, state
        self.before = Reach(fn, state)
        self.device = choose_device(layout, self.before)
        if torch.amp.is_autocast_available(self.device.type) and torch.is_autocast_enabled(self.device.type):
            raise GraphError(
                f"{name}: got autocast around capture(), wanted none: its cached casts of the weights would go stale; "
                "write `with torch.autocast(...)` inside the function."
            )
        self.runner = runner_for(self.device, pool)
        self.snapshot = Snapshot(self.device)
        self.watch = Watch(self.device, layout.buffers, self.snapshot)
        self._bound: dict[str, tuple[Tensor, Tensor | None]] = {}
        self.leaves: dict[str, Tensor] = {}
        self.generators = Generators(self.device)
        for generator in self.before.generators:
            self.generators.add(generator, generator.get_state())
        for found in self.before.of_state:
            self._take_state(found)
        for found in self.before.tensors:
            self.watch.leaf(found.tensor, certain=True)
        if not self._try_calls(warmup):
            notice(f"capture({name}): the device has no memory for fn beside copies of its state; they are moved to the host.")
            gc.collect()  # what the broken call held
            self._try_calls(warmup)
        self._settle()

    def capture(self) -> None:
        """Record the graph, and leave the state as it was before the first warm-up."""
        for name, leaf in self.leaves.items():
            leaf.grad = self._start[name]
        try:
            self.outputs = self.runner.record(self.name, self._call, self.generators.extra, self.foreign)
        except BaseException:
            self._undo()
            raise
        self._bound = {name: (leaf, leaf.grad) for name, leaf in self.leaves.items()}
        self.reset()
        self.guard = Held(self._held(), self.reach, self._steady(), self._watched_gradients())

    @property
    def new_gradients(self) -> list[str]:
        """The names of the gradients that a call of fn makes anew, instead of adding to what is there."""
        return [
            name
            for name, (_, gradient) in self._bound.items()
            if gradient is not None and gradient is not self._old_gradients[name] and storage_key(gradient) not in self.foreign
        ]

    @property
    def foreign(self) -> set[int]:
        """The memory that is not the graph's own."""
        return {*self.watch.external, *self.watch.inputs}

    def _call(self) -> Any:
        return self.fn(*self.layout.static)

    def eager(self, inputs: tuple) -> Any:
        """A call in the graph's own memory, so that activations are not held twice. `poison_results` wipes it afterwards."""
        with allocating_in(self.runner.pool, self.device):
            outputs = self.runner.run(lambda: self.fn(*inputs))
        for leaf, bound in self._bound.values() if self.runner.pool is not None else ():
            if leaf.grad is not None and leaf.grad is not bound:
                leaf.grad = leaf.grad.detach().clone()  # the replay would write over it
        return outputs

    def replay(self) -> None:
        self.runner.replay()

    def poison_results(self) -> None:
        """NaN into whatever the next replay must write, so that an element it leaves out is seen.

        Also into the graph's free memory: eager has just left there what the replay is to compute by itself.
        """
        fill_results(self.outputs, self.made_gradients(), self.foreign)
        scribble(self.runner.pool, self.device)

    def made_gradients(self) -> list[Tensor]:
        """The gradients that the graph makes anew at every replay, in its own memory."""
        made = [self._bound[name][1] for name in self.new_gradients] if self.runner.binds_gradients else []
        return [gradient for gradient in made if gradient is not None]

    def bind_gradients(self) -> None:
        """Point every leaf at the gradient that the graph writes: an eager call between may have made another."""
        for leaf, gradient in self._bound.values():
            leaf.grad = gradient

    def reset(self) -> None:
        """The state before the first warm-up, bit for bit. A gradient that the graph makes starts from the old one, or zero."""
        self.bind_gradients()
        self.snapshot.restore()
        self.generators.rewind()
        for name, (_, gradient) in self._bound.items():
            old = self._old_gradients[name]
            if gradient is None or gradient is old or storage_key(gradient) in self.snapshot.memories:
                continue
            if old is not None and old.shape == gradient.shape:
                gradient.detach().copy_(old)
            else:
                gradient.detach().zero_()

    def release(self) -> None:
        """Let go of the copies: a runner may keep this object alive."""
        self.snapshot.memories.clear()
        self._old_gradients.clear()

    def _take_state(self, found: Found) -> None:
        """A tensor given in `state=` counts as used, and unless it is a frozen weight as written: by what we cannot see."""
        self.watch.see(found.tensor, Place())
        if not (isinstance(found.tensor, nn.Parameter) and not found.tensor.requires_grad):
            self.snapshot.add(found.tensor, found.name)
            if (seen := self.watch.external.get(storage_key(found.tensor))) is not None:
                seen.is_written = True  # or each kernel that gets it would be tried with a copy of it

    def _try_calls(self, warmup: int) -> bool:
        """All calls before the capture. False when there was no memory for them, but is now: copies have left the device."""
        try:
            self._warm_up(warmup)
            self._refuse()
            self._look_for_waits()
        except torch.OutOfMemoryError:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the broken call's kernels still run
            self._undo()
            if not self.snapshot.leave_device():
                raise
            return False
        except BaseException:
            self._undo()
            raise
        return True

    def _warm_up(self, calls: int) -> None:
        """Watched calls, until state that only a first call makes has been made and used."""
        for _ in range(calls):
            self.runner.run(lambda: self.watch.run(self._call))
        for generator, state in self.watch.generators:
            self.generators.add(generator, state)

    def _look_for_waits(self) -> None:
        """On a GPU: calls in which torch says where it waits for the device, also inside an operation, unseen by the watch."""
        if found := self.runner.waits(self._call):
            raise explain.refuse(self.name, [explain.Hazard(place, explain.WAIT) for place in found])

    def _refuse(self) -> None:
        """Raise for whatever the last warm-up showed that a graph cannot hold or repeat."""
        watch = self.watch
        if watch.hazards:
            raise explain.refuse(self.name, watch.hazards)
        names = [slot.name for slot in self.layout.slots if slot.buffer is not None]
        for index, place in watch.written_inputs.items():
            at = f" at {place.line.at}" if place.line is not None else ""
            raise GraphError(
                f"{names[index]}: fn writes into it{at}, which would reach only the graph's own copy; "
                "pass the tensor in state= and use it directly, or write into a new tensor."
            )
        for name, buffer in zip(names, self.layout.buffers):
            if buffer.grad is not None:
                raise GraphError(
                    f"{name}: fn leaves a gradient on it, which would reach only the graph's own copy; "
                    "return torch.autograd.grad(loss, input) instead."
                )
        for seen in watch.external.values():
            there = seen.tensor.device
            if there != self.device and there.type != "cpu":
                raise GraphError(
                    f"{self._name(seen.tensor)}: got a tensor on {there}, wanted {self.device}, where fn's inputs lie; "
                    "capture one graph for each device."
                )
        for way, value in self.before.constants:
            if not same(now := way.find(), value):
                raise GraphError(
                    f"{way.name}: fn changes this Python value ({value!r} became {now!r}), which a replay would not do again; "
                    "keep it in a tensor on the device and update it in place."
                )

    def _settle(self) -> None:
        """After the warm-ups: name everything, put the state back, and find the gradients that a capture starts from."""
        self.reach = Reach(self.fn, self.state)
        self._old_gradients, self._start = {}, {}
        for leaf, old in self.watch.leaves.values():
            name = f"{self._name(leaf)}.grad"
            self.leaves[name], self._old_gradients[name] = leaf, old
            # Accumulated into from call to call: the capture must find it. Made anew at every call: it must not.
            kept = leaf.grad is not None and storage_key(leaf.grad) in self.watch.external
            self._start[name] = leaf.grad if kept else old
        try:
            self._restore_survivors()
        except BaseException:
            self._undo()
            raise
        for key, memory in self.snapshot.memories.items():
            memory.name = self._name(self.watch.external[key].tensor) if key in self.watch.external else memory.name

    def _restore_survivors(self) -> None:
        """State that the first call made, an optimizer's moments say: back to what it began as, from then on like any other."""
        self.snapshot.restore()
        self.generators.rewind()
        gradients = {storage_key(leaf.grad) for leaf in self.leaves.values() if leaf.grad is not None}
        for key, origin in self.watch.survivors().items():
            seen = self.watch.external[key]
            if key in gradients:
                whole(seen.tensor).zero_()
            elif not seen.is_written:
                if self.watch.moves(key):
                    raise self._moving(seen.tensor, origin)
                continue  # a table made once and only read
            elif origin.fill is not None:
                whole(seen.tensor).fill_(origin.fill)
            elif not origin.empty:
                if self.watch.moves(key) or self._altered(seen.tensor):
                    raise self._moving(seen.tensor, origin)
                continue  # a table that Triton kernels read: what a kernel is given counts as written until it is tried
            self.snapshot.add(seen.tensor)

    def _altered(self, tensor: Tensor) -> bool:
        """Whether another call changes `tensor`. The state is put back."""
        before = whole(tensor).clone()
        self.runner.run(self._call)
        self.snapshot.restore()
        self.generators.rewind()
        return not torch.equal(before, whole(tensor))

    def _moving(self, tensor: Tensor, origin: Any) -> GraphError:
        line = origin.place.line
        made = f"made at {line.at}" if line is not None else "made in the backward pass"
        if self.watch.moves(storage_key(tensor)):
            return GraphError(
                f"{self._name(tensor)}: {made} by one call and read by the next, so it lies elsewhere each time; "
                "make it before the capture and write into it with copy_()."
            )
        return GraphError(
            f"{self._name(tensor)}: {made} by the first call and updated by later ones, so what it began as is lost; "
            f"call {self.name} once yourself before capture()."
        )

    def _undo(self) -> None:
        self.snapshot.restore()
        self.generators.rewind()
        for leaf, old in self.watch.leaves.values():
            leaf.grad = old

    def _name(self, tensor: Tensor) -> str:
        reach = getattr(self, "reach", self.before)
        if (name := reach.name(tensor)) is not None:
            return name
        for leaf, _ in self.watch.leaves.values():
            if leaf.grad is not None and storage_key(leaf.grad) == storage_key(tensor):
                return f"{reach.name(leaf) or 'an unnamed leaf'}.grad"
        return self.watch.external[storage_key(tensor)].describe()

    def _held(self) -> list[tuple[str, Tensor]]:
        """Every tensor from outside that the graph uses: all that have names, and one for each other piece of memory."""
        used = set(self.watch.external)
        named = {id(found.tensor): (self._name(found.tensor), found.tensor) for found in self.reach.tensors}
        held = [(name, tensor) for name, tensor in named.values() if storage_key(tensor) in used]
        covered = {storage_key(tensor) for _, tensor in held}
        held += [(self._name(seen.tensor), seen.tensor) for key, seen in self.watch.external.items() if key not in covered]
        return held + [(slot.name, slot.buffer) for slot in self.layout.slots if slot.buffer is not None]

    def _steady(self) -> list[tuple[Way, Any]]:
        """The Python values that fn names and leaves alone. One that it counts up itself is the certificate's to judge."""
        before = {way.name: value for way, value in self.before.plain}
        return [(way, value) for way, value in self.reach.plain if way.name in before and same(value, before[way.name])]

    def _watched_gradients(self) -> list[tuple[str, Tensor, Tensor]]:
        return [
            (name, leaf, gradient)
            for name, (leaf, gradient) in self._bound.items()
            if gradient is not None
            and (
                storage_key(gradient) in self.watch.external
                or (self.runner.binds_gradients and gradient is not self._old_gradients[name])
            )
        ]


def choose_device(layout: StaticInputs, reach: Reach) -> torch.device:
    """Where fn works: the GPU that anything it reaches lies on, else the CPU. Inputs must lie there too."""
    named = [(slot.name, slot.buffer) for slot in layout.slots if slot.buffer is not None]
    devices = list(dict.fromkeys([tensor.device for _, tensor in named] + reach.devices()))
    device = next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))
    for name, tensor in named:
        if tensor.device != device:
            raise GraphError(
                f"{name}: got a tensor on {tensor.device}, wanted {device}, where fn works; move it before the capture."
            )
    return device
