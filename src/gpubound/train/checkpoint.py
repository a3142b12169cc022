"""Checkpoints: each is complete or absent, and they are written while the training goes on.

`snapshot` clones the tensors on their device, in order with the step's own work, so no step waits for the disk. `write` lets a
thread copy the clone to the host on a side stream and write a temporary folder, which is renamed once all of it is on disk: a
run that is killed at any moment leaves its last complete checkpoint. Opening a checkpoint verifies its checksums.

    <folder>/step-00000120/
        tensors.safetensors    every tensor, by name
        state.json             step, facts, size and crc32 of the tensors' file, and the crc32 of all of this
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import DataError
from ..trace import fallback, notice
from ..words import readable

TENSORS, STATE = "tensors.safetensors", "state.json"
WHOLE = "state_crc32"
_NAME = re.compile(r"step-(\d{8,})$")
_BLOCK = 1 << 24  # bytes at a time, for a checksum and from the GPU


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint on disk. `facts` is read at once, tensors when asked for."""

    path: Path
    step: int
    facts: dict[str, Any]

    def tensors(self, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        return load_file(self.path / TENSORS, device=str(device))


class Checkpoints:
    """The checkpoints of one run. `first` puts on disk, on the writing thread, what must be there before a checkpoint is."""

    def __init__(
        self, folder: str | Path, keep: int = 3, keep_every: int | None = None, first: Callable[[], None] = lambda: None
    ):
        if keep < 1:
            raise ValueError(f"Checkpoints: keep must be at least 1, got {keep}; the newest one is what a resumed run needs.")
        self.folder, self.keep, self.keep_every, self.first = Path(folder), keep, keep_every, first
        self._snapshot: tuple[Any, ...] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpubound-checkpoint")
        self._writing: Future | None = None

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], score: Any = None, wait: bool = False) -> None:
        """Snapshot now, write in the background; `wait` until it is on disk. A lower `score`, a number or a list, is better."""
        self.snapshot(step, tensors, facts, score)
        self.write()
        if wait:
            self.wait()

    def snapshot(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], score: Any = None) -> None:
        """Copy everything as it is now. `write` writes it, later."""
        self.write()
        self.wait()  # one snapshot at a time; also where an earlier write's failure is raised
        copied = _copied(tensors)
        device = next((t.device for t in copied.values() if t.is_cuda), None)
        # The reading stream waits for this event.
        done = None if device is None else torch.cuda.current_stream(device).record_event()
        self._snapshot = (step, copied, done, dict(facts) | ({"score": score} if score is not None else {}))

    def write(self) -> None:
        """Write the snapshot, if there is one, in the background."""
        if self._snapshot:
            work, self._snapshot = self._snapshot, None
            self._writing = self._thread.submit(self._write, *work)

    def wait(self) -> None:
        """Until the checkpoint under way is on disk. Raises what its writing raised."""
        failure = self._writing.exception() if self._writing else None
        self._writing = None
        if failure:
            raise DataError(
                f"the checkpoint could not be written: {failure}; earlier checkpoints in {self.folder} are intact. "
                f"Free space or choose another folder."
            ) from failure

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint. Damaged ones are skipped, each with a line that says why."""
        for path in reversed(self.paths()):
            try:
                return open_checkpoint(path)
            except DataError as error:
                notice(f"{error} Skipped; trying the one before.")
        return None

    def at(self, step: int) -> Checkpoint:
        return open_checkpoint(self._place(step))

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def paths(self) -> list[Path]:
        """All that are there, whole or damaged."""
        return sorted((p for p in self.folder.glob("step-*") if p.is_dir() and _NAME.search(p.name)), key=_number)

    def _write(self, step: int, snapshot: dict[str, Tensor], done: torch.cuda.Event | None, facts: dict[str, Any]) -> None:
        final = self._place(step)
        fresh = self.folder / f".{final.name}.{os.getpid()}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            save_file(_to_host(snapshot, done), fresh / TENSORS)
            size, crc = (fresh / TENSORS).stat().st_size, checksum(fresh / TENSORS)
            state = {"step": step, "facts": facts, "bytes": size, "crc32": crc}
            state = json.loads(json.dumps(state))  # as it will be read: with texts for keys
            (fresh / STATE).write_text(json.dumps(state | {WHOLE: _crc_of(state)}, indent=1))
            for file in (fresh / TENSORS, fresh / STATE):
                _flush(file)
            self.first()
            if final.exists():  # a resumed run reaches a step that it had saved before
                shutil.rmtree(final)
            os.replace(fresh, final)
            _flush(self.folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        self._prune(step)

    def _prune(self, newest: int) -> None:
        """Remove what is neither among the newest, nor on the grid, nor the best, and leftovers of killed writers.

        A step beyond `newest`, just written, was damaged, or the run had gone on from there: it must push no whole one out.
        """
        paths = [p for p in self.paths() if _number(p) <= newest]
        kept = set(paths[-self.keep :])
        kept |= {p for p in paths if self.keep_every and _number(p) % self.keep_every == 0}
        scores = [(score, p) for p in paths if (score := _score(p)) is not None]
        kept |= {min(scores)[1]} if scores else set()
        for path in set(self.paths()) - kept:
            shutil.rmtree(path)
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in `path`, after its size and checksums have been verified."""
    path = Path(path)
    try:
        state, size = _state(path), (path / TENSORS).stat().st_size
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a whole checkpoint: {error}.") from error
    if size != state.get("bytes") or checksum(path / TENSORS) != state.get("crc32"):
        raise _damaged(path, TENSORS)
    return Checkpoint(path, state["step"], state["facts"])


