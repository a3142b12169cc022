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

import torch
from torch import Tensor

from ..device import count_memory
from ..trace import notice
from .ranks import Ranks

PIECE = (16 << 20) // 4  # elements that are fetched before they are added: scratch memory for each other rank
ALIGNED = 32  # elements: shares begin where a copy is fast


def shares(start: int, stop: int, world: int) -> list[tuple[int, int]]:
    """Elements start to stop, in one share for each rank."""
    each = -(-(stop - start) // world)
    each += -each % ALIGNED
    cuts = [min(start + each * number, stop) for number in range(world + 1)]
    return list(pairwise(cuts))


class PeerSums:
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


def peer_sums(ranks: Ranks, elements: int) -> PeerSums | None:
    """Of fp32 buffers of so many elements in memory that all ranks see; None where they do not see each other's.

    All ranks must call it.
    """
    if ranks.alone or ranks.device.type != "cuda" or not elements:
        return None
    where = ranks.gather((socket.gethostname(), ranks.device.index))
    if len({host for host, _ in where}) > 1:
        return None  # NCCL knows the way between machines
    own = ranks.device.index
    if not ranks.all(all(other == own or torch.cuda.can_device_access_peer(own, other) for _, other in where)):
        notice("parallel: gradients are summed by NCCL's kernels: these GPUs cannot read each other's memory.")
        return None
    from torch.distributed import _symmetric_memory as symmetric  # a second's import

    before = torch.cuda.memory_reserved(ranks.device)
    buffer = symmetric.empty(elements, dtype=torch.float32, device=ranks.device)
    counted = torch.cuda.memory_reserved(ranks.device) - before  # nothing, by torch 2.11
    shared = symmetric.rendezvous(buffer, ranks.group)
    seen = [shared.get_buffer(rank, (elements,), torch.float32) for rank in range(ranks.world)]
    sums = PeerSums(seen, shared.rank, shared.barrier, torch.cuda.Stream(ranks.device))
    count_memory(sums, ranks.device, max(buffer.nbytes - counted, 0))
    return sums
