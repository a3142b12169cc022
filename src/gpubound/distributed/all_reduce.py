"""All-reduce of the gradients, once per step, bucket by bucket, most of it while backward still runs.

The gradients are one flat buffer, and a bucket is a range of it. The all-reduce of a bucket begins when the last of its
parameters has its gradient in this backward; the host goes on, and the step waits on the device, before the norm. A hook on the
parameter's AccumulateGrad node reports this; the node runs also where the library's own GEMMs have added the gradient to
main_grad and returned none. A tied weight has one node, which runs after its last use.

The order of the buckets is the same on every rank, whichever gradient arrives first: the order in which a first backward
completed them. Ranks with different orders would deadlock. A parameter that is not completed exactly once in that backward, on
any rank, is reduced at the end.

Between the GPUs of one machine, copy engines carry the data. NCCL's kernels occupy multiprocessors, and a concurrent GEMM waits
for these: with all-reduces that overlap backward, a step of 350m on two H200s took 96.6 ms, without any all-reduce 90.0, and
fewer NCCL blocks only made the step longer. A copy engine takes no multiprocessor. Only the addition is a kernel.
"""

import math
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from ..device import count_memory
from ..kernels.peer_exchange import Stamps, can_stamp
from ..trace import notice
from .ranks import Ranks

# NCCL comes near its full rate between 25 and 200 MB. Nothing hides the last bucket: at 300 GB/s these take 0.2 ms.
BUCKET = (64 << 20) // 4  # elements
PIECE = (16 << 20) // 4  # elements fetched before each addition; one scratch buffer of this size per other rank
ALIGNED = 32  # elements: alignment of shards, for fast copies
LATE = math.inf
T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """Elements start to stop of the flat buffer, and the indices of its parameters."""

    start: int
    stop: int
    members: tuple[int, ...]
    ready: float = LATE  # number of completed parameters after which the bucket is complete


def cut(starts: Sequence[int], size: int, borders: Collection[int], order: Sequence[float], most: int) -> list[Bucket]:
    """Divide elements 0 to `size` into buckets of at most `most` elements, in the order in which they are complete.

    starts   start of each parameter, ascending
    borders  starts that no bucket crosses: on either side are parameters of all layers, such as matrices and norms' gains
    order    position of each parameter in the order of completion; LATE if unknown
    """
    runs: list[list[int]] = []
    for number, start in enumerate(starts):
        stop = starts[number + 1] if number + 1 < len(starts) else size
        apart = not runs or start in borders or (order[number] == LATE) != (order[runs[-1][0]] == LATE)
        if apart or stop - starts[runs[-1][0]] > most:
            runs.append([])
        runs[-1].append(number)
    stops = [starts[run[0]] for run in runs[1:]] + [size]
    buckets = [Bucket(starts[run[0]], stop, tuple(run), max(order[n] for n in run)) for run, stop in zip(runs, stops)]
    return sorted(buckets, key=lambda bucket: (bucket.ready, bucket.start))


