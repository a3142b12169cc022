"""What a corpus is on the disk: a folder of shards, which its manifest lists.

A shard is one file: a header that says what is inside, with checksums, then tokens, the documents' offsets and the loss mask.

    bytes 0..8    b"GBTOKENS"
    8..20         three little-endian uint32: format version, length of the JSON, CRC-32 of the JSON
    20..          JSON: dtype, counts, vocabulary, tokenizer, the section table {name: [offset, bytes, crc]}
    4096..        tokens (uint16 or uint32), documents (uint64: where each begins, and the end), mask (uint8 a token; may lack)

A shard is written under another name and then renamed, so a file with this name is whole or damaged, never half written.
CRC-32 runs at 2.2 GB/s on one core, SHA-256 at 1.3: checking a billion 16-bit tokens takes about a second.
"""

import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..files import beside, read_json, reading, regular, replacing
from .documents import Document

MAGIC = b"GBTOKENS"
VERSION = 1
SUFFIX = ".gbt"
MANIFEST = "corpus.json"  # written when a build is complete
CLAIM = "building.json"  # written when it begins: this folder is a corpus's own
CURE = "restore the file or build the corpus anew"
_FIXED = struct.Struct("<8sIII")
_PAGE = 4096
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
Encoded = tuple[np.ndarray, np.ndarray | None]  # a document's ids, and the loss mask where not all may be learnt


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
class DocumentRun:
    """A run of whole documents."""

    tokens: np.ndarray
    documents: np.ndarray  # (documents + 1,) where each begins in `tokens`, and the end
    mask: np.ndarray | None  # 1 where the token may be learnt

    def slice(self, first: int, last: int) -> "DocumentRun":
        start, end = int(self.documents[first]), int(self.documents[last])
        mask = None if self.mask is None else self.mask[start:end]
        return DocumentRun(self.tokens[start:end], self.documents[first : last + 1] - self.documents[first], mask)

    def cut(self, at: int) -> tuple["DocumentRun", "DocumentRun"]:
        """What lies before the token `at`, and the rest; the document that holds it falls into two."""
        before, behind = self.documents[self.documents < at], self.documents[self.documents > at]
        masks = (None, None) if self.mask is None else (self.mask[:at], self.mask[at:])
        return (
            DocumentRun(self.tokens[:at], np.append(before, at), masks[0]),
            DocumentRun(self.tokens[at:], np.insert(behind - at, 0, 0), masks[1]),
        )


@dataclass(frozen=True)
class Shard(DocumentRun):
    path: Path
    header: Header


def write_shard(path: Path, tokens: np.ndarray, documents: np.ndarray, mask: np.ndarray | None, **about: Any) -> None:
    """`about`: the header's vocab_size, tokenizer, texts_read and texts_crc."""
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


def shard_name(number: int) -> str:
    return f"shard-{number:05d}{SUFFIX}"


@dataclass(frozen=True)
class Position:
    """How many texts were read, and the CRC-32 of all of them."""

    texts: int = 0
    crc: int = 0

    def after(self, text: Document) -> "Position":
        said = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        return Position(self.texts + 1, zlib.crc32(said.encode("utf-8", "surrogatepass"), self.crc))


@dataclass
class Shards:
    """The shard being filled, and those written."""

    path: Path
    settings: dict[str, Any]
    names: list[str] = field(default_factory=list)
    tokens: int = 0
    at: Position = Position()
    filling: list[Encoded] = field(default_factory=list)
    filled: int = 0

    @staticmethod
    def found(path: Path, settings: dict[str, Any]) -> "Shards":
        """Those that an interrupted build left in `path`."""
        state = Shards(path, settings)
        for number, file in enumerate(sorted(path.glob(f"*{SUFFIX}"))):
            if file.name != (wanted := shard_name(number)):
                raise DataError(f"{path}: holds {file.name}, wanted {wanted} there; delete the folder and build anew.")
            header = read_shard(file).header
            state.names.append(file.name)
            state.tokens, state.at = state.tokens + header.tokens, Position(header.texts_read, header.texts_crc)
        return state

    def add(self, text: Document, encoded: Encoded) -> None:
        self.at = self.at.after(text)
        if not len(encoded[0]):
            return
        self.filling.append(encoded)
        self.filled += len(encoded[0])
        self.tokens += len(encoded[0])
        if self.filled >= self.settings["shard_tokens"]:
            self.close()

    def close(self) -> None:
        """Write the shard, if anything is in it."""
        if not self.filling:
            if not self.names:
                raise ValueError(
                    f"Corpus.build: {self.path}: the texts hold no tokens, wanted at least one document; give others."
                )
            return
        name, about = shard_name(len(self.names)), {key: self.settings[key] for key in ("vocab_size", "tokenizer")}
        masked = any(mask is not None for _, mask in self.filling)
        masks = [mask if mask is not None else np.ones(len(ids), np.uint8) for ids, mask in self.filling]
        tokens: np.ndarray = np.concatenate([ids for ids, _ in self.filling])
        write_shard(
            self.path / name,
            tokens.astype(DTYPES[str(self.settings["dtype"])]),
            np.cumsum([0, *(len(ids) for ids, _ in self.filling)]),
            np.concatenate(masks) if masked else None,
            **about,
            texts_read=self.at.texts,
            texts_crc=self.at.crc,
        )
        self.names.append(name)
        self.filling, self.filled = [], 0


