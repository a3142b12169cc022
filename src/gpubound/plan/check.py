"""The predictions beside what was measured: the training lines of benchmarks/results, the newest of each case.

python -m gpubound.plan.check, or gpubound plan --check.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cards import CARDS, Card, Network
from .cases import cases
from .memory import GIB, WORKSPACES, memory, reserved
from .pace import pace

RESULTS = Path("benchmarks/results")
FILES = {"h200": "nvidia-h200.jsonl", "h100": "nvidia-h100-80gb-hbm3.jsonl"}
GATES = {"tok/s": 0.20, "GiB": 0.10}
"""Unit -> how far off a prediction may be."""
LEAST_GIB = WORKSPACES / GIB  # of memory, a prediction may always be off by as much as it assumes for workspaces


@dataclass(frozen=True)
class Compared:
    """One prediction and what was measured."""

    gpu: str
    bench: str
    case: str
    unit: str
    predicted: float
    measured: float
    commit: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def gate(self) -> float:
        return max(GATES[self.unit], LEAST_GIB / self.measured if self.unit == "GiB" else 0.0)

    @property
    def holds(self) -> bool:
        return abs(self.error) <= self.gate

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"error": self.error, "gate": self.gate, "holds": self.holds}


def check(folder: Path = RESULTS) -> list[Compared]:
    """Every case that has lines in `folder`."""
    found = []
    for gpu, name in FILES.items():
        if not (folder / name).is_file():
            raise ValueError(
                f"check: {folder / name} is missing; give the folder of the committed results with --results, as it lies in "
                f"the repository: {RESULTS}."
            )
        lines = [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        found += compared(gpu, CARDS[gpu], lines)
    return found


def compared(gpu: str, card: Card, lines: list[dict[str, Any]]) -> list[Compared]:
    """`lines` in the order in which they were measured."""
    found = []
    for case in cases():
        setting = case.setting
        speed = setting.tokens_per_step / setting.world / sum(pace(setting, card, Network()).values())  # of each GPU
        if (newest := case.newest(lines, "", "tok/s")) is not None:
            found.append(Compared(gpu, case.bench, case.name, "tok/s", speed, *newest))
        if (newest := case.newest(lines, " peak memory", "GiB")) is not None:
            size = reserved(memory(setting))
            found.append(Compared(gpu, case.bench, case.name, "GiB", size / GIB, *newest))
    return found


def table(rows: list[Compared]) -> str:
    lines = [f"{'gpu':6}{'bench':7}{'case':14}{'predicted':>12}{'measured':>12}{'unit':>7}{'error':>8}{'gate':>7}  commit"]
    for r in rows:
        style = ",.0f" if r.unit == "tok/s" else ".2f"
        figures = f"{r.predicted:>12{style}}{r.measured:>12{style}}{r.unit:>7}{r.error:>+8.1%}{r.gate:>7.0%}"
        lines.append(f"{r.gpu:6}{r.bench:7}{r.case:14}{figures}  {r.commit}{'' if r.holds else '  MISSED'}")
    return "\n".join(lines)


def main(folder: Path = RESULTS) -> int:
    rows = check(folder)
    print(table(rows))
    return 0 if rows and all(r.holds for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
