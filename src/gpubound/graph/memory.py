"""Copies of storages, restored bit for bit; fingerprints of storages; the comparison of two results.

Views overlap, so whole storages are copied. A storage of zeros, such as a moment at first, costs no copy. A capture must not
need more memory than the function: only small copies are made on the device, all others on the host. A 64-bit fingerprint,
computed on the device, tells whether a storage still equals its copy on the host without reading the host; a storage that is
only compared, never restored, has a fingerprint instead of a copy on the host.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..device import usable_bytes
from ..kernels.accumulate import ensure_record, record_of
from .reachable import storage_key

CHUNK = 1 << 25  # bytes copied, or compared bit for bit, at a time
PART = 3 << 22  # bytes fingerprinted at a time: the intermediates are four times as many
COMPARED = 1 << 22  # bytes compared in fp64 at a time: the intermediates are five to sixteen times as many
PARTS = 1 << 9  # or a storage in this many parts: in those of COMPARED bytes, 14.7 GB took 0.9 s to launch
ALIGNED = 256  # bytes: where a copy in lent memory begins
ON_DEVICE = 1 << 24  # bytes of a state's copies on its device; a constant, so that all ranks make the same calls


def bytes_of(tensor: Tensor) -> Tensor:
    """Return all bytes of the tensor's storage. Writes through them do not change its version counter, as autograd needs."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def elements_of(tensor: Tensor) -> Tensor:
    """Return all elements of the tensor's storage."""
    raw, size = bytes_of(tensor), tensor.element_size()
    return raw[: raw.numel() // size * size].view(tensor.dtype)


class CopyBudget:
    """Device memory for copies. Further copies are made in host memory.

    passing  True: for copies that are freed after one operation, half of what is free
    lent     memory of others, as bytes, for copies that do not fit
    """

    def __init__(self, device: torch.device, passing: bool = False, lent: Iterable[Tensor] = ()) -> None:
        self.left: float = float("inf")
        self.lent = list(lent)
        self.lenders = {storage_key(memory) for memory in self.lent}
        if device.type == "cuda":
            self.left = usable_bytes(device) // 2 if passing else ON_DEVICE

    def fits(self, live: Tensor, pending: int = 0) -> bool:
        """Return whether a copy of `live` fits on its device, in addition to `pending` bytes of other copies."""
        return not live.is_cuda or live.numel() + pending <= self.left

    def allocate(self, live: Tensor) -> Tensor:
        if not self.fits(live):
            large_enough = [index for index, memory in enumerate(self.lent) if len(memory) >= live.numel()]
            if not large_enough:
                return torch.empty(live.numel(), dtype=torch.uint8, device="cpu")
            memory = self.lent.pop(min(large_enough, key=lambda index: len(self.lent[index])))
            self.lent.append(memory[-(-live.numel() // ALIGNED) * ALIGNED :])
            return memory[: live.numel()]
        if live.is_cuda:
            self.left -= live.numel()
        return torch.empty_like(live)

    def release(self, copy: Tensor | None) -> None:
        if copy is None:
            return
        if storage_key(copy) in self.lenders:
            self.lent.append(copy)
        elif copy.is_cuda:
            self.left += copy.numel()


class StorageCopy:
    """A storage and a copy of its bytes, made at once, or with now=False by the first `save`.

    Of a quantised tensor, whose record can dequantise it, the dequantised values are compared.
    """

    def __init__(self, tensor: Tensor, name: str, budget: CopyBudget, now: bool = True) -> None:
        self.name, self.budget = name, budget
        self.tensor = tensor.detach()
        record = record_of(tensor)
        self.dequantize = None if record is None else record.numbers
        if self.dequantize is not None:
            ensure_record(self.tensor).numbers = self.dequantize
        self.live = bytes_of(tensor)
        self.saved: Tensor | None = None  # None: all zeros
        self.fingerprint: int | None = None  # of a copy on another device than the storage
        if now:
            self.save()

    @property
    def nbytes(self) -> int:
        return 0 if self.saved is None else self.saved.numel()

    def save(self) -> None:
        if not _any(self.live):
            self.budget.release(self.saved)
            self.saved = self.fingerprint = None
            return
        if self.saved is None:
            self.saved = self.budget.allocate(self.live)
        copy_bytes(self.live, self.saved)
        self.fingerprint = fingerprint(self.live) if on_two_devices(self.live, self.saved) else None

    def restore(self) -> None:
        if self.saved is None:
            self.live.zero_()
        elif self.fingerprint is None or self.changed():
            copy_bytes(self.saved, self.live)

    def swap(self) -> None:
        """Exchange the storage's bytes with the copy."""
        if self.saved is None:
            self.save()
            self.live.zero_()
            return
        if self.fingerprint is not None:
            if (now := fingerprint(self.live)) == self.fingerprint:
                return
            self.fingerprint = now
        for live, copy in zip(self.live.split(CHUNK), self.saved.split(CHUNK)):
            temporary = live.clone()
            copy_bytes(copy, live)
            copy_bytes(temporary, copy)

    def changed(self) -> bool:
        """Return whether the storage differs from its copy. Waits for the device."""
        if self.saved is None:
            return _any(self.live)
        if self.fingerprint is not None:
            return fingerprint(self.live) != self.fingerprint
        return any(not torch.equal(_long(live), _long(copy)) for live, copy in self._pairs(CHUNK))

    def difference(self) -> "Difference":
        """Return the difference of the storage from its copy, as elements of the tensor's dtype."""
        if not self.changed():
            return EQUAL
        if self.dequantize is not None:
            copy = torch.zeros_like(self.live) if self.saved is None else self.saved
            both = zip(*(self.dequantize(raw, self.live.device) for raw in (self.live, copy)))
            parts = (zip(*(t.split(COMPARED // t.element_size()) for t in pair)) for pair in both)
            return _largest_difference(chain.from_iterable(parts))
        dtype, size = self.tensor.dtype, self.tensor.element_size()
        compared = max(COMPARED, -(-len(self.live) // PARTS // ALIGNED) * ALIGNED)
        parts = (zip(*(t.split(compared) for t in pair)) for pair in self._pairs(max(CHUNK, compared)))
        pairs = ([t[: t.numel() // size * size].view(dtype) for t in pair] for pair in chain.from_iterable(parts))
        return _largest_difference((live, copy) for live, copy in pairs if live.numel())

    def _pairs(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (storage, copy) bytes part by part, both on the storage's device."""
        for start in range(0, self.live.numel(), size):
            live = self.live[start : start + size]
            copy = torch.zeros_like(live) if self.saved is None else self.saved[start : start + size]
            if on_two_devices(live, copy):
                copy_bytes(copy, copy := torch.empty_like(live))
            yield live, copy


class StorageFingerprint:
    """A storage and a fingerprint of its bytes, instead of a copy that is never restored.

    constant  the storage must keep the bytes that it has now: a `save` of others counts as a change
    """

    def __init__(self, storage: StorageCopy, constant: bool = False) -> None:
        self.name, self.live = storage.name, storage.live
        self.constant, self.was_changed = constant, False
        self.value: int | None = fingerprint(self.live) if constant else None

    def save(self) -> None:
        now = fingerprint(self.live)
        self.was_changed = self.was_changed or (self.constant and now != self.value)
        self.value = self.value if self.constant else now

    def changed(self) -> bool:
        return self.was_changed or fingerprint(self.live) != self.value


def _any(raw: Tensor) -> bool:
    """Return whether a byte is not zero. Weights show one in their first chunk."""
    return any(bool(_long(part).any()) for part in raw.split(CHUNK))


def _long(raw: Tensor) -> Tensor:
    """Return bytes as words of eight, where they are as many: a GPU compares one element a thread, whatever its size."""
    return raw.view(torch.int64) if raw.numel() % 8 == 0 and raw.storage_offset() % 8 == 0 else raw


class Snapshot:
    """Copies of storages, each made before the storage's first write, and restored together."""

    def __init__(self, device: torch.device) -> None:
        self.budget = CopyBudget(device)
        self.copies: dict[int, StorageCopy] = {}

    def add(self, tensor: Tensor, name: str = "") -> None:
        key = storage_key(tensor)
        if key and key not in self.copies and tensor.untyped_storage().nbytes():
            self.copies[key] = StorageCopy(tensor, name, self.budget)

    def restore(self) -> None:
        for copy in self.copies.values():
            copy.restore()


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy `source` into `target`: between a GPU and the host through two alternating pinned buffers, else by one `copy_`.

    Pinned memory carries 55 GB/s on an H200, pageable memory 9.
    """
    if not on_two_devices(source, target):
        target.copy_(source)
        return
    buffers, download, filled = [_PinnedBuffer(source, target), _PinnedBuffer(source, target)], is_download(source), None
    for number, (source_chunk, target_chunk) in enumerate(zip(source.split(CHUNK), target.split(CHUNK))):
        buffer = buffers[number % 2]
        buffer.fill(source_chunk)
        if not download:
            buffer.empty(target_chunk)
            continue
        if filled is not None:
            filled[0].empty(filled[1])
        filled = buffer, target_chunk
    if filled is not None:
        filled[0].empty(filled[1])
    for buffer in buffers:
        buffer.wait()


def on_two_devices(one: Tensor, other: Tensor) -> bool:
    return one.device != other.device


def is_download(source: Tensor) -> bool:
    return source.is_cuda


class _PinnedBuffer:
    """A pinned buffer. The GPU's copies to and from it are asynchronous; the next user of the buffer waits for them."""

    chunk: Tensor

    def __init__(self, source: Tensor, target: Tensor) -> None:
        gpu, size = source.device if source.is_cuda else target.device, min(CHUNK, source.numel())
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=gpu.type == "cuda", device="cpu")
        self.stream = torch.cuda.current_stream(gpu) if gpu.type == "cuda" else None
        self.done = torch.cuda.Event() if gpu.type == "cuda" else None

    def fill(self, source: Tensor) -> None:
        self.wait()
        self.chunk = self.bytes[: source.numel()]
        self._copy(source, self.chunk, launched=source.is_cuda)

    def empty(self, target: Tensor) -> None:
        self.wait()
        self._copy(self.chunk, target, launched=target.is_cuda)

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()  # returns at once if nothing was launched

    def _copy(self, source: Tensor, target: Tensor, launched: bool) -> None:
        target.copy_(source, non_blocking=True)
        if launched and self.done is not None:  # a copy on the host is complete, and the stream may be at the other buffer
            self.done.record(self.stream)


# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators): its step and its finalizer.
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def fingerprint(raw: Tensor) -> int:
    """Return a 64-bit hash of `raw`, a dense uint8 tensor that begins at a multiple of four. Waits for the device."""
    return fingerprints([raw])[0]


def fingerprints(storages: Sequence[Tensor]) -> list[int]:
    """Return the fingerprint of each. Waits for the device once.

    Each four-byte word is multiplied by a pseudorandom odd number of 64 bits, which depends on its position, and the products
    are summed: the order of the sums does not matter, and the fingerprint is the same on any device. One other word is always
    seen; several collide in one case in 2^32 or fewer, whatever their difference.
    """
    totals, longest = list[Tensor](), max(map(len, storages), default=0)
    keys = dict[torch.device, Tensor]()  # of the first part; others multiply theirs by another number
    for raw in storages:
        if raw.device not in keys:
            keys[raw.device] = _keys(min(PART, longest) // 4 + 1, raw.device)
        total = torch.zeros((), dtype=torch.int64, device=raw.device)
        for number, part in enumerate(raw.split(PART)):
            words = _words(part).to(torch.int64)
            total += words.mul_(keys[raw.device][: len(words)]).sum() * _signed((number * STEP | 1) % (1 << 64))
            del words  # else the next ones are allocated beside these
        totals.append(total * _signed(SECOND) + raw.numel())
    return torch.stack([total.to(totals[0].device) for total in totals]).tolist() if totals else []


def _words(part: Tensor) -> Tensor:
    """Return the bytes as words; an incomplete last word is padded with its number of bytes."""
    left = part.numel() % 4
    if not left:
        return part.view(torch.int32)
    last = torch.zeros(4, dtype=torch.uint8, device=part.device)
    last[:left] = part[-left:]
    last[3] = left
    return torch.cat([part[:-left].view(torch.int32), last.view(torch.int32)])


def _keys(count: int, device: torch.device) -> Tensor:
    """Return pseudorandom odd numbers of 64 bits."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_signed(STEP))
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return x.bitwise_or_(1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference of a result from the expected one, and that divided by the largest expected value."""

    bitwise: bool
    absolute: float
    relative: float


EQUAL = Difference(True, 0.0, 0.0)


def difference(got: Tensor, want: Tensor) -> Difference:
    """Compare two tensors of one shape and dtype; NaN equals NaN."""
    if all(torch.equal(a, b) for a, b in zip(_bits(got).split(CHUNK), _bits(want).split(CHUNK))):
        return EQUAL
    size = COMPARED // got.element_size()
    return _largest_difference(zip(got.detach().reshape(-1).split(size), want.detach().reshape(-1).split(size)))


def _largest_difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> Difference:
    """Return the difference over all parts, each (got, want), of which one at least is not equal bit for bit."""
    maxima = []  # read once, at the end
    for got, want in pairs:
        if got.is_complex():
            got, want = torch.view_as_real(got), torch.view_as_real(want)
        a, b = got.to(torch.float64, copy=True), want.double()
        same = (a == b) | (a.isnan() & b.isnan())
        gap = a.sub_(b).abs_().masked_fill_(same, 0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        furthest = gap.max()
        del a, gap, same  # what two parts take at a time is reserved in addition to a step's graph
        maxima.append(torch.stack([furthest, b.nan_to_num(0.0, 0.0, 0.0).abs_().max()]))
        del b
    absolute, largest = torch.stack(maxima).amax(0).tolist() if maxima else (0.0, 0.0)
    return Difference(False, absolute, absolute / largest if largest else absolute)


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


class Generators:
    """Random generators of a function (the CPU's, the device's, those that it is seen to use), with their first states."""

    def __init__(self, device: torch.device) -> None:
        defaults = [torch.default_generator]
        if device.type == "cuda":
            defaults.append(torch.cuda.default_generators[device.index])
        self._all = [(generator, generator.get_state()) for generator in defaults]
        self._defaults = len(defaults)

    def add(self, generator: torch.Generator) -> None:
        if all(generator is not known for known, _ in self._all):
            self._all.append((generator, generator.get_state()))

    @property
    def custom(self) -> list[torch.Generator]:
        """Return the generators that a graph does not register itself."""
        return [generator for generator, _ in self._all[self._defaults :]]

    def states(self) -> list[Tensor]:
        return [generator.get_state() for generator, _ in self._all]

    def set(self, states: list[Tensor]) -> None:
        for (generator, _), state in zip(self._all, states):
            generator.set_state(state)

    def rewind(self) -> None:
        """Restore the first states."""
        self.set([state for _, state in self._all])


@contextlib.contextmanager
def allocating_in(pool: Any, device: torch.device) -> Iterator[None]:
    """Allocate this thread's memory in a graph's pool, which between replays is free except for the outputs.

    Autograd's threads would allocate elsewhere; GraphRunner runs backward on this one. Others (a feed's) are not affected.
    """
    if pool is None:
        yield
        return
    torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
