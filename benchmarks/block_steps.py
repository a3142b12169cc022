"""Whole training steps of masked diffusion beside the next token's: one model, but for what its tokens see.

Diffusion hides tokens and draws weights, and multiplies whole squares of scores where causal attention multiplies half of them.
"""

from collections.abc import Callable
from typing import Any

import torch

from gpubound import measure
from gpubound.models.richards import checkpoint
from gpubound.train import AdamW, TrainStep
from gpubound.train.objectives import objective_class

from .harness import Bench

LARGE, TINY = ("350m", 16, 1024, 32768, 4), ("tiny", 2, 8, 128, 1)  # preset, rows, tokens of a row, words, steps
KINDS = {"ours": ("diffusion-{}", "masked_diffusion"), "next token": ("richards-{}+swiglu", "next_token")}
GATES = {"next token": 0.9}
Turns = Callable[[dict[str, Callable[[], Any]], torch.device, int], dict[str, list[float]]]


def measure_steps(bench: Bench, in_turn: Turns) -> None:
    size, rows, seq, words, count = TINY if bench.dry else LARGE
    steps = {
        who: begun(model.format(size), loss, rows, seq, words, count, bench.device) for who, (model, loss) in KINDS.items()
    }
    found = measure.compare_samples(in_turn(steps, bench.device, bench.rounds), clock="perf_counter, waited for")
    bench.keep(f"masked diffusion, {size}, {rows}x{seq}", found, unit="tok/s", amount=count * rows * seq, gates=GATES)


def begun(name: str, loss: str, rows: int, seq: int, words: int, count: int, device: torch.device) -> Callable[[], None]:
    """`count` steps of that model on one batch, timed together. The first captures, where there is something to capture in."""
    torch.manual_seed(0)
    model = checkpoint.make(name, words, seq, device).train()
    options = {"mask_token": words - 1} if loss == "masked_diffusion" else {}
    precision = "bf16" if device.type == "cuda" else "fp32"
    step = TrainStep(model, objective_class(loss)(**options), AdamW(1e-4), clip=1.0, precision=precision)
    ids = torch.randint(words - 1, (rows, seq), device=device)
    batch = {"input_ids": ids, "labels": ids}

    def run() -> None:
        for _ in range(count):
            step([batch])

    return run
