"""Runners of a function: a CUDA graph on a GPU, or eager calls through the same static buffers on a CPU; poisoned memory.

Poison is NaN in memory that a replay must not read before it writes it.

Tensors lend memory to CUDA graphs while their contents are not needed (`LentMemory`). A decoder's cache is dead while a policy
learns, and the activations of the step's graphs are dead while it samples. So the cache is one block of the graphs' pool. While
it is free, captures take it for activations. Allocated again, it has the address that the decoder's graphs were captured with,
since between replays nothing else of the pool is allocated. torch's allocator keeps account of both: it never gives a block to
two of them. Where a tensor that outlives its graph's replay takes a part of the block, the next allocation has another address,
which `take_back` reports.

A tensor of the borrower that is dead meanwhile, too, such as the sums of gradients, may have the first bytes. Only the rest is
then freed and allocated again, and the cache is over both. Until there is a cache, it has no memory either
(`released`): the building of a decoder was the peak of a run, with 2.2 of 28.2 GiB for sums of zeros.
"""

import contextlib
import functools
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..device import without_autocast
from ..errors import GraphError
from ..formatting import readable
from ..trace import fallback, timed
from ..watch.events import Place, here
from .discover import broken_capture
from .guards import ReentryGuard
from .memory import allocating_in
from .reachable import storage_key

_WAIT = "called a synchronizing CUDA operation"  # how torch's warning begins


def open_gate() -> None:
    """Default gate, called before each run or replay."""


class EagerRunner:
    """Eager calls on a CPU: a replay is a call on the static inputs, its results copied into the static outputs.

    Gradient mode and inference mode are those of the capture, because a graph ignores the modes around a replay.
    """

    mode = "eager (no CUDA)"
    binds_gradients = False  # every call may bind new ones, as eager calls do
    stream = None
    pool = None
    memory_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device, self.gate = device, open_gate
        self.grad_enabled, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(self, call: Callable[[], Any]) -> Any:
        self.gate()
        inference = torch.inference_mode(self.inference)
        with inference, torch.set_grad_enabled(self.grad_enabled), without_autocast(self.device):
            return call()

    def release_cached(self) -> None:
        """There is no cache."""

    def needs_plain_call(self) -> bool:
        """Return True, so that a recording that fails is not retried: with several ranks one would, and the others go on."""
        return True

    def waits(self, call: Callable[[], Any]) -> list[Place]:
        """There is no device to wait for."""
        return []

    def noting_waits(self, lines: list[Place]) -> AbstractContextManager[None]:
        """There is no device to wait for."""
        return contextlib.nullcontext()

    def record(self, name: str, call: Callable[[], Any], generators: list[torch.Generator], external: set[int]) -> Any:
        """Run once and keep the outputs. Outputs in `external` memory (inputs, state) stay views of it."""
        self._name, self._call, self._external = name, call, external
        leaves, self._spec = tree_flatten(self.run(call))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[index] = leaf.detach() if storage_key(leaf) in external else leaf.detach().clone()
        self._outputs = leaves
        return tree_unflatten(leaves, self._spec)

    def release(self) -> None:
        del self._call, self._outputs

    def replay(self) -> None:
        leaves, spec = tree_flatten(self.run(self._call))
        if spec != self._spec:
            raise GraphError(
                f"{self._name}: returned another nesting of outputs than when captured; return the same every time."
            )
        with torch.inference_mode(self.inference), torch.no_grad():
            for index, (static, new) in enumerate(zip(self._outputs, leaves)):
                if isinstance(static, Tensor) and storage_key(static) not in self._external:
                    if static.shape != new.shape or static.dtype != new.dtype:
                        raise GraphError(
                            f"{self._name}: output {index} is {new.dtype} {tuple(new.shape)}, wanted {static.dtype} "
                            f"{tuple(static.shape)} as captured; a graph's shapes are fixed."
                        )
                    static.copy_(new)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of `device` on which all warm-ups and captures run; captures that share a pool share the stream.

    torch.cuda.graph has one default stream per process, created on the first device it saw; a capture on another device then
    records nothing, without an error.
    """
    return torch.cuda.Stream(device)


def backward_here() -> Any:
    """Return a context in which backward runs on this thread. Each of autograd's threads has a handle of cuBLAS, with a
    workspace of 32 MiB for every stream, which stays: 96 MiB after a training step's first call at 135m."""
    return torch.autograd.set_multithreading_enabled(False)


