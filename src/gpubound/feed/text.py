"""Reading texts: one text or chat after another from whatever the user has, without holding more than one file's part in
memory.

A document is a `str`, or a chat: a list of {"role", "content"} messages.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError

Document = str | list[dict[str, Any]]

SUFFIXES = (".txt", ".jsonl", ".parquet")
_CHUNK = 1 << 20


def documents(texts: Any, separator: str | None = None) -> Iterator[Document]:
    """The documents of `texts`: a path or several (txt, jsonl, parquet, a folder of them, a saved Hugging Face dataset), or
    an iterable of strings, chats or rows with "text" or "messages". `separator` splits a txt file, as in "<|endoftext|>";
    without it a file is one document.
    """
    if isinstance(texts, str | Path):
        yield from _read_path(_existing(texts), separator)
        return
    if not isinstance(texts, Iterable) or isinstance(texts, bytes | Mapping):
        raise ValueError(f"texts: got a {type(texts).__name__}, wanted a path, or an iterable of strings, chats or paths.")
    for number, item in enumerate(texts):
        if isinstance(item, Path):
            yield from _read_path(_existing(item), separator)
        else:
            yield _document(item, f"texts[{number}]", first=number == 0)


def files(texts: Any) -> list[Path] | None:
    """Every file that `documents(texts)` would read; None when the texts come from the program."""
    if isinstance(texts, str | Path):
        texts = [_existing(texts)]
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(item, Path) for item in texts):
        return None
    return [
        file for item in texts for file in ([item] if item.is_file() else sorted(p for p in item.rglob("*") if p.is_file()))
    ]


def _existing(path: str | Path) -> Path:
    if not Path(path).exists():
        said = repr(str(path) if len(str(path)) < 80 else str(path)[:77] + "...")
        raise ValueError(
            f"texts: {said} does not exist, wanted the path of a file or folder; pass a single text as a list of one."
        )
    return Path(path)


def _document(item: Any, where: str, first: bool = False) -> Document:
    """A text or a chat out of one item or row."""
    if isinstance(item, Mapping):
        for key in ("text", "messages"):
            if item.get(key) is not None:
                return _document(item[key], f"{where}[{key!r}]")
        raise DataError(f"{where}: has the keys {', '.join(map(repr, item))}, wanted 'text' or 'messages'.")
    if isinstance(item, str):
        if first and len(item) < 4096 and Path(item).suffix in SUFFIXES and Path(item).is_file():
            raise ValueError(
                f"{where}: got {item!r}, which is the name of a file, wanted a text; write Path({item!r}) to have it read."
            )
        return item
    chat = list(item) if isinstance(item, list | tuple) else None
    if not chat or not all(isinstance(m, Mapping) and isinstance(m.get("content"), str) and "role" in m for m in chat):
        raise DataError(
            f"{where}: got a {type(item).__name__}, wanted a string or a chat [{{'role': ..., 'content': ...}}, ...]."
        )
    return [dict(message) for message in chat]


def _read_path(path: Path, separator: str | None) -> Iterator[Document]:
    if path.is_dir():
        yield from _read_folder(path, separator)
    elif path.suffix == ".jsonl":
        yield from _read_jsonl(path)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix == ".txt":
        yield from _read_txt(path, separator)
    else:
        raise ValueError(f"{path}: cannot be read as texts, wanted one of {', '.join(SUFFIXES)} or a folder.")


def _read_folder(path: Path, separator: str | None) -> Iterator[Document]:
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(json.loads((path / "dataset_dict.json").read_text())["splits"])
        raise ValueError(f"{path}: holds the splits {splits}, wanted one of them; pass the folder of the split.")
    if (path / "dataset_info.json").exists() and (path / "state.json").exists():
        rows = _load("datasets", path).load_from_disk(str(path))
        for number, row in enumerate(rows):
            yield _document(row, f"{path}: row {number}")
        return
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    if not found:
        raise ValueError(f"{path}: holds no texts, wanted {', '.join(SUFFIXES)} files or a saved Hugging Face dataset.")
    for file in found:
        yield from _read_path(file, separator)


def _read_txt(path: Path, separator: str | None) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as file:
            if separator is None:
                yield file.read()
                return
            rest = ""
            while chunk := file.read(_CHUNK):
                *whole, rest = (rest + chunk).split(separator)
                yield from (text.strip("\n") for text in whole)
            yield rest.strip("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); convert it first.") from error


def _read_jsonl(path: Path) -> Iterator[Document]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: is not JSON ({error}); every line must be one JSON object.") from error
            yield _document(row, f"{path}:{number}")


def _read_parquet(path: Path) -> Iterator[Document]:
    parquet = _load("pyarrow.parquet", path)
    file = parquet.ParquetFile(path)
    columns = [name for name in ("text", "messages") if name in file.schema_arrow.names]
    if not columns:
        raise DataError(f"{path}: has the columns {', '.join(file.schema_arrow.names)}, wanted 'text' or 'messages'.")
    number = 0
    for batch in file.iter_batches(columns=columns[:1]):
        for row in batch.to_pylist():
            yield _document(row, f"{path}: row {number}")
            number += 1


def _load(module: str, path: Path) -> Any:
    """Import what only this kind of file needs."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{path}: reading it needs {package}, which is not installed; pip install 'gpubound[hf]', or convert it to jsonl."
        ) from error
