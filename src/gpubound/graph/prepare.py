"""Preparation of a graph from a function: warm up, restore the state, capture, restore the state again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import GraphError
from ..watch.ops import on_host
from .guards import CaptureGuards, StaticInputs, check_open
from .memory import allocating_in
from .perturb import poison_pool, poison_results
from .reachable import Reachable, Values, same, storage_key
from .restored_bindings import Bindings
from .runner import runner_for
from .warm_up import Leaf, WarmUp


def prepare(
    name: str, fn: Callable, inputs: StaticInputs, state: Any, pool: Any, warmup: int, gate: Callable[[], None]
) -> "Recording":
    """The recorded graph of `fn`, and what it needs. The state is as it was before, also when an error ends this."""
    before = Reachable(fn, state, inputs.objects)
    device = choose_device(inputs, before)
    refuse_autocast(name, device)
    runner = runner_for(device, pool)
    runner.gate = gate
    bindings = Bindings(before.nodes(), before.functions)
    try:
        return _prepared(WarmUp(name, fn, inputs, before, runner, device), state, warmup, bindings)
    except BaseException:
        bindings.put_back()
        raise


def _prepared(warm_up: WarmUp, state: Any, warmup: int, bindings: Bindings) -> "Recording":
    fn, inputs, before = warm_up.fn, warm_up.inputs, warm_up.before
    warm_up.perform(warmup)
    with warm_up.undone_on_error():
        warm_up.reachable = Reachable(fn, state, inputs.objects)
        leaves = warm_up.leaves()
        warm_up.settle()
        recording = Recording(warm_up, leaves, bindings)
        recording.record()
    recording.reset()
    gradients = guarded_gradients(warm_up, recording)
    recording.held = CaptureGuards(
        guarded_tensors(warm_up), warm_up.reachable, steady_values(before, warm_up.reachable), gradients
    )
    return recording


def choose_device(inputs: StaticInputs, reachable: Reachable) -> torch.device:
    """Return fn's device: the GPU of any tensor that it reaches, else the CPU. Inputs must be on the same device."""
    devices = [tensor.device for tensor in inputs.buffers] + [tensor.device for _, tensor in reachable.tensors]
    device = next((device for device in devices if not on_host(device)), torch.device("cpu"))
    for name, tensor in zip(inputs.names, inputs.buffers):
        if tensor.device != device:
            raise GraphError(
                f"{name}: got a tensor on {tensor.device}, wanted {device}, where fn works; move it before the capture."
            )
    return device


def refuse_autocast(name: str, device: torch.device) -> None:
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        raise GraphError(
            f"{name}: got autocast around capture(), wanted none: its cached casts of the weights would go stale; "
            "write `with torch.autocast(...)` inside the function."
        )


