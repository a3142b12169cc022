"""The line that a running training shows: step, loss, speed, share of the matrix rate, host syncs, memory."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..trace import printable
from ..words import quantity, readable

# Without a terminal (a log file, CI) a line every tenth of the run says as much as a bar would.
LINES = 10
SELDOM = ("held_out", "syncs", "power_w", "memory_bytes")  # not measured at every step: the last figure stays in the line


def describe(record: dict[str, Any]) -> str:
    """One step in a line. Only what was measured appears."""
    parts = [printable(record["phase"])] if "phase" in record else []
    if "loss" in record:
        parts.append(f"loss {float(record['loss']):.3f}")
    if "held_out" in record:
        parts.append(f"held out {record['held_out']:.3f}")
    if "tokens_per_s" in record:
        parts.append(quantity(record["tokens_per_s"], " tok/s"))
    if "mfu" in record:
        parts.append(f"{record['mfu']:.1%} of the matrix rate")
    if "gpu_busy" in record:
        parts.append(f"GPU busy {record['gpu_busy']:.0%}")
    if "syncs" in record:
        parts.append(f"{record['syncs']:g} syncs/step")
    if "power_w" in record:
        parts.append(f"{record['power_w']:.0f} W")
    if "memory_bytes" in record:
        parts.append(readable(record["memory_bytes"]))
    if record.get("skipped"):
        parts.append(f"{record['skipped']} skipped")
    return "  ".join(parts)


class _Bar(Progress):
    """The bar, and below it the figures: beside it they would leave neither any room on 80 columns."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["line"]) for task in self.tasks)


class LiveLine:
    """`with LiveLine(steps) as live: live.show(record)`. A bar on a terminal, plain lines elsewhere."""

    def __init__(self, steps: int, title: str = "train", console: Console | None = None):
        self.steps, self.title = steps, printable(title)
        self.console = console or Console(file=sys.stderr)
        self._every = max(1, steps // LINES)
        self._bar: Progress | None = None
        self._shown = False
        self._seldom: dict[str, Any] = {}
        self._phase: str | None = None

    def __enter__(self) -> "LiveLine":
        if self.console.is_terminal:
            named = TextColumn("{task.description}", markup=False)  # [b] in a name is part of the name
            columns = (named, BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = _Bar(*columns, console=self.console)
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.steps, line="")
        return self

    def show(self, record: dict[str, Any]) -> None:
        if record.get("phase") != self._phase:
            self._phase = record.get("phase")
            self._seldom.pop("held_out", None)  # of other data
        self._seldom |= {key: record[key] for key in SELDOM if key in record}
        record = self._seldom | record
        if self._bar:
            self._bar.update(self._task, completed=record["step"], line=describe(record))
        elif record["step"] % self._every == 0 or record["step"] == self.steps or not self._shown:
            line = f"{self.title} {record['step']}/{self.steps}  {describe(record)}"
            self.console.print(Text(line), highlight=False, soft_wrap=True)
        self._shown = True

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