class GraphRunner:
    """Calls on a GPU's capture stream, one of which is captured into a graph."""

    mode = "graph"
    binds_gradients = True  # the graph writes into the gradients that the capture created

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.device, self.stream, self.gate = device, capture_stream(device), open_gate
        self.pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        self.memory_bytes = 0

    def run(self, call: Callable[[], Any]) -> Any:
        self.gate()
        with torch.cuda.device(self.device), warnings.catch_warnings():
            # Optimizers built with capturable=True warn when they step outside a capture, as in the warm-up.
            warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream), backward_here():
                result = call()
            current.wait_stream(self.stream)
        return result

    def release_cached(self) -> None:
        """Release cached memory: the blocks of one call do not fit the next one's, and those of another stream are of no use.

        Four calls of 350m, 16 x 1,024 tokens, had reserved 20.4 GiB; the captured one needs 17.7.
        """
        torch.cuda.empty_cache()

    def needs_plain_call(self) -> bool:
        """Return whether fn is called once without being watched before the capture. Functions of torch.compile need that,
        which run uncompiled while they are watched, and so do ranks, all of which make the same calls.

        Elsewhere the capture itself shows waits, which saves 0.2 s of a first step at 350m, 0.4 with adapters at 8b.
        """
        if self.gate is not open_gate:
            return True
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is None:
            return False
        backends = getattr(dynamo, "cached_backends", None)
        return backends is None or any(map(callable, backends.values()))  # None: a torch that calls them otherwise

    def waits(self, call: Callable[[], Any]) -> list[Place]:
        """Return the lines of a run that wait for the device, also where the wait is inside an operation.

        Compilation and tuning at the first unwatched call may wait: then it is the second that shows what always does. A first
        one without waits is enough, but for other processes in fn.
        """
        if self.gate is not open_gate:  # others make as many calls
            self.run(call)
        elif not self._waits(call):
            return []
        self.release_cached()
        return self._waits(call)

    def _waits(self, call: Callable[[], Any]) -> list[Place]:
        lines: list[Place] = []
        with self.noting_waits(lines):
            self.run(call)
        return lines

    @contextmanager
    def noting_waits(self, lines: list[Place]) -> Iterator[None]:
        """Add the lines that wait inside. torch warns there. It could raise instead, but then show one line only."""
        before, caller = torch.cuda.get_sync_debug_mode(), threading.current_thread()
        with warnings.catch_warnings():
            show = warnings.showwarning

            def note(message, *rest, **named):
                # torch warns of every thread's waits. A loader's waits are not the function's; those of autograd are, whose
                # threads C++ starts: Python knows them as dummies.
                current = threading.current_thread()
                if not str(message).startswith(_WAIT):
                    show(message, *rest, **named)
                elif current is caller or isinstance(current, threading._DummyThread):
                    lines.append(here())

            warnings.filterwarnings("always", message=_WAIT)
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def record(self, name: str, call: Callable[[], Any], generators: list[torch.Generator], external: set[int]) -> Any:
        """Capture one call. The default generator of the device registers itself; the others are registered here."""
        self.graph = torch.cuda.CUDAGraph()
        for generator in generators:
            if generator.device.type == "cuda":
                self.graph.register_generator_state(generator)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream), _without_collector(), backward_here():
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(self.device)
            try:
                with timed(f"capture of {name}"):
                    self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                    outputs = call()
                    self.graph.capture_end()
            except BaseException as error:
                self._abandon()
                if isinstance(error, Exception) and (refusal := broken_capture(name, error)) is not None:
                    raise refusal from error
                raise
            self.memory_bytes = torch.cuda.memory_reserved(self.device) - before
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        leaves, spec = tree_flatten(outputs)
        return tree_unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def _abandon(self) -> None:
        """End a broken capture so that the process can continue. Each step may fail because the one before it sufficed."""
        with contextlib.suppress(RuntimeError):  # raises because the stream's capture is invalid
            self.graph.capture_end()
        with contextlib.suppress(RuntimeError):  # raises if the allocator no longer records to the pool
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
        torch.cuda.synchronize(self.device)
        try:
            torch.rand(1, device=self.device, dtype=torch.float32)
        except RuntimeError:  # the generator still expects a capture: an empty one that succeeds resets it
            empty = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that the graph is empty
                empty.capture_begin(capture_error_mode="thread_local")
                empty.capture_end()

    def replay(self) -> None:
        self.gate()
        self.graph.replay()

    def release(self) -> None:
        torch.cuda.synchronize(self.device)  # a replay may still run
        self.graph.reset()


