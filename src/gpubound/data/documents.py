"""What a document is: a text, or a chat as a list of {"role", "content"} messages. How a row becomes one, and how files do.

Each reader of a kind of file yields (document, bytes of the file read so far).
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import beside, read_json, reading, regular
from ..formatting import shown
from ..trace import notice

Document = str | list[dict[str, Any]]
Read = Iterator[tuple[Document, int]]

KEYS = ("text", "messages")  # where a row's document is looked for
_DEEPEST = 64  # a message's further fields may be nested; a template writes them out, and Python ends at a thousand
_SHOWN = 8  # keys that an error lists, and kinds of files that a line does

PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex")
CODE = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".cs", ".swift",
    ".js", ".mjs", ".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".clj", ".ex", ".erl",
    ".zig", ".nim", ".lean", ".sh", ".sql",
)  # fmt: skip
PLAIN = PROSE + CODE
ROWS = (".jsonl", ".parquet", ".json")
SUFFIXES = PLAIN + ROWS
IN_FOLDERS = tuple(suffix for suffix in SUFFIXES if suffix != ".json")  # there a .json holds settings more often than texts
KINDS = "plain text (.txt, .md, .py and other source code), .jsonl, .parquet, .json"
_CHUNK = 1 << 20


def as_document(item: Any, where: str, text_key: str | None = None) -> Document:
    """The document in `item`, which stands at `where`: a text, a chat, or a row that holds one under `text_key`."""
    if isinstance(item, Mapping):
        keys = KEYS if text_key is None else (text_key,)
        found = [key for key in keys if item.get(key) is not None]
        if not found:
            raise DataError(_without_text(item, where, keys))
        if len(found) > 1:  # a text that a chat was written to: as a text its prompts would be learnt, too
            both = " and ".join(map(repr, found))
            raise DataError(f"{where}: has both {both}; name the one to learn with text_key (--text-key).")
        item, where = item[found[0]], f"{where}[{found[0]!r}]"
    if isinstance(item, str):
        _check_text(item, where)
        return item
    return _chat(item, where)


def _without_text(row: Mapping, where: str, keys: tuple[str, ...]) -> str:
    names = [repr(key) for key in row]
    there = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    if null := [key for key in keys if key in row]:
        return f"{where}: its {null[0]!r} is null, wanted a text or a chat; leave the row out."
    return f"{where}: has {'the keys ' + there if there else 'no keys'}, {_wanted(keys)}"


def _wanted(keys: tuple[str, ...]) -> str:
    return f"wanted {' or '.join(map(repr, keys))}; name another with text_key (--text-key)."


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write "\ud800", half of a character
        raise DataError(
            f"{where}: holds half a surrogate pair (U+{ord(text[error.start]):04X} at character {error.start}), which no "
            f"tokenizer takes; remove it or write the whole character."
        ) from error


def _chat(item: Any, where: str) -> list[dict[str, Any]]:
    chat = list(item) if isinstance(item, list | tuple) else None
    if not chat or not all(isinstance(message, Mapping) for message in chat):
        got = "an empty list" if chat == [] else f"a {type(item).__name__}"
        raise DataError(f"{where}: got {got}, wanted a string or a chat [{{'role': ..., 'content': ...}}, ...].")
    for number, message in enumerate(chat):
        here = f"{where}[{number}]"
        for key, wanted in (
            ("role", "a text such as 'user' or 'assistant'"),
            ("content", "a text; leave the row out, or write one"),
        ):
            if not isinstance(message.get(key), str):
                raise DataError(f"{here}: {key}: got {shown(message.get(key))}, wanted {wanted}.")
        _check_text(message["role"], here)
        _check_text(message["content"], here)
        if any(_deeper(value, _DEEPEST) for value in message.values()):
            raise DataError(f"{here}: is nested more than {_DEEPEST} deep; leave the field out.")
    return [dict(message) for message in chat]


def _deeper(value: Any, than: int) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return than == 0 or any(_deeper(inner, than - 1) for inner in value)


def weight(document: Document) -> int:
    """Letters of a document."""
    return len(document) if isinstance(document, str) else sum(len(message["content"]) for message in document)


def refuse_a_files_name(first: Any) -> None:
    """A list of paths given as strings would be learnt as a few very short texts."""
    if isinstance(first, str) and len(first) < 4096 and first.endswith(SUFFIXES) and os.path.isfile(first):
        raise ValueError(
            f"texts[0]: got {first!r}, which is the name of a file, wanted a text; write Path({first!r}) to have it read."
        )


def files_of(path: Path) -> list[Path]:
    """The file `path`, or the files of texts in that folder and below, in the order of their paths.

    Names that begin with a dot are passed over: version control, caches, environments. So is .json, which is read where it is
    named itself. Links to folders are not followed, and a file of several names is read by one of them. A line counts what else
    is left out, such as texts that are compressed.
    """
    if not path.is_dir():
        return [regular(path)]
    found, left = [], Counter[str]()
    for folder, inner, names in os.walk(path, onerror=_unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        left["links to folders"] += sum(Path(folder, name).is_symlink() for name in inner)
        for file in (Path(folder, name) for name in names if not name.startswith(".")):
            if file.name.endswith(IN_FOLDERS):
                found.append(file)
            else:
                left[file.suffix or "without a suffix"] += 1
    if not found:
        raise ValueError(
            f"{path}: holds no texts, wanted {KINDS} files or a saved Hugging Face dataset; "
            f"a .json is read where it is named itself."
        )
    once = {inode(file): file for file in sorted(found, key=lambda file: (file.is_symlink(), file), reverse=True)}
    left["other names of these files"] = len(found) - len(once)
    if kinds := [f"{left[kind]:,} {kind}" for kind in sorted(left, key=lambda kind: (-left[kind], kind)) if left[kind]]:
        more = f" and {len(kinds) - _SHOWN} kinds more" if len(kinds) > _SHOWN else ""
        notice(f"{path}: files to read: {len(once):,}; left out: {', '.join(kinds[:_SHOWN])}{more}.")
    return sorted(once.values())


def inode(file: Path) -> tuple[int, int]:
    """Where it lies, by whatever name."""
    at = regular(file).stat()
    return at.st_dev, at.st_ino


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read: {error.strerror}; check its permissions.") from error


def read_file(path: Path, separator: str | None, text_key: str | None) -> Read:
    """The documents of one file, by its suffix."""
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: cannot be read as texts, wanted {KINDS} or a folder; rename the file if it is one of them.")
    with reading(path):
        if path.suffix == ".jsonl":
            yield from read_jsonl(path, text_key)
        elif path.suffix == ".json":
            yield from read_json_list(path, text_key)
        elif path.suffix == ".parquet":
            yield from read_parquet(path, text_key)
        else:
            yield from read_plain(path, separator)


def read_plain(path: Path, separator: str | None) -> Read:
    """A text file as one document, or split at `separator`. What is empty is no document."""
    try:
        with open(path, "rb") as raw, TextIOWrapper(raw, encoding="utf-8-sig") as file:  # sig: a byte order mark is no text
            if separator is None:
                text = file.read()
                yield from [(text, path.stat().st_size)] if text else []
                return
            rest = ""
            while chunk := file.read(_CHUNK):
                *whole, rest = (rest + chunk).split(separator)
                yield from ((text.strip("\n"), raw.tell()) for text in whole if text.strip("\n"))
            if rest.strip("\n"):
                yield rest.strip("\n"), raw.tell()
    except UnicodeDecodeError as error:
        place = f" at byte {error.start}" if separator is None else ""  # of a chunk, it says nothing
        raise DataError(f"{path}: is not UTF-8 text ({error.reason}{place}); convert it first.") from error


def read_jsonl(path: Path, text_key: str | None) -> Read:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # RecursionError: nested a thousand deep
                raise DataError(f"{path}:{number}: is not JSON ({error}); every line must be one JSON object.") from error
            yield as_document(row, f"{path}:{number}", text_key), file.tell()


def read_json_list(path: Path, text_key: str | None) -> Read:
    """A list of texts, chats or rows. A list of messages is one chat."""
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({_line(error)}); mend the file, or write a row a line to a .jsonl.") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds a JSON {type(rows).__name__}, wanted a list of texts, of chats or of rows.")
    if text_key is None and rows and all(isinstance(row, dict) and {"role", "content"} <= row.keys() for row in rows):
        rows = [rows]
    yield from _of_rows(rows, len(rows), path, path.stat().st_size, text_key)


def read_parquet(path: Path, text_key: str | None) -> Read:
    parquet = _load("pyarrow.parquet", path)
    try:
        file = parquet.ParquetFile(path)
        there = file.schema_arrow.names
        keys = KEYS if text_key is None else (text_key,)
        columns = [name for name in keys if name in there]
        if not columns:
            raise DataError(f"{path}: has the columns {', '.join(there)}, {_wanted(keys)}")
        rows = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
        yield from _of_rows(rows, file.metadata.num_rows, path, path.stat().st_size, text_key)
    except (_load("pyarrow", path).ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is not a parquet file that pyarrow reads: {_line(error)}; write it anew.") from error


def is_dataset(path: Path) -> bool:
    """Whether the folder is what `datasets.Dataset.save_to_disk` writes."""
    return (path / "dataset_info.json").exists() and (path / "state.json").exists()


def tables_of(path: Path) -> list[Path]:
    """The files of a saved dataset, which its state.json names."""
    listing = path / "state.json"
    listed = read_json(listing).get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise DataError(f"{listing}: _data_files: got {listed!r}, wanted the files of the dataset; save it anew.")
    return [regular(beside(listing, entry.get("filename"))) for entry in listed]


def read_dataset(path: Path, text_key: str | None) -> Read:
    """A saved Hugging Face dataset."""
    read_json(path / "dataset_info.json")
    size = sum(file.stat().st_size for file in tables_of(path))
    datasets = _load("datasets", path)
    try:
        rows = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever a damaged table makes of pyarrow and datasets
        raise DataError(f"{path}: is not a dataset that datasets reads: {_line(error)}; save it anew.") from error
    yield from _of_rows(rows, len(rows), path, size, text_key)


def _of_rows(rows: Iterable[Any], count: int, path: Path, size: int, text_key: str | None) -> Read:
    """Their documents; the bytes read are an estimate by rows."""
    for number, row in enumerate(rows):
        yield as_document(row, f"{path}: row {number}", text_key), size * (number + 1) // count


def refuse_splits(path: Path) -> None:
    """A DatasetDict holds several datasets, and which is meant must be said."""
    listing = path / "dataset_dict.json"
    if listing.exists():
        splits = read_json(listing).get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) else "of a DatasetDict"
        raise ValueError(f"{path}: holds the splits {names}, wanted one of them; pass the folder of the split.")


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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
