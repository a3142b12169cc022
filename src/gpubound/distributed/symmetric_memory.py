"""All-reduce of a flat buffer over the GPUs of one machine, carried by their copy engines.

NCCL's kernels occupy multiprocessors, and a concurrent GEMM waits for these: with all-reduces that overlap backward, a step of
350m on two H200s took 96.6 ms, without any all-reduce 90.0, and fewer NCCL blocks only made the step longer. A copy engine
takes no multiprocessor. Only the addition is a kernel.

The buffers are in torch's symmetric memory, which all ranks can read. Each rank reduces one shard of each bucket: it fetches
the other ranks' terms of its shard and adds them (reduce-scatter); then each rank fetches the other shards' sums (all-gather).
So all ranks have the same bits.
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ..device import count_memory
from ..trace import notice
from .ranks import Ranks

PIECE = (16 << 20) // 4  # elements fetched before each addition; one scratch buffer of this size per other rank
T = TypeVar("T")
ALIGNED = 32  # elements: alignment of shards, for fast copies


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
        with self._beside():
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
        with self._beside():
            self._meet()
            return self._done()

    def _add(self, start: int, stop: int) -> None:
        for first in range(start, stop, PIECE):
            last = min(first + PIECE, stop)
            for other, row in zip(self._others, self._scratch):
                row[: last - first].copy_(self.buffers[other][first:last])
            for row in self._scratch:
                self.mine[first:last].add_(row[: last - first])

    def _beside(self) -> AbstractContextManager:
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
        buffer, uncounted = _tried(ranks, lambda: _buffer(ranks.device, elements, [index for _, index in where]))
        sums = _tried(ranks, lambda: _shared(ranks, buffer))
    except _NotHere as reason:
        notice(f"parallel: gradients are summed by NCCL's kernels, not by copies between GPUs: {reason}.")
        return None
    count_memory(sums, ranks.device, uncounted)
    return sums


class _NotHere(Exception):
    """Reason why one of the ranks cannot use symmetric memory; the same on all ranks."""


def _tried(ranks: Ranks, work: Callable[[], T]) -> T:
    """Return work() once it has succeeded on every rank. If it fails on one rank, raise _NotHere on all: a rank that went on
    alone would wait for the others."""
    result, why = None, None
    try:
        result = work()
    except (RuntimeError, _NotHere) as error:  # a driver or container without shared memory between processes
        why = str(error).partition("\n")[0]
    if reasons := [said for said in ranks.gather(why) if said]:
        raise _NotHere(reasons[0])
    return result  # type: ignore[return-value]


def cannot(own: int, indices: Sequence[int]) -> str | None:
    """Return the reason why GPU `own` cannot read the memory of the others, or None."""
    if len(set(indices)) < len(indices):
        return "each process sees its own GPU alone"
    if blind := [other for other in indices if other != own and not torch.cuda.can_device_access_peer(own, other)]:
        return f"GPU {own} cannot read the memory of GPU {blind[0]}"
    return None


def _buffer(device: torch.device, elements: int, indices: Sequence[int]) -> tuple[Tensor, int]:
    """Return a buffer, and the number of its bytes that torch's allocator does not count: all of them, in torch 2.11."""
    if why := cannot(device.index, indices):
        raise _NotHere(why)
    from torch.distributed import _symmetric_memory as symmetric  # this import takes a second

    before = torch.cuda.memory_reserved(device)
    buffer = symmetric.empty(elements, dtype=torch.float32, device=device)
    return buffer, max(buffer.nbytes - (torch.cuda.memory_reserved(device) - before), 0)


def _shared(ranks: Ranks, buffer: Tensor) -> SymmetricSums:
    from torch.distributed import _symmetric_memory as symmetric

    shared = symmetric.rendezvous(buffer, ranks.group)
    seen = [shared.get_buffer(rank, tuple(buffer.shape), buffer.dtype) for rank in range(ranks.world)]
    return SymmetricSums(seen, shared.rank, shared.barrier, torch.cuda.Stream(ranks.device))
