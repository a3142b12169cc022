"""Work on a second stream that is needed later: a weight's gradient is needed at the update, not before.

Backward is a chain of input gradients; each weight gradient hangs off it by itself. A small model's kernels leave most of the
GPU idle, and what is off the chain can run beside it. In a captured step the second stream becomes a branch of the graph.

All additions to accumulators of one backward run on the one side stream, so their order, and with it every bit, is the same as
without it. The tensors that it reads belong to the main stream, whose allocator would hand their memory out again as soon as
autograd lets go of them, though the side stream may not have read them yet. They are held until the main stream has waited
for their reader: at the end, or as soon as more than HELD_BYTES are held.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .tensor_state import record_of

HELD_BYTES = 256 << 20


class Side:
    """The side stream of one step's backwards, and what it may still be reading. Work goes there while it is open."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self._open = False
        self._held: deque[tuple[torch.cuda.Event, int, tuple[Tensor, ...]]] = deque()
        self._bytes = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, `aside` means the side stream; after it, the current stream waits for all of it."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self._held.clear()
            self._bytes = 0

    def run(self, work: Callable[[], object], reads: tuple[Tensor, ...]) -> None:
        if not self._open:
            work()
            return
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            work()
        size = sum(t.nbytes for t in reads)
        self._held.append((self.stream.record_event(), size, reads))
        self._bytes += size
        while self._bytes > HELD_BYTES:
            read, size, _ = self._held.popleft()
            main.wait_event(read)
            self._bytes -= size


def aside(weight: Tensor, work: Callable[[], object], *reads: Tensor) -> None:
    """Do `work`, a delivery to the weight's accumulator that reads `reads`, on the side stream of its record, else here."""
    record = record_of(weight)
    if record is None or record.side is None:
        work()
    else:
        record.side.run(work, reads)
