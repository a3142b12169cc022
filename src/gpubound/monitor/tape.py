"""The log of a run: a folder with run.json (facts) and steps.jsonl (a line for each step), the only input of the report.

A line has the step's number as `step`, figures (FIGURES: names with their units), and in a run of several phases the phase's
name as `phase`. Figures that were not measured are left out, not zero.
"""

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import make_folder, read_json, read_text, write_atomic, writing
from ..formatting import shown
from ..trace import notice

ABOUT, STEPS = "run.json", "steps.jsonl"
CURE = "restore it, or move it away and go on with gpubound train --resume, which begins a new one"
LAST = 2**53 - 1  # the largest step; larger ones are not exact as floats
FIGURES = (
    "loss", "held_out", "grad_norm", "lr", "tokens", "seconds", "tokens_per_s", "mfu", "gpu_busy", "host_lead_ms", "syncs",
    "h2d_bytes", "memory_bytes", "memory_allocated_bytes", "memory_reserved_bytes", "power_w", "sm_active", "skipped",
    "slowest_rank", "held_up_ms", "sums_share", "elapsed_s",  # since training began
    "reward", "eval_reward", "length", "ended", "entropy", "gap", "largest_gap", "kl", "clipped", "truncated", "no_signal",
    "policy_loss", "sampled_per_s", "sample_share", "reward_share", "learn_share",  # of reinforcement learning
)  # fmt: skip
TEXTS = ("name", "verdict", "doctor", "sample", "placement", "mfu")
KINDS = {
    "config": dict,
    "changed": list,
    "machine": dict,
    "fallbacks": list,
    "starts": list,
    "memory": list,
    **dict.fromkeys(TEXTS, str),
}
ROWS: dict[str, dict[str, type]] = {
    "fallbacks": {"what": str, "why": str, "times": int},
    "starts": {"date": str, "command": str},
    "memory": {"phase": str, "allocated": int, "reserved": int, "predicted": int},
}
WORDS = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}


def changed(recipe: Any) -> list[str]:
    """Return the names of a dataclass's fields that differ from their defaults."""

    def default(each: Field) -> Any:
        return each.default if each.default_factory is MISSING else each.default_factory()

    return [each.name for each in fields(recipe) if getattr(recipe, each.name) != default(each)]


class RunTape:
    """The log of a run. `RunTape.create` starts one, `RunTape.open` reads one, also during the run."""

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path, self.about = path, about
        self._zero = time.monotonic()  # the beginning of the training

    @classmethod
    def create(cls, path: str | Path, **about: Any) -> "RunTape":
        """Start a log, or continue the one in the folder: a resumed run appends its lines, and its start to `starts`."""
        path = Path(path)
        make_folder(path)
        old = _about(path) if (path / ABOUT).exists() else {}
        if old and "starts" not in old:
            raise DataError(f"{path / ABOUT}: was not written by a run, and a run would replace it; give another folder.")
        start = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": _command()}
        tape = cls(path, old | {"starts": [*(old.get("starts") or []), start]} | about)
        if (path / STEPS).exists():
            tape.rewind(LAST)  # removes a truncated last line
        tape.tell()
        return tape

    @classmethod
    def open(cls, path: str | Path) -> "RunTape":
        path = Path(path)
        if not (path / ABOUT).is_file():
            raise DataError(f"{path} is not a run: it has no {ABOUT}; give the folder that train or demo wrote.")
        return cls(path, _about(path))

    def tell(self, **about: Any) -> None:
        """Add facts to run.json."""
        self.about |= about
        write_atomic(self.path / ABOUT, json.dumps(self.about, indent=1, default=str))

    def append(self, record: dict[str, Any]) -> None:
        record = record | {"elapsed_s": round(time.monotonic() - self._zero, 3)}
        line = json.dumps({k: _plain(v) for k, v in record.items() if v is not None})
        path = self.path / STEPS
        try:
            with writing(path), open(path, "a") as file:
                file.write(line + "\n")
        except OSError as error:  # the disk is full
            raise DataError(
                f"{path} could not be written: {error.strerror}; the checkpoints next to it are unchanged. "
                f"Free space, then go on with --resume."
            ) from error

    def flush(self) -> None:
        """Write every line to the disk: a checkpoint of a step must not outlive its line."""
        with suppress(FileNotFoundError), open(self.path / STEPS, "rb") as file:
            os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Remove the lines after `step`, which a resumed run writes again. The training time continues at the last line."""
        lines = "".join(json.dumps(record) + "\n" for record in self._lines() if record["step"] <= step)
        write_atomic(self.path / STEPS, lines)
        self._zero = time.monotonic() - next((float(record.get("elapsed_s", 0)) for record in reversed(self.steps())), 0.0)

    def steps(self) -> list[dict[str, Any]]:
        """Return every step's record, oldest first. If a step has several lines, the last one counts."""
        return sorted({record["step"]: record for record in self._lines()}.values(), key=lambda record: record["step"])

    def _lines(self) -> Iterator[dict[str, Any]]:
        file = self.path / STEPS
        if not file.exists():
            return
        *complete, truncated = read_text(file, CURE).split("\n")
        for number, line in enumerate(complete, 1):
            yield _record(line, f"{file}, line {number}")
        if truncated:  # the run was killed during a write
            notice(f"{file}: line {len(complete) + 1} is cut off and was left out")


def _about(path: Path) -> dict[str, Any]:
    """Read run.json and check the types of its entries."""
    file = path / ABOUT
    about = read_json(file, CURE)
    for key, kind in KINDS.items():
        value = about.get(key)
        if value is not None and not isinstance(value, kind):
            raise DataError(f"{file}: {key} is {_kind(value)}, wanted {WORDS[kind]}; {CURE}.")
    for key, columns in ROWS.items():
        for row in about.get(key) or []:
            if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in columns.items()):
                wanted = ", ".join(f"{name} ({WORDS[kind]})" for name, kind in columns.items())
                raise DataError(f"{file}: {key} holds {shown(row)}, wanted objects with {wanted}; {CURE}.")
    return about


def _record(line: str, where: str) -> dict[str, Any]:
    """Parse and check a line of steps.jsonl."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not readable JSON: {error}; remove the line.") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} holds {_kind(record)}, wanted an object with a step; remove the line.")
    step = record.get("step")
    if type(step) is not int or not 0 <= step <= LAST:
        raise DataError(f"{where}: step is {shown(step)}, wanted a whole number; remove the line.")
    for key in FIGURES:
        if record.get(key) is not None and not _is_number(record[key]):
            raise DataError(f"{where}: {key} is {shown(record[key])}, wanted a number; remove the line.")
    waited = record.get("waited_ms", [])
    if not isinstance(waited, list) or not all(map(_is_number, waited)):
        raise DataError(f"{where}: waited_ms is {shown(waited)}, wanted a list of numbers; remove the line.")
    if not isinstance(record.get("phase", ""), str):
        raise DataError(f"{where}: phase is {shown(record['phase'])}, wanted a text; remove the line.")
    return record


def _is_number(value: Any) -> bool:
    """Return True for a number, or the name of one that is not finite, which JSON cannot represent."""
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return type(value) is float or (type(value) is int and abs(value) < 2**1023)  # a larger one overflows a float


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _kind(value: Any) -> str:
    return WORDS.get(type(value), "null")


def _command() -> str:
    """Return the command line of this process, quoted for a shell."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])
