"""Recording: the way from a function to its CUDA graph. Warm up, restore the state, capture, restore the state again.

The watched warm-up calls show the tensors that the function uses, and reject what no graph can hold. Warm-up and capture change
the function's state; it is restored bit for bit, also after an error.

Attention's backward is compiled by cuDNN in a thread while the forward goes on: a shape's first forward takes 0.7 s at 350m.
cuDNN has a plan for each thread, and keeps what it compiled for all: the certificate's backward runs in another thread than the
first one, and took 0.14 s. So a thread that runs each shape on empty tensors leaves little to the thread of the first backward.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ..errors import GraphError
from ..trace import hooked, timed
from ..watch.events import WAIT, Place
from ..watch.ops import on_host
from .discover import Discovery, FirstValue, Hazard, refuse
from .guards import CaptureGuards, StaticInputs, check_open
from .memory import Generators, Snapshot, allocating_in, bytes_of, elements_of, fingerprints
from .reachable import Bindings, Reachable, Values, same, storage_key
from .runner import open_gate, poison_pool, poison_results, runner_for


@contextmanager
def attention_ahead(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Compile the backward of each shape that F.scaled_dot_product_attention is called with inside, on the calls' stream.

    None: do nothing, as on a CPU
    """
    if stream is None or not _compiles_attention():
        yield
        return
    started, threads, caller = set[Any](), list[threading.Thread](), threading.get_ident()

    def attend(own: Callable, *arguments: Any, **options: Any) -> Any:
        out = own(*arguments, **options)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        drops = options.get("dropout_p") or len(arguments) > 4  # it would draw from the generator
        if threading.get_ident() == caller and out.requires_grad and len(tensors) == 3 and not drops and key not in started:
            started.add(key)
            threads.append(threading.Thread(target=_run, args=(stream, own, key, tensors[0].device, options), daemon=True))
            threads[-1].start()
        return out

    try:
        with hooked(F, "scaled_dot_product_attention", attend):
            yield
    finally:  # after an error, too: what follows may capture on this stream
        for thread in threads:
            thread.join()


@contextmanager
def attention_of(rows: int, tokens: int, device: torch.device) -> Iterator[None]:
    """Compile attention of `rows` of `tokens` in the background once the block ends, which calls it with a part of one row.

    A step's first forward waited 0.7 s for it at 350m.
    """
    calls = dict[Any, tuple[Callable, dict[str, Any]]]()

    def attend(own: Callable, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 3 and options.get("attn_mask") is None and all(t.stride(1) <= t.stride(2) for t in arguments):
            shapes = ((rows, t.shape[1], tokens, t.shape[3]) for t in arguments)  # heads are beside each other
            strides = ((tokens * t.stride(2), *t.stride()[1:]) for t in arguments)
            calls[tuple(zip(shapes, strides, (t.dtype for t in arguments)))] = own, options
        return own(*arguments, **options)

    if device.type != "cuda" or not _compiles_attention():
        yield
        return
    with hooked(F, "scaled_dot_product_attention", attend):
        yield
    for key, (own, options) in calls.items():
        rest = torch.cuda.Stream(device), own, key, device, options
        threading.Thread(target=_run, args=rest, daemon=True).start()


def _compiles_attention() -> bool:
    return torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()


def _run(stream: torch.cuda.Stream, own: Callable, key: Any, device: torch.device, options: dict[str, Any]) -> None:
    # What fails here, as for want of memory, fails again in the call itself, which raises.
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False), suppress(RuntimeError):
        leaves = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in key]
        out = own(*(tensor.requires_grad_() for tensor in leaves), **options)
        torch.autograd.grad(out, leaves, torch.empty_like(out))


@dataclass
class Leaf:
    """A tensor that may be given a gradient, with its gradient at first, at the capture's start, and the one a graph writes."""

    name: str
    tensor: Tensor
    old: Tensor | None
    start: Tensor | None
    gradient: Tensor | None = None


