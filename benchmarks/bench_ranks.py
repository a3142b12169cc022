"""Whole training steps on several GPUs of one machine: beside one GPU, and beside what a user would run instead.

Weak scaling: each GPU has as many rows as the single one, and the line says tokens a second for each GPU. A contender is a
team of processes (workers.py: Team), one for each GPU; two of them are alive at a time and step in turn.

Of an 8b model one team alone fits: an H200 has 150 GB, and a rank of two holds 64 GB of weights, gradient and moments in fp32,
whoever trains. Such teams are measured one after the other. Each has as many rows a step, in the largest micro-batches that
fit.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError

from . import results
from .bench_train import SAME_LOSS, Case, Goal, peers_here
from .harness import Bench, chosen
from .ranks_worker import CONTENDERS
from .serving import Job
from .workers import Team, Worker, started, take_turns

UNJUDGED: Goal = (None, None)
ONE = "one GPU"
# Our speed on each of so many GPUs over that on one by itself, for the gate and beyond: 0.965 is 1.93 times one GPU on two.
ALONE: dict[int, Goal] = {2: (0.965, 0.985), 4: (0.9625, None), 8: (0.95, None)}
Each = partial(Worker, module="benchmarks.ranks_worker")


@dataclass(frozen=True, kw_only=True)
class LargeCase(Case):
    """`rows`: the micro-batches that a contender tries, largest first. `wanted`: tokens a second for each GPU, or none said."""

    rows: Mapping[str, tuple[int, ...]]
    wanted: float | None = None

    def jobs(self, who: str, device: str) -> Iterator[Job]:
        job = self.job(who, device)
        for micro in self.rows[who]:
            yield replace(job, micro=micro, accumulate=self.micro * self.accumulate // micro)


CASES = {
    "350m": Case("350m", 1024, 16, 1, {"ddp-liger": UNJUDGED, "ddp-compile": UNJUDGED}, ours="ours-ddp"),
    "350m-x8": Case("350m", 1024, 16, 8, {"ddp-liger": UNJUDGED}, ours="ours-ddp"),
    "1b": Case("1b", 2048, 4, 8, {"ddp-liger": UNJUDGED}, ours="ours-ddp", recompute="none"),
    "8b": LargeCase(
        "8b", 4096, 4, 1, {"fsdp-compile": UNJUDGED, "fsdp-liger": UNJUDGED}, ours="ours-fsdp",
        rows={"ours-fsdp": (4, 2, 1), "fsdp-compile": (4, 2, 1), "fsdp-liger": (4, 2, 1)}, wanted=9750,
    ),
    "8b-lora": LargeCase(
        "8b", 4096, 4, 1, {"fsdp-peft": UNJUDGED, "fsdp-peft-liger": UNJUDGED}, ours="ours-fsdp-lora",
        rows=dict.fromkeys(("ours-fsdp-lora", "fsdp-peft", "fsdp-peft-liger"), (4, 2, 1)),
    ),
}  # fmt: skip
TINY = {
    "tiny": Case("tiny", 32, 2, 1, {"ddp": UNJUDGED}, ours="ours-ddp"),
    "tiny-large": LargeCase(
        "tiny", 32, 2, 1, {"fsdp": UNJUDGED}, ours="ours-fsdp", rows={"ours-fsdp": (2,), "fsdp": (1,)}, wanted=1
    ),
    "tiny-lora": LargeCase(
        "tiny", 32, 2, 1, {"fsdp-peft": UNJUDGED}, ours="ours-fsdp-lora", rows={"ours-fsdp-lora": (2,), "fsdp-peft": (2,)}
    ),
}


@dataclass(frozen=True)
class RanksBench:
    """Measure training on several GPUs beside one of them, and beside DDP and FSDP2 as PyTorch has them.

    Example: gpubound bench ranks --only 350m
    """

    only: str = "350m,350m-x8,1b"
    """Cases, by comma: 350m, 350m-x8 (eight micro-batches a step), 1b, 8b, which wants GPUs of 140 GB, and 8b-lora: adapters
    over a base in shards."""
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
            case, rounds = known[name], 3 if options.dry else options.rounds
            measured = measure_large if isinstance(case, LargeCase) else measure_case
            measured(bench, name, case, options.gpus, rounds, peers, kernels)
    return bench.finish()


def measure_case(bench: Bench, name: str, case: Case, world: int, rounds: int, peers: list[str], kernels: str) -> None:
    team = partial(Team, world=world, module="benchmarks.ranks_worker", kernels=kernels)
    job = partial(Case.job, case, device=bench.device.type)
    if (mine := started(bench, name, team, job(case.ours))) is None:
        return
    with mine:
        said = f"{name} on {world}"
        tell_syncs(bench, said, mine.facts)
        if (one := started(bench, name, Each, job(case.ours))) is not None:
            with one:
                beside(bench, said, case, mine, ONE, one, ALONE.get(world, UNJUDGED), rounds)
        for peer, goal in peers_here(bench, name, case, peers):
            if (theirs := started(bench, name, team, job(peer))) is not None:
                with theirs:
                    beside(bench, said, case, mine, peer, theirs, goal, rounds)


def beside(bench: Bench, said: str, case: Case, mine: Team, peer: str, theirs: Worker | Team, goal: Goal, rounds: int) -> None:
    """Tokens a second for each GPU, and peak memory of each, beside a peer that starts from the same loss."""
    if not begin_alike(bench, said, mine.facts["loss"], peer, theirs.facts["loss"]):
        return
    found = measure.compare_samples(take_turns({"ours": mine, peer: theirs}, rounds), clock="perf_counter, drained")
    gate, moonshot = goal
    gates, moonshots = {peer: gate} if gate else None, {peer: moonshot} if moonshot else None
    bench.keep(said, found, unit="tok/s", amount=case.tokens, gates=gates, moonshots=moonshots)
    tell_peaks(bench, said, mine.facts, peer, theirs.facts)


def begin_alike(bench: Bench, said: str, ours: float, peer: str, theirs: float) -> bool:
    """Whether the first losses are the same; what begins otherwise is told, and not compared."""
    if alike := abs(ours - theirs) <= SAME_LOSS * abs(theirs):
        return alike
    bench.wrong.append(f"{said}: the first loss of ours is {ours:.4f}, of {peer} {theirs:.4f}; not compared")
    return False


def tell_syncs(bench: Bench, said: str, mine: Mapping[str, Any]) -> None:
    if "syncs" in mine:
        bench.figure(f"{said} host syncs", "syncs", mine["syncs"], {"budget": 0}, {"budget": 1.0})


def tell_peaks(bench: Bench, said: str, mine: Mapping[str, Any], peer: str, theirs: Mapping[str, Any]) -> None:
    if "peak_gib" in theirs:
        bench.figure(f"{said} peak memory", "GiB", mine["peak_gib"], {peer: theirs["peak_gib"]}, {})


def measure_large(bench: Bench, name: str, case: LargeCase, world: int, rounds: int, peers: list[str], kernels: str) -> None:
    """One team after the other, ours first. Each begins anew, so a machine that slows down shows as a slower peer."""
    said = f"{name} on {world}"

    def measured(who: str) -> tuple[list[float], dict[str, Any]] | None:
        if (team := fitting(bench, said, case, who, world, kernels)) is None:
            return None
        with team:
            return take_turns({who: team}, rounds)[who], team.facts

    if (ours := measured(case.ours)) is None:
        return
    seconds, mine = ours
    tell_syncs(bench, said, mine)
    if case.wanted is not None:
        speed = case.tokens / statistics.median(seconds)
        bench.figure(f"{said} speed", "tok/s", speed, {"wanted": case.wanted}, {"wanted": 1.0})
    for peer, _ in peers_here(bench, name, case, peers):
        if (theirs := measured(peer)) is None or not begin_alike(bench, said, mine["loss"], peer, theirs[1]["loss"]):
            continue
        found = measure.compare_samples({"ours": seconds, peer: theirs[0]}, clock="perf_counter, drained, in turn")
        bench.keep(said, found, unit="tok/s", amount=case.tokens)
        tell_peaks(bench, said, mine, peer, theirs[1])


def fitting(bench: Bench, said: str, case: LargeCase, who: str, world: int, kernels: str) -> Team | None:
    """The contender with the largest micro-batch that it can take a step with, which is told; None where there is none."""
    for job in case.jobs(who, bench.device.type):
        try:
            team = Team(job, world, "benchmarks.ranks_worker", kernels)
        except MeasureError as error:
            print(f"{said}: {job.accumulate} micro-batches of {job.micro}: {error}", flush=True)
            continue
        print(f"{said}: {who}: {job.accumulate} micro-batches of {job.micro} rows a step, of {job.seq} tokens", flush=True)
        return team
    bench.unmeasured.append(f"{said}: {who}: no size of micro-batch ran to the end of its steps; the reasons are above")
    return None


if __name__ == "__main__":
    sys.exit(guarded("bench", main, sys.argv[1:]))
