"""The sum of a flat buffer over the GPUs of one machine, carried by their copy engines.

NCCL's kernels hold multiprocessors, and a product that runs beside them waits for these: with sums that begin while backward
runs, a step of 350m on two H200s took 96.6 ms, without any sum 90.0, and fewer of NCCL's blocks only made it longer. A copy
engine takes no multiprocessor. The addition alone is a kernel.

The buffers lie in memory that all ranks see, torch's symmetric memory. Of each bucket a rank owns one share. It fetches what
the others have of that share and adds it to its own; then each fetches the others' sums. So all have the same bits.
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

PIECE = (16 << 20) // 4  # elements that are fetched before they are added: scratch memory for each other rank
T = TypeVar("T")
ALIGNED = 32  # elements: shares begin where a copy is fast


def shares(start: int, stop: int, world: int) -> list[tuple[int, int]]:
    """Elements start to stop, in one share for each rank."""
    each = -(-(stop - start) // world)
    each += -each % ALIGNED
    cuts = [min(start + each * number, stop) for number in range(world + 1)]
    return list(pairwise(cuts))


class SymmetricSums:
    """Adds up stretches of `buffers`, one a rank, by rank, of which `rank` is this process's. All ranks ask for the same.

    meet    makes the current stream wait until the streams of all ranks have come there
    stream  what all of this runs on, beside the step; None: on a CPU, at once
    """

    def __init__(self, buffers: Sequence[Tensor], rank: int, meet: Callable[[], None], stream: torch.cuda.Stream | None = None):
        self.buffers, self.rank, self._meet, self._stream = list(buffers), rank, meet, stream
        self.mine = self.buffers[rank]
        world = len(self.buffers)
        self._others = [(rank + step) % world for step in range(1, world)]  # each rank begins at another one
        self._scratch = self.mine.new_empty(world - 1, min(PIECE, self.mine.numel()))

    def begin(self, start: int, stop: int) -> Callable[[], None]:
        """Begin to add up elements start to stop, behind what the current stream has been given; what it returns waits."""
        with self._beside():
            self._meet()  # all have written theirs
            every = shares(start, stop, len(self.buffers))
            self._add(*every[self.rank])
            self._meet()  # all sums are there, and nobody wants this rank's terms any more
            for other in self._others:
                first, last = every[other]
                self.mine[first:last].copy_(self.buffers[other][first:last])
            return self._done()

    def end(self) -> Callable[[], None]:
        """Nobody reads this rank's buffer any more, once what it returns has waited."""
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
    """Of fp32 buffers of so many elements in memory that all ranks see; None where NCCL or gloo must sum.

    All ranks must call it. Between machines NCCL knows the way; on one machine a line says why it is taken.
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
    """Why one of the ranks cannot; the same on all of them."""


def _tried(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` gave here, once no rank's has failed: one that went on alone would wait for the others."""
    result, why = None, None
    try:
        result = work()
    except (RuntimeError, _NotHere) as error:  # a driver, or a container, without memory that processes share
        why = str(error).partition("\n")[0]
    if reasons := [said for said in ranks.gather(why) if said]:
        raise _NotHere(reasons[0])
    return result  # type: ignore[return-value]


def cannot(own: int, indices: Sequence[int]) -> str | None:
    """Why GPU `own` cannot read the memory of the others, or None."""
    if len(set(indices)) < len(indices):
        return "each process sees its own GPU alone"
    if blind := [other for other in indices if other != own and not torch.cuda.can_device_access_peer(own, other)]:
        return f"GPU {own} cannot read the memory of GPU {blind[0]}"
    return None


def _buffer(device: torch.device, elements: int, indices: Sequence[int]) -> tuple[Tensor, int]:
    """A buffer, and how many of its bytes torch's allocator does not count: all of them, by torch 2.11."""
    if why := cannot(device.index, indices):
        raise _NotHere(why)
    from torch.distributed import _symmetric_memory as symmetric  # a second's import

    before = torch.cuda.memory_reserved(device)
    buffer = symmetric.empty(elements, dtype=torch.float32, device=device)
    return buffer, max(buffer.nbytes - (torch.cuda.memory_reserved(device) - before), 0)


def _shared(ranks: Ranks, buffer: Tensor) -> SymmetricSums:
    from torch.distributed import _symmetric_memory as symmetric

    shared = symmetric.rendezvous(buffer, ranks.group)
    seen = [shared.get_buffer(rank, tuple(buffer.shape), buffer.dtype) for rank in range(ranks.world)]
    return SymmetricSums(seen, shared.rank, shared.barrier, torch.cuda.Stream(ranks.device))
