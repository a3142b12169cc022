"""Memory as bytes: a copy of what a function writes, put back bit for bit; and the comparison of two results.

A copy is made of the whole storage, not of a tensor, because views overlap. Copies lie on the device until they fill half of
what is free there, then in pinned host memory: a training state of tens of GB must not be the reason that a capture fails.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .reach import storage_key

_CHUNK = 1 << 26  # bytes exchanged or compared at a time


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the tensor's storage. Writing through them leaves its version counter alone: autograd does not mind."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def whole(tensor: Tensor) -> Tensor:
    """Everything in the tensor's storage, as numbers of its dtype."""
    raw, size = bytes_of(tensor), tensor.element_size()
    return raw[: raw.numel() // size * size].view(tensor.dtype)


class Room:
    """Where copies go: the device until they fill half of what was free there, then pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self.left: float = float("inf")
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            self.left = (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2

    def take(self, live: Tensor) -> Tensor:
        if live.is_cuda and live.numel() > self.left:
            return torch.empty(live.numel(), dtype=torch.uint8, pin_memory=True)
        if live.is_cuda:
            self.left -= live.numel()
        return torch.empty_like(live)

    def give_back(self, kept: Tensor) -> None:
        if kept.is_cuda:
            self.left += kept.numel()


class Memory:
    """One storage, and the bytes kept of it."""

    def __init__(self, tensor: Tensor, name: str, room: Room) -> None:
        self.name = name
        self.tensor = tensor.detach()
        self.live = bytes_of(tensor)
        self.kept = room.take(self.live)
        self.keep()

    def keep(self) -> None:
        self.kept.copy_(self.live)

    def put_back(self) -> None:
        self.live.copy_(self.kept)

    def swap(self) -> None:
        """Exchange what is live with what is kept."""
        for start in range(0, self.live.numel(), _CHUNK):
            here, there = self.live[start : start + _CHUNK], self.kept[start : start + _CHUNK]
            passing = here.clone()
            here.copy_(there)
            there.copy_(passing)

    def changed(self) -> bool:
        """Whether the live bytes differ from the kept ones. Waits for the device."""
        for start in range(0, self.live.numel(), _CHUNK):
            here = self.live[start : start + _CHUNK]
            if not torch.equal(here, self.kept[start : start + _CHUNK].to(here.device)):
                return True
        return False

    def difference(self) -> "Difference":
        """How far the live contents are from the kept ones, read as numbers of the tensor's dtype."""
        if not self.changed():
            return EQUAL
        now = whole(self.tensor)
        return difference(now, self.kept[: now.nbytes].view(now.dtype).to(now.device))


class Snapshot:
    """Copies of storages, taken one by one before their first write, and put back together."""

    def __init__(self, device: torch.device) -> None:
        self.room = Room(device)
        self.memories: dict[int, Memory] = {}

    def add(self, tensor: Tensor, name: str = "") -> None:
        key = storage_key(tensor)
        if key and key not in self.memories and tensor.untyped_storage().nbytes():
            self.memories[key] = Memory(tensor, name, self.room)

    def adopt(self, key: int, memory: Memory) -> None:
        self.memories.setdefault(key, memory)

    def restore(self) -> None:
        for memory in self.memories.values():
            memory.put_back()

    @property
    def nbytes(self) -> int:
        return sum(memory.kept.numel() for memory in self.memories.values())

    def where(self) -> str:
        """On what the copies lie, in words."""
        places = {str(memory.kept.device) if memory.kept.device.type != "cpu" else "" for memory in self.memories.values()}
        lives = {memory.live.device.type for memory in self.memories.values()}
        host = "pinned host memory" if lives - {"cpu"} else "host memory"
        return " and ".join(sorted(place or host for place in places)) or "nowhere"


@dataclass(frozen=True)
class Difference:
    """How far a result is from the one wanted: bit for bit, at most by how much, and that over the largest value wanted."""

    bitwise: bool
    absolute: float
    relative: float


EQUAL = Difference(True, 0.0, 0.0)


def difference(got: Tensor, want: Tensor) -> Difference:
    """Compare two tensors of one shape and dtype; NaN equals NaN."""
    if torch.equal(_bits(got), _bits(want)):
        return EQUAL
    got, want = got.detach().reshape(-1), want.detach().reshape(-1)
    if got.is_complex():
        got, want = torch.view_as_real(got).reshape(-1), torch.view_as_real(want).reshape(-1)
    absolute = largest = 0.0
    for start in range(0, got.numel(), _CHUNK // 8):
        a, b = got[start : start + _CHUNK // 8].double(), want[start : start + _CHUNK // 8].double()
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        absolute = max(absolute, gap.max().item())
        largest = max(largest, torch.where(b.isfinite(), b.abs(), 0.0).max().item())
    return Difference(False, absolute, absolute / largest if largest else absolute)


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


class Generators:
    """The random generators that a function draws from (the CPU's, the device's, those seen), with their first states."""

    def __init__(self, device: torch.device) -> None:
        own = [torch.default_generator]
        if device.type == "cuda":
            own.append(torch.cuda.default_generators[device.index])
        self._all = [(generator, generator.get_state()) for generator in own]
        self._own = len(own)

    def add(self, generator: torch.Generator, state: Tensor) -> None:
        if all(generator is not known for known, _ in self._all):
            self._all.append((generator, state))

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
