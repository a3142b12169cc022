"""The tape of a run: a folder with run.json (what it is) and steps.jsonl (one line a step). Everything else is read from it.

A step's line holds whatever was measured, under names with their units. The ones that the charts know:
    step, loss, held_out, grad_norm, lr, tokens, seconds, tokens_per_s, mfu, gpu_busy, host_lead_ms, syncs, h2d_bytes,
    memory_bytes, memory_allocated_bytes, memory_reserved_bytes, power_w, sm_active, skipped
and, in a run of several phases, phase: its name.
What was not measured is left out, never written as zero.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..trace import notice

ABOUT, STEPS = "run.json", "steps.jsonl"


class Tape:
    """One run's folder. `Tape.create` starts one, `Tape.open` reads one; a running tape may be read at any time."""

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path, self.about = path, about

    @classmethod
    def create(cls, path: str | Path, **about: Any) -> "Tape":
        """Start a tape. A folder that already holds one goes on (a resumed run appends to its own lines)."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        old = json.loads((path / ABOUT).read_text()) if (path / ABOUT).exists() else {}
        tape = cls(path, old | about)
        tape.tell()
        return tape

    @classmethod
    def open(cls, path: str | Path) -> "Tape":
        path = Path(path)
        if not (path / ABOUT).is_file():
            raise DataError(f"{path} is not a run: it has no {ABOUT}; give the folder that train or demo wrote.")
        try:
            return cls(path, json.loads((path / ABOUT).read_text()))
        except ValueError as error:
            raise DataError(f"{path / ABOUT} is not readable JSON: {error}; restore it or run again.") from error

    def tell(self, **about: Any) -> None:
        """Add facts to run.json. Written beside and renamed, so that a reader never sees half of it."""
        self.about |= about
        fresh = self.path / (ABOUT + ".new")
        fresh.write_text(json.dumps(self.about, indent=1, default=str))
        os.replace(fresh, self.path / ABOUT)

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps({k: _plain(v) for k, v in record.items() if v is not None})
        try:
            with open(self.path / STEPS, "a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise DataError(
                f"{self.path / STEPS} could not be written: {error}; the checkpoints beside it are intact. "
                f"Free space, then go on with --resume."
            ) from error

    def flush(self) -> None:
        """Every line is on the disk when this returns: a checkpoint of a step must not outlive its line."""
        if (self.path / STEPS).exists():
            with open(self.path / STEPS, "rb") as file:
                os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Keep the lines up to `step` alone: a resumed run writes the later ones again, and perhaps never comes as far."""
        kept = [json.dumps(record) for record in self._lines() if record["step"] <= step]
        fresh = self.path / (STEPS + ".new")
        fresh.write_text("".join(line + "\n" for line in kept))
        os.replace(fresh, self.path / STEPS)

    def steps(self) -> list[dict[str, Any]]:
        """Every step's record, oldest first. When a resumed run wrote a step again, the later line counts."""
        return list({record["step"]: record for record in self._lines()}.values())

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not (self.path / STEPS).exists():
            return
        for number, line in enumerate((self.path / STEPS).read_text().splitlines(), 1):
            try:
                yield json.loads(line)
            except ValueError:  # a run killed in the middle of a write leaves half a line
                notice(f"{self.path / STEPS}: line {number} is cut off and was left out")


def _plain(value: Any) -> Any:
    """JSON has no NaN; a figure that is not finite is kept as its name."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
