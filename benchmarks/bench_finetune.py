"""Fine-tuning adapters on examples of uneven length beside TRL's trainers: tokens of examples, or pairs of answers, a second.

Ours packs whole examples, or whole pairs. TRL's SFTTrainer runs with packing and Liger, with Liger on
padded batches, and as it comes; its DPOTrainer with Liger and without. Everyone adapts all linear layers with rank 16, in bf16.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve

from . import results
from .harness import Bench, chosen, need_transformers
from .serving import Job
from .workers import Worker, started

WINDOW_S = 1.0  # of steps that are timed together


@dataclass(frozen=True)
class Case:
    """A shape, rows (of examples, or of pairs) in a micro-batch for each contender, ours first, and the wanted ratios."""

    shape: str
    seq: int
    micro: dict[str, int]
    gates: dict[str, float]

    def job(self, who: str, device: str) -> Job:
        return Job(who, self.shape, self.seq, self.micro[who], 1, device)


SFT_GATES, DPO_GATES = {"trl-packed": 1.6, "trl-plain": 3.0}, {"trl-dpo": 1.5, "trl-dpo-plain": 1.5}
CASES = {
    "1b-sft": Case("1b", 4096, {"ours": 2, "trl-packed": 2, "trl-placed": 2, "trl-padded": 8, "trl-plain": 8}, SFT_GATES),
    "8b-sft": Case("8b", 4096, {"ours": 1, "trl-packed": 1, "trl-padded": 4, "trl-plain": 2}, SFT_GATES),
    "1b-dpo": Case("1b", 2048, {"ours-dpo": 8, "trl-dpo": 8, "trl-dpo-plain": 8}, DPO_GATES),
}
TINY = {
    "tiny-sft": Case("tiny", 64, {"ours": 2, "trl-packed": 2, "trl-placed": 2, "trl-plain": 4}, {}),
    "tiny-dpo": Case("tiny", 64, {"ours-dpo": 2, "trl-dpo-plain": 2}, {}),
}


@dataclass(frozen=True)
class FineTune:
    """Measure fine-tuning of adapters beside TRL's trainers, on the same examples.

    Example: gpubound bench finetune --only 1b-sft
    """

    only: str = ",".join(CASES)
    """Cases, by comma: 1b-sft, 8b-sft (examples of up to 4,096 tokens), 1b-dpo (pairs of up to 2,048)."""
    peers: str = ""
    """Peers, by comma: trl-packed, trl-padded (with Liger), trl-placed (gb.place), trl-plain, trl-dpo, trl-dpo-plain."""
    rounds: int = 8
    """How often they take turns; about a second each."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(FineTune, argv, "bench finetune")
    known = TINY if options.dry else CASES
    names = list(known) if options.dry else chosen("--only", options.only, list(known))
    every = list(dict.fromkeys(who for case in known.values() for who in case.micro if not who.startswith("ours")))
    peers = chosen("--peers", options.peers, every) if options.peers else every
    need_transformers("bench finetune")
    bench = Bench.of(options, "finetune", resolve("cpu" if options.dry else "require"), argv)
    for name in names:
        measure_case(bench, name, known[name], peers, 2 if options.dry else options.rounds)
    return bench.finish()


def measure_case(bench: Bench, name: str, case: Case, peers: Sequence[str], rounds: int) -> None:
    """Ours in turn with one peer after another, as each holds a model on the GPU."""
    ours, unit = next(iter(case.micro)), "pairs/s" if "dpo" in name else "tok/s"

    def start(who: str) -> Worker | None:
        worker = started(bench, name, Worker, case.job(who, bench.device.type), module="benchmarks.finetune_worker")
        if worker is not None:
            print(f"{name} {who}: first steps after {worker.facts['warmup_s']:.1f} s", flush=True)
        return worker

    if (mine := start(ours)) is None:
        return
    with mine:
        for peer in (who for who in case.micro if who in peers):
            if (other := start(peer)) is None:
                continue
            with other:
                found = in_turn({"ours": mine, peer: other}, rounds, bench.dry)
                bench.keep(
                    name, measure.compare_samples(found, clock="perf_counter, drained"), unit=unit, amount=1, gates=case.gates
                )
                if (peak := other.ask(memory=True)) is not None:
                    print(f"{name} {peer}: {peak:.1f} GiB reserved at the peak, ours {mine.ask(memory=True):.1f}", flush=True)


def in_turn(workers: Mapping[str, Worker], rounds: int, dry: bool) -> dict[str, list[float]]:
    """Seconds for a token, or a pair, of each, round by round, in windows of the same time."""
    steps, shuffle = {}, random.Random(0).shuffle
    for who, worker in workers.items():
        seconds, _ = worker.ask(steps=4)
        steps[who] = 2 if dry else max(4, round(WINDOW_S * 4 / seconds))
    order, found = list(workers), {who: [] for who in workers}
    for _ in range(rounds):
        shuffle(order)
        for who in order:
            seconds, learnt = workers[who].ask(steps=steps[who])
            found[who].append(seconds / learnt)
    return found


if __name__ == "__main__":
    sys.exit(guarded("bench finetune", main, sys.argv[1:]))
