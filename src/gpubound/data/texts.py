"""Texts: documents from files, folders, saved datasets or the program, read one at a time.

A document is a text, or a chat as a list of {"role", "content"} messages.
"""

import hashlib
import json
import os
import sys
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import read_json, reading, regular, sibling
from ..formatting import readable, shown
from ..trace import bar, notice, printable, prints, say

Document = str | list[dict[str, Any]]
Read = Iterator[tuple[Document, int]]  # each document, and the bytes of its file read so far

TEXT_KEYS = ("text", "messages")  # of a row, without text_key
MAX_DEPTH = 64  # of a message's other fields: a template may print them, and Python recurses a thousand deep
MAX_LISTED = 8  # keys or suffixes that a message lists

PLAIN = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".cs", ".swift",
    ".js", ".mjs", ".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".clj", ".ex", ".erl",
    ".zig", ".nim", ".lean", ".sh", ".sql",
)  # fmt: skip
ROWS = (".jsonl", ".parquet", ".json")
SUFFIXES = PLAIN + ROWS
FOLDER_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix != ".json")  # a folder's .json mostly holds settings
KINDS = "plain text (.txt, .md, .py and other source code), .jsonl, .parquet, .json"
_CHUNK = 1 << 20
PROGRESS_SECONDS = 10.0  # between the lines of a log file


class Texts:
    """Iterable of the documents of `texts`, with the amount read so far.

    texts       a path or several (plain text, source code, jsonl, parquet, a folder of them, a saved Hugging Face dataset),
                or an iterable of strings, chats, rows, paths or other Texts
    separator   splits a text file into documents, as in "<|endoftext|>"; without it a file is one document
    text_key    the key or column of a row that holds its text or chat; without it "text" or "messages"

    files   every file that will be read; None when texts come from the program
    size    bytes of the files and characters of the texts; None for an iterator
    read    how much of `size` has been read
    """

    def __init__(self, texts: Any, separator: str | None = None, text_key: str | None = None):
        if isinstance(texts, str | Path):
            texts = [Path(texts)]
        elif not isinstance(texts, Iterable) or isinstance(texts, bytes | Mapping):
            raise ValueError(f"texts: got a {type(texts).__name__}, wanted a path, or an iterable of strings, chats or paths.")
        if separator == "":
            raise ValueError("texts: separator: got an empty text, wanted one such as '<|endoftext|>', or None.")
        self.texts, self.separator, self.text_key, self.read = texts, separator, text_key, 0
        self.files: list[Path] | None = None
        self.size: int | None = None
        if isinstance(texts, list | tuple) and texts:
            self.texts = [self._opened(item) for item in texts]
            self._measure(self.texts)

    def _opened(self, item: Any) -> Any:
        return _PathTexts(item, self.separator, self.text_key) if isinstance(item, Path) else item

    def _measure(self, items: list[Any]) -> None:
        sizes = [
            len(item) if isinstance(item, str) else item.size for item in items if isinstance(item, str | _PathTexts | Texts)
        ]
        if len(sizes) == len(items) and None not in sizes:
            self.size = sum(size or 0 for size in sizes)
        paths = [item for item in items if isinstance(item, _PathTexts)]
        owners: dict[tuple[int, int], _PathTexts] = {}
        for path in paths:
            _check_read_once(path, owners)
        if len(paths) < len(items):
            return
        self.files = [file for path in paths for file in path.files]
        if self.text_key is not None and not any(path.has_rows for path in paths):
            raise ValueError(
                f"texts: text_key: {self.text_key!r} has no effect on {paths[0].path}, which has no rows; leave it out."
            )

    def __iter__(self) -> Iterator[Document]:
        self.read = empty = 0
        owners: dict[tuple[int, int], _PathTexts] = {}
        for number, item in enumerate(self.texts):
            before, opened = self.read, self._opened(item)
            if opened is not item:  # a path that an iterator yields: __init__ checked those of a list
                _check_read_once(opened, owners)
            if isinstance(opened, _PathTexts | Texts):
                for document in opened:
                    self.read = before + opened.read
                    yield document
                self.read = before + opened.read
                continue
            # A list of paths given as strings would be learnt as a few very short texts.
            if number == 0 and isinstance(item, str) and len(item) < 4096 and item.endswith(SUFFIXES) and os.path.isfile(item):
                raise ValueError(
                    f"texts[0]: got {item!r}, which is the name of a file, wanted a text; write Path({item!r}) to have it read."
                )
            if document := as_document(item, f"texts[{number}]", self.text_key):
                yield document
            empty += not document
            self.read = before + (len(item) if isinstance(item, str) else 0)
        _report_empty("texts", empty)