def _state(path: Path) -> dict[str, Any]:
    """What stands beside the tensors, after its own checksum has been verified."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except RecursionError:
        state = None
    if not isinstance(state, dict) or WHOLE not in state:
        raise ValueError(f"its {STATE} is not one that this version of gpubound writes")
    if state.pop(WHOLE) != _crc_of(state):
        raise _damaged(path, STATE)
    return state


def _damaged(path: Path, file: str) -> DataError:
    return DataError(f"{path} is damaged: its {file} does not have the checksum that was written with it.")


def _crc_of(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _number(path: Path) -> int:
    return int(_NAME.search(path.name)[1])  # type: ignore[index]


def _score(path: Path) -> Any:
    """None, too, where it cannot be read: what is damaged is not the best."""
    try:
        return _state(path)["facts"].get("score")
    except (OSError, ValueError, DataError):
        return None


def checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the tensors' own devices; on the host, which the step has to wait for, where there is no room for them."""
    try:
        return {name: t.detach().clone() for name, t in tensors.items()}
    except torch.OutOfMemoryError:
        size = sum(t.nbytes for t in tensors.values() if t.is_cuda)
        fallback("checkpoint in the background", f"the GPU has no {readable(size)} free for a copy of the run's state")
        return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}


def _to_host(snapshot: dict[str, Tensor], done: torch.cuda.Event | None) -> dict[str, Tensor]:
    """Contiguous CPU tensors, each with memory of its own. Read on a side stream: the training stream goes on."""
    if done is None:
        return {name: t.contiguous() for name, t in snapshot.items()}
    device = next(t.device for t in snapshot.values() if t.is_cuda)
    stream, bounce = torch.cuda.Stream(device), torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=True)
    stream.wait_event(done)
    with torch.cuda.stream(stream):
        return {n: _read(t, bounce, stream) if t.is_cuda else t.contiguous() for n, t in snapshot.items()}


def _read(tensor: Tensor, bounce: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """By way of pinned memory, six times as fast as into pageable memory at once (55 against 9 GB/s on an H200)."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    there, here = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, host))
    for part, place in zip(there.split(_BLOCK), here.split(_BLOCK)):
        bounce[: len(part)].copy_(part, non_blocking=True)
        stream.synchronize()
        place.copy_(bounce[: len(part)])
    return host


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
