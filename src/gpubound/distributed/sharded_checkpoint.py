"""Tensors of many ranks on disk, by torch.distributed.checkpoint: every rank writes its shards.

A table holds the position of every shard in its tensor, so another number of ranks, or one process, reads the parts that it
needs. Tensors that are equal on all ranks are written by one of them.
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

TABLE = ".metadata"  # file with the table of shards
CLASSES = {
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


def write(folder: Path, pieces: dict[str, LocalShard], ranks: Ranks) -> list[Path]:
    """Write shards in host memory, and return the files of this rank, which are on disk. All ranks must call it.

    A rank that cannot write raises its error. The others return: they learn of it from Ranks.together.
    """
    _check_replicated(pieces, ranks)
    writer = dcp.FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    writer.fs = files = _Files()
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state = {name: _Stored(piece) for name, piece in pieces.items()}
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=ranks.host, no_dist=ranks.alone)
    except CheckpointException as error:
        if ranks.rank in error.failures:
            raise files.error or error.failures[ranks.rank][0] from error
        return []
    written = sorted(folder.glob(f"__{ranks.rank}_*"))
    return [*written, folder / TABLE] if ranks.first else written


def _check_replicated(pieces: Mapping[str, LocalShard], ranks: Ranks) -> None:
    """Raise RankError if two ranks have different values of a whole tensor: only one of them would be written."""
    checksums = {}
    for name, piece in pieces.items():
        if piece.local.shape == piece.shape:
            local = piece.local.contiguous().view(-1)
            checksums[name] = zlib.crc32(local.view(torch.uint8).numpy().data) if local.numel() else 0
    first: dict[str, tuple[int, int]] = {}
    for rank, theirs in enumerate(ranks.gather(checksums)):
        for name, crc in theirs.items():
            if first.setdefault(name, (rank, crc))[1] != crc:
                raise RankError(
                    f"rank {rank}: its {name} is not rank {first[name][0]}'s, and neither is a shard: a checkpoint would hold "
                    f"one of them; give it as a DTensor, or under a name of each rank's own"
                )


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every tensor in the folder, by name."""
    table = _Reader(folder).read_metadata().state_dict_metadata
    return {name: (t.size, t.properties.dtype) for name, t in table.items() if isinstance(t, TensorStorageMetadata)}


def read(folder: Path, pieces: Mapping[str, LocalShard]) -> None:
    """Fill the shards in place. Each process reads only its shards, independently."""
    state = {name: _Stored(piece) for name, piece in pieces.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no rank needs another's plan
        try:
            dcp.load(state, storage_reader=_Reader(folder), planner=_LoadPlanner(), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


@dataclass(frozen=True)
class _Stored:
    """A shard with the interface of torch.distributed.checkpoint."""

    piece: LocalShard

    def size(self) -> torch.Size:
        return self.piece.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.piece.offsets), self.piece.local.shape)]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        local, shape = self.piece.local, self.piece.shape
        if not local.numel() and 0 not in shape:
            return []  # there are more ranks than rows
        data = TensorWriteData(self.__create_chunk_list__()[0], TensorProperties.create_from_tensor(local), shape)
        return [WriteItem(MetadataIndex(name, torch.Size(self.piece.offsets)), WriteItemType.SHARD, tensor_data=data)]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].piece.local


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].piece.local


class _Files(FileSystem):
    """Keep the OSError of a failed write: torch's archive reports only positions afterwards."""

    error: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _Writer(io.FileIO(path, "w")) as writer:
            writer.files = self
            yield writer


class _Writer(io.BufferedWriter):
    files: _Files

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.files.error = self.files.error or error
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
        if (module, name) in CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise DataError(f"a checkpoint's table of shards names {module}.{name}, which no such table holds; do not open it.")