Runner = EagerRunner | GraphRunner


def runner_for(device: torch.device, pool: Any) -> Runner:
    return GraphRunner(device, pool) if device.type == "cuda" else EagerRunner(device)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Disable garbage collection during a capture: it may free another graph, or memory that CUDA must not release then.

    There is no collection before the capture either: with transformers imported it takes 0.1 s, a third of the time of a
    decoder's three captures.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def poison_results(results: Any, external: set[int]) -> None:
    """Poison the outputs and gradients in the graph's memory, but not views of inputs or state."""
    for leaf in tree_leaves(results):
        if isinstance(leaf, Tensor) and storage_key(leaf) not in external:
            floating = leaf.is_floating_point() or leaf.is_complex()
            leaf.detach().fill_(float("nan") if floating else 119)  # 119 fits every integer, and is True


def poison_pool(pool: Any, device: torch.device) -> int:
    """Fill every free block of a graph's pool with 0xFF, which is NaN in every floating dtype. Return the number of bytes.

    Such a block is free between replays, so a replay must write to it before it reads from it.
    """
    if pool is None or device.type != "cuda":
        return 0
    segments = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(pool)]
    blocks = [block for segment in segments if segment["device"] == device.index for block in segment["blocks"]]
    free = [block for block in blocks if block["state"] == "inactive"]
    for block in free:
        memory = {"shape": (block["size"],), "typestr": "|u1", "data": (block["address"], False), "version": 2}
        torch.as_tensor(SimpleNamespace(__cuda_array_interface__=memory), device=device).fill_(255)  # it makes no copy
    return sum(block["size"] for block in free)


ALIGNED = 512  # bytes, as the allocator's blocks are
SMALL = 1 << 20  # bytes up to which the allocator has other blocks
LEAST = 12 << 20  # bytes from which on the allocator reserves a segment for one block, of which a graph's outputs take nothing
# Bytes of the pool besides the block, at most: the allocator takes the smallest free block that fits, so what a first call
# makes and keeps, such as a rotary table, takes no part of the block.
ASIDE = 1 << 26


