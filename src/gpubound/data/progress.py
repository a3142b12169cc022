"""Progress of a build, on stderr."""

import sys
import time

from ..formatting import readable
from ..trace import bar, printable, prints, say

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
