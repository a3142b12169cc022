"""The files of a checkpoint: state.json, with the size and checksum of every file, and the tensors of one process.

`shapes`, `read` and `write` are the interface of distributed/sharded_checkpoint.py too, in which every rank
writes its own shards.

`Staging` copies tensors from the device to the host while training continues. Tensors are cloned on the device, and the clones
are read on a side stream. Clones use only memory that steps leave free. A tensor without room is copied straight to the host,
and the next step waits for it: into pinned memory, which an H200 fills at 55 GB/s, or, until that is allocated, through a small
pinned buffer at 4 GB/s. Pinned memory is allocated in the background (`make_ready`), because 16 GB of it took 17 s, and is
kept.

Clones that just fit cost more than they save: with 8b in two shards every step took 1.0 to 1.6 s instead of 0.32 until they
were read, 9 s later, since each step freed memory and allocated it again.
"""

import json
import os
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...device import free_bytes, usable_bytes
from ...distributed import Ranks
from ...distributed.local_shard import LocalShard
from ...errors import DataError
from ...formatting import readable
from ...models.storing import write_tensors
from ...trace import fallback

STATE = "state.json"
STATE_CRC = "state_crc32"
TENSORS = "tensors.safetensors"
CHECKSUM_BLOCK = 1 << 24  # bytes read at a time
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json with its own checksum; it is on disk when this returns."""
    state = json.loads(json.dumps(state))  # as it will be read: with strings for keys
    (folder / STATE).write_text(json.dumps(state | {STATE_CRC: _state_crc(state)}, indent=1))
    flush(folder / STATE)
    flush(folder)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the verified content of state.json."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except RecursionError:
        state = None
    if not isinstance(state, dict) or STATE_CRC not in state:
        raise ValueError(f"its {STATE} is not one that this version of gpubound writes")
    if state.pop(STATE_CRC) != _state_crc(state):
        raise damaged(folder, STATE)
    if "sharded" not in state:  # written before 30 November 2026
        state |= {"sharded": "files" in state}
        state.setdefault("files", {TENSORS: [state.get("bytes"), state.get("crc32")]})
    return state


def score_of(folder: Path) -> Any:
    """Return the score of a checkpoint, None where it has none or is damaged."""
    try:
        return read_state(folder)["facts"].get("score")
    except (OSError, ValueError, DataError):
        return None


def described(file: Path) -> list[Any]:
    """Return [name, size, checksum]."""
    return [file.name, file.stat().st_size, checksum(file)]


def flushed(file: Path) -> list[Any]:
    """Wait until a file is on disk, and return its description."""
    flush(file)
    return described(file)


def damaged(folder: Path, file: str) -> DataError:
    return DataError(f"{folder} is damaged: its {file} does not have the checksum that was written with it.")


def _state_crc(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(CHECKSUM_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def flush(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(folder: Path, shards: dict[str, LocalShard], ranks: Ranks) -> list[Path]:
    """Write the tensors and return the files of this rank."""
    if not ranks.first:
        return []
    write_tensors({name: shard.local for name, shard in shards.items()}, folder / TENSORS)
    return [folder / TENSORS]


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape and dtype of every tensor, by name."""
    with safe_open(folder / TENSORS, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        return {name: (torch.Size(s.get_shape()), DTYPES[s.get_dtype()]) for name, s in slices.items()}


def read(folder: Path, shards: Mapping[str, LocalShard]) -> None:
    """Fill the shards in place, reading no more than their slices."""
    # Under another default device of the caller the slices would be there, without values.
    with torch.device("cpu"), safe_open(folder / TENSORS, framework="pt") as file:
        for name, shard in shards.items():
            if shard.local.numel():
                shard.local.copy_(file.get_slice(name)[shard.slices] if shard.offsets else file.get_tensor(name))


BLOCK = 1 << 24  # bytes read from the GPU at a time
SPARE = 32  # 1/32 of the GPU's memory stays free: allocations of steps vary a little
WHAT = "checkpoint in the background"


class Staging:
    """One set of tensors at a time: `take` copies them in stream order, `give` waits for the copies."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}
        self._wanted: dict[str, tuple[torch.Size, torch.dtype]] = {}  # pinned memory to be allocated
        self._gpu: torch.device | None = None
        self._done: torch.cuda.Event | None = None
        self._room, self._retries = -1, 0

    def expect(self, tensors: dict[str, Tensor]) -> None:
        """Note which tensors have no room on the device, for `make_ready`. Steps do not need the memory that is free now."""
        for name in tensors.keys() - self._fitting(tensors, settled=True):
            self._want(name, tensors[name])

    def make_ready(self) -> None:
        """Allocate the pinned memory that is wanted, on a background thread; ends early when the program does."""
        while self._wanted and threading.main_thread().is_alive():
            name, (shape, dtype) = self._wanted.popitem()
            try:
                with torch.cuda.device(self._gpu):  # a thread begins on GPU 0, which may be another rank's
                    self._pinned[name] = torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")
            except RuntimeError as error:  # the host's memory is full, or cannot be pinned
                self._wanted.clear()
                fallback(WHAT, f"no pinned memory of the host ({str(error).partition(chr(10))[0]}); steps wait longer for it")

    def take(self, tensors: dict[str, Tensor], to_host: bool = False, last: bool = False) -> dict[str, Tensor]:
        """Return copies of the tensors in stream order. The host waits only for those without room or pinned memory.

        to_host  none of them on the device: those of a policy of 0.6b were 7.8 of the 47.4 GiB that its run had reserved
        last     no others follow, for which pinned memory would be worth its while
        """
        fitting = self._fitting(tensors, room=0 if to_host else None)
        copies = {name: self._copy(name, t.detach(), name in fitting, again=not last) for name, t in tensors.items()}
        sizes = {name: t.nbytes for name, t in tensors.items() if t.is_cuda}
        if not to_host and (on_host := sum(size for name, size in sizes.items() if not copies[name].is_cuda)):
            total = sum(sizes.values())
            most = f"{readable(total - on_host)} of {readable(total)}"
            fallback(WHAT, f"besides the steps the GPU has room for {most}; the next step waits until the host has the rest")
        # The reading stream waits for this event.
        self._done = None if self._gpu is None else torch.cuda.current_stream(self._gpu).record_event()
        return copies

    def give(self, copies: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the copies as contiguous tensors on the host. Waits for the device, so call it on a background thread."""
        if self._done is not None:
            self._done.synchronize()
        device = _gpu_of(copies)
        if device is None:
            return {name: t.contiguous() for name, t in copies.items()}
        with torch.cuda.device(device):  # a thread begins on GPU 0
            stream, buffer = torch.cuda.Stream(device), _pinned_buffer()
            with torch.cuda.stream(stream):
                return {n: _read(t, buffer, stream) if t.is_cuda else t.contiguous() for n, t in copies.items()}

    def _copy(self, name: str, tensor: Tensor, fits: bool, again: bool) -> Tensor:
        """again: others of the tensor follow, for which pinned memory is worth its while"""
        if fits:
            try:
                return tensor.clone()
            except torch.OutOfMemoryError:  # another process has allocated the room
                self._room = 0
        pinned = self._pinned.get(name)
        if pinned is not None and (pinned.shape, pinned.dtype) == (tensor.shape, tensor.dtype):
            return pinned.copy_(tensor, non_blocking=True)
        if again:
            self._want(name, tensor)
        return _read(tensor, _pinned_buffer(), torch.cuda.current_stream(tensor.device))

    def _fitting(self, tensors: dict[str, Tensor], settled: bool = False, room: int | None = None) -> set[str]:
        """Return the names of the tensors whose copies stay on their device."""
        sizes = {name: t.nbytes for name, t in tensors.items() if t.is_cuda}
        self._gpu = _gpu_of(tensors)
        if room is None and self._gpu is not None:
            room = self._room_on(self._gpu, settled)
        on_gpu = fitting(sizes, room or 0)
        return (tensors.keys() - sizes.keys()) | on_gpu.keys()

    def _want(self, name: str, tensor: Tensor) -> None:
        self._pinned.pop(name, None)  # it has another shape or dtype
        self._wanted[name] = tensor.shape, tensor.dtype

    def _room_on(self, device: torch.device, settled: bool = False) -> int:
        """Return the bytes that copies may use: with `settled` those that are free, else those free at the peak of allocations.

        Halved each time that the allocator has had to free cached memory since: copies may have been the reason.
        """
        stats = torch.cuda.memory_stats(device)
        retries = stats.get("num_alloc_retries", 0)
        if self._room < 0:
            more = stats.get("allocated_bytes.all.peak", 0) - stats.get("allocated_bytes.all.current", 0)
            free = free_bytes(device) if settled else usable_bytes(device) - more
            self._room = max(0, free - torch.cuda.mem_get_info(device)[1] // SPARE)
        elif retries > self._retries:
            self._room //= 2
        self._retries = retries
        return self._room


def fitting(sizes: dict[str, int], room: int) -> dict[str, int]:
    """Return the sizes that fit into `room`, first come, first served."""
    result = {}
    for name, size in sizes.items():
        if size <= room:
            result[name], room = size, room - size
    return result


def _gpu_of(tensors: dict[str, Tensor]) -> torch.device | None:
    return next((t.device for t in tensors.values() if t.is_cuda), None)


def _pinned_buffer() -> Tensor:
    return torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True, device="cpu")


def _read(tensor: Tensor, buffer: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Return a host copy made through a pinned buffer: 55 GB/s on an H200, against 9 GB/s into pageable memory directly."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    source, target = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, host))
    for part, place in zip(source.split(BLOCK), target.split(BLOCK)):
        buffer[: len(part)].copy_(part, non_blocking=True)
        stream.synchronize()
        place.copy_(buffer[: len(part)])
    return host
