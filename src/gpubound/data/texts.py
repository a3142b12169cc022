"""Reading texts, one document after another from whatever the user has, without holding more than one file's part in memory.

A corpus takes minutes to read, so `Progress` shows how much of it is done.
"""

import hashlib
import os
import re
import sys
import sysconfig
import time
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..formatting import readable
from ..trace import bar, notice, printable, prints, say
from .documents import (
    ROWS,
    Document,
    as_document,
    files_of,
    inode,
    is_dataset,
    read_dataset,
    read_file,
    refuse_a_files_name,
    refuse_splits,
    tables_of,
)

PROGRESS_SECONDS = 10.0  # between plain lines: a log file wants few
LONGEST = 1024  # letters that a tokenizer learns as one word
_ENDLESS = re.compile(rf"\w{{{LONGEST}}}|\s{{{LONGEST}}}|[^\w\s]{{{LONGEST}}}")


class _Given:
    """The documents of a path that was given, and how far its files have been read."""

    def __init__(self, path: Path, separator: str | None, text_key: str | None):
        if not path.exists():
            said = repr(str(path) if len(str(path)) < 80 else str(path)[:77] + "...")
            raise ValueError(
                f"texts: {said} does not exist, wanted the path of a file or folder; pass a single text as a list of one."
            )
        refuse_splits(path)
        if is_dataset(path):
            self.files, self.rows = tables_of(path), True
            self.readers = [partial(read_dataset, path, text_key)]
        else:
            self.files = files_of(path)
            self.rows = any(file.suffix in ROWS for file in self.files)
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
        _say_empty(str(self.path), empty)


Owners = dict[tuple[int, int], _Given]  # of files, by where they lie


def _refuse_twice(place: _Given, owners: Owners) -> None:
    """A file that an earlier path leads to, too, by whatever name: held-out documents would be trained on."""
    for file in place.files:
        if (owner := owners.setdefault(inode(file), place)) is not place:
            raise ValueError(
                f"texts: {file} would be read twice, for {owner.path} and for {place.path}; give it once, so that no "
                f"text is both held out and trained on."
            )


def _say_empty(where: str, count: int) -> None:
    """An empty row is no document, as an empty file is none: of its end alone there is nothing to learn."""
    if count:
        notice(f"{where}: left out: {count:,} empty texts.")


class Texts:
    """The documents of `texts`, and how far they have been read.

    texts       a path or several (plain text, source code, jsonl, parquet, a folder of them, a saved Hugging Face dataset),
                or an iterable of strings, chats, rows, paths or other Texts
    separator   splits a text file into documents, as in "<|endoftext|>"; without it a file is one document
    text_key    the key or column of a row that holds its text or chat; without it "text" or "messages"

    files   every file that will be read; None when texts come from the program
    size    bytes of the files and letters of the texts; None when the program yields them one by one
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
            self.texts = [self._part(item) for item in texts]
            self._measure(self.texts)

    def _part(self, item: Any) -> Any:
        return _Given(item, self.separator, self.text_key) if isinstance(item, Path) else item

    def _measure(self, items: list[Any]) -> None:
        sizes = [len(item) if isinstance(item, str) else item.size for item in items if isinstance(item, str | _Given | Texts)]
        if len(sizes) == len(items) and None not in sizes:
            self.size = sum(size or 0 for size in sizes)
        places, owners = [item for item in items if isinstance(item, _Given)], Owners()
        for place in places:
            _refuse_twice(place, owners)
        if len(places) < len(items):
            return
        self.files = [file for place in places for file in place.files]
        if self.text_key is not None and not any(place.rows for place in places):
            raise ValueError(
                f"texts: text_key: {self.text_key!r} has no effect on {places[0].path}, which has no rows; leave it out."
            )

    def __iter__(self) -> Iterator[Document]:
        self.read, empty, owners = 0, 0, Owners()
        for number, given in enumerate(self.texts):
            before, item = self.read, self._part(given)
            if item is not given:  # a path that comes one by one: those of a list were looked at before
                _refuse_twice(item, owners)
            if isinstance(item, _Given | Texts):
                for document in item:
                    self.read = before + item.read
                    yield document
                self.read = before + item.read
                continue
            if number == 0:
                refuse_a_files_name(item)
            if document := as_document(item, f"texts[{number}]", self.text_key):
                yield document
            empty += not document
            self.read = before + (len(item) if isinstance(item, str) else 0)
        _say_empty("texts", empty)


def in_parts(text: str) -> Iterator[str]:
    """`text`, cut where a word of it goes on and on: a genome, a long row of blanks. The time to learn one word grows with the
    square of its length, so that one of a million letters would take minutes."""
    begin = 0
    for at in range(0, len(text), LONGEST):
        if _ENDLESS.fullmatch(text, at, at + LONGEST):
            yield text[begin:at]
            begin = at
    yield text[begin:]


class Progress:
    """`with Progress("tokenising", wanted, size) as report: report.show(done, "1,024 texts")`.

    `size` is in bytes, or None where nobody knows it.
    """

    def __init__(self, title: str, wanted: bool = True, size: int | None = None):
        self.title, self.wanted, self.size = printable(title), wanted, size
        self.began = self._shown = time.monotonic()
        self._line, self._bar = "", None

    def __enter__(self) -> "Progress":
        if self.wanted and prints() and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import TimeElapsedColumn

            self._bar = bar(Console(stderr=True), self.title, self.size, TimeElapsedColumn())
        return self

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.began, 1e-3)

    def show(self, done: int, *facts: str) -> None:
        """Show `done` of the size, and what else there is to say; not more often than is of use."""
        if not self.wanted:
            return
        now, far = time.monotonic(), f"{readable(done)} read"
        if self.size:
            done = min(done, self.size)
            far = f"{readable(done)} of {readable(self.size)} ({100 * done // self.size} %)"
        self._line = ", ".join((far, *facts))
        if now - self._shown >= (PROGRESS_SECONDS if self._bar is None else 0.1):
            self._shown = now
            self._print(done)

    def say(self, text: str) -> None:
        """Show `text` now: what happens after everything has been read."""
        if self.wanted:
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
            self._print(self.size)  # the last state, however short the time since the one before
        if self._bar is not None:
            self._bar.stop()


_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test", "pydoc_data"}


def python_stdlib_texts(limit_bytes: int | None = None) -> Iterator[str]:
    """Source files of this Python's standard library, a corpus that every machine has. Each begins with its name, a comment.

    The order mixes packages and is always the same. The texts end before the file that would exceed `limit_bytes`.
    """
    yield from _sources(Path(sysconfig.get_paths()["stdlib"]), limit_bytes)


def torch_source_texts(limit_bytes: int | None = None) -> Iterator[str]:
    """Source files of the installed torch, in the same form: several times as much text, on every machine that runs this."""
    import torch

    yield from _sources(Path(torch.__file__).parent, limit_bytes)


def _sources(root: Path, limit_bytes: int | None) -> Iterator[str]:
    total, names = 0, []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED]  # site-packages may hold a hundred times as many files
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    # Mixed by a hash: by name, the first files would be of few packages.
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        with tokenize.open(root / name) as file:  # honours a coding line
            text = f"# {name}\n{file.read()}"
        total += len(text.encode())
        if limit_bytes is not None and total > limit_bytes:
            return
        yield text
