"""The file of tokens: a header that says what is inside and its checksums, then the tokens, the documents' offsets, and the
loss mask.

    bytes 0..8    b"GBTOKENS"
    8..20         three little-endian uint32: format version, length of the JSON, CRC-32 of the JSON
    20..          JSON: dtype, counts, vocabulary, tokenizer, the section table {name: [offset, bytes, crc]}
    4096..        tokens (uint16 or uint32), documents (uint64: where each begins, and the end), mask (uint8, one a token; may
                  be absent)

A shard is written under another name, flushed to the disk and then renamed, so a file with this name is whole or damaged,
never half written. CRC-32 runs at 2.2 GB/s on one core, SHA-256 at 1.3: checking a billion 16-bit tokens takes about a
second.
"""

import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError

MAGIC = b"GBTOKENS"
VERSION = 1
SUFFIX = ".gbt"
_FIXED = struct.Struct("<8sIII")
_PAGE = 4096
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Header:
    dtype: str
    tokens: int
    documents: int
    vocab_size: int
    tokenizer: str  # fingerprint of the tokenizer that made the ids
    texts_read: int  # texts of the build read up to the end of this shard: where an interrupted build goes on
    texts_crc: int  # CRC-32 of those texts: they must be the same ones then
    sections: dict[str, list[int]]


@dataclass(frozen=True)
class Shard:
    path: Path
    header: Header
    tokens: np.ndarray
    documents: np.ndarray  # (documents + 1,) where each begins, and the end
    mask: np.ndarray | None  # 1 where the token may be learnt


def write_shard(
    path: Path,
    tokens: np.ndarray,
    documents: np.ndarray,
    mask: np.ndarray | None,
    *,
    vocab_size: int,
    tokenizer: str,
    texts_read: int,
    texts_crc: int,
) -> None:
    if path.exists():
        raise DataError(f"{path}: exists already; nothing was overwritten.")
    parts = {"tokens": tokens, "documents": documents.astype("<u8")} | ({"mask": mask.astype("u1")} if mask is not None else {})
    sections, at = {}, _PAGE
    for name, array in parts.items():
        sections[name] = [at, array.nbytes, zlib.crc32(np.ascontiguousarray(array).data)]
        at = -(-(at + array.nbytes) // 64) * 64
    header = Header(tokens.dtype.name, len(tokens), len(documents) - 1, vocab_size, tokenizer, texts_read, texts_crc, sections)
    text = json.dumps(asdict(header)).encode()
    assert _FIXED.size + len(text) <= _PAGE
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(temporary, "wb") as file:
        file.write(_FIXED.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text)
        for name, array in parts.items():
            file.seek(sections[name][0])
            file.write(np.ascontiguousarray(array).data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


def read_shard(path: Path | str, verify: bool = True) -> Shard:
    """Map the shard at `path` into memory. `verify` also reads all of it and compares the checksums."""
    path = Path(path)
    header = _read_header(path)
    dtype = DTYPES[header.dtype]
    tokens = _section(path, header, "tokens", dtype, header.tokens, verify)
    documents = _section(path, header, "documents", np.dtype("<u8"), header.documents + 1, verify)
    mask = _section(path, header, "mask", np.dtype("u1"), header.tokens, verify) if "mask" in header.sections else None
    if documents[0] != 0 or documents[-1] != header.tokens or (np.diff(documents.astype(np.int64)) <= 0).any():
        raise DataError(
            f"{path}: corrupt: its documents do not cover its tokens in order; restore the file or build the corpus anew."
        )
    return Shard(path, header, tokens, documents, mask)


def _read_header(path: Path) -> Header:
    try:
        with open(path, "rb") as file:
            start, size = file.read(_PAGE), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; check the path.") from error
    if not start.startswith(MAGIC):
        raise DataError(f"{path}: not a token shard of gpubound: it begins with {start[:8]!r}, wanted {MAGIC!r}.")
    if len(start) < _PAGE:
        raise DataError(
            f"{path}: truncated: {size} bytes, wanted at least the header's {_PAGE}; restore the file or build the corpus anew."
        )
    _, version, length, crc = _FIXED.unpack_from(start)
    if version != VERSION:
        raise DataError(
            f"{path}: has format version {version}, wanted {VERSION}; it was written by another version of gpubound."
        )
    text = start[_FIXED.size : _FIXED.size + length]
    if len(text) != length or zlib.crc32(text) != crc:
        raise DataError(f"{path}: corrupt: the header's checksum is wrong; restore the file or build the corpus anew.")
    header = Header(**json.loads(text))
    end = max(offset + count for offset, count, _ in header.sections.values())
    if size != end:
        state = "truncated" if size < end else "corrupt"
        raise DataError(f"{path}: {state}: {size} bytes, wanted {end}; restore the file or build the corpus anew.")
    return header


def _section(path: Path, header: Header, name: str, dtype: np.dtype, count: int, verify: bool) -> np.ndarray:
    offset, size, crc = header.sections[name]
    assert size == count * dtype.itemsize, (path, name)
    array = np.memmap(path, dtype, "r", offset, (count,))
    if verify and zlib.crc32(array.data) != crc:
        raise DataError(f"{path}: corrupt: the checksum of its {name} is wrong; restore the file or build the corpus anew.")
    return array


def facts(header: Header) -> dict[str, Any]:
    """What the shards of one corpus have in common."""
    return {"dtype": header.dtype, "vocab_size": header.vocab_size, "tokenizer": header.tokenizer}
