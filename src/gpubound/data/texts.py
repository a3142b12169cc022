"""Texts: documents from files, folders, saved datasets, the Hugging Face hub or the program, read one at a time; and the source
code that is on every machine.

formats.py has the rows that it takes. `Progress` shows a build's on stderr.
"""

import hashlib
import json
import os
import re
import sys
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from math import inf
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import read_json, reading, regular, sibling
from ..formatting import counted, readable
from ..trace import bar, notice, printable, prints, say
from .formats import MAX_LISTED, Document, RowParser, serialized

Read = Iterator[tuple[Document, int, str]]  # each document, the bytes of its file read so far, and where it is
NewParser = Callable[..., RowParser]  # of rows of one source: it settles on the format of the first

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
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+){0,2}")
_CHUNK = 1 << 20


class Texts:
    """Iterable of the documents of `texts`, with the amount read so far.

    texts       a path or several (plain text, source code, jsonl, parquet, a folder of them, a saved Hugging Face dataset, or
                "owner/name" or "owner/name:split" of the hub), {path: weight}, or an iterable of strings, chats, rows, paths or
                other Texts
    separator   splits a text file into documents, as in "<|endoftext|>"; without it a file is one document
    text_key    the key or column of a row that holds its text or chat; without it the row's format is detected
    format      the name of a format in formats.FORMATS, for rows with the keys of several
    hub_bytes   bytes of text to read of each dataset of the hub, as a stream: nothing else of it is downloaded or stored

    files    every file that will be read; None when texts come from the program or the hub
    size     bytes of the files and characters of the texts; None for an iterator
    read     how much of `size` has been read
    where    the file and line of the last document, for messages
    weights  {path: weight}, or None; `source` is the number of the path that is being read
    """

    def __init__(
        self,
        texts: Any,
        separator: str | None = None,
        text_key: str | None = None,
        format: str | None = None,
        hub_bytes: int | None = None,
    ):
        self.weights = _checked_weights(texts) if isinstance(texts, Mapping) else None
        if isinstance(texts, str | Path):
            texts = [Path(texts)]
        elif self.weights is not None:
            texts = [Path(name) for name in self.weights]
        elif not isinstance(texts, Iterable) or isinstance(texts, bytes):
            raise ValueError(f"texts: got a {type(texts).__name__}, wanted a path, or an iterable of strings, chats or paths.")
        if separator == "":
            raise ValueError("texts: separator: got an empty text, wanted one such as '<|endoftext|>', or None.")
        self._parser: NewParser = partial(RowParser, text_key, format)
        self._parser()  # checks the format's name
        self.texts, self.text_key = texts, text_key
        self._path_texts = partial(_PathTexts, parser=self._parser, separator=separator, hub_bytes=hub_bytes)
        self.read = self.source = 0
        self.where = ""
        self.files: list[Path] | None = None
        self.size: int | None = None
        if isinstance(texts, list | tuple) and texts:
            self.texts = [self._opened(item) for item in texts]
            self._measure(self.texts)

    def _opened(self, item: Any) -> Any:
        return self._path_texts(item) if isinstance(item, Path) else item

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
        if not any(path.is_remote for path in paths):
            self.files = [file for path in paths for file in path.files]
        if self.text_key is not None and not any(path.has_rows for path in paths):
            raise ValueError(
                f"texts: text_key: {self.text_key!r} has no effect on {paths[0].path}, which has no rows; leave it out."
            )

    def __iter__(self) -> Iterator[Document]:
        self.read = empty = 0
        owners: dict[tuple[int, int], _PathTexts] = {}
        parse = self._parser(mixed=True)
        for number, item in enumerate(self.texts):
            self.source = 0 if self.weights is None else number
            before, opened = self.read, self._opened(item)
            if opened is not item:  # a path that an iterator yields: __init__ checked those of a list
                _check_read_once(opened, owners)
            if isinstance(opened, _PathTexts | Texts):
                for document in opened:
                    self.read, self.where = before + opened.read, opened.where
                    yield document
                self.read = before + opened.read
                continue
            # A list of paths given as strings would be learnt as a few very short texts.
            if number == 0 and isinstance(item, str) and len(item) < 4096 and item.endswith(SUFFIXES) and os.path.isfile(item):
                raise ValueError(
                    f"texts[0]: got {item!r}, which is the name of a file, wanted a text; write Path({item!r}) to have it read."
                )
            self.where = f"texts[{number}]"
            if document := parse(item, self.where):
                yield document
            empty += not document
            self.read = before + (len(item) if isinstance(item, str) else 0)
        _report_empty("texts", empty)


