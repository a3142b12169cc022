"""Tensors of many ranks on disk, by torch.distributed.checkpoint: every rank writes the shards that it holds.

A table says of every shard where in the whole tensor it stands. So another number of ranks, or one process alone, reads the
parts that it needs. What all ranks hold alike is written by one of them.
"""

import io
import pickle
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType

from ..errors import DataError, RankError
from .local_shard import LocalShard
from .ranks import Ranks

TABLE = ".metadata"  # the file that has it
KINDS = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
} | {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorStorageMetadata", "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    )
}  # fmt: skip
"""Classes that a table may contain, besides dtypes."""


def mine(pieces: dict[str, LocalShard], ranks: Ranks) -> dict[str, LocalShard]:
    """Return the shards that this rank must pass to `write`."""
    return pieces


def write(folder: Path, pieces: dict[str, LocalShard], ranks: Ranks) -> list[Path]:
    """The files that this rank wrote, which are on disk. All ranks must call it, with pieces on the host.

    The error of a rank that cannot write is raised there. The others come back: they must ask it (Ranks.together).
    """
    _check_alike(pieces, ranks)
    writer = dcp.FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    writer.fs = files = _Files()
    planner = _Saving(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.save(_stored(pieces), storage_writer=writer, planner=planner, process_group=ranks.host, no_dist=ranks.alone)
    except CheckpointException as error:
        if ranks.rank in error.failures:
            raise files.refused or error.failures[ranks.rank][0] from error
        return []
    own = sorted(folder.glob(f"__{ranks.rank}_*"))
    return [*own, folder / TABLE] if ranks.first else own


def _check_alike(pieces: Mapping[str, LocalShard], ranks: Ranks) -> None:
    """RankError where two ranks hold the whole of a tensor, and not the same: only one of them would be written."""
    own = {name: _crc(piece.local) for name, piece in pieces.items() if piece.local.shape == piece.shape}
    first: dict[str, tuple[int, int]] = {}
    for rank, theirs in enumerate(ranks.gather(own)):
        for name, crc in theirs.items():
            if first.setdefault(name, (rank, crc))[1] != crc:
                raise RankError(
                    f"rank {rank}: its {name} is not rank {first[name][0]}'s, and neither is a shard: a checkpoint would hold "
                    f"one of them; give it as a DTensor, or under a name of each rank's own"
                )


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor there, by name."""
    table = _Reader(folder).read_metadata().state_dict_metadata
    return {name: (t.size, t.properties.dtype) for name, t in table.items() if isinstance(t, TensorStorageMetadata)}


def read(folder: Path, pieces: Mapping[str, LocalShard]) -> None:
    """Fill the shards in place. Each process reads only its shards, independently."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # not at all: no rank needs another's plan
        try:
            dcp.load(_stored(pieces), storage_reader=_Reader(folder), planner=_Loading(), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


@dataclass(frozen=True)
class _Stored:
    """A piece in the words of torch.distributed.checkpoint."""

    piece: LocalShard

    def size(self) -> torch.Size:
        return self.piece.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.piece.offsets), self.piece.local.shape)]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        local, shape = self.piece.local, self.piece.shape
        if not local.numel() and 0 not in shape:
            return []  # more ranks than rows: this one has none
        data = TensorWriteData(self.__create_chunk_list__()[0], TensorProperties.create_from_tensor(local), shape)
        return [WriteItem(MetadataIndex(name, torch.Size(self.piece.offsets)), WriteItemType.SHARD, tensor_data=data)]


def _stored(pieces: Mapping[str, LocalShard]) -> dict[str, Any]:
    return {name: _Stored(piece) for name, piece in pieces.items()}


class _Saving(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].piece.local


class _Loading(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].piece.local


class _Files(FileSystem):
    """Keep the OSError of a failed write: torch's archive reports only positions afterwards."""

    refused: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _Written(io.FileIO(path, "w")) as written:
            written.files = self
            yield written


class _Written(io.BufferedWriter):
    files: _Files

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.files.refused = self.files.refused or error
            raise


class _Reader(dcp.FileSystemReader):
    """Reader that unpickles only the classes of a table: a pickle from elsewhere could run any program."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        file = Path(self.path) / TABLE
        with file.open("rb") as opened:
            table = _Unpickler(opened).load()
        if not isinstance(table, Metadata):
            raise DataError(f"{file} is no table of shards; restore the checkpoint, or take the one before.")
        table.storage_meta = table.storage_meta or StorageMeta()
        table.storage_meta.load_id = self.load_id
        return table


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KINDS or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise DataError(f"a checkpoint's table of shards names {module}.{name}, which no such table holds; do not open it.")
