"""From the device to the host, while the training goes on: copies on the device, read behind it on a stream of their own.

Copies take only the memory that steps leave free. What finds no room is copied into pinned memory of the host, and the next
step waits for that copy alone: an H200 sends 55 GB a second. Pinned memory is kept from one time to the next; its allocation
takes seconds. Copies of all tensors cost more where nothing but them fits: of 8b in two shards every step took 1.0 to 1.6 s
instead of 0.32 until they were read, 9 s later, since each freed memory and asked for it again.
"""

import torch
from torch import Tensor

from ..trace import fallback
from ..words import readable

_BLOCK = 1 << 24  # bytes at a time from the GPU
SPARE = 32  # one part of so many of the GPU's memory stays free beside copies: what steps allocate changes a little


class Staging:
    """One set of tensors at a time: `take` copies them in order with the device's own work, `give` waits for the copies."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}
        self._done: torch.cuda.Event | None = None
        self._room, self._retries = -1, 0

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors as they are when the device comes to it. The host does not wait."""
        device = _gpu_of(tensors)
        copies = self._copied(tensors, device)
        # The reading stream waits for this event.
        self._done = None if device is None else torch.cuda.current_stream(device).record_event()
        return copies

    def give(self, copies: dict[str, Tensor]) -> dict[str, Tensor]:
        """The copies as contiguous tensors on the host. For a thread of its own: it waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        device = _gpu_of(copies)
        if device is None:
            return {name: t.contiguous() for name, t in copies.items()}
        with torch.cuda.device(device):  # a thread begins on GPU 0, which may be another rank's
            stream, bounce = torch.cuda.Stream(device), torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=True, device="cpu")
            with torch.cuda.stream(stream):
                return {n: _read(t, bounce, stream) if t.is_cuda else t.contiguous() for n, t in copies.items()}

    def _copied(self, tensors: dict[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
        sizes = {name: t.nbytes for name, t in tensors.items() if t.is_cuda}
        here = sizes if device is None else fitting(sizes, self._room_on(device))
        copies = {name: self._copy(name, t.detach(), not t.is_cuda or name in here) for name, t in tensors.items()}
        if there := sum(size for name, size in sizes.items() if not copies[name].is_cuda):
            all_of_it = sum(sizes.values())
            most = f"{readable(all_of_it - there)} of {readable(all_of_it)}"
            why = f"beside the steps the GPU has room for {most}; the next step waits until the rest is in the host's memory"
            fallback("checkpoint in the background", why)
        return copies

    def _copy(self, name: str, tensor: Tensor, here: bool) -> Tensor:
        if here:
            try:
                return tensor.clone()
            except torch.OutOfMemoryError:  # another process has taken the room
                self._room = 0
        return self._pin(name, tensor)

    def _room_on(self, device: torch.device) -> int:
        """Bytes that copies may take: those that are free when the first are made. And half as many each time that the
        allocator has had to take memory back since the last time: copies may have been why."""
        retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
        if self._room < 0:
            free, total = torch.cuda.mem_get_info(device)
            self._room = max(0, free - total // SPARE)
        elif retries > self._retries:
            self._room //= 2
        self._retries = retries
        return self._room

    def _pin(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._pinned.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        return kept.copy_(tensor, non_blocking=True)


def fitting(sizes: dict[str, int], room: int) -> dict[str, int]:
    """Those that find room, in their order."""
    found = {}
    for name, size in sizes.items():
        if size <= room:
            found[name], room = size, room - size
    return found


def _gpu_of(tensors: dict[str, Tensor]) -> torch.device | None:
    return next((t.device for t in tensors.values() if t.is_cuda), None)


def _read(tensor: Tensor, bounce: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """By way of pinned memory, six times as fast as into pageable memory at once (55 against 9 GB/s on an H200)."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    there, here = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, host))
    for part, place in zip(there.split(_BLOCK), here.split(_BLOCK)):
        bounce[: len(part)].copy_(part, non_blocking=True)
        stream.synchronize()
        place.copy_(bounce[: len(part)])
    return host
