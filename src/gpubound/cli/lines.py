"""What `gpubound generate --gpus N` writes: a line of JSON for each sequence, in the order of the prompts.

A run that was broken off leaves the lines of the first prompts, and perhaps half a line, which is taken off. One that had to
leave prompts out leaves the lines of the others. Either file is gone on with.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from ..files import flock, regular, writing
from ..formatting import shown

BEGIN = b'{"number": '  # of a line


class Lines:
    """The lines of one run, in `path` or on stdout. Those that come before their turn wait for it.

    n     sequences of a prompt, a line each
    mark  what tells this model and these settings from others; every line has it
    """

    def __init__(self, path: str | None, prompts: list[str], n: int, mark: str):
        self.prompts, self.n, self.mark = prompts, n, mark
        self.written = 0  # prompts whose lines are written, from the first on
        self._waiting: dict[int, list[str]] = {}
        self._out: TextIO = sys.stdout
        if path is not None:
            self._out = self._opened(Path(path))

    def answered(self, number: int) -> bool:
        return number < self.written or number in self._waiting

    def put(self, number: int, sequences: list[dict[str, Any]]) -> None:
        """The sequences of one prompt, written once it is their turn."""
        if not self.answered(number):
            self._waiting[number] = [json.dumps({"number": number + 1, **one, "run": self.mark}) for one in sequences]
        while self.written in self._waiting:
            self._write(self.written)
            self.written += 1

    def close(self) -> None:
        """What still waits is written behind a gap: a prompt before it has no answer."""
        try:
            for number in sorted(self._waiting):
                self._write(number)
        finally:
            if self._out is not sys.stdout:
                self._out.close()

    def _write(self, number: int) -> None:
        print("\n".join(self._waiting.pop(number)), file=self._out, flush=True)

    def _opened(self, path: Path) -> TextIO:
        """The file, for this process alone: two would write every answer twice."""
        if path.exists():
            regular(path)
        with writing(path), ExitStack() as unwanted:
            out = unwanted.enter_context(open(path, "a", encoding="utf-8", newline="\n"))
            if not flock(out.fileno(), path, "make sure that no other process writes there"):
                raise ValueError(f"output: another process writes to {path}; wait until it has ended, or name another file.")
            out.truncate(self._go_on(path))
            unwanted.pop_all()
        return out

    def _go_on(self, path: Path) -> int:
        """Take what the file holds for written, up to the first gap, and give its bytes; what is behind it waits again."""
        found: dict[int, list[str]] = {}
        *lines, cut = path.read_bytes().split(b"\n")
        for at, line in enumerate(lines, 1):
            found.setdefault(self._number(path, at, line), []).append(line.decode())
        if not cut.startswith(BEGIN[: len(cut)]):  # a file without a newline is no half answer: it is somebody's
            raise ValueError(_foreign(path, len(lines) + 1))
        whole = {number: lines for number, lines in found.items() if len(lines) == self.n}
        while self.written in whole:
            self.written += 1
        kept = [line for number in range(self.written) for line in whole.pop(number)]
        self._waiting = whole
        return sum(len(line.encode()) + 1 for line in kept)

    def _number(self, path: Path, at: int, line: bytes) -> int:
        """Which prompt a line of the file answers."""
        try:
            one = json.loads(line)
            number, prompt, mark = one["number"] - 1, one["prompt"], one["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(_foreign(path, at)) from error
        if not 0 <= number < len(self.prompts) or prompt != self.prompts[number]:
            raise ValueError(
                f"output: line {at} of {path} answers {shown(prompt)}, which is not prompt {number + 1} here; "
                f"give the prompts that it was begun with, or name another file."
            )
        if mark != self.mark:
            raise ValueError(
                f"output: line {at} of {path} was written by another model or with other settings; "
                f"give those that it was begun with, or name another file."
            )
        return number


def _foreign(path: Path, at: int) -> str:
    return f"output: line {at} of {path} is no answer of gpubound generate; name another file."