class LentMemory:
    """The memory of `tensors`, to which they are moved: `lend` frees it, and `take_back` allocates it again, as zeros.

    users  the guard of the code that uses the tensors
    first  a tensor of the borrower, all of its storage, that loses its contents when the memory is taken back, and is zeros
           once it is lent
    pool   the handle of the pool for graphs that use the memory while it is lent; None on a CPU
    """

    def __init__(self, tensors: Sequence[Tensor], users: ReentryGuard, first: Tensor | None = None) -> None:
        self.device, self.users, self.tensors, self.first = tensors[0].device, users, tensors, first
        self.nbytes, self.pool = sum(map(_aligned, tensors)), None
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)  # or old and new memory exist at once
        self._block = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._begin = 0  # the block's first byte in the memory: those before are of `first`
        self._address = 0
        if self.device.type == "cuda":
            self.nbytes, self.pool = max(self.nbytes, LEAST), self._make_pool()
            if first is not None and SMALL < first.nbytes < self.nbytes - SMALL:
                self._move_first(first)
        if first is not None:
            _allocate(first)
        self.lent = True
        self.take_back()
        if self.pool is not None:
            with self._allocating():
                torch.empty(min(ASIDE, self.nbytes // 64), device=self.device, dtype=torch.uint8)

    def _make_pool(self) -> Any:
        """Return a pool that lives as long as this object and the graphs in it."""
        torch.cuda.empty_cache()
        index, pool = self.device.index, torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)  # counts a user of the pool
        torch._C._cuda_endAllocateToPool(index, pool)
        finalize(self, torch._C._cuda_releasePool, index, pool).atexit = False
        with torch.cuda.device(self.device), torch.cuda.stream(capture_stream(self.device)):
            # cuBLAS keeps a workspace of some 32 MB for each stream where it has multiplied: not in the block.
            for dtype in (torch.bfloat16, torch.float32):
                square = torch.zeros(16, 16, device=self.device, dtype=dtype)
                torch.addmm(square[0], square, square @ square)
        return pool

    def _move_first(self, first: Tensor) -> None:
        """Move `first`, its views included, to the first bytes of what will be the memory."""
        storage, size = first.untyped_storage(), first.nbytes
        storage.resize_(0)
        torch.cuda.empty_cache()
        with self._allocating():
            address = torch.empty(self.nbytes, device=self.device, dtype=torch.uint8).data_ptr()
            storage.resize_(size)
        first.zero_()
        self._begin = -(-size // ALIGNED) * ALIGNED if storage.data_ptr() == address else 0

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        """Allocate in the pool, for the stream of warm-ups and captures: the allocator gives a block to its own stream only."""
        if self.pool is None:
            yield
        else:
            with torch.cuda.stream(capture_stream(self.device)), allocating_in(self.pool, self.device):
                yield

    def lend(self) -> None:
        """Free the memory. The tensors have no contents until `take_back`."""
        assert not self.users.taken, "a cache lends its memory while a request uses it"
        if not self.lent:
            self._block.untyped_storage().resize_(0)
            self.lent = True
            if self.first is not None:
                self.first.zero_()

    def take_back(self) -> bool:
        """Allocate the memory again, as zeros, if it is lent. Return whether the tensors have moved."""
        if not self.lent:
            return False
        self.lent, before, block = False, self._address, self._block.untyped_storage()
        reserved = 0 if self.pool is None else torch.cuda.memory_reserved(self.device)
        with self._allocating():
            block.resize_(self.nbytes - self._begin)
            if self._begin and self.first is not None and block.data_ptr() != self.first.data_ptr() + self._begin:
                block.resize_(0)  # another tensor has the bytes after `first`
                self._begin = 0
                block.resize_(self.nbytes)
        self._address = block.data_ptr() - self._begin
        if self._address != before:
            self._move_tensors(block)
        self._bytes.zero_()  # masks of attention hide other numbers, not NaN. 17.5 GiB take 5 ms
        if self.first is not None and self.pool is None:
            self.first.fill_(torch.nan)  # as a GPU's is overwritten
        if before and self.pool is not None and (more := torch.cuda.memory_reserved(self.device) - reserved):
            fallback("memory lent to graphs", f"they keep a part of it, so {readable(more)} more are reserved")
        return before not in (0, self._address)

    def _move_tensors(self, storage: Any) -> None:
        if self._begin:
            storage = torch._C._construct_storage_from_data_pointer(self._address, self.device, self.nbytes)
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (self.nbytes,), (1,))
        start = 0
        for tensor in self.tensors:
            tensor.set_(storage, start // tensor.itemsize, tensor.shape, tensor.stride())
            start += _aligned(tensor)


@contextmanager
def released(tensor: Tensor | None) -> Iterator[None]:
    """Free the memory of a tensor, all of its storage, while inside. It is zeros afterwards, or once it is allocated inside."""
    if tensor is None:
        yield
        return
    tensor.untyped_storage().resize_(0)
    if tensor.is_cuda:
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        _allocate(tensor)


def _allocate(tensor: Tensor) -> None:
    """Give a tensor without memory zeros."""
    if not tensor.untyped_storage().nbytes():
        tensor.untyped_storage().resize_(tensor.nbytes)
        tensor.zero_()


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED
