"""state.json, what stands beside a checkpoint's tensors: its facts, the checksums of their files, and its own."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from ..errors import DataError
from .safetensors_file import TENSORS

STATE = "state.json"
WHOLE = "state_crc32"
_BLOCK = 1 << 24  # bytes at a time, for a checksum


def write(folder: Path, state: dict[str, Any]) -> None:
    """With its own checksum, and on disk when this returns."""
    state = json.loads(json.dumps(state))  # as it will be read: with texts for keys
    (folder / STATE).write_text(json.dumps(state | {WHOLE: _crc_of(state)}, indent=1))
    flush(folder / STATE)
    flush(folder)


def read(path: Path) -> dict[str, Any]:
    """What stands beside the tensors, after its own checksum has been verified."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except RecursionError:
        state = None
    if not isinstance(state, dict) or WHOLE not in state:
        raise ValueError(f"its {STATE} is not one that this version of gpubound writes")
    if state.pop(WHOLE) != _crc_of(state):
        raise damaged(path, STATE)
    return state


def score_of(path: Path) -> Any:
    """None, too, where it cannot be read: what is damaged is not the best."""
    try:
        return read(path)["facts"].get("score")
    except (OSError, ValueError, DataError):
        return None


def files_of(state: dict[str, Any]) -> dict[str, list[Any]]:
    """Size and checksum of every file that holds tensors, by name."""
    return state["files"] if "files" in state else {TENSORS: [state.get("bytes"), state.get("crc32")]}


def about(file: Path) -> list[Any]:
    """Name, size and checksum."""
    return [file.name, file.stat().st_size, checksum(file)]


def flushed(file: Path) -> list[Any]:
    flush(file)
    return about(file)


def damaged(path: Path, file: str) -> DataError:
    return DataError(f"{path} is damaged: its {file} does not have the checksum that was written with it.")


def _crc_of(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
