"""Memory that tensors lend to CUDA graphs while their contents are not needed.

A decoder's cache is dead while a policy learns, and the activations of the step's graphs are dead while it samples. So the
cache is one block of the graphs' pool. While it is free, captures take it for activations. Allocated again, it has the address
that the decoder's graphs were captured with, since between replays nothing else of the pool is allocated. torch's allocator
keeps account of both: it never gives a block to two of them. Where a tensor that outlives its graph's replay lies in the block,
the next allocation has another address, which `take_back` reports.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ..formatting import readable
from ..trace import fallback
from .guards import ReentryGuard
from .memory import allocating_in, bytes_of
from .runner import capture_stream

ALIGNED = 512  # bytes, as the allocator's blocks are
# Bytes of the pool beside the block, at most: the allocator takes the smallest free block that fits, so what a first call makes
# and keeps, such as a rotary table, does not lie in the block.
ASIDE = 1 << 26


class LentMemory:
    """The memory of `tensors`, to which they are moved: `lend` frees it, and `take_back` allocates it again, as zeros.

    users  the guard of the code that uses the tensors
    pool   the handle of the pool for graphs that use the memory while it is lent; None on a CPU
    """

    def __init__(self, tensors: Sequence[Tensor], users: ReentryGuard) -> None:
        self.device, self.users, self.pool = tensors[0].device, users, None
        starts, self.nbytes = list[int](), 0
        for tensor in tensors:
            starts.append(self.nbytes)
            self.nbytes += -(-tensor.nbytes // ALIGNED) * ALIGNED
            tensor.untyped_storage().resize_(0)  # or old and new memory exist at once
        if self.device.type == "cuda":
            self.pool = self._made_pool()
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._address: int | None = None
        self.lent = True
        self.take_back()
        for tensor, start in zip(tensors, starts):
            tensor.set_(self._memory.untyped_storage(), start // tensor.itemsize, tensor.shape, tensor.stride())

    def _made_pool(self) -> Any:
        """Return a pool that lives as long as this object and the graphs in it."""
        torch.cuda.empty_cache()
        index, pool = self.device.index, torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)  # counts a user of the pool
        torch._C._cuda_endAllocateToPool(index, pool)
        finalize(self, torch._C._cuda_releasePool, index, pool).atexit = False
        with torch.cuda.device(self.device), torch.cuda.stream(capture_stream(self.device)):
            # cuBLAS keeps a workspace of some 32 MB for each stream where it has multiplied, which is not to lie in the block.
            for dtype in (torch.bfloat16, torch.float32):
                square = torch.zeros(16, 16, device=self.device, dtype=dtype)
                torch.addmm(square[0], square, square @ square)
            with allocating_in(pool, self.device):
                torch.empty(min(ASIDE, self.nbytes // 64), device=self.device, dtype=torch.uint8)
        return pool

    def lend(self) -> None:
        """Free the memory. The tensors have no contents until `take_back`."""
        assert not self.users.taken, "a cache lends its memory while a request uses it"
        if not self.lent:
            self._memory.untyped_storage().resize_(0)
            self.lent = True

    def take_back(self) -> bool:
        """Allocate the memory again, as zeros, if it is lent. Return whether the tensors have moved."""
        if not self.lent:
            return False
        # The allocator gives a block to its own stream only, which is that of warm-ups and captures.
        stream: Any = nullcontext() if self.pool is None else torch.cuda.stream(capture_stream(self.device))
        with stream, allocating_in(self.pool, self.device):
            self._memory.untyped_storage().resize_(self.nbytes)
        self.lent = False
        bytes_of(self._memory).zero_()  # masks of attention hide other numbers, not NaN. 17.5 GiB take 5 ms
        before, self._address = self._address, self._memory.untyped_storage().data_ptr()
        moved = before is not None and before != self._address
        if moved and self.pool is not None:
            fallback("memory lent to graphs", f"they keep a part of it, so it is reserved again: {readable(self.nbytes)}")
        return moved
