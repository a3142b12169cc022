"""Training steps of five models that are no transformers of text through gb.TrainStep, beside eager PyTorch and torch.compile.

A step is forward, backward and AdamW from a batch on the device. Eager has torch's fused AdamW, and in bf16 autocast, as its
users write it; its products follow the same TF32 setting. The losses of the first steps are compared before anything is timed.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gpubound as gb
from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import products, resolve

from . import results
from .bench_graph import kernel_seconds
from .harness import Bench, chosen, release
from .step_models import TASKS, Batch, Task

RATE = 1e-3
FIRST = 3  # steps whose losses are compared
NEAR = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2}  # relative, of a loss: bf16 weights beside autocast's fp32 ones
GATE = 1.0  # never slower than eager
LAUNCH_BOUND = 1.5  # where eager's step takes this many times what its kernels take, as large a speed-up is wanted


@dataclass(frozen=True)
class Steps:
    """Measure training steps of five models that are no transformers of text beside eager PyTorch.

    Example: gpubound bench steps --only unet,gnn --precisions tf32
    """

    only: str = ""
    """Models, by comma: unet, lstm, vit, world, gnn. Empty: all."""
    precisions: str = "fp32,tf32,bf16"
    """Precisions, by comma: fp32, tf32, bf16."""
    compile: bool = False
    """Time torch.compile(mode="reduce-overhead") of the forward and loss, too."""
    rounds: int = 20
    """Rounds of a step for each contestant."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Tiny batches on the CPU: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Steps, argv, "bench steps")
    device = resolve("cpu" if options.dry else "require")
    bench = Bench.of(options, "steps", device, argv)
    bench.rounds = 3 if options.dry else options.rounds
    for name in chosen("--only", options.only, list(TASKS)):
        for precision in ("fp32",) if options.dry else chosen("--precisions", options.precisions, list(NEAR)):
            with products("tf32" if precision == "tf32" else "ieee") if device.type == "cuda" else nullcontext():
                measure_case(bench, name, precision, options.compile and not options.dry)
            release(device)
    return bench.finish()


def measure_case(bench: Bench, name: str, precision: str, compiled: bool) -> None:
    task, case = TASKS[name], f"{name} {precision}"
    torch.manual_seed(0)
    batch = {key: value.to(bench.device) for key, value in task.batch(2 if bench.dry else task.size).items()}
    model = (task.tiny if bench.dry and task.tiny else task.model)().to(bench.device)
    works = {
        "ours": ours(task, copy.deepcopy(model), batch, precision),
        "eager": eager(task, copy.deepcopy(model), batch, precision),
    }
    if compiled:
        works["torch.compile"] = eager(task, model, batch, precision, compiled=True)
    losses = {contestant: torch.stack([work() for _ in range(FIRST)]).tolist() for contestant, work in works.items()}
    for contestant, found in losses.items():
        if not all(abs(a - b) <= NEAR[precision] * abs(b) for a, b in zip(found, losses["ours"])):
            bench.wrong.append(f"{case}: losses of {contestant} {found}, of ours {losses['ours']}; not timed")
            del works[contestant]
    if len(works) < 2:
        return
    found = measure.compare(works, rounds=bench.rounds, warmup=3, device=bench.device)
    gates = {"eager": GATE}
    if bench.device.type == "cuda":
        kernels = kernel_seconds(works["eager"])
        bound = found.timings["eager"].median_s / kernels
        print(f"{case}: eager takes {bound:.2f} times what its kernels take")
        gates = {"eager": LAUNCH_BOUND if bound >= LAUNCH_BOUND else GATE}
    bench.keep(case, found, unit="ms", amount=1, gates=gates)


def ours(task: Task, model: nn.Module, batch: Batch, precision: str) -> Callable[[], Tensor]:
    optimizer = gb.AdamW(lr=RATE, weight_decay=0.0)
    step = gb.TrainStep(model, task.summed, optimizer, precision=precision, clip=None, graph="auto")
    if precision == "bf16":
        batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}

    def run() -> Tensor:
        return step([batch]).loss

    return run


def eager(task: Task, model: nn.Module, batch: Batch, precision: str, compiled: bool = False) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    loss: Callable[[Any, Batch], Tensor] = task.loss
    if compiled:
        loss = torch.compile(partial(task.loss), mode="reduce-overhead")

    def run() -> Tensor:
        with torch.autocast(next(iter(batch.values())).device.type, torch.bfloat16, enabled=precision == "bf16"):
            found = loss(model, batch)
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found.detach().clone()

    return run


if __name__ == "__main__":
    sys.exit(guarded("bench steps", main, sys.argv[1:]))