class Recording:
    """The recorded graph of a function, and eager calls of the same function from the same state, which a certificate compares.

    The state is as it was before, also when the constructor raises.
    """

    outputs: Any
    guards: CaptureGuards

    def __init__(
        self,
        name: str,
        fn: Callable,
        inputs: StaticInputs,
        state: Any,
        pool: Any,
        gate: Callable[[], None],
        warm_in_pool: bool = False,
        reads: Sequence[Tensor] = (),
    ) -> None:
        self.name, self.fn, self.inputs = name, fn, inputs
        self.warm_pool = pool if warm_in_pool else None
        self.reachable = before = Reachable(fn, state, inputs.objects)
        self.device = choose_device(inputs, before)
        if torch.amp.is_autocast_available(self.device.type) and torch.is_autocast_enabled(self.device.type):
            raise GraphError(
                f"{name}: got autocast around capture(), wanted none: its cached casts of the weights would go stale; "
                "write `with torch.autocast(...)` inside the function."
            )
        self.runner = runner_for(self.device, pool)
        self.runner.gate = gate
        self.bindings = Bindings(before)
        try:
            self.snapshot, self.generators = Snapshot(self.device), Generators(self.device)
            for generator in before.generators:
                self.generators.add(generator)
            frozen = {storage_key(t) for _, t in before.tensors if isinstance(t, nn.Parameter) and not t.requires_grad}
            weights = [*reads, *(t for _, t in before.tensors if isinstance(t, nn.Parameter))]
            self.discovery = Discovery(self.device, inputs.buffers, self.snapshot, self.generators, frozen, weights, reads)
            for path, tensor in before.of_state:
                self._add_state(path.name, tensor)
            for _, tensor in before.tensors:
                self.discovery.leaf(tensor, certain=True)
            self._warm_up()
            with self._restored_on_error():
                # The first call makes moments, caches and gradients: what fn reaches now is more than before.
                self.reachable = Reachable(fn, state, inputs.objects)
                self.leaves = self._gradient_leaves()
                self._settle()
                # memory that is not the graph's own
                self.external = {*self.discovery.external, *self.discovery.inputs}
                self._record()
            self.reset()
            steady = _steady_values(before, self.reachable)
            self.guards = CaptureGuards(self._guarded_tensors(), self.reachable, steady, self._guarded_gradients())
            self.fingerprints = self.discovery.fingerprints
            del self.discovery
        except BaseException:
            self.bindings.restore()
            raise

    def _add_state(self, name: str, tensor: Tensor) -> None:
        """Count a tensor of `state=` as used, and as written unless it is in `reads` or shares its memory with frozen weights,
        as a stacked matrix does: watching cannot see its uses. A trained weight in the same memory counts by itself."""
        self.discovery.see(tensor, Place())
        if storage_key(tensor) in self.discovery.reads:  # copies of 8B's took 2 s and 16 GB of host memory
            return
        if storage_key(tensor) not in self.discovery.frozen or (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
            self.snapshot.add(tensor, name)
            if (use := self.discovery.external.get(storage_key(tensor))) is not None:
                use.is_written = True  # else each kernel that gets the tensor would be tried with a copy of it

    def _warm_up(self) -> None:
        """Make the watched calls."""
        with self._restored_on_error():
            # State that only the first call makes is made, used, and seen to have settled, mostly in the second call. The
            # third took 0.8 of a first step's 14 s at 8B with adapters.
            self.unaltered: set[int] = set()
            for number in range(3):
                alone = self.runner.gate is open_gate  # else other processes make as many calls, altered or not
                if number == 2 and alone and self.discovery.has_settled(self.unaltered):
                    break
                self.runner.release_cached()
                tables = self.discovery.live_tables() if number == 1 else self.discovery.created_and_written() if number else {}
                before = {key: bytes_of(table).clone() for key, table in tables.items() if alone}
                del tables
                with timed(f"watched call {number + 1}"), attention_ahead(None if number else self.runner.stream):
                    self.runner.run(lambda: self.discovery.run(self._warm_call))
                after = self.discovery.created_and_written().items()
                self.unaltered = {key for key, t in after if key in before and torch.equal(before[key], bytes_of(t))}
            if self.discovery.hazards:
                raise refuse(self.name, self.discovery.hazards)
            self._refuse_changed_inputs()
            for use in self.discovery.external.values():
                device = use.tensor.device
                if device != self.device and device.type != "cpu":
                    raise GraphError(
                        f"{self.name_of(use.tensor)}: got a tensor on {device}, wanted {self.device}, where fn's inputs are; "
                        "capture one graph for each device."
                    )
            for path, value in self.reachable.constants:
                if not same(now := path.find(), value):
                    raise GraphError(
                        f"{path.name}: fn changes this Python value ({value!r} became {now!r}), which a replay would not do "
                        "again; keep it in a tensor on the device and update it in place."
                    )
            self.called_plainly = self.runner.needs_plain_call()
            if self.called_plainly:
                self._refuse_waits()

    def _refuse_waits(self) -> None:
        """Raise if a call that is not watched waits for the device, also inside an operation, which no operation shows."""
        self.runner.release_cached()
        with timed("call that shows waits"):
            lines = self.runner.waits(self._warm_call)
        if lines:
            raise refuse(self.name, [Hazard(line, WAIT) for line in lines])

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

    def refuse_changed_reads(self) -> None:
        """Raise if fn has written into a weight where watching did not see it, as in an extension's kernel."""
        unwritten = [pair for key, pair in self.fingerprints.items() if key not in self.snapshot.copies]
        self.fingerprints.clear()
        for (weight, before), now in zip(unwritten, fingerprints([weight for weight, _ in unwritten])):
            if now != before:
                raise GraphError(
                    f"{self.reachable.name(weight)}: fn writes into it where watching cannot see it, as in an extension's "
                    f"kernel, so it was not restored; load it again, and call fn without a graph."
                )

    @contextlib.contextmanager
    def _restored_on_error(self) -> Iterator[None]:
        """Restore the state from before the first call if the block raises."""
        try:
            yield
        except BaseException:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # kernels of the failed call still run
            self._restore_state()
            for leaf, old in self.discovery.leaves.values():
                leaf.grad = old
            raise

    def _restore_state(self) -> None:
        self.snapshot.restore()
        self.generators.rewind()

    def name_of(self, tensor: Tensor) -> str:
        """Return a tensor's name for messages: its access path, else the line that uses it."""
        if (name := self.reachable.name(tensor)) is not None:
            return name
        for leaf, _ in self.discovery.leaves.values():
            if leaf.grad is not None and storage_key(leaf.grad) == storage_key(tensor):
                return f"{self.reachable.name(leaf) or 'an unnamed leaf'}.grad"
        return self.discovery.external[storage_key(tensor)].describe()

    def _gradient_leaves(self) -> list[Leaf]:
        leaves = []
        for tensor, old in self.discovery.leaves.values():
            # A gradient that calls accumulate into must exist at the capture; one that each call creates must not.
            accumulated = tensor.grad is not None and storage_key(tensor.grad) in self.discovery.external
            leaves.append(Leaf(f"{self.name_of(tensor)}.grad", tensor, old, tensor.grad if accumulated else old))
        return leaves

    def _settle(self) -> None:
        """Restore the state. A tensor that the first call created, such as an optimizer's moment, gets its first value."""
        self._restore_state()
        gradients = {storage_key(leaf.grad) for leaf, _ in self.discovery.leaves.values() if leaf.grad is not None}
        for key, first in self.discovery.survivors().items():
            use = self.discovery.external[key]
            if key in gradients:
                elements_of(use.tensor).zero_()
            elif not use.is_written:
                if self.discovery.moves(key):
                    raise self._moving(use.tensor, first)
                continue  # a table, created once and only read
            elif first.fill is not None:
                elements_of(use.tensor).fill_(first.fill)
            elif not first.empty:
                if self.discovery.moves(key) or (key not in self.unaltered and self._is_altered_by_a_call(use.tensor)):
                    raise self._moving(use.tensor, first)
                continue  # a table that Triton kernels read: a kernel's arguments count as written until they are compared
            self.snapshot.add(use.tensor)
        for key, copy in self.snapshot.copies.items():
            copy.name = self.name_of(self.discovery.external[key].tensor) if key in self.discovery.external else copy.name

    def _is_altered_by_a_call(self, tensor: Tensor) -> bool:
        before = elements_of(tensor).clone()
        self.runner.run(self._warm_call)
        self._restore_state()
        return not torch.equal(before, elements_of(tensor))

    def _moving(self, tensor: Tensor, first: FirstValue) -> GraphError:
        line = first.place.line
        created = f"made at {line.at}" if line is not None else "made in the backward pass"
        if self.discovery.moves(storage_key(tensor)):
            return GraphError(
                f"{self.name_of(tensor)}: {created} by one call and read by the next, so its address changes; "
                "make it before the capture and write into it with copy_()."
            )
        return GraphError(
            f"{self.name_of(tensor)}: {created} by the first call and updated by later ones, so its first value is lost; "
            f"call {self.name} once yourself before capture()."
        )

    def _record(self) -> None:
        """Capture a call. One that waits cannot be captured: then a call that is not watched names the lines. It may also have
        been the first to do what only first calls do, such as loading a kernel, so the capture is tried once more."""
        try:
            self._record_once()
        except GraphError:
            if self.called_plainly:
                raise
            for leaf in self.leaves:  # which may have gradients in the broken capture's memory
                leaf.tensor.grad = leaf.start
            self._refuse_waits()
            self._restore_state()
            self._record_once()

    def _record_once(self) -> None:
        lines: list[Place] = []

        def call() -> Any:
            with self.runner.noting_waits(lines):  # on a stream that does not join the capture, which does not break it
                return self._call()

        for leaf in self.leaves:
            leaf.tensor.grad = leaf.start
        self.outputs = self.runner.record(self.name, call, self.generators.custom, self.external)
        if lines:
            raise refuse(self.name, [Hazard(line, WAIT) for line in lines])
        for index, output in enumerate(tree_leaves(self.outputs)):
            check_open(f"output {index}", output)
        for leaf in self.leaves:
            leaf.gradient = leaf.tensor.grad

    def _call(self) -> Any:
        return self.fn(*self.inputs.static)

    def _warm_call(self) -> Any:
        with allocating_in(self.warm_pool, self.device):
            return self._call()

    def _guarded_tensors(self) -> list[tuple[str, Tensor]]:
        """Return every external tensor that the graph uses: those with names, and one for each other storage."""
        external = self.discovery.external
        named = {id(tensor): tensor for _, tensor in self.reachable.tensors}
        guarded = [(self.name_of(tensor), tensor) for tensor in named.values() if storage_key(tensor) in external]
        covered = {storage_key(tensor) for _, tensor in guarded}
        guarded += [(self.name_of(use.tensor), use.tensor) for key, use in external.items() if key not in covered]
        return guarded + list(zip(self.inputs.names, self.inputs.buffers))

    def _guarded_gradients(self) -> list[tuple[str, Tensor, Tensor]]:
        """Return (name, leaf, gradient) of each gradient that the graph writes in place."""
        external, binds = self.discovery.external, self.runner.binds_gradients
        return [
            (leaf.name, leaf.tensor, leaf.gradient)
            for leaf in self.leaves
            if leaf.gradient is not None
            and (storage_key(leaf.gradient) in external or (binds and leaf.gradient is not leaf.old))
        ]

    def eager(self, inputs: tuple) -> Any:
        """Call eagerly in the graph's own memory, so that activations exist once. `poison_results` overwrites them."""
        with allocating_in(self.runner.pool, self.device):
            outputs = self.runner.run(lambda: self.fn(*inputs))
        for leaf in self.leaves if self.runner.pool is not None else ():
            if leaf.tensor.grad is not None and leaf.tensor.grad is not leaf.gradient:
                leaf.tensor.grad = leaf.tensor.grad.detach().clone()  # the replay would overwrite it
        return outputs

    def poison_results(self) -> None:
        """Write NaN into all memory that the next replay must write, so that an element that it leaves out is seen.

        This includes the graph's free memory, where an eager call has just left what the replay is to compute.
        """
        gradients = [leaf.gradient for leaf in self.new_leaves] if self.runner.binds_gradients else []
        poison_results([self.outputs, gradients], self.external)
        poison_pool(self.runner.pool, self.device)

    @property
    def new_leaves(self) -> list[Leaf]:
        """Leaves whose gradients a call creates instead of accumulating into them."""
        return [
            leaf
            for leaf in self.leaves
            if leaf.gradient is not None and leaf.gradient is not leaf.old and storage_key(leaf.gradient) not in self.external
        ]

    @property
    def memory_bytes(self) -> int:
        """Static inputs, and the growth of the pool or, without a pool, the static outputs."""
        outputs = sum(leaf.nbytes for leaf in tree_leaves(self.outputs) if isinstance(leaf, Tensor))
        return sum(buffer.nbytes for buffer in self.inputs.buffers) + (self.runner.memory_bytes or outputs)

    def attach_gradients(self) -> None:
        """Attach to every leaf the gradient that the graph writes: an eager call may have created another."""
        for leaf in self.leaves:
            leaf.tensor.grad = leaf.gradient

    def reset(self) -> None:
        """Restore the state from before the first call, bit for bit. The graph's new gradients become the old ones, or zero."""
        self.attach_gradients()
        self._restore_state()
        for leaf in self.leaves:
            gradient, old = leaf.gradient, leaf.old
            if gradient is None or gradient is old or storage_key(gradient) in self.snapshot.copies:
                continue
            if old is not None and old.shape == gradient.shape:
                gradient.detach().copy_(old)
            else:
                gradient.detach().zero_()

    def undo(self) -> None:
        """Restore the state and the bindings from before the first call; the graph will not be replayed."""
        self.reset()
        self.bindings.restore()

    def release_copies(self) -> None:
        """Release the objects that only the certificate needed."""
        self.snapshot.copies.clear()
        del self.reachable, self.bindings
        self.leaves = self.new_leaves
        for leaf in self.leaves:
            leaf.old = leaf.start = None


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


def _steady_values(before: Reachable, after: Reachable) -> Values:
    """Return the Python values that fn names and does not change. The certificate judges a value that fn counts up itself."""
    first = {path.name: value for path, value in before.plain}
    return [(path, value) for path, value in after.plain if path.name in first and same(value, first[path.name])]
