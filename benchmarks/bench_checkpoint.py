"""What a checkpoint in the background costs: the step that triggers it, and those while it is written, beside a normal step.

Steps are launched one ahead of the device, as the training loop does, and timed from the end of one to the end of the next on
the device's own clock (train/loop.py). The snapshot is taken between two of them, so all of it is in the next one's time.

With --gpus the model lies in shards, each rank writes its own, and PyTorch's own asynchronous save of the same tensors takes
turns with ours (saves_worker.py). What counts is the slowest rank. With --resume another number of GPUs takes up what they
wrote, and must come to the loss that they have come to themselves.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError
from gpubound.formatting import readable
from gpubound.models import PRESETS, Decoder
from gpubound.trace import strict
from gpubound.train import AdamW, TrainStep
from gpubound.train.checkpoint import Checkpoints, joined
from gpubound.train.records import Instant

from . import results
from .harness import Bench, release
from .serving import Job
from .workers import Team, started

BEFORE, BEHIND = 4, 8  # steps timed before the one that triggers, and after it
TRIGGERED = 1.10  # the gate: so many times a normal step at the most
HELD_MS = 1000.0  # the gate of shards
SAME_LOSS = 1e-3  # of steps whose gradients other ranks sum in bf16 products


@dataclass(frozen=True)
class SavesJob(Job):
    """`folder`: where ranks write. `resume`: they begin with the newest checkpoint there."""

    folder: str = ""
    resume: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """Measure the step that triggers a background checkpoint beside a normal step.

    Examples: gpubound bench checkpoint --accumulate 8,1 --folder /scratch
              gpubound bench checkpoint --gpus 4 --resume 2
    """

    model: str = "1b"
    """A preset of gpubound.models."""
    seq: int = 2048
    """Tokens a row."""
    micro: int = 4
    """Rows of a micro-batch."""
    accumulate: str = "8,1"
    """Micro-batches a step, by comma: a case each."""
    gpus: int = 1
    """GPUs of this machine. Of several each holds, and writes, its rows of every tensor."""
    resume: int = 0
    """With --gpus: so many GPUs take up the last checkpoint and train on. 0: none do."""
    alone: bool = False
    """With --gpus: without PyTorch's own save, which writes as much again."""
    rounds: int = 3
    """Checkpoints a case. Each is written whole before the next is taken."""
    folder: str | None = None
    """Where the checkpoints are written, two at a time (36 GB at 1b); a temporary folder, removed at the end."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU: shows that the script works, keeps nothing. With --gpus 2, two processes."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Checkpoint, argv, "bench checkpoint")
    if options.model not in PRESETS:
        raise ValueError(f"--model: got {options.model!r}, wanted one of {', '.join(PRESETS)}.")
    if options.dry:
        options = replace(options, model="tiny", seq=32, micro=2, accumulate="2")
    device = resolve("cpu" if options.dry else "require")
    if options.resume and options.gpus < 2:
        raise ValueError(f"--resume: got {options.resume} with --gpus {options.gpus}, wanted --gpus 2 or more beside it.")
    for name, wanted in (("--gpus", options.gpus), ("--resume", options.resume)):
        if device.type == "cuda" and torch.cuda.device_count() < wanted:
            raise MeasureError(f"{name}: wanted {wanted} GPUs on this machine, got {torch.cuda.device_count()}.")
    bench = Bench.of(options, "checkpoint", device, argv)
    for word in options.accumulate.split(","):
        if options.gpus > 1:
            measure_shards(bench, options, int(word))
            continue
        with strict():  # a snapshot that went through the host would be measured as one on the device
            measure_case(bench, options, int(word))
        release(device)
    return bench.finish()


def measure_case(bench: Bench, options: Checkpoint, accumulate: int) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        torch.manual_seed(0)
        model = Decoder(PRESETS[options.model], device=bench.device).train()
        step = TrainStep(model, "next_token", AdamW(lr=1e-4), accumulate=accumulate, clip=1.0, precision="bf16")
        store = Checkpoints(folder, keep=1)
        window = batches(PRESETS[options.model].vocabulary, options.seq, options.micro, accumulate, bench.device)
        first, *rounds = (one_round(step, window, store, number) for number in range(options.rounds + 1))
        state = joined(model=model.state_dict(), step=step.state_dict())
        size = readable(sum(t.nbytes for t in state.values()))
        print(f"    {size} in {len(state)} tensors, on disk {max(r['written'] for r in rounds):.1f} s later at most")
        print(f"    the first, which allocates: {1e3 * first['triggers']:.1f} ms beside {1e3 * first['normal']:.1f} ms")
        keep(bench, f"{options.model} seq {options.seq} micro {options.micro} x {accumulate}", rounds)
        step.close()


def measure_shards(bench: Bench, options: Checkpoint, accumulate: int) -> None:
    """How much longer the step that triggers is than a normal one, and how long until the checkpoint is on disk."""
    case = f"{options.model} in {options.gpus} shards, seq {options.seq} micro {options.micro} x {accumulate}"
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        job = SavesJob("saves", options.model, options.seq, options.micro, accumulate, bench.device.type, folder=folder)
        ranks = started(bench, case, Team, job, world=options.gpus, module="benchmarks.saves_worker")
        if ranks is None:
            return
        with ranks as team:
            print(f"    {readable(team.facts['bytes'])} in all")
            ways = ["ours"] if options.alone else ["ours", "dcp"]
            first, *rounds = ({way: saved(team, way) for way in ways} for _ in range(options.rounds + 1))
            print(f"    the first holds a step up by {held_ms(first['ours']):.0f} ms")
            left = saved(team, "ours", leave=True) if options.resume else None
        if left is not None:
            measure_resumed(bench, case, job, options, left)
    held, whole = (
        {way: statistics.median(read(r[way]) for r in rounds) for way in ways}
        for read in (held_ms, lambda r: 1e3 * r["written"])
    )
    ours = held.pop("ours"), whole.pop("ours")
    bench.figure(f"{case}, held up", "ms", ours[0], {**held, "wanted": HELD_MS}, {"wanted": 1.0})
    if whole:
        bench.figure(f"{case}, until it is on disk", "ms", ours[1], whole, {})


def saved(team: Team, way: str, **more: bool) -> dict[str, float]:
    found = team.ask(save=way, **more)
    steps = ", ".join(f"{1e3 * found[name]:.0f}" for name in ("normal", "triggers", "behind", "slowest"))
    print(
        f"    {way}: on disk after {found['written']:.1f} s; ms a step before, at, behind (mean and slowest): {steps}",
        flush=True,
    )
    return found


def held_ms(found: dict[str, float]) -> float:
    return 1e3 * max(found["triggers"] - found["normal"], 1e-4)


def measure_resumed(bench: Bench, case: str, job: SavesJob, options: Checkpoint, left: dict[str, float]) -> None:
    """Another number of GPUs takes up the checkpoint and the steps behind it. `left`: what those who wrote it said."""
    said = f"{case}, taken up by {options.resume}"
    ranks = started(bench, said, Team, replace(job, resume=True), world=options.resume, module="benchmarks.saves_worker")
    if ranks is None:
        return
    with ranks as team:
        loss, seconds = team.ask(steps=BEHIND)["loss"], team.facts["read"]
    print(f"    the loss {BEHIND} steps behind it: {loss:.6g}, and {left['loss']:.6g} of those who wrote it")
    if not abs(loss - left["loss"]) <= SAME_LOSS * abs(left["loss"]):
        bench.wrong.append(f"{said}: {BEHIND} steps later their loss is {loss:.6g}, of those who wrote it {left['loss']:.6g}")
        return
    bench.figure(f"{said}, until it is read", "s", seconds, {"writing it": left["written"]}, {})


def batches(vocabulary: int, seq: int, micro: int, accumulate: int, device: torch.device) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(vocabulary, (micro, seq), generator=draw) for _ in range(accumulate)]
    return [{"input_ids": i, "labels": i} for i in (i.to(device) for i in ids)]


class Saves(Protocol):
    """What saves while steps go on: Checkpoints, or what it is compared with."""

    def save(self, number: int, tensors: dict[str, Tensor], facts: dict[str, Any], /) -> None: ...
    def wait(self) -> Any: ...


def one_round(step: TrainStep, window: list[dict[str, Tensor]], store: Saves, number: int) -> dict[str, float]:
    """Seconds of a normal step, of the one that triggers, of those behind it; and until the checkpoint is on disk."""
    marks: list[Instant] = []
    previous, began = None, 0.0
    for at in range(BEFORE + BEHIND):
        result = step(window)
        marks.append(Instant(step.device))
        assert result is not None
        if previous is not None:
            previous.read()
        previous = result
        if at == BEFORE - 1:
            began = time.perf_counter()
            store.save(number, joined(model=step.model.state_dict(), step=step.state_dict()), {})
    store.wait()
    written = time.perf_counter() - began
    assert previous is not None
    if step.device.type == "cuda":
        torch.cuda.synchronize(step.device)
    seconds = [b.since(a) for a, b in pairwise(marks)]
    normal, behind = seconds[: BEFORE - 1], seconds[BEFORE:]
    return {
        "normal": sum(normal) / len(normal), "triggers": seconds[BEFORE - 1],
        "behind": sum(behind) / len(behind), "slowest": max(behind), "written": written, "loss": previous.read().loss,
    }  # fmt: skip


def keep(bench: Bench, case: str, rounds: list[dict[str, float]]) -> None:
    for what, name in (
        ("triggers", "the step that triggers it"),
        ("behind", "steps behind it"),
        ("slowest", "the slowest of them"),
    ):
        found = measure.compare_samples({"ours": [r[what] for r in rounds], "normal step": [r["normal"] for r in rounds]})
        gates = {"normal step": 1 / TRIGGERED} if what == "triggers" else None
        bench.keep(f"{case}, {name}", found, unit="ms", amount=1, gates=gates)


if __name__ == "__main__":
    sys.exit(guarded("bench checkpoint", main, sys.argv[1:]))
