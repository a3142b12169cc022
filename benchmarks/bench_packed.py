"""Packed rows beside dense rows of the same tokens: whole training steps, and attention alone.

Examples are log-normal in length, 400 tokens on average and at most a row of 4,096, packed by best fit. Dense rows are one
example each, so their attention computes about ten times as much.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.layers.attention import attend
from gpubound.layers.packed_attention import Segments

from . import results
from .bench_train import tell_start
from .harness import KERNELS, Bench, chosen, need_transformers
from .packed_rows import packed_fields
from .serving import Job
from .shapes import SHAPES
from .train_worker import BATCHES
from .workers import Worker, started, take_turns

PARTS = ("steps", "attention")
GATE = 1 / 1.05  # speed of packed rows over that of dense ones
SEQ = 4096
BOUNDS = (0, 64, 256)  # examples that a row may have; 0: as many as the fullest one of the corpus has


@dataclass(frozen=True)
class Case:
    """Training of a shape. `kind` ends the contenders' names."""

    shape: str
    micro: int
    seq: int = SEQ
    kind: str = ""

    def job(self, who: str, device: str) -> Job:
        return Job(who + self.kind, self.shape, self.seq, self.micro, BATCHES, device)


CASES = {"350m": Case("350m", 4), "1b-lora": Case("1b", 2, kind="-lora")}
TINY = {"tiny": Case("tiny", 2, 64), "tiny-lora": Case("tiny", 2, 64, "-lora")}


@dataclass(frozen=True)
class Packed:
    """Measure training on packed rows beside dense rows of the same tokens.

    Example: gpubound bench packed --only 1b-lora
    """

    parts: str = ",".join(PARTS)
    """What to measure, by comma: steps (whole training steps), attention (alone, by the number of examples a row may have)."""
    only: str = "350m,1b-lora"
    """Cases, by comma: 350m (4 rows of 4,096 tokens), 1b-lora (2)."""
    rounds: int = 12
    """How often the two take turns; about half a second each."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Packed, argv, "bench packed")
    parts, known = chosen("--parts", options.parts, PARTS), TINY if options.dry else CASES
    names = list(known) if options.dry else chosen("--only", options.only, list(known))
    need_transformers("bench packed")
    device = resolve("cpu" if options.dry else "require")
    bench = Bench.of(options, "packed", device, argv)
    for name in names:
        if "steps" in parts:
            measure_steps(bench, name, known[name], 3 if options.dry else options.rounds)
    for name in names:
        if "attention" in parts:
            measure_attention(bench, name, known[name])
    return bench.finish()


def measure_steps(bench: Bench, name: str, case: Case, rounds: int) -> None:
    """Milliseconds a step of eight micro-batches, all with other bounds, and tokens of examples a second."""
    module, device = "benchmarks.packed_rows", bench.device.type
    fields = packed_fields(case.seq, case.micro)
    held = sum(int((batch["segment_ids"] >= 0).sum()) for batch in fields)  # in a step, which reads all of them
    examples = sum(int((batch["position_ids"] == 0).sum()) for batch in fields)
    rows = BATCHES * case.micro
    print(f"{name}: {examples / rows:.1f} examples a row of {case.seq}, {held / rows / case.seq:.1%} full", flush=True)
    if (mine := started(bench, name, Worker, case.job("packed", device), module=module)) is None:
        return
    with mine:
        tell_start(bench, name, mine)
        if (dense := started(bench, name, Worker, case.job("dense", device), module=module)) is None:
            return
        with dense:
            seconds = take_turns({"ours": mine, "dense": dense}, rounds)
            found = measure.compare_samples(seconds, clock="perf_counter, drained")
            bench.keep(f"{name} packed", found, unit="ms", amount=1, gates={"dense": GATE})
            bench.keep(f"{name} packed, tokens that count", found, unit="tok/s", amount=held)


def measure_attention(bench: Bench, name: str, case: Case) -> None:
    """Forward and backward of one layer's attention. More bounds than examples are programs of the kernel that end at once."""
    shape = SHAPES[case.shape]
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        size = (case.micro, case.seq, heads, shape.head_dim)
        return torch.randn(size, generator=generator).to(bench.device, dtype).requires_grad_()

    q, k, v = drawn(shape.heads), drawn(shape.kv_heads), drawn(shape.kv_heads)
    upstream = drawn(shape.heads).detach()

    def both(mask: Segments | None) -> tuple[Tensor, ...]:
        y = attend(*(t.transpose(1, 2) for t in (q, k, v)), mask, shape.head_dim**-0.5)
        return torch.autograd.grad(y, (q, k, v), upstream)

    fields = packed_fields(case.seq, case.micro)[0]
    own = len(fields["cu_seqlens"])
    for most in BOUNDS:
        length = max(own, case.micro * most + 1)
        cu_seqlens = F.pad(fields["cu_seqlens"], (0, length - own), value=case.micro * case.seq)
        segments = Segments(fields["segment_ids"].to(bench.device), cu_seqlens.to(bench.device))
        works: dict[str, Callable[[], tuple[Tensor, ...]]] = {"ours": partial(both, segments), "dense": partial(both, None)}
        clock = KERNELS if bench.device.type == "cuda" else {}
        found = measure.compare(works, rounds=bench.rounds, warmup=1 if bench.dry else 3, device=bench.device, **clock)
        bench.keep(f"{name} attention, {(length - 1) // case.micro} bounds a row", found, unit="ms", amount=1)


if __name__ == "__main__":
    sys.exit(guarded("bench packed", main, sys.argv[1:]))