def _checked_weights(texts: Mapping[Any, Any]) -> dict[str, float]:
    for name, weight in texts.items():
        if not isinstance(name, str | Path) or type(weight) not in (int, float) or not 0 < weight < inf:
            raise ValueError(f"texts: got {name!r}: {weight!r}, wanted a path and a weight above 0, such as 2 or 0.5.")
    return {str(name): float(weight) for name, weight in texts.items()}


class _PathTexts:
    """Iterable of the documents of one path, with the bytes read so far."""

    def __init__(self, path: Path, parser: NewParser, separator: str | None, hub_bytes: int | None):
        self.path, self.size, self.read, self.where = path, None, 0, ""
        self.files, self.has_rows, self.is_remote = list[Path](), True, is_hub_id(path)
        self.readers: list[Callable[[], Read]]
        if self.is_remote:
            self.readers = [partial(read_hub, str(path), parser, hub_bytes)]
            return
        if not path.exists():
            brief = repr(str(path) if len(str(path)) < 80 else str(path)[:77] + "...")
            raise ValueError(
                f"texts: {brief} does not exist, wanted the path of a file or folder, or a dataset of the hub as 'owner/name'; "
                f"pass a single text as a list of one."
            )
        if (listing := path / "dataset_dict.json").exists():
            splits = read_json(listing).get("splits")
            names = ", ".join(map(str, splits)) if isinstance(splits, list) else "of a DatasetDict"
            raise ValueError(f"{path}: holds the splits {names}, wanted one of them; pass the folder of the split.")
        if (path / "dataset_info.json").exists() and (path / "state.json").exists():  # of Dataset.save_to_disk
            self.files = dataset_files(path)
            self.readers = [partial(read_dataset, path, parser)]
        else:
            self.files = text_files(path)
            self.has_rows = any(file.suffix in ROWS for file in self.files)
            self.readers = [partial(read_file, file, parser, separator) for file in self.files]
        self.size = sum(file.stat().st_size for file in self.files)

    def __iter__(self) -> Iterator[Document]:
        self.read = empty = 0
        first = ""
        for reader in self.readers:
            before = self.read
            for document, done, self.where in reader():
                self.read = before + done
                if document:
                    yield document
                else:
                    first, empty = first or self.where, empty + 1
        _report_empty(str(self.path), empty, first)


def _check_read_once(path: _PathTexts, owners: dict[tuple[int, int], _PathTexts]) -> None:
    """Raise ValueError if an earlier path leads to the same file: held-out documents would be trained on."""
    for file in path.files:
        if (owner := owners.setdefault(_inode(file), path)) is not path:
            raise ValueError(
                f"texts: {file} would be read twice, for {owner.path} and for {path.path}; give it once, so that no "
                f"text is both held out and trained on."
            )


def _report_empty(where: str, count: int, first: str = "") -> None:
    if count:
        facts = "empty, or two equal answers" + (f"; the first is {first}" if first else "")
        notice(f"{where}: left out: {counted(count, 'row')} without anything to learn ({facts}).")


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


def read_file(path: Path, parser: NewParser, separator: str | None) -> Read:
    """Yield the documents of one file, read according to its suffix."""
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: cannot be read as texts, wanted {KINDS} or a folder; rename the file if it is one of them.")
    parse = parser()
    with reading(path):
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path, parse)
        elif path.suffix == ".json":
            yield from _read_json(path, parse)
        elif path.suffix == ".parquet":
            yield from _read_parquet(path, parse)
        else:
            yield from _read_plain(path, separator)


def _read_plain(path: Path, separator: str | None) -> Read:
    try:
        with open(path, "rb") as raw, TextIOWrapper(raw, encoding="utf-8-sig") as file:  # without the byte order mark
            if separator is None:
                if text := file.read():
                    yield text, path.stat().st_size, str(path)
                return
            rest = ""
            while chunk := file.read(_CHUNK):
                *texts, rest = (rest + chunk).split(separator)
                yield from ((text.strip("\n"), raw.tell(), str(path)) for text in texts if text.strip("\n"))
            if rest.strip("\n"):
                yield rest.strip("\n"), raw.tell(), str(path)
    except UnicodeDecodeError as error:
        position = f" at byte {error.start}" if separator is None else ""  # within a chunk it means nothing
        raise DataError(f"{path}: is not UTF-8 text ({error.reason}{position}); convert it first.") from error


