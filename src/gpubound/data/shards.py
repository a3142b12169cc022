"""A corpus on disk: a folder of shards, which its manifest lists.

A shard is one file: a header with checksums, then the tokens, the documents' offsets and the loss mask.

    bytes 0..8    b"GBTOKENS"
    8..20         three little-endian uint32: format version, length of the JSON, CRC-32 of the JSON
    20..          JSON: dtype, counts, vocabulary, tokenizer, the section table {name: [offset, bytes, crc]}
    4096..        tokens (uint16 or uint32), documents (uint64: offset of each, and the end), mask (uint8 a token; optional)

A shard is written under a temporary name and then renamed, so no file is half written.
CRC-32 runs at 2.2 GB/s on one core, SHA-256 at 1.3: checking a billion 16-bit tokens takes about a second.
"""

import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..files import read_json, reading, regular, replacing, sibling
from .source import mix

MAGIC = b"GBTOKENS"
VERSION = 1
SUFFIX = ".gbt"
MANIFEST = "corpus.json"  # written when a build is complete
CLAIM = "building.json"  # written when a build begins: the folder is a corpus's
CURE = "restore the file or build the corpus anew"
_FIXED = struct.Struct("<8sIII")
_PAGE = 4096
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Header:
    dtype: str
    tokens: int
    documents: int
    vocab_size: int
    tokenizer: str  # fingerprint of the tokenizer that made the ids
    texts_read: int  # texts of the build up to the end of this shard, where an interrupted build continues
    texts_crc: int  # CRC-32 of those texts, which must not change until then
    sections: dict[str, list[int]]
    source: int = 0  # number of the path in {path: weight} that its documents are from


@dataclass(frozen=True)
class DocumentRun:
    """Consecutive documents."""

    tokens: np.ndarray
    documents: np.ndarray  # (documents + 1,) offset of each in `tokens`, and the end
    mask: np.ndarray | None  # 1 for the tokens that the loss counts
    source: int = 0  # see Header

    def slice(self, first: int, last: int) -> "DocumentRun":
        start, end = int(self.documents[first]), int(self.documents[last])
        mask = None if self.mask is None else self.mask[start:end]
        return DocumentRun(self.tokens[start:end], self.documents[first : last + 1] - self.documents[first], mask, self.source)

    def split(self, at: int) -> tuple["DocumentRun", "DocumentRun"]:
        """Return the tokens before `at` and the rest; the document around `at` becomes two."""
        before, after = self.documents[self.documents < at], self.documents[self.documents > at]
        masks = (None, None) if self.mask is None else (self.mask[:at], self.mask[at:])
        return (
            DocumentRun(self.tokens[:at], np.append(before, at), masks[0], self.source),
            DocumentRun(self.tokens[at:], np.insert(after - at, 0, 0), masks[1], self.source),
        )


@dataclass(frozen=True, kw_only=True)
class Shard(DocumentRun):
    path: Path
    header: Header


