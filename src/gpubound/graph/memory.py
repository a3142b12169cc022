"""Memory as bytes: a copy of what a function writes, put back bit for bit; and the comparison of two results.

A copy is made of the whole storage, not of a tensor, because views overlap. What holds nothing but zeros, as moments and
accumulators do at first, costs no copy. Copies lie on the device until they fill half of what is free there, then on the host:
a training state of tens of GB must not be the reason that a capture fails. Whether such a copy is still what lies on the device
a fingerprint says, which reads nothing of the host; and what is only to be compared has a fingerprint in place of a copy there.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..device import usable_bytes
from ..kernels.tensor_state import made_record, record_of
from .fingerprint import fingerprint
from .reachable import storage_key
from .staging_copy import apart, copy_bytes

_CHUNK = 1 << 26  # bytes compared at a time
_PART = 1 << 24  # bytes compared as numbers at a time: in fp64 they are up to eight times as many, several times over


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the tensor's storage. Writing through them leaves its version counter alone: autograd does not mind."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def whole(tensor: Tensor) -> Tensor:
    """Everything in the tensor's storage, as numbers of its dtype."""
    raw, size = bytes_of(tensor), tensor.element_size()
    return raw[: raw.numel() // size * size].view(tensor.dtype)


class Room:
    """Where copies go: the device until they fill half of what was free there, then host memory."""

    def __init__(self, device: torch.device) -> None:
        self.left: float = usable_bytes(device) // 2 if device.type == "cuda" else float("inf")

    def holds(self, live: Tensor, beside: int = 0) -> bool:
        """Whether a copy of that would lie on the device, beside copies of so many bytes to come."""
        return not live.is_cuda or live.numel() + beside <= self.left

    def take(self, live: Tensor) -> Tensor:
        if not self.holds(live):
            return torch.empty(live.numel(), dtype=torch.uint8, device="cpu")
        if live.is_cuda:
            self.left -= live.numel()
        return torch.empty_like(live)

    def give_back(self, kept: Tensor | None) -> None:
        if kept is not None and kept.is_cuda:
            self.left += kept.numel()


class Memory:
    """One storage, and the bytes kept of it: at once, or with now=False from the first `keep` on.

    Of a tensor of codes, whose record says which `numbers` they stand for, these are compared, and not the codes.
    """

    def __init__(self, tensor: Tensor, name: str, room: Room, now: bool = True) -> None:
        self.name, self.room = name, room
        self.tensor = tensor.detach()
        record = record_of(tensor)
        self.numbers = None if record is None else record.numbers
        if self.numbers is not None:
            made_record(self.tensor).numbers = self.numbers
        self.live = bytes_of(tensor)
        self.kept: Tensor | None = None  # None: nothing but zeros
        self.mark: int | None = None  # of what is kept elsewhere than the storage lies
        if now:
            self.keep()

    @property
    def nbytes(self) -> int:
        """What the copy takes."""
        return 0 if self.kept is None else self.kept.numel()

    def keep(self) -> None:
        if not _any(self.live):
            self.room.give_back(self.kept)
            self.kept = self.mark = None
            return
        if self.kept is None:
            self.kept = self.room.take(self.live)
        copy_bytes(self.live, self.kept)
        self.mark = fingerprint(self.live) if apart(self.live, self.kept) else None

    def put_back(self) -> None:
        if self.kept is None:
            self.live.zero_()
        elif self.mark is None or self.changed():
            copy_bytes(self.kept, self.live)

    def swap(self) -> None:
        """Exchange what is live with what is kept."""
        if self.kept is None:
            self.keep()
            self.live.zero_()
            return
        if self.mark is not None:
            if (now := fingerprint(self.live)) == self.mark:
                return
            self.mark = now
        for here, there in zip(self.live.split(_CHUNK), self.kept.split(_CHUNK)):
            passing = here.clone()
            copy_bytes(there, here)
            copy_bytes(passing, there)

    def leave_device(self) -> bool:
        """Move the copy to the host; False when it does not lie on a device."""
        if (there := self.kept) is None or there.device.type == "cpu":
            return False
        self.kept = torch.empty(there.numel(), dtype=torch.uint8, device="cpu")
        copy_bytes(there, self.kept)
        self.mark = fingerprint(there)
        return True

    def changed(self) -> bool:
        """Whether the live bytes differ from the kept ones. Waits for the device."""
        if self.kept is None:
            return _any(self.live)
        if self.mark is not None:
            return fingerprint(self.live) != self.mark
        return any(not torch.equal(here, there) for here, there in self._pairs(_CHUNK))

    def difference(self) -> "Difference":
        """How far the live contents are from the kept ones, read as numbers of the tensor's dtype."""
        if not self.changed():
            return EQUAL
        if self.numbers is not None:
            kept = torch.zeros_like(self.live) if self.kept is None else self.kept
            return _furthest((a, b.to(a.device)) for a, b in zip(self.numbers(self.live), self.numbers(kept)))
        dtype, size = self.tensor.dtype, self.tensor.element_size()
        pairs = ([t[: t.numel() // size * size].view(dtype) for t in pair] for pair in self._pairs(_PART))
        return _furthest((here, there) for here, there in pairs)

    def _pairs(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(live, kept) bytes, part by part, on the live ones' device."""
        for at in range(0, self.live.numel(), size):
            here = self.live[at : at + size]
            there = torch.zeros_like(here) if self.kept is None else self.kept[at : at + size]
            if apart(here, there):
                copy_bytes(there, there := torch.empty_like(here))
            yield here, there


class MemoryMark:
    """A fingerprint of what a storage held, in place of a `Memory` whose copy would lie on the host and nobody wants back."""

    def __init__(self, memory: Memory) -> None:
        self.name, self.live = memory.name, memory.live
        self.seen: int | None = None

    def keep(self) -> None:
        self.seen = fingerprint(self.live)

    def changed(self) -> bool:
        return fingerprint(self.live) != self.seen


def _any(raw: Tensor) -> bool:
    """Whether there is anything but zeros. Weights say so in their first part."""
    return any(bool(part.any()) for part in raw.split(_CHUNK))


class Snapshot:
    """Copies of storages, taken one by one before their first write, and put back together."""

    def __init__(self, device: torch.device) -> None:
        self.room = Room(device)
        self.memories: dict[int, Memory] = {}

    def add(self, tensor: Tensor, name: str = "") -> None:
        key = storage_key(tensor)
        if key and key not in self.memories and tensor.untyped_storage().nbytes():
            self.memories[key] = Memory(tensor, name, self.room)

    def restore(self) -> None:
        for memory in self.memories.values():
            memory.put_back()

    def leave_device(self) -> bool:
        """Move all copies to the host, and those to come; False when none lay on a device."""
        self.room.left = 0
        moved = [memory.leave_device() for memory in self.memories.values()]
        return any(moved)


def where(memories: Iterable[Memory]) -> str:
    """On what the copies lie, in words; empty where there are none."""
    places = {"host memory" if m.kept.device.type == "cpu" else str(m.kept.device) for m in memories if m.kept is not None}
    return " and ".join(sorted(places))


@dataclass(frozen=True)
class Difference:
    """How far a result is from the one wanted: bit for bit, at most by how much, and that over the largest value wanted."""

    bitwise: bool
    absolute: float
    relative: float


EQUAL = Difference(True, 0.0, 0.0)


def difference(got: Tensor, want: Tensor) -> Difference:
    """Compare two tensors of one shape and dtype; NaN equals NaN."""
    if all(torch.equal(a, b) for a, b in zip(_bits(got).split(_CHUNK), _bits(want).split(_CHUNK))):
        return EQUAL
    size = _PART // got.element_size()
    return _furthest(zip(got.detach().reshape(-1).split(size), want.detach().reshape(-1).split(size)))


def _furthest(pairs: Iterable[tuple[Tensor, Tensor]]) -> Difference:
    """The difference of parts that are not all equal, each (got, want)."""
    absolute = largest = 0.0
    for got, want in pairs:
        if got.is_complex():
            got, want = torch.view_as_real(got), torch.view_as_real(want)
        a, b = got.double(), want.double()
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        absolute = max(absolute, gap.max().item())
        largest = max(largest, torch.where(b.isfinite(), b.abs(), 0.0).max().item())
    return Difference(False, absolute, absolute / largest if largest else absolute)


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


@contextlib.contextmanager
def allocating_in(pool: Any, device: torch.device) -> Iterator[None]:
    """What this thread allocates lies in a graph's pool, where all is free between replays but its outputs.

    Autograd's threads allocate elsewhere, so backward stays on this one. Other threads (a feed's) go on as before.
    """
    if pool is None:
        yield
        return
    torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


class Generators:
    """The random generators that a function draws from (the CPU's, the device's, those seen), with their first states."""

    def __init__(self, device: torch.device) -> None:
        own = [torch.default_generator]
        if device.type == "cuda":
            own.append(torch.cuda.default_generators[device.index])
        self._all = [(generator, generator.get_state()) for generator in own]
        self._own = len(own)

    def add(self, generator: torch.Generator) -> None:
        if all(generator is not known for known, _ in self._all):
            self._all.append((generator, generator.get_state()))

    @property
    def extra(self) -> list[torch.Generator]:
        """Those that a graph does not register by itself."""
        return [generator for generator, _ in self._all[self._own :]]

    def states(self) -> list[Tensor]:
        return [generator.get_state() for generator, _ in self._all]

    def set(self, states: list[Tensor]) -> None:
        for (generator, _), state in zip(self._all, states):
            generator.set_state(state)

    def rewind(self) -> None:
        """Back to the states they had at first."""
        self.set([state for _, state in self._all])