def _read_jsonl(path: Path, parse: RowParser) -> Read:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # RecursionError: nested a thousand deep
                raise DataError(f"{path}:{number}: is not JSON ({error}); every line must be one JSON object.") from error
            yield parse(row, where := f"{path}:{number}"), file.tell(), where


def _read_json(path: Path, parse: RowParser) -> Read:
    """Yield the documents of a list of texts, chats or rows. A list of messages is one chat."""
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({_line(error)}); fix the file, or write a row a line to a .jsonl.") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds a JSON {type(rows).__name__}, wanted a list of texts, of chats or of rows.")
    if parse.text_key is None and rows and all(isinstance(row, dict) and {"role", "content"} <= row.keys() for row in rows):
        rows = [rows]
    yield from _documents(rows, len(rows), path, path.stat().st_size, parse)


def _read_parquet(path: Path, parse: RowParser) -> Read:
    parquet, errors = _library("pyarrow.parquet", path), _library("pyarrow", path).ArrowException
    try:
        file = parquet.ParquetFile(path)
        columns = parse.columns(file.schema_arrow.names, str(path))
        rows = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
        yield from _documents(rows, file.metadata.num_rows, path, path.stat().st_size, parse)
    except (errors, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is not a parquet file that pyarrow reads: {_line(error)}; write it anew.") from error


def dataset_files(path: Path) -> list[Path]:
    """Return the files of a saved Hugging Face dataset, which its state.json names."""
    listing = path / "state.json"
    names = read_json(listing).get("_data_files")
    if not isinstance(names, list) or not all(isinstance(entry, dict) for entry in names):
        raise DataError(f"{listing}: _data_files: got {names!r}, wanted the files of the dataset; save it anew.")
    return [regular(sibling(listing, entry.get("filename"))) for entry in names]


def read_dataset(path: Path, parser: NewParser) -> Read:
    read_json(path / "dataset_info.json")
    size = sum(file.stat().st_size for file in dataset_files(path))
    datasets = _library("datasets", path)
    try:
        rows = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged table raises errors of pyarrow, datasets and others
        raise DataError(f"{path}: is not a dataset that datasets reads: {_line(error)}; save it anew.") from error
    yield from _documents(rows, len(rows), path, size, parser())


def is_hub_id(name: str | Path) -> bool:
    """Return True for "owner/name", "owner/name:split" or "owner/name:config:split", unless it looks like a path here."""
    if _HUB_ID.fullmatch(str(name)) is None or str(name).endswith(SUFFIXES):
        return False
    return not Path(name).exists() and not Path(name).parent.exists()


def read_hub(name: str, parser: NewParser, limit: int | None) -> Read:
    """Yield the documents of a dataset that `datasets` downloads, or finds in its cache. The split is "train" by default.

    limit  bytes of text, read as a stream
    """
    repository, *rest = name.split(":")
    config, split = rest[0] if len(rest) > 1 else None, rest[-1] if rest else "train"
    datasets = _library("datasets", Path(name))
    more = {} if limit is None else {"streaming": True}

    def read() -> Iterator[Any]:
        try:
            yield from datasets.load_dataset(repository, config, split=split, **more)
        except Exception as error:  # of requests, huggingface_hub, datasets and others
            raise DataError(
                f"{name}: is no file here, and datasets.load_dataset({repository!r}, {config!r}, split={split!r}) failed: "
                f"{_line(error)}; check the name and the network, or give a local path."
            ) from error

    size = 0
    for document, _, where in _documents(read(), 1, Path(name), 0, parser()):
        size += len(serialized(document).encode("utf-8", "surrogatepass"))
        if limit is not None and size > limit:
            return
        yield document, 0, where


def _documents(rows: Iterable[Any], count: int, path: Path, size: int, parse: RowParser) -> Read:
    for number, row in enumerate(rows):
        yield parse(row, where := f"{path}: row {number}"), size * (number + 1) // count, where


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


PROGRESS_SECONDS = 10.0  # between the lines of a log file


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
