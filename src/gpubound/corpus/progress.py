"""How far a long piece of work is: a live bar on a terminal, plain lines elsewhere, nothing when nobody wants it."""

import sys
import time
from collections.abc import Iterable
from typing import Any

from ..trace import printable, prints, say
from ..words import readable

SECONDS = 10.0  # between plain lines: a log file wants few


class Progress:
    """`with Progress("tokenising", wanted, size) as report: report.show(done, "1,024 texts")`.

    `size` is in bytes, or None where nobody knows it.
    """

    def __init__(self, title: str, wanted: bool = True, size: int | None = None):
        self.title, self.wanted, self.size = printable(title), wanted, size
        self.began = self._shown = time.monotonic()
        self._line = ""
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if self.wanted and prints() and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task(self.title, total=self.size, line="")
            self._bar.start()
        return self

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.began, 1e-3)

    def show(self, done: int, *facts: str) -> None:
        """Show `done` of the size, and what else there is to say; not more often than is of use."""
        if not self.wanted:
            return
        now = time.monotonic()
        self._line = ", ".join((self._of(done), *facts))
        if now - self._shown >= (SECONDS if self._bar is None else 0.1):
            self._shown = now
            self._print(done)

    def say(self, text: str) -> None:
        """Show `text` now: what happens after everything has been read."""
        if self.wanted:
            self._line = text
            self._print(self.size)
            self._line = ""

    def _of(self, done: int) -> str:
        if not self.size:
            return f"{readable(done)} read"
        done = min(done, self.size)
        return f"{readable(done)} of {readable(self.size)} ({100 * done // self.size} %)"

    def _print(self, done: int | None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, line=self._line)
        else:
            say(f"{self.title}: {self._line}", stacklevel=4)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._line and kind is None:
            self._print(self.size)  # the last state, however short the time since the one before
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Any:
    """A bar, and below it the figures: beside it they would leave neither any room on 80 columns."""
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Two(Bar):
        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            yield from (Text(task.fields["line"]) for task in self.tasks)

    title = TextColumn("{task.description}", markup=False)  # [b] in a folder's name is part of the name
    return Two(title, BarColumn(bar_width=24), TimeElapsedColumn(), console=Console(stderr=True))
