"""Memory that tensors lend to CUDA graphs while their contents are not needed.

A decoder's cache is dead while a policy learns, and the activations of the step's graphs are dead while it samples. So the
cache is one block of the graphs' pool. While it is free, captures take it for activations. Allocated again, it has the address
that the decoder's graphs were captured with, since between replays nothing else of the pool is allocated. torch's allocator
keeps account of both: it never gives a block to two of them. Where a tensor that outlives its graph's replay takes a part of
the block, the next allocation has another address, which `take_back` reports.

A tensor of the borrower that is dead meanwhile, too, such as the sums of gradients, may have the first bytes. Only the rest is
then freed and allocated again, and the cache is over both. Until there is a cache, it has no memory either
(`released`): the building of a decoder was the peak of a run, with 2.2 of 28.2 GiB for sums of zeros.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ..formatting import readable
from ..trace import fallback
from .guards import ReentryGuard
from .memory import allocating_in
from .runner import capture_stream

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