class Recording:
    """A recorded graph, and eager calls of the same function from the same state: what a certificate compares."""

    outputs: Any
    held: CaptureGuards

    def __init__(self, warm_up: WarmUp, leaves: list[Leaf], bindings: Bindings) -> None:
        self.name, self.fn, self.inputs, self.device = warm_up.name, warm_up.fn, warm_up.inputs, warm_up.device
        self.runner, self.snapshot, self.generators = warm_up.runner, warm_up.snapshot, warm_up.generators
        self.reachable, self.leaves, self.bindings = warm_up.reachable, leaves, bindings
        self.foreign = {*warm_up.discovery.external, *warm_up.discovery.inputs}  # the memory that is not the graph's own

    def record(self) -> None:
        for leaf in self.leaves:
            leaf.tensor.grad = leaf.start
        self.outputs = self.runner.record(self.name, self._call, self.generators.extra, self.foreign)
        for index, output in enumerate(tree_leaves(self.outputs)):
            check_open(f"output {index}", output)
        for leaf in self.leaves:
            leaf.bound = leaf.tensor.grad

    def _call(self) -> Any:
        return self.fn(*self.inputs.static)

    def eager(self, inputs: tuple) -> Any:
        """A call in the graph's own memory, so that activations are not held twice. `poison_results` wipes it afterwards."""
        with allocating_in(self.runner.pool, self.device):
            outputs = self.runner.run(lambda: self.fn(*inputs))
        for leaf in self.leaves if self.runner.pool is not None else ():
            if leaf.tensor.grad is not None and leaf.tensor.grad is not leaf.bound:
                leaf.tensor.grad = leaf.tensor.grad.detach().clone()  # the replay would write over it
        return outputs

    def poison_results(self) -> None:
        """NaN into whatever the next replay must write, so that an element it leaves out is seen.

        Also into the graph's free memory: an eager call has just left there what the replay is to compute by itself.
        """
        gradients = [leaf.bound for leaf in self.new_leaves] if self.runner.binds_gradients else []
        poison_results([self.outputs, gradients], self.foreign)
        poison_pool(self.runner.pool, self.device)

    @property
    def new_leaves(self) -> list[Leaf]:
        """Leaves whose gradients a call creates instead of accumulating into them."""
        return [
            leaf
            for leaf in self.leaves
            if leaf.bound is not None and leaf.bound is not leaf.old and storage_key(leaf.bound) not in self.foreign
        ]

    @property
    def memory_bytes(self) -> int:
        """Static inputs, and the growth of the pool or, without a pool, the static outputs."""
        outputs = sum(leaf.nbytes for leaf in tree_leaves(self.outputs) if isinstance(leaf, Tensor))
        return sum(buffer.nbytes for buffer in self.inputs.buffers) + (self.runner.memory_bytes or outputs)

    def bind_gradients(self) -> None:
        """Point every leaf at the gradient that the graph writes: an eager call between may have made another."""
        for leaf in self.leaves:
            leaf.tensor.grad = leaf.bound

    def reset(self) -> None:
        """The state before the first call, bit for bit. A gradient that the graph makes starts from the old one, or zero."""
        self.bind_gradients()
        self.snapshot.restore()
        self.generators.rewind()
        for leaf in self.leaves:
            gradient, old = leaf.bound, leaf.old
            if gradient is None or gradient is old or storage_key(gradient) in self.snapshot.memories:
                continue
            if old is not None and old.shape == gradient.shape:
                gradient.detach().copy_(old)
            else:
                gradient.detach().zero_()

    def undo(self) -> None:
        """Restore the state and the bindings from before the first call; the graph will not be replayed."""
        self.reset()
        self.bindings.put_back()

    def release(self) -> None:
        """Release the objects that only the certificate needed."""
        self.snapshot.memories.clear()
        del self.reachable, self.bindings
        self.leaves = self.new_leaves
        for leaf in self.leaves:
            leaf.old = leaf.start = None


def guarded_tensors(warm_up: WarmUp) -> list[tuple[str, Tensor]]:
    """Every tensor from outside that the graph uses: all that have names, and one for each other piece of memory."""
    external, name_of = warm_up.discovery.external, warm_up.name_of
    named = {id(tensor): tensor for _, tensor in warm_up.reachable.tensors}
    held = [(name_of(tensor), tensor) for tensor in named.values() if storage_key(tensor) in external]
    covered = {storage_key(tensor) for _, tensor in held}
    held += [(name_of(seen.tensor), seen.tensor) for key, seen in external.items() if key not in covered]
    return held + list(zip(warm_up.inputs.names, warm_up.inputs.buffers))


def steady_values(before: Reachable, after: Reachable) -> Values:
    """The Python values that fn names and leaves alone. One that it counts up itself is the certificate's to judge."""
    first = {way.name: value for way, value in before.plain}
    return [(way, value) for way, value in after.plain if way.name in first and same(value, first[way.name])]


def guarded_gradients(warm_up: WarmUp, recording: Recording) -> list[tuple[str, Tensor, Tensor]]:
    """(name, leaf, gradient) of each gradient that the graph writes where it lies."""
    external, binds = warm_up.discovery.external, recording.runner.binds_gradients
    return [
        (leaf.name, leaf.tensor, leaf.bound)
        for leaf in recording.leaves
        if leaf.bound is not None and (storage_key(leaf.bound) in external or (binds and leaf.bound is not leaf.old))
    ]
