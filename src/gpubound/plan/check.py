"""The predictions beside what was measured: the training lines of benchmarks/results, the newest of each case.

python -m gpubound.plan.check, or gpubound plan --check.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models.llama.decoder import PRESETS, Decoder
from ..train.optimizer import AdamW
from .cards import CARDS, Card, Network
from .memory import GIB, memory, reserved
from .pace import pace
from .setting import META, Setting, outlined

RESULTS = Path("benchmarks/results")
CASES: dict[str, tuple[str, int, int, int, str, str]] = {
    "350m": ("350m", 1024, 16, 1, "cheap", "bf16"),
    "350m-x8": ("350m", 1024, 16, 8, "cheap", "bf16"),
    "350m-fp8": ("350m", 1024, 16, 1, "cheap", "fp8"),
    "135m": ("135m", 1024, 1, 1, "cheap", "bf16"),
    "1b-x8": ("1b", 2048, 4, 8, "none", "bf16"),
}
"""A case of `gpubound bench train` -> preset, seq, micro-batch, accumulate, recompute, precision."""
FILES = {"h200": "nvidia-h200.jsonl", "h100": "nvidia-h100-80gb-hbm3.jsonl"}
GATES = {"tok/s": 0.20, "GiB": 0.10}
"""Unit -> how far off a prediction may be."""


@dataclass(frozen=True)
class Compared:
    """One prediction and what was measured."""

    gpu: str
    case: str
    unit: str
    predicted: float
    measured: float
    commit: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        return abs(self.error) <= GATES[self.unit]

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"error": self.error, "gate": GATES[self.unit], "holds": self.holds}


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
    for case, asked in CASES.items():
        setting = setting_of_case(*asked)
        predicted = {
            (case, "tok/s"): setting.tokens_per_step / sum(pace(setting, card, Network()).values()),
            (f"{case} peak memory", "GiB"): reserved(memory(setting)) / GIB,
        }
        for (name, unit), figure in predicted.items():
            measured = [r for r in lines if (r["bench"], r["case"], r["unit"]) == ("train", name, unit) and not r["dirty"]]
            if measured:
                newest = measured[-1]
                found.append(Compared(gpu, case, unit, figure, newest["ours"], newest["commit"]))
    return found


def setting_of_case(preset: str, seq: int, rows: int, accumulate: int, recompute: str, precision: str) -> Setting:
    outline = outlined(Decoder(PRESETS[preset], device=META))
    return Setting(outline, AdamW(), precision, seq, rows, accumulate, recompute)


def table(rows: list[Compared]) -> str:
    lines = [f"{'gpu':6}{'case':10}{'predicted':>12}{'measured':>12}{'unit':>7}{'error':>8}{'gate':>7}  commit"]
    for r in rows:
        style = ",.0f" if r.unit == "tok/s" else ".2f"
        figures = f"{r.predicted:>12{style}}{r.measured:>12{style}}{r.unit:>7}{r.error:>+8.1%}{GATES[r.unit]:>7.0%}"
        lines.append(f"{r.gpu:6}{r.case:10}{figures}  {r.commit}{'' if r.holds else '  MISSED'}")
    return "\n".join(lines)


def main(folder: Path = RESULTS) -> int:
    rows = check(folder)
    print(table(rows))
    return 0 if rows and all(r.holds for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
