"""From the device to the host, while the training goes on: copies on the device, read behind it on a stream of their own.

Copies take only the memory that steps leave free. What finds no room goes straight to the host, and the next step waits for
it: into pinned memory, of which an H200 fills 55 GB a second, or, until there is some, by way of a small piece of it, 4 GB a
second. Pinned memory is allocated beside the steps (`make_ready`), since 16 GB of it took 17 s, and kept.

Copies of all tensors cost more where nothing but them fits: of 8b in two shards every step took 1.0 to 1.6 s instead of 0.32
until they were read, 9 s later, since each freed memory and asked for it again.
"""

import threading

import torch
from torch import Tensor

from ..device import free_bytes, usable_bytes
from ..formatting import readable
from ..trace import fallback

_BLOCK = 1 << 24  # bytes at a time from the GPU
SPARE = 32  # one part of so many of the GPU's memory stays free beside copies: what steps allocate changes a little
WHAT = "checkpoint in the background"

Form = tuple[torch.Size, torch.dtype]


class Staging:
    """One set of tensors at a time: `take` copies them in order with the device's own work, `give` waits for the copies."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}
        self._wanted: dict[str, Form] = {}  # pinned memory that is to be allocated
        self._gpu: torch.device | None = None
        self._done: torch.cuda.Event | None = None
        self._room, self._retries = -1, 0

    def expect(self, tensors: dict[str, Tensor]) -> None:
        """Find out what has no room on the device, for `make_ready`. What is free now, steps do not need."""
        for name in tensors.keys() - self._fitting(tensors, settled=True):
            self._want(name, tensors[name])

    def make_ready(self) -> None:
        """Allocate the pinned memory that is wanted. For a thread of its own; it ends early when the program does."""
        while self._wanted and threading.main_thread().is_alive():
            name, (shape, dtype) = self._wanted.popitem()
            try:
                with torch.cuda.device(self._gpu):  # a thread begins on GPU 0, which may be another rank's
                    self._pinned[name] = torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")
            except RuntimeError as error:  # the host's memory is full, or may not be pinned
                self._wanted.clear()
                fallback(WHAT, f"no pinned memory of the host ({str(error).partition(chr(10))[0]}); steps wait longer for it")

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors as they are when the device comes to it. The host does not wait where these have a place."""
        copies = self._copied(tensors)
        # The reading stream waits for this event.
        self._done = None if self._gpu is None else torch.cuda.current_stream(self._gpu).record_event()
        return copies

    def give(self, copies: dict[str, Tensor]) -> dict[str, Tensor]:
        """The copies as contiguous tensors on the host. For a thread of its own: it waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        device = _gpu_of(copies)
        if device is None:
            return {name: t.contiguous() for name, t in copies.items()}
        with torch.cuda.device(device):  # as above
            stream, bounce = torch.cuda.Stream(device), _bounce()
            with torch.cuda.stream(stream):
                return {n: _read(t, bounce, stream) if t.is_cuda else t.contiguous() for n, t in copies.items()}

    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        here = self._fitting(tensors)
        copies = {name: self._copy(name, t.detach(), name in here) for name, t in tensors.items()}
        sizes = {name: t.nbytes for name, t in tensors.items() if t.is_cuda}
        if there := sum(size for name, size in sizes.items() if not copies[name].is_cuda):
            all_of_it = sum(sizes.values())
            most = f"{readable(all_of_it - there)} of {readable(all_of_it)}"
            fallback(WHAT, f"beside the steps the GPU has room for {most}; the next step waits until the host has the rest")
        return copies

    def _copy(self, name: str, tensor: Tensor, here: bool) -> Tensor:
        if here:
            try:
                return tensor.clone()
            except torch.OutOfMemoryError:  # another process has taken the room
                self._room = 0
        kept = self._pinned.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept.copy_(tensor, non_blocking=True)
        self._want(name, tensor)
        return _read(tensor, _bounce(), torch.cuda.current_stream(tensor.device))

    def _fitting(self, tensors: dict[str, Tensor], settled: bool = False) -> set[str]:
        """Those whose copies lie where they do."""
        sizes = {name: t.nbytes for name, t in tensors.items() if t.is_cuda}
        self._gpu = _gpu_of(tensors)
        here = {} if self._gpu is None else fitting(sizes, self._room_on(self._gpu, settled))
        return (tensors.keys() - sizes.keys()) | here.keys()

    def _want(self, name: str, tensor: Tensor) -> None:
        self._pinned.pop(name, None)  # of another form than this one
        self._wanted[name] = tensor.shape, tensor.dtype

    def _room_on(self, device: torch.device, settled: bool = False) -> int:
        """Bytes that copies may take: what steps leave free; not `settled`, what is left when as much is in use as ever was.

        Half as many each time that the allocator has had to take memory back since: copies may have been why.
        """
        now = torch.cuda.memory_stats(device)
        retries = now.get("num_alloc_retries", 0)
        if self._room < 0:
            more = now.get("allocated_bytes.all.peak", 0) - now.get("allocated_bytes.all.current", 0)
            free = free_bytes(device) if settled else usable_bytes(device) - more
            self._room = max(0, free - torch.cuda.mem_get_info(device)[1] // SPARE)
        elif retries > self._retries:
            self._room //= 2
        self._retries = retries
        return self._room


def fitting(sizes: dict[str, int], room: int) -> dict[str, int]:
    """Those that find room, in their order."""
    found = {}
    for name, size in sizes.items():
        if size <= room:
            found[name], room = size, room - size
    return found


def _gpu_of(tensors: dict[str, Tensor]) -> torch.device | None:
    return next((t.device for t in tensors.values() if t.is_cuda), None)


def _bounce() -> Tensor:
    return torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=True, device="cpu")


def _read(tensor: Tensor, bounce: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """By way of pinned memory, six times as fast as into pageable memory at once (55 against 9 GB/s on an H200)."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    there, here = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, host))
    for part, place in zip(there.split(_BLOCK), here.split(_BLOCK)):
        bounce[: len(part)].copy_(part, non_blocking=True)
        stream.synchronize()
        place.copy_(bounce[: len(part)])
    return host