class Reduction:
    """All-reduce of a step: `flat` in buckets, then the small tensors `sums`, and the maximum of each tensor in `largest`.

    parameters, starts, borders  parameters whose gradients are in `flat`, and their positions: see `cut`
    settle  called with the parameters of a bucket before its all-reduce; adds pending gradients to `flat`
    launch  runs the start of an all-reduce on the stream that writes gradients
    peers   all-reduce of `flat` between the GPUs of one machine; None: NCCL or gloo
    """

    def __init__(
        self,
        ranks: Ranks,
        flat: Tensor,
        parameters: Sequence[Parameter],
        starts: Sequence[int],
        borders: Collection[int],
        settle: Callable[[Sequence[Parameter]], None],
        launch: Callable[[Callable[[], Any]], Any],
        sums: Sequence[Tensor],
        largest: Sequence[Tensor] = (),
        peers: "SymmetricSums | None" = None,
    ):
        self.ranks, self.flat, self.sums, self.largest, self._peers = ranks, flat, sums, largest, peers
        self._parameters, self._starts, self._borders = list(parameters), list(starts), set(borders)
        self._settle, self._launch = settle, launch
        # Autograd may run nodes without a gradient in the caller's thread and the others in the device's.
        self._lock = threading.RLock()
        self._on_complete: Callable[[int], None] = self._arrived
        self._due = False  # other ranks count on sums of this step
        # When this rank's device began to wait for the sums of this step, and when it had them.
        self._waits = Stamps(flat.device, 2) if not ranks.alone and can_stamp(flat.device) else None
        self._set_buckets([Bucket(0, flat.numel(), tuple(range(len(starts))))] if starts else [])

    def _set_buckets(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._bucket_of = {member: index for index, bucket in enumerate(buckets) for member in bucket.members}
        self.begin()

    @property
    def learns(self) -> bool:
        """Return whether the reduction must observe a backward before its first sum."""
        return bool(self._parameters) and not self.ranks.alone

    @property
    def waited(self) -> Tensor | None:
        """Return int64 (2,), ns: start and end of this rank's wait for sums in the newest step. None if not measured."""
        return None if self._waits is None else self._waits.times

    def begin(self) -> None:
        """Begin a new step."""
        self._left = [len(bucket.members) for bucket in self.buckets]
        self._begun = 0
        self._works: list[Callable[[], Any]] = []

    def learn(self, backward: Callable[[], Any]) -> None:
        """Run `backward` and form buckets by the order in which it completes parameters. Nothing is reduced."""
        completed: list[int] = []
        self._on_complete = completed.append
        try:
            backward()
        finally:
            self._on_complete = self._arrived
        once = {number: float(at) for at, number in enumerate(completed) if completed.count(number) == 1}
        first, *others = self.ranks.gather([once.get(number, LATE) for number in range(len(self._starts))])
        order = [LATE if LATE in positions else positions[0] for positions in zip(first, *others)]
        self._set_buckets(cut(self._starts, self.flat.numel(), self._borders, order, BUCKET))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Begin all-reduces inside the block, the last backward of a step, as parameters are completed."""
        if not self.learns:
            yield
            return
        # New hooks for each backward: a node kept over steps keeps its stream, and a capture on another one would wait for it.
        nodes = [get_gradient_edge(parameter).node for parameter in self._parameters]
        handles = [node.register_hook(partial(_call, self._on_complete, number)) for number, node in enumerate(nodes)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arrived(self, number: int) -> None:
        with self._lock:
            index = self._bucket_of[number]
            if self.buckets[index].ready == LATE:
                return
            self._left[index] -= 1
            assert self._left[index] >= 0, "a parameter was finished twice in one backward, and only once in the first"
            while self._begun < len(self.buckets) and self._left[self._begun] == 0 and self.buckets[self._begun].ready != LATE:
                self._begin_next()

    def _begin_next(self) -> None:
        bucket = self.buckets[self._begun]
        self._settle([self._parameters[number] for number in bucket.members])
        start, stop, peers = bucket.start, bucket.stop, self._peers
        begin = partial(self.ranks.begin_sum, self.flat[start:stop]) if peers is None else partial(peers.begin, start, stop)
        self._launch(lambda: self._works.append(begin()))
        self._begun += 1

    def finish(self) -> None:
        """Reduce the remaining buckets, and let the device wait for all of them."""
        while self._begun < len(self.buckets):
            self._begin_next()
        if self._waits is not None:
            self._waits.put(0)
        if self._peers is not None:
            self._works.append(self._peers.end())
        self._works += [self.ranks.begin_sum(tensor) for tensor in self.sums]
        for tensor in self.largest:
            self.ranks.take_largest(tensor)
        for wait in self._works:
            wait()
        if self._waits is not None:
            self._waits.put(1)
        self.begin()
        self._due = False

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Take part in the sums that are due when the step inside the block fails, or the other ranks would wait."""
        self.begin()
        self._due = True
        try:
            yield
        except BaseException:
            recording = self.flat.is_cuda and torch.cuda.is_current_stream_capturing()
            if self._due and not recording:  # a recorded call does not run
                settle, self._settle = self._settle, lambda parameters: None
                try:
                    self.finish()
                finally:
                    self._settle = settle
            raise


def _call(on_complete: Callable[[int], None], number: int, *gradients: Any) -> None:
    on_complete(number)


def shares(start: int, stop: int, world: int) -> list[tuple[int, int]]:
    """Split elements start to stop into one shard per rank."""
    each = -(-(stop - start) // world)
    each += -each % ALIGNED
    cuts = [min(start + each * number, stop) for number in range(world + 1)]
    return list(pairwise(cuts))


class SymmetricSums:
    """All-reduce of ranges of `buffers`, one buffer per rank; `rank` is this process's index. All ranks must make the same
    calls.

    meet    barrier: makes the current stream wait until the streams of all ranks have reached it
    stream  side stream for the copies and sums; None: run synchronously, on a CPU
    """

    def __init__(self, buffers: Sequence[Tensor], rank: int, meet: Callable[[], None], stream: torch.cuda.Stream | None = None):
        self.buffers, self.rank, self._meet, self._stream = list(buffers), rank, meet, stream
        self.mine = self.buffers[rank]
        world = len(self.buffers)
        self._others = [(rank + step) % world for step in range(1, world)]  # each rank starts with a different peer
        self._scratch = self.mine.new_empty(world - 1, min(PIECE, self.mine.numel()))

    def begin(self, start: int, stop: int) -> Callable[[], None]:
        """Begin the all-reduce of elements start to stop, after the work queued on the current stream. Return a function
        that makes the current stream wait for the result."""
        with self._on_side_stream():
            self._meet()  # all ranks have written their terms
            every = shares(start, stop, len(self.buffers))
            self._add(*every[self.rank])
            self._meet()  # all sums are complete, and no rank reads this rank's terms any more
            for other in self._others:
                first, last = every[other]
                self.mine[first:last].copy_(self.buffers[other][first:last])
            return self._done()

    def end(self) -> Callable[[], None]:
        """Return a function that makes the current stream wait until no rank reads this rank's buffer any more."""
        with self._on_side_stream():
            self._meet()
            return self._done()

    def _add(self, start: int, stop: int) -> None:
        for first in range(start, stop, PIECE):
            last = min(first + PIECE, stop)
            for other, row in zip(self._others, self._scratch):
                row[: last - first].copy_(self.buffers[other][first:last])
            for row in self._scratch:
                self.mine[first:last].add_(row[: last - first])

    def _on_side_stream(self) -> AbstractContextManager:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.mine.device))
        return torch.cuda.stream(self._stream)

    def _done(self) -> Callable[[], None]:
        if self._stream is None:
            return lambda: None
        event, device = self._stream.record_event(), self.mine.device
        return lambda: torch.cuda.current_stream(device).wait_event(event)


