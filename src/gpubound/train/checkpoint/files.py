"""The files of a checkpoint: state.json, with the size and checksum of every file, and the tensors of one process.

`shapes`, `read` and `write` are the interface of distributed/sharded_checkpoint.py too, in which every rank
writes its own shards.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...distributed import Ranks
from ...distributed.local_shard import LocalShard
from ...errors import DataError
from ...models.storing import write_tensors

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
