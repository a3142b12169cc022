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
    since: str = ""
    """Lines from before this time are of another form."""

    def measured(self, line: Line) -> bool:
        same = (line.gpu, line.bench, line.case, line.peer_name) == (GPU, self.bench, self.case, self.peer)
        held_to = same and line.date >= self.since and line.gate is not None and line.gate >= self.gate
        return held_to and (self.budget is None or line.peer >= 0.999 * self.budget)  # a rate, by way of seconds

    @property
    def machine(self) -> str:
        return f"{self.gpus} {GPU}s" if self.gpus > 1 else GPU

    @property
    def sentence(self) -> str:
        return f"UNMEASURED  {self.bench}: {self.case}, beside {self.peer} ({self.machine}, gpubound bench {self.command})"


FINGERPRINTS = "2026-11-27T10:30"  # a5e1c81a and what followed it

WANTED = [
    # Since then what waits for h asks for it behind the product, and products with adapters have other plans.
    Wanted(
        "decode", "1b batch 1, an adapter of rank 16", "merged", "decode --parts adapters --only 1b", 0.9,
        since="2026-11-27T15:30",
    ),
    *(
        Wanted(
            "decode", f"{name} attention of 32768 tokens in chunks of 2048", "SDPA", "decode --parts prefill --only 1b,8b", 0.8
        )
        for name in ("1b", "8b")
    ),
    # Since then certificates compare fingerprints, which made first steps a sixth to a quarter shorter.
    *(
        Wanted("lora", f"{name} first step", "budget", "lora --parts start --only 135m,1b,1b-nf4,8b,8b-fp8", since=FINGERPRINTS)
        for name in ("135m", "1b", "1b-nf4", "8b", "8b-fp8")
    ),
    Wanted(
        "lora", "1b, eight adapters in one batch first step", "budget", "lora --parts rows --only 1b --peers ours-lora",
        since=FINGERPRINTS,
    ),
    Wanted(
        "checkpoint", "8b in 2 shards, seq 2048 micro 1 x 1, held up", "wanted",
        "checkpoint --model 8b --micro 1 --accumulate 1 --gpus 2 --rounds 1 --alone", gpus=2,
    ),
    *(Wanted("ranks", f"{name} on 8", "one GPU", f"ranks --only {name} --gpus 8", 0.95, gpus=8) for name in ("350m", "1b")),
    Wanted("ranks", "8b on 8 speed", "wanted", "ranks --only 8b --gpus 8", budget=9_750, gpus=8),
]  # fmt: skip


def unmeasured(lines: Iterable[Line], wanted: Iterable[Wanted] = WANTED) -> list[Wanted]:
    lines = list(lines)
    return [one for one in wanted if not any(map(one.measured, lines))]