def symmetric_sums(ranks: Ranks, elements: int) -> SymmetricSums | None:
    """Return SymmetricSums over fp32 buffers of `elements` elements in symmetric memory; None where NCCL or gloo must reduce.

    All ranks must call it. Ranks on several machines use NCCL; on one machine the reason for using NCCL is logged.
    """
    if ranks.alone or ranks.device.type != "cuda" or not elements:
        return None
    where = ranks.gather((socket.gethostname(), ranks.device.index))
    if len({host for host, _ in where}) > 1:
        return None
    try:
        buffer, uncounted = _on_every_rank(ranks, lambda: _buffer(ranks.device, elements, [index for _, index in where]))
        sums = _on_every_rank(ranks, lambda: _shared(ranks, buffer))
    except _Unavailable as reason:
        notice(f"parallel: gradients are summed by NCCL's kernels, not by copies between GPUs: {reason}.")
        return None
    count_memory(sums, ranks.device, uncounted)
    return sums


class _Unavailable(Exception):
    """Reason why one of the ranks cannot use symmetric memory; the same on all ranks."""


def _on_every_rank(ranks: Ranks, work: Callable[[], T]) -> T:
    """Return work() once it has succeeded on every rank. If it fails on one rank, raise _Unavailable on all: a rank that goes
    on alone would wait for the others."""
    result, why = None, None
    try:
        result = work()
    except (RuntimeError, _Unavailable) as error:  # a driver or container without shared memory between processes
        why = str(error).partition("\n")[0]
    if reasons := [reason for reason in ranks.gather(why) if reason]:
        raise _Unavailable(reasons[0])
    return result  # type: ignore[return-value]


def cannot(own: int, indices: Sequence[int]) -> str | None:
    """Return the reason why GPU `own` cannot read the memory of the others, or None."""
    if len(set(indices)) < len(indices):
        return "each process sees only its own GPU"
    if blind := [other for other in indices if other != own and not torch.cuda.can_device_access_peer(own, other)]:
        return f"GPU {own} cannot read the memory of GPU {blind[0]}"
    return None


def _buffer(device: torch.device, elements: int, indices: Sequence[int]) -> tuple[Tensor, int]:
    """Return a buffer, and the number of its bytes that torch's allocator does not count: all of them, in torch 2.11."""
    if why := cannot(device.index, indices):
        raise _Unavailable(why)
    from torch.distributed import _symmetric_memory as symmetric  # this import takes a second

    before = torch.cuda.memory_reserved(device)
    buffer = symmetric.empty(elements, dtype=torch.float32, device=device)
    return buffer, max(buffer.nbytes - (torch.cuda.memory_reserved(device) - before), 0)


def _shared(ranks: Ranks, buffer: Tensor) -> SymmetricSums:
    from torch.distributed import _symmetric_memory as symmetric

    shared = symmetric.rendezvous(buffer, ranks.group)
    buffers = [shared.get_buffer(rank, tuple(buffer.shape), buffer.dtype) for rank in range(ranks.world)]
    return SymmetricSums(buffers, shared.rank, shared.barrier, torch.cuda.Stream(ranks.device))
