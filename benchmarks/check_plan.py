"""Compare the predictions of gpubound.plan with the newest committed measurement of each case: python -m benchmarks.check_plan

Cases of bench_train, bench_lora and bench_ranks. Exit code 1 when a prediction is off by more than 20 %.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpubound.models.llama.decoder import PRESETS, Decoder
from gpubound.plan.costs import memory, reserved, seconds
from gpubound.plan.step import GIB, GPUS, META, StepConfig, outlined
from gpubound.train import AdamW
from gpubound.train.fields import Lora

RESULTS = Path(__file__).parent / "results"
FILES = {"h200": "nvidia-h200.jsonl", "h100": "nvidia-h100-80gb-hbm3.jsonl"}
GATE = 0.20
RANK = 16
SHARED = {"1b": "1b, eight adapters in one batch"}  # a case that is also measured as another one's peer, by the name OURS
OURS = "ours-lora"

# (bench, case): preset, seq, micro-batch, options of the step
CASES: dict[tuple[str, str], tuple[str, int, int, dict[str, Any]]] = {
    ("train", "350m"): ("350m", 1024, 16, {}),
    ("train", "350m-x8"): ("350m", 1024, 16, {"accumulate": 8}),
    ("train", "350m-fp8"): ("350m", 1024, 16, {"precision": "fp8"}),
    ("train", "135m"): ("135m", 1024, 1, {}),
    ("train", "1b-x8"): ("1b", 2048, 4, {"accumulate": 8, "recompute": "none"}),
    ("lora", "1b"): ("1b", 1024, 8, {"lora": Lora(RANK)}),
    ("lora", "1b-nf4"): ("1b", 1024, 8, {"lora": Lora(RANK, base="nf4")}),
    ("lora", "135m"): ("135m", 512, 1, {"lora": Lora(RANK)}),
    ("lora", "8b"): ("8b", 4096, 1, {"lora": Lora(RANK)}),
    ("lora", "8b-fp8"): ("8b", 4096, 1, {"lora": Lora(RANK, base="fp8")}),
    ("ranks", "350m on 2"): ("350m", 1024, 16, {"world": 2}),
    ("ranks", "350m on 4"): ("350m", 1024, 16, {"world": 4}),
    ("ranks", "1b on 4"): ("1b", 2048, 4, {"accumulate": 8, "recompute": "none", "world": 4}),
    ("ranks", "8b on 2"): ("8b", 4096, 4, {"world": 2, "sharded": True}),
    ("ranks", "8b on 4"): ("8b", 4096, 4, {"world": 4, "sharded": True}),
    ("ranks", "8b-lora on 2"): ("8b", 4096, 4, {"lora": Lora(RANK), "world": 2, "sharded": True}),
}


@cache
def step_of_case(name: tuple[str, str]) -> StepConfig:
    preset, seq, rows, options = CASES[name]
    options = {"precision": "bf16", "accumulate": 1} | options
    return outlined(Decoder(PRESETS[preset], device=META), AdamW(), seq=seq, rows=rows, **options)


@dataclass(frozen=True)
class Compared:
    """A prediction and a measurement."""

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
    def holds(self) -> bool:
        return abs(self.error) <= GATE

    def __str__(self) -> str:
        figures = [
            f"{figure:>12,.0f}" if self.unit == "tok/s" else f"{figure:>12.2f}" for figure in (self.predicted, self.measured)
        ]
        end = f"{self.unit:>7}{self.error:>+8.1%}  {self.commit}{'' if self.holds else '  MISSED'}"
        return f"{self.gpu:6}{self.bench:7}{self.case:14}{''.join(figures)}{end}"


def compared(results: Path = RESULTS) -> Iterator[Compared]:
    """Yield every case with a measurement: speed of each GPU, and peak memory that the allocator reserved."""
    for name, file in FILES.items():
        lines = [json.loads(line) for line in (results / file).read_text(encoding="utf-8").splitlines()]
        for bench, case in CASES:
            step = step_of_case((bench, case))
            speed = step.tokens_per_step / step.world / sum(seconds(step, GPUS[name]).values())
            for unit, what, predicted in (("tok/s", "", speed), ("GiB", " peak memory", reserved(memory(step)) / GIB)):
                if (newest := newest_of(lines, bench, case, what, unit)) is not None:
                    yield Compared(name, bench, case, unit, predicted, *newest)


def newest_of(lines: list[dict[str, Any]], bench: str, case: str, what: str, unit: str) -> tuple[float, str] | None:
    """Return (figure, commit) of the newest line, as ours or as another case's peer."""
    for line in reversed(lines):
        if line["bench"] == bench and line["unit"] == unit and not line["dirty"]:
            if line["case"] == case + what:
                return line["ours"], line["commit"]
            if line["case"] == SHARED.get(case, "") + what and line["peer_name"] == OURS:
                return line["peer"], line["commit"]
    return None


def main() -> int:
    rows = list(compared())
    print(f"{'gpu':6}{'bench':7}{'case':14}{'predicted':>12}{'measured':>12}{'unit':>7}{'error':>8}  commit", *rows, sep="\n")
    return 0 if rows and all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