class _PathTexts:
    """Iterable of the documents of one path, with the bytes read so far."""

    def __init__(self, path: Path, separator: str | None, text_key: str | None):
        if not path.exists():
            brief = repr(str(path) if len(str(path)) < 80 else str(path)[:77] + "...")
            raise ValueError(
                f"texts: {brief} does not exist, wanted the path of a file or folder; pass a single text as a list of one."
            )
        if (listing := path / "dataset_dict.json").exists():
            splits = read_json(listing).get("splits")
            names = ", ".join(map(str, splits)) if isinstance(splits, list) else "of a DatasetDict"
            raise ValueError(f"{path}: holds the splits {names}, wanted one of them; pass the folder of the split.")
        self.readers: list[Callable[[], Read]]
        if (path / "dataset_info.json").exists() and (path / "state.json").exists():  # of Dataset.save_to_disk
            self.files, self.has_rows = dataset_files(path), True
            self.readers = [partial(read_dataset, path, text_key)]
        else:
            self.files = text_files(path)
            self.has_rows = any(file.suffix in ROWS for file in self.files)
            self.readers = [partial(read_file, file, separator, text_key) for file in self.files]
        self.path, self.size, self.read = path, sum(file.stat().st_size for file in self.files), 0

    def __iter__(self) -> Iterator[Document]:
        self.read = empty = 0
        for reader in self.readers:
            before = self.read
            for document, done in reader():
                self.read = before + done
                if document:
                    yield document
                empty += not document
        _report_empty(str(self.path), empty)


def _check_read_once(path: _PathTexts, owners: dict[tuple[int, int], _PathTexts]) -> None:
    """Raise ValueError if an earlier path leads to the same file: held-out documents would be trained on."""
    for file in path.files:
        if (owner := owners.setdefault(_inode(file), path)) is not path:
            raise ValueError(
                f"texts: {file} would be read twice, for {owner.path} and for {path.path}; give it once, so that no "
                f"text is both held out and trained on."
            )


def _report_empty(where: str, count: int) -> None:
    if count:
        notice(f"{where}: left out: {count:,} empty texts.")


def text_files(path: Path) -> list[Path]:
    """Return the file `path`, or the files of texts in that folder and below, sorted by path.

    Names that begin with a dot are skipped (version control, caches, environments), and so are .json files. Links to folders
    are not followed, and a file with several names is read once. A notice counts every other file that is left out.
    """
    if not path.is_dir():
        return [regular(path)]
    files, skipped = [], Counter[str]()
    for folder, inner, names in os.walk(path, onerror=_unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        skipped["links to folders"] += sum(Path(folder, name).is_symlink() for name in inner)
        for file in (Path(folder, name) for name in names if not name.startswith(".")):
            if file.name.endswith(FOLDER_SUFFIXES):
                files.append(file)
            else:
                skipped[file.suffix or "without a suffix"] += 1
    if not files:
        raise ValueError(
            f"{path}: holds no texts, wanted {KINDS} files or a saved Hugging Face dataset; "
            f"a .json is read where it is named itself."
        )
    unique = {_inode(file): file for file in sorted(files, key=lambda file: (file.is_symlink(), file), reverse=True)}
    skipped["other names of these files"] = len(files) - len(unique)
    if skips := [
        f"{skipped[kind]:,} {kind}" for kind in sorted(skipped, key=lambda kind: (-skipped[kind], kind)) if skipped[kind]
    ]:
        more = f" and {len(skips) - MAX_LISTED} kinds more" if len(skips) > MAX_LISTED else ""
        notice(f"{path}: files to read: {len(unique):,}; left out: {', '.join(skips[:MAX_LISTED])}{more}.")
    return sorted(unique.values())


def _inode(file: Path) -> tuple[int, int]:
    status = regular(file).stat()
    return status.st_dev, status.st_ino


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read: {error.strerror}; check its permissions.") from error


def as_document(item: Any, where: str, text_key: str | None = None) -> Document:
    """Return the document in `item`: a text, a chat, or a row that holds one under `text_key`. Errors begin with `where`."""
    if isinstance(item, Mapping):
        keys = TEXT_KEYS if text_key is None else (text_key,)
        present = [key for key in keys if item.get(key) is not None]
        if len(present) > 1:  # a chat and its rendered text: the text would train on the prompts, too
            both = " and ".join(map(repr, present))
            raise DataError(f"{where}: has both {both}; name the one to learn with text_key (--text-key).")
        if not present:
            raise DataError(f"{where}: {_missing_text(item, keys)}")
        item, where = item[present[0]], f"{where}[{present[0]!r}]"
    if isinstance(item, str):
        _check_text(item, where)
        return item
    if not isinstance(item, list | tuple) or not item or not all(isinstance(message, Mapping) for message in item):
        got = "an empty list" if isinstance(item, list | tuple) and not item else f"a {type(item).__name__}"
        raise DataError(f"{where}: got {got}, wanted a string or a chat [{{'role': ..., 'content': ...}}, ...].")
    for number, message in enumerate(item):
        _check_message(message, f"{where}[{number}]")
    return [dict(message) for message in item]


def _missing_text(row: Mapping, keys: tuple[str, ...]) -> str:
    if null := [key for key in keys if key in row]:
        return f"its {null[0]!r} is null, wanted a text or a chat; leave the row out."
    names = ", ".join(map(repr, list(row)[:MAX_LISTED])) + (
        f" and {len(row) - MAX_LISTED} more" if len(row) > MAX_LISTED else ""
    )
    return f"has {'the keys ' + names if row else 'no keys'}, {_wanted(keys)}"


def _wanted(keys: tuple[str, ...]) -> str:
    return f"wanted {' or '.join(map(repr, keys))}; name another with text_key (--text-key)."


def _check_message(message: Mapping, where: str) -> None:
    for key, wanted in (
        ("role", "a text such as 'user' or 'assistant'"),
        ("content", "a text; leave the row out, or write one"),
    ):
        if not isinstance(message.get(key), str):
            raise DataError(f"{where}: {key}: got {shown(message.get(key))}, wanted {wanted}.")
        _check_text(message[key], where)
    if any(_is_deeper(value, MAX_DEPTH) for value in message.values()):
        raise DataError(f"{where}: is nested more than {MAX_DEPTH} deep; leave the field out.")


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write "\ud800", half of a character
        raise DataError(
            f"{where}: holds half a surrogate pair (U+{ord(text[error.start]):04X} at character {error.start}), which no "
            f"tokenizer takes; remove it or write the whole character."
        ) from error


def _is_deeper(value: Any, depth: int) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list | tuple) and (depth == 0 or any(_is_deeper(inner, depth - 1) for inner in value))