def write_shard(path: Path, tokens: np.ndarray, documents: np.ndarray, mask: np.ndarray | None, **about: Any) -> None:
    """Write a new shard. `about`: vocab_size, tokenizer, texts_read, texts_crc and source of the header."""
    if path.exists():
        raise DataError(f"{path}: exists already; nothing was overwritten.")
    parts = {"tokens": tokens, "documents": documents.astype("<u8")} | ({"mask": mask.astype("u1")} if mask is not None else {})
    sections, at = {}, _PAGE
    for name, array in parts.items():
        sections[name] = [at, array.nbytes, zlib.crc32(np.ascontiguousarray(array).data)]
        at = -(-(at + array.nbytes) // 64) * 64
    header = Header(tokens.dtype.name, len(tokens), len(documents) - 1, sections=sections, **about)
    text = json.dumps(asdict(header)).encode()
    assert _FIXED.size + len(text) <= _PAGE
    with replacing(path) as file:
        file.write(_FIXED.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text)
        for name, array in parts.items():
            file.seek(sections[name][0])
            file.write(np.ascontiguousarray(array).data)


def read_shard(path: Path | str, verify: bool = True) -> Shard:
    """Map the shard at `path` into memory. `verify` reads all of it and checks checksums and ids."""
    path = Path(path)
    header = _read_header(path)
    tokens = _section(path, header, "tokens", verify)
    documents = _section(path, header, "documents", verify).astype(np.int64)
    mask = _section(path, header, "mask", verify) if "mask" in header.sections else None
    if documents[0] != 0 or documents[-1] != header.tokens or (np.diff(documents) <= 0).any():
        raise DataError(f"{path}: corrupt: its documents do not cover its tokens in order; {CURE}.")
    if verify and tokens.max() >= header.vocab_size:
        raise DataError(
            f"{path}: corrupt: it holds the id {tokens.max()}, its vocabulary ends at {header.vocab_size - 1}; {CURE}."
        )
    return Shard(tokens, documents, mask, header.source, path=path, header=header)


def _read_header(path: Path) -> Header:
    with reading(path), open(regular(path), "rb") as file:
        start, size = file.read(_PAGE), os.fstat(file.fileno()).st_size
    if not start.startswith(MAGIC):
        raise DataError(f"{path}: not a token shard of gpubound: it begins with {start[:8]!r}, wanted {MAGIC!r}.")
    if len(start) < _PAGE:
        raise DataError(f"{path}: truncated: {size} bytes, wanted at least the header's {_PAGE}; {CURE}.")
    _, version, length, crc = _FIXED.unpack_from(start)
    if version != VERSION:
        raise DataError(
            f"{path}: has format version {version}, wanted {VERSION}; it was written by another version of gpubound."
        )
    text = start[_FIXED.size : _FIXED.size + length]
    if len(text) != length or zlib.crc32(text) != crc:
        raise DataError(f"{path}: corrupt: the header's checksum is wrong; {CURE}.")
    try:
        header = Header(**json.loads(text))
        _check_header(header)
    except (ValueError, TypeError, RecursionError) as error:  # with a correct checksum: written on purpose
        raise DataError(f"{path}: corrupt: its header is not a shard's ({error}); {CURE}.") from error
    end = max(offset + count for offset, count, _ in header.sections.values())
    if size != end:
        state = "truncated" if size < end else "corrupt"
        raise DataError(f"{path}: {state}: {size} bytes, wanted {end}; {CURE}.")
    return header


def _check_header(header: Header) -> None:
    """Raise ValueError unless the fields have their types and the sections the lengths of the counts."""
    if header.dtype not in DTYPES or not isinstance(header.tokenizer, str):
        raise ValueError(f"dtype is {header.dtype!r}, tokenizer {header.tokenizer!r}")
    for name, least in (("tokens", 1), ("documents", 1), ("vocab_size", 1), ("texts_read", 0), ("texts_crc", 0), ("source", 0)):
        value = getattr(header, name)
        if type(value) is not int or not least <= value < 1 << 62:
            raise ValueError(f"{name} is {value!r}")
    sections = header.sections
    if not isinstance(sections, dict) or not {"tokens", "documents"} <= sections.keys() <= {"tokens", "documents", "mask"}:
        raise ValueError(f"sections are {sections!r}")
    for name, entry in sections.items():
        if not isinstance(entry, list) or len(entry) != 3 or not all(type(n) is int and 0 <= n < 1 << 62 for n in entry):
            raise ValueError(f"section {name} is {entry!r}")
        dtype, count = _shape(header, name)
        if entry[1] != count * dtype.itemsize:
            raise ValueError(f"section {name} has {entry[1]} bytes for {count} x {dtype.name}")


def _shape(header: Header, name: str) -> tuple[np.dtype, int]:
    """Return (dtype, elements) of a section."""
    if name == "documents":
        return np.dtype("<u8"), header.documents + 1
    return (DTYPES[header.dtype] if name == "tokens" else np.dtype("u1")), header.tokens


def _section(path: Path, header: Header, name: str, verify: bool) -> np.ndarray:
    dtype, count = _shape(header, name)
    offset, _, crc = header.sections[name]
    with reading(path):
        array = np.memmap(path, dtype, "r", offset, (count,))
    if verify and zlib.crc32(array.data) != crc:
        raise DataError(f"{path}: corrupt: the checksum of its {name} is wrong; {CURE}.")
    return array


def manifest_shards(folder: Path) -> list[Path]:
    manifest = folder / MANIFEST
    if not manifest.exists():
        if (folder / CLAIM).exists():
            complete = len(list(folder.glob(f"*{SUFFIX}")))
            raise DataError(
                f"{folder}: its build was interrupted after {complete} whole shards; call Corpus.build again with the same "
                "texts to finish it."
            )
        raise DataError(f"{folder}: not a corpus of gpubound: it has no {MANIFEST}; wanted a folder that Corpus.build wrote.")
    entries = read_json(manifest, CURE).get("shards")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{manifest}: shards: got {entries!r}, wanted the names of the corpus' shards; {CURE}.")
    names = [sibling(manifest, name) for name in entries]
    if len(set(names)) < len(names):
        raise DataError(f"{manifest}: shards: a file is listed twice; {CURE}.")
    for name in names:
        if not name.exists():
            raise DataError(f"{name}: is missing, though {manifest} lists it; {CURE}.")
    return names


def tokenizer_checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each existing file of the tokenizer in `folder`."""
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    return {file.name: zlib.crc32(regular(file).read_bytes()) for file in files}


def tokenizer_is_unchanged(folder: Path) -> bool:
    """Return True if the tokenizer's files have the checksums that the build recorded."""
    recorded = read_json(folder / MANIFEST, CURE).get("tokenizer_files")
    return bool(recorded) and recorded == tokenizer_checksums(folder)


def contents(shards: Sequence[Shard]) -> int:
    """Return a hash of all tokens and masks, from the shards' checksums."""
    crcs = [shard.header.sections[name][2] for shard in shards for name in ("tokens", "mask") if name in shard.header.sections]
    return mix(len(shards), *crcs)