def read_shard(path: Path | str, verify: bool = True) -> Shard:
    """Map the shard at `path` into memory. `verify` also reads all of it: checksums, and ids inside the vocabulary."""
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
    return Shard(tokens, documents, mask, path, header)


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
    except (ValueError, TypeError, RecursionError) as error:  # a right checksum: somebody made it so
        raise DataError(f"{path}: corrupt: its header is not a shard's ({error}); {CURE}.") from error
    end = max(offset + count for offset, count, _ in header.sections.values())
    if size != end:
        state = "truncated" if size < end else "corrupt"
        raise DataError(f"{path}: {state}: {size} bytes, wanted {end}; {CURE}.")
    return header


def _check_header(header: Header) -> None:
    """ValueError unless every field is of its kind and the sections are as long as the counts say."""
    if header.dtype not in DTYPES or not isinstance(header.tokenizer, str):
        raise ValueError(f"dtype is {header.dtype!r}, tokenizer {header.tokenizer!r}")
    for name, least in (("tokens", 1), ("documents", 1), ("vocab_size", 1), ("texts_read", 0), ("texts_crc", 0)):
        value = getattr(header, name)
        if type(value) is not int or not least <= value < 1 << 62:
            raise ValueError(f"{name} is {value!r}")
    sections = header.sections
    if not isinstance(sections, dict) or not {"tokens", "documents"} <= sections.keys() <= {"tokens", "documents", "mask"}:
        raise ValueError(f"sections are {sections!r}")
    for name, place in sections.items():
        if not isinstance(place, list) or len(place) != 3 or not all(type(n) is int and 0 <= n < 1 << 62 for n in place):
            raise ValueError(f"section {name} is {place!r}")
        dtype, count = _shape(header, name)
        if place[1] != count * dtype.itemsize:
            raise ValueError(f"section {name} has {place[1]} bytes for {count} x {dtype.name}")


def _shape(header: Header, name: str) -> tuple[np.dtype, int]:
    """(dtype, elements) of a section."""
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


def listed_shards(folder: Path) -> list[Path]:
    """The shards of the corpus in `folder`, in order, as its manifest names them."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        if (folder / CLAIM).exists():
            whole = len(list(folder.glob(f"*{SUFFIX}")))
            raise DataError(
                f"{folder}: its build was interrupted after {whole} whole shards; call Corpus.build again with the same "
                "texts to finish it."
            )
        raise DataError(f"{folder}: not a corpus of gpubound: it has no {MANIFEST}; wanted a folder that Corpus.build wrote.")
    listed = read_json(manifest, CURE).get("shards")
    if not isinstance(listed, list) or not listed:
        raise DataError(f"{manifest}: shards: got {listed!r}, wanted the names of the corpus' shards; {CURE}.")
    names = [beside(manifest, name) for name in listed]
    if len(set(names)) < len(names):
        raise DataError(f"{manifest}: shards: a file is listed twice; {CURE}.")
    for name in names:
        if not name.exists():
            raise DataError(f"{name}: is missing, though {manifest} lists it; {CURE}.")
    return names


def tokenizer_checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of each file that a tokenizer is saved in; a file that is absent has none."""
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    return {file.name: zlib.crc32(regular(file).read_bytes()) for file in files}


def saved_files_are_intact(folder: Path) -> bool:
    """Whether the tokenizer's files are those that the build wrote. False for a corpus that does not record them."""
    recorded = read_json(folder / MANIFEST, CURE).get("tokenizer_files")
    return bool(recorded) and recorded == tokenizer_checksums(folder)