def read_file(path: Path, separator: str | None, text_key: str | None) -> Read:
    """Yield the documents of one file, read according to its suffix."""
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: cannot be read as texts, wanted {KINDS} or a folder; rename the file if it is one of them.")
    with reading(path):
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path, text_key)
        elif path.suffix == ".json":
            yield from _read_json(path, text_key)
        elif path.suffix == ".parquet":
            yield from _read_parquet(path, text_key)
        else:
            yield from _read_plain(path, separator)


def _read_plain(path: Path, separator: str | None) -> Read:
    try:
        with open(path, "rb") as raw, TextIOWrapper(raw, encoding="utf-8-sig") as file:  # without the byte order mark
            if separator is None:
                if text := file.read():
                    yield text, path.stat().st_size
                return
            rest = ""
            while chunk := file.read(_CHUNK):
                *texts, rest = (rest + chunk).split(separator)
                yield from ((text.strip("\n"), raw.tell()) for text in texts if text.strip("\n"))
            if rest.strip("\n"):
                yield rest.strip("\n"), raw.tell()
    except UnicodeDecodeError as error:
        position = f" at byte {error.start}" if separator is None else ""  # within a chunk it means nothing
        raise DataError(f"{path}: is not UTF-8 text ({error.reason}{position}); convert it first.") from error


def _read_jsonl(path: Path, text_key: str | None) -> Read:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # RecursionError: nested a thousand deep
                raise DataError(f"{path}:{number}: is not JSON ({error}); every line must be one JSON object.") from error
            yield as_document(row, f"{path}:{number}", text_key), file.tell()


def _read_json(path: Path, text_key: str | None) -> Read:
    """Yield the documents of a list of texts, chats or rows. A list of messages is one chat."""
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({_line(error)}); fix the file, or write a row a line to a .jsonl.") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds a JSON {type(rows).__name__}, wanted a list of texts, of chats or of rows.")
    if text_key is None and rows and all(isinstance(row, dict) and {"role", "content"} <= row.keys() for row in rows):
        rows = [rows]
    yield from _documents(rows, len(rows), path, path.stat().st_size, text_key)


