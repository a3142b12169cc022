"""What is asked for and no line has measured: `make gates` and docs/figures.md name each, with its command.

A gate comes with its line, so what was never run would be passed over, and so would a goal that was raised since. An entry goes
when its line is there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .results import Line

GPU = "NVIDIA H200"


@dataclass(frozen=True)
class Wanted:
    bench: str
    case: str
    peer: str
    command: str
    """`gpubound bench` and this measures it."""
    gate: float = 1.0
    budget: float | None = None
    """What the peer's figure is at least, where it was raised."""
    gpus: int = 1

    def measured(self, line: Line) -> bool:
        same = (line.gpu, line.bench, line.case, line.peer_name) == (GPU, self.bench, self.case, self.peer)
        held_to = same and line.gate is not None and line.gate >= self.gate
        return held_to and (self.budget is None or line.peer >= 0.999 * self.budget)  # a rate, by way of seconds

    @property
    def machine(self) -> str:
        return f"{self.gpus} {GPU}s" if self.gpus > 1 else GPU

    @property
    def sentence(self) -> str:
        return f"UNMEASURED  {self.bench}: {self.case}, beside {self.peer} ({self.machine}, gpubound bench {self.command})"


def _far(name: str, rate: float) -> Wanted:
    case, command = f"{name} batch 1 behind 4096 tokens", "decode --parts far --only 350m,1b,8b"
    return Wanted("decode", case, "budget", command, budget=rate)


def _adapters(name: str) -> list[Wanted]:
    command = f"decode --parts adapters --only {name}"
    rows = f"{name} batch 8, each row with its own of 8 adapters"
    return [
        Wanted("decode", f"{name} batch 1, an adapter of rank 16", "merged", command, 0.9),
        Wanted("decode", rows, "one adapter", command, 0.9),
    ]


def _rate(name: str, rate: float, peers: str = "") -> Wanted:
    return Wanted("train", name, "budget", f"train --only {name}{peers}", budget=rate)


WANTED = [
    *(_far(name, rate) for name, rate in (("350m", 2_050), ("1b", 1_230), ("8b", 250))),
    *_adapters("1b"),
    Wanted("decode", "8b batch 1", "budget", "decode --parts speed --only 8b --batch 1 --peers graph", budget=266),
    Wanted("decode", "8b batch 1 int4", "budget", "decode --parts packed --only 8b", budget=600),
    Wanted("decode", "8b batch 32", "budget", "decode --parts speed --only 8b --batch 32 --peers graph", budget=6_600),
    Wanted("decode", "8b batch 16 in two stages", "one GPU", "decode --parts stages --only 8b", 1.6, gpus=2),
    Wanted("train", "350m", "liger-autocast", "train --only 350m --peers liger-autocast", 1.45),
    _rate("135m", 186_000),
    _rate("350m-fp8", 250_000),
    _rate("1b-x8", 78_000, " --peers liger"),
    Wanted("train", "1b-x8-fp8", "ours-bf16", "train --only 1b-x8-fp8", 1.25),
    _rate("1b-x8-fp8", 95_000),
    _rate("8b", 11_000),
    Wanted("lora", "1b-8192", "peft-compile", "lora --parts train --only 1b-8192 --peers peft-compile,peft-liger", 1.35),
    Wanted("ranks", "1b on 2", "one GPU", "ranks --only 1b", 0.965, gpus=2),
    Wanted(
        "checkpoint", "8b in 4 shards, seq 2048 micro 1 x 1, held up", "wanted",
        "checkpoint --model 8b --micro 1 --accumulate 1 --gpus 4 --rounds 1", gpus=4,
    ),
    *(Wanted("ranks", f"{name} on 8", "one GPU", f"ranks --only {name} --gpus 8", 0.95, gpus=8) for name in ("350m", "1b")),
    Wanted("ranks", "8b on 8 speed", "wanted", "ranks --only 8b --gpus 8", budget=9_750, gpus=8),
]  # fmt: skip


def unmeasured(lines: Iterable[Line], wanted: Iterable[Wanted] = WANTED) -> list[Wanted]:
    lines = list(lines)
    return [one for one in wanted if not any(map(one.measured, lines))]
