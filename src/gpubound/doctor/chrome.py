"""Reads traces in Chrome's JSON format event by event: a file of several GB needs the memory of a few MB of text."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import DataError
from ..files import reading, regular
from ..words import readable, shown

CHUNK = 1 << 20  # characters
LARGEST = 1 << 26  # characters that one value outside the events may have
LONG = 1 << 20  # characters; no string of a trace is as long: an error so far from the end is damage, not a cut

WANTED = "give the file that torch.profiler's export_chrome_trace wrote (.json or .json.gz)."

_decode = json.JSONDecoder(strict=False).raw_decode
_space = re.compile(r"[\s,]*")


def events(path: Path, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each event of a trace. What stands beside the events is put into `head`."""
    with reading(regular(path)), open(path, "rb") as file:
        begin = file.read(16)
    if begin.startswith(b"SQLite format 3") or path.suffix in (".nsys-rep", ".qdrep"):
        raise DataError(f"{path}: is a report of Nsight Systems, wanted a trace of torch.profiler; {WANTED}")
    open_ = gzip.open if begin.startswith(b"\x1f\x8b") else open
    with reading(path), open_(path, "rt", encoding="utf-8", errors="replace") as text:
        yield from _Reader(path, text).events(head)


class _Reader:
    def __init__(self, path: Path, text: IO[str]):
        self.path, self.text = path, text
        self.buffer, self.at, self.ended = "", 0, False
        self.count = 0

    def events(self, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        first = self.peek()
        if first == "[":
            yield from self.array()
        elif first == "{":
            self.at += 1
            yield from self.members(head)
        else:
            begin = shown(self.buffer[self.at : self.at + 20])
            raise DataError(f"{self.path}: begins with {begin}, wanted JSON; {WANTED}")

    def members(self, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        found = False
        while self.peek() != "}":
            key = self.value()
            if self.peek() != ":":
                raise self.damaged()
            self.at += 1
            if key == "traceEvents" and self.peek() == "[":
                found = True
                yield from self.array()
            else:
                head[key] = self.value()
        if not found:
            raise DataError(f"{self.path}: is JSON without traceEvents, so it is no trace; {WANTED}")

    def array(self) -> Iterator[dict[str, Any]]:
        self.at += 1
        while self.peek() != "]":
            event = self.value()
            if not isinstance(event, dict):
                raise self.damaged()
            self.count += 1
            yield event
        self.at += 1

    def peek(self) -> str:
        """The next character that is neither space nor a comma."""
        while True:
            self.at = _space.match(self.buffer, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if self.ended:
                raise self.cut()
            self.fill()

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = _decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                size = len(self.buffer) - self.at
                if size > LARGEST or (error.pos and len(self.buffer) - error.pos > LONG):
                    raise self.damaged() from error
                if self.ended:
                    raise self.cut() from error
                self.fill()
                continue
            if end == len(self.buffer) and not self.ended:
                self.fill()  # a number may go on
                continue
            self.at = end
            return value

    def fill(self) -> None:
        try:
            more = self.text.read(CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self.cut() from error
        self.buffer, self.at, self.ended = self.buffer[self.at :] + more, 0, not more

    def cut(self) -> DataError:
        return DataError(
            f"{self.path}: ends in the middle, after {self.count:,} events; let the profiler finish writing, or copy the file "
            "again."
        )

    def damaged(self) -> DataError:
        read = readable(self.path.stat().st_size)
        return DataError(f"{self.path}: is not JSON after event {self.count:,} (file of {read}); record the trace again.")