def _read_parquet(path: Path, text_key: str | None) -> Read:
    parquet, errors = _library("pyarrow.parquet", path), _library("pyarrow", path).ArrowException
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        keys = TEXT_KEYS if text_key is None else (text_key,)
        columns = [name for name in keys if name in names]
        if not columns:
            raise DataError(f"{path}: has the columns {', '.join(names)}, {_wanted(keys)}")
        rows = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
        yield from _documents(rows, file.metadata.num_rows, path, path.stat().st_size, text_key)
    except (errors, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is not a parquet file that pyarrow reads: {_line(error)}; write it anew.") from error


def dataset_files(path: Path) -> list[Path]:
    """Return the files of a saved Hugging Face dataset, which its state.json names."""
    listing = path / "state.json"
    names = read_json(listing).get("_data_files")
    if not isinstance(names, list) or not all(isinstance(entry, dict) for entry in names):
        raise DataError(f"{listing}: _data_files: got {names!r}, wanted the files of the dataset; save it anew.")
    return [regular(sibling(listing, entry.get("filename"))) for entry in names]


def read_dataset(path: Path, text_key: str | None) -> Read:
    read_json(path / "dataset_info.json")
    size = sum(file.stat().st_size for file in dataset_files(path))
    datasets = _library("datasets", path)
    try:
        rows = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged table raises errors of pyarrow, datasets and others
        raise DataError(f"{path}: is not a dataset that datasets reads: {_line(error)}; save it anew.") from error
    yield from _documents(rows, len(rows), path, size, text_key)


def _documents(rows: Iterable[Any], count: int, path: Path, size: int, text_key: str | None) -> Read:
    for number, row in enumerate(rows):
        yield as_document(row, f"{path}: row {number}", text_key), size * (number + 1) // count


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _library(module: str, path: Path) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{path}: reading it needs {package}, which is not installed; pip install 'gpubound[hf]', or convert it to jsonl."
        ) from error


class Progress:
    """Progress of reading texts on stderr: a live bar on a terminal, else a line every ten seconds.

    `with Progress("tokenising", enabled, size) as report: report.show(done, "1,024 texts")`; `size` is in bytes, or None.
    """

    def __init__(self, title: str, enabled: bool = True, size: int | None = None):
        self.title, self.enabled, self.size = printable(title), enabled, size
        self.began = self._shown = time.monotonic()
        self._line, self._bar = "", None

    def __enter__(self) -> "Progress":
        if self.enabled and prints() and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import TimeElapsedColumn

            self._bar = bar(Console(stderr=True), self.title, self.size, TimeElapsedColumn())
        return self

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.began, 1e-3)

    def show(self, done: int, *facts: str) -> None:
        """Show `done` of the size and `facts`, if the last output is old enough."""
        if not self.enabled:
            return
        now, fraction = time.monotonic(), f"{readable(done)} read"
        if self.size:
            done = min(done, self.size)
            fraction = f"{readable(done)} of {readable(self.size)} ({100 * done // self.size} %)"
        self._line = ", ".join((fraction, *facts))
        if now - self._shown >= (PROGRESS_SECONDS if self._bar is None else 0.1):
            self._shown = now
            self._print(done)

    def say(self, text: str) -> None:
        """Show `text` now, for work that follows the reading."""
        if self.enabled:
            self._line = text
            self._print(self.size)
            self._line = ""

    def _print(self, done: int | None) -> None:
        if self._bar is not None:
            self._bar.update(0, completed=done, line=self._line)
        else:
            say(f"{self.title}: {self._line}", stacklevel=4)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._line and kind is None:
            self._print(self.size)  # the final state, also soon after the previous output
        if self._bar is not None:
            self._bar.stop()


_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test", "pydoc_data"}


def python_stdlib_texts(limit_bytes: int | None = None) -> Iterator[str]:
    """Yield source files of this Python's standard library, a corpus on every machine. Each begins with its name, a comment.

    The order mixes packages and is always the same. The texts end before the file that would exceed `limit_bytes`.
    """
    yield from _sources(Path(sysconfig.get_paths()["stdlib"]), limit_bytes)


def torch_source_texts(limit_bytes: int | None = None) -> Iterator[str]:
    """Yield source files of the installed torch in the same format: several times as much text as the standard library."""
    import torch

    yield from _sources(Path(torch.__file__).parent, limit_bytes)


def _sources(root: Path, limit_bytes: int | None) -> Iterator[str]:
    total, names = 0, []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED]  # site-packages may hold a hundred times as many files
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    # Sorted by a hash: by name, the first files would be of few packages.
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        with tokenize.open(root / name) as file:  # honours a coding line
            text = f"# {name}\n{file.read()}"
        total += len(text.encode())
        if limit_bytes is not None and total > limit_bytes:
            return
        yield text
