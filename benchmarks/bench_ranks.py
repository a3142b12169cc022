"""Whole training steps on several GPUs of one machine: beside one GPU, and beside what a user would run instead.

Weak scaling: each GPU has as many rows as the single one, and the line says tokens a second for each GPU. A contender is a
team of processes (workers.py: Team), one for each GPU; two of them are alive at a time and step in turn.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError

from . import results
from .bench_train import SAME_LOSS, Case, Goal, peers_here
from .harness import Bench, chosen
from .ranks_worker import CONTENDERS
from .workers import Team, Worker, started, take_turns

ONE = "one GPU"
Each = partial(Worker, module="benchmarks.ranks_worker")


@dataclass(frozen=True)
class RankCase(Case):
    """`alone`: our speed on each GPU over that on one by itself. 0.965 is 1.93 times one GPU on two."""

    alone: Goal = (0.965, 0.985)


UNJUDGED: Goal = (None, None)
CASES = {
    "350m": RankCase("350m", 1024, 16, 1, {"ddp-liger": UNJUDGED, "ddp-compile": UNJUDGED}, ours="ours-ddp"),
    "350m-x8": RankCase("350m", 1024, 16, 8, {"ddp-liger": UNJUDGED}, ours="ours-ddp"),
    "1b": RankCase("1b", 2048, 4, 8, {"ddp-liger": UNJUDGED}, ours="ours-ddp", recompute="none"),
}
TINY = {"tiny": RankCase("tiny", 32, 2, 1, {"ddp": UNJUDGED}, ours="ours-ddp")}


@dataclass(frozen=True)
class RanksBench:
    """Measure training on several GPUs beside one of them, and beside DDP and FSDP2 as PyTorch has them.

    Example: gpubound bench ranks --only 350m
    """

    only: str = "350m,350m-x8,1b"
    """Cases, by comma: 350m, 350m-x8 (eight micro-batches a step) and 1b."""
    peers: str = ""
    """Of a case's peers only these, by comma."""
    gpus: int = 2
    """GPUs of this machine that a team has."""
    rounds: int = 12
    """How often two contenders take turns; about half a second each."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU, two processes: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(RanksBench, argv, "bench ranks")
    known = TINY if options.dry else CASES
    names = list(TINY) if options.dry else chosen("--only", options.only, list(CASES))
    peers = chosen("--peers", options.peers, list(CONTENDERS)) if options.peers else []
    device = resolve("cpu" if options.dry else "require")
    if device.type == "cuda" and torch.cuda.device_count() < options.gpus:
        raise MeasureError(f"--gpus: wanted {options.gpus} GPUs on this machine, got {torch.cuda.device_count()}.")
    bench = Bench.of(options, "ranks", device, argv)
    for name in names:
        with tempfile.TemporaryDirectory() as kernels:
            measure_case(bench, name, known[name], options.gpus, 3 if options.dry else options.rounds, peers, kernels)
    return bench.finish()


def measure_case(bench: Bench, name: str, case: RankCase, world: int, rounds: int, peers: list[str], kernels: str) -> None:
    team = partial(Team, world=world, module="benchmarks.ranks_worker", kernels=kernels)
    job = partial(Case.job, case, device=bench.device.type)
    if (mine := started(bench, name, team, job(case.ours))) is None:
        return
    with mine:
        said = f"{name} on {world}"
        if "syncs" in mine.facts:
            bench.figure(f"{said} host syncs", "syncs", mine.facts["syncs"], {"budget": 0}, {"budget": 1.0})
        if (one := started(bench, name, Each, job(case.ours))) is not None:
            with one:
                beside(bench, said, case, mine, ONE, one, case.alone, rounds)
        for peer, goal in peers_here(bench, name, case, peers):
            if (theirs := started(bench, name, team, job(peer))) is not None:
                with theirs:
                    beside(bench, said, case, mine, peer, theirs, goal, rounds)


def beside(
    bench: Bench, said: str, case: RankCase, mine: Team, peer: str, theirs: Worker | Team, goal: Goal, rounds: int
) -> None:
    """Tokens a second for each GPU, and peak memory of each, beside a peer that starts from the same loss."""
    a, b = mine.facts["loss"], theirs.facts["loss"]
    if not abs(a - b) <= SAME_LOSS * abs(b):
        bench.wrong.append(f"{said}: the first loss of ours is {a:.4f}, of {peer} {b:.4f}; not timed")
        return
    found = measure.compare_samples(take_turns({"ours": mine, peer: theirs}, rounds), clock="perf_counter, drained")
    gate, moonshot = goal
    gates, moonshots = {peer: gate} if gate else None, {peer: moonshot} if moonshot else None
    bench.keep(said, found, unit="tok/s", amount=case.tokens, gates=gates, moonshots=moonshots)
    if "peak_gib" in theirs.facts:
        bench.figure(f"{said} peak memory", "GiB", mine.facts["peak_gib"], {peer: theirs.facts["peak_gib"]}, {})


if __name__ == "__main__":
    sys.exit(guarded("bench", main, sys.argv[1:]))
