"""benchmarks/results/<gpu>.jsonl: one JSON line a case and peer, appended and never edited.

`ratio` is ours over the peer and above 1 is better, whatever the unit: GB/s and tokens/s divide one way, ms and GiB the other.
`gate` and `moonshot` are what the ratio is meant to reach. A ceiling stands as a peer too ("copy rate"), so that a gate on a
percentage of it is a gate on a ratio. A budget ("budget") is a peer whose count is what is allowed; counts are never printed as
ratios. (Lines of before 2026-11-22 hold (peer + 1) / (ours + 1) for them.)

python -m benchmarks.results add lines.jsonl --commit 0a55bec    keep lines that were measured on another machine
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from gpubound import measure
from gpubound.cli import guarded
from gpubound.files import make_folder, writing

FOLDER = Path(__file__).parent / "results"
MORE_IS_BETTER = {"GB/s", "TFLOP/s", "tok/s", "steps/s", "%"}
LESS_IS_BETTER = {"us", "ms", "s", "GiB", "% off"}
COUNTS = {"syncs", "launches", "nats"}  # what may be 0: nats are a difference of log-probabilities
UNITS = MORE_IS_BETTER | LESS_IS_BETTER | COUNTS
MEMORY = ("allocated", "predicted", "the limit", "a later step", "the weights and 1.5 GiB")  # beside what is reserved: no peers
FLOOR = "frozen forward + dX"  # what an adapter's work is beside: a peer that is never behind, so multiples of it are told


@dataclass(frozen=True)
class Line:
    bench: str
    case: str
    ours: float
    peer: float
    peer_name: str
    unit: str
    ratio: float
    gate: float | None
    moonshot: float | None
    spread: float | None
    percent_of_ceiling: float | None
    gpu: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str
    dirty: bool
    date: str
    command: str

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two lines measurements of the same thing."""
        return (self.gpu, self.bench, self.case, self.peer_name, self.unit)

    @property
    def short(self) -> bool:
        return self.gate is not None and not self.ratio >= self.gate

    def share(self, ratio: float) -> str:
        """A ratio to this peer, as it is told: above 1 is better, but of a floor its multiple, which is better near 1."""
        return f"{1 / ratio:.2f} x" if self.peer_name == FLOOR else f"{ratio:.2f}"


def ratio(unit: str, ours: float, peer: float) -> float:
    """Ours over the peer, above 1 is better. A count may be zero, and has none: 1 where ours is no more than theirs, else 0.

    >>> ratio("ms", ours=2.0, peer=3.0)
    1.5
    """
    if unit not in UNITS:
        raise ValueError(f"ratio: unknown unit {unit!r}, wanted one of {', '.join(sorted(UNITS))}.")
    if unit in COUNTS:
        return float(ours <= peer)
    return ours / peer if unit in MORE_IS_BETTER else peer / ours


def provenance(device: torch.device, command: str) -> dict:
    """Where, when and with what a line is measured."""
    here = measure.machine()
    commit, dirty = _commit()
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{here.cpu}, {here.threads} threads",
        "driver": here.driver,
        "torch": here.torch,
        "triton": here.triton,
        "commit": commit,
        "dirty": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }


def _commit() -> tuple[str, bool]:
    """The commit the tree stands on, and whether the tree differs from it (results apart); 'unknown' outside git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=FOLDER.parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
    except FileNotFoundError:  # no git on this machine
        return "unknown", False
    return commit or "unknown", bool(git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results"))


def file_of(gpu: str, folder: Path = FOLDER) -> Path:
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".jsonl")


def append(lines: Iterable[Line], folder: Path = FOLDER) -> None:
    make_folder(folder)
    for line in lines:
        path = file_of(line.gpu, folder)
        with writing(path), path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a run that was killed left half a line: it must not swallow this one
                    file.write(b"\n")
            file.write(json.dumps(asdict(line)).encode() + b"\n")


def read(source: Path = FOLDER) -> list[Line]:
    """Every line of a file, or of all files of a folder, oldest first within each."""
    files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    return [_parse(text, f"{file.name}:{number}") for file in files for number, text in _numbered(file) if text.strip()]


def _numbered(file: Path) -> Iterable[tuple[int, str]]:
    return enumerate(file.read_text(encoding="utf-8").splitlines(), 1)


def _parse(text: str, where: str) -> Line:
    wanted = {field.name for field in fields(Line)}
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not a JSON line ({error}); remove it, or measure the case again.") from None
    if not isinstance(row, dict) or set(row) != wanted:
        differing = sorted(set(row) ^ wanted) if isinstance(row, dict) else [type(row).__name__]
        raise ValueError(f"{where}: the fields differ from a result line's: {', '.join(differing)}.")
    return Line(**row)


def newest(lines: Iterable[Line]) -> list[Line]:
    """The last measurement of each case and peer, in the order in which the cases first appeared."""
    kept: dict[tuple[str, ...], Line] = {}
    for line in lines:
        if line.key not in kept or line.date >= kept[line.key].date:
            kept[line.key] = line
    return list(kept.values())


def main(argv: Sequence[str]) -> int:
    if len(argv) not in (2, 4) or argv[0] != "add" or (len(argv) == 4 and argv[2] != "--commit"):
        print("usage: python -m benchmarks.results add FILE.jsonl [--commit SHA]", file=sys.stderr)
        return 2
    lines = read(Path(argv[1]))
    if len(argv) == 4:
        lines = [replace(line, commit=argv[3]) if line.commit == "unknown" else line for line in lines]
    append(lines)
    print(f"{len(lines)} lines added to {', '.join(sorted({file_of(line.gpu).name for line in lines}))}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded("results", main, sys.argv[1:]))
