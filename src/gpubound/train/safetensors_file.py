"""A checkpoint's tensors in one safetensors file, which one process writes: those of a run alone, or of replicas.

The functions are those of distributed/sharded_checkpoint.py, where every rank writes its own shards.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from ..distributed import Ranks
from ..distributed.local_shard import LocalShard
from ..models.storing import write_tensors

TENSORS = "tensors.safetensors"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def mine(pieces: dict[str, LocalShard], ranks: Ranks) -> dict[str, LocalShard]:
    """What this rank must give to `write`: the first all, the others, which hold the same, nothing."""
    return pieces if ranks.first else {}


def write(folder: Path, pieces: dict[str, LocalShard], ranks: Ranks) -> list[Path]:
    """The files that this rank wrote."""
    if not ranks.first:
        return []
    write_tensors({name: piece.local for name, piece in pieces.items()}, folder / TENSORS)
    return [folder / TENSORS]


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor there, by name."""
    with safe_open(folder / TENSORS, framework="pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        return {name: (torch.Size(about.get_shape()), DTYPES[about.get_dtype()]) for name, about in found.items()}


def read(folder: Path, pieces: Mapping[str, LocalShard]) -> None:
    """Fill the pieces, which lie where the reader wants them, with no more than they take."""
    # A default device of the caller's would be that of the slices, which have no values there.
    with torch.device("cpu"), safe_open(folder / TENSORS, framework="pt") as file:
        for name, piece in pieces.items():
            if piece.local.numel():
                found = file.get_slice(name)[piece.slices] if piece.offsets else file.get_tensor(name)
                piece.local.copy_(found)
