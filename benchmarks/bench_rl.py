"""Reinforcement learning on one GPU: rollouts, a prefill for several samples, exact log-probabilities, and whole steps.

Random weights of Qwen3-0.6B's shape, in bf16. A step is 64 prompts x 8 samples x 512 tokens: of `gb.rl.train`, with its
defaults, and of TRL's GRPOTrainer, which generates with transformers, at equal settings.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve

from . import results
from .harness import Bench, asked, chosen, need_transformers
from .rl_worker import RLJob
from .workers import Worker, started

PARTS = ("rollouts", "prefill", "exact", "step")
PEERS = ("trl", "trl-continuous")
RATE = 95_000.0  # tokens a second of 0.6b's rollouts, with equal lengths whose mean is that of the unlike ones
UNLIKE, SHARED, PRICE, GAP, FASTER, MEMORY = 0.85, 1 / 1.15, 1 / 1.3, 1e-3, 8.0, 1 / 1.2
GATED = "256"  # of equal lengths, the one that the rate is asked of


def case(shape: str, micro: int, **rest: Any) -> RLJob:
    """64 x 8 answers of 512 tokens, for TRL in micro-batches that its logits leave room for."""
    return RLJob("", shape, 640, micro, 512 // micro, "cuda", **rest)


CASES = {"0.6b": case("0.6b", 16), "1.7b": case("1.7b", 16, steps=2), "8b-lora": case("8b", 8, lora=True, steps=2)}
SMALL = RLJob(
    "", "tiny-qwen3", 12, 4, 2, "cpu", prompts=4, samples=2, prompt=4, new=8, rows=4, equal=(4, 8), mean=4, most=16,
    sequences=12, lengths=(4, 9), prefills=1, limit=300.0,
)  # fmt: skip
TINY = {"tiny": SMALL, "tiny-lora": replace(SMALL, shape="tiny", lora=True)}


@dataclass(frozen=True)
class RL:
    """Measure rollouts and steps of reinforcement learning, steps beside TRL's.

    Example: gpubound bench rl --parts rollouts,prefill
    """

    parts: str = ",".join(PARTS)
    """What to measure, by comma: rollouts, prefill, exact (what equal log-probabilities cost), step (beside the peers)."""
    only: str = "0.6b"
    """Cases, by comma: 0.6b, 1.7b (all weights train), 8b-lora (adapters do)."""
    peers: str = "trl"
    """Peers of a step, by comma: trl, trl-continuous (generates with transformers' continuous batching); none."""
    limit: float = CASES["0.6b"].limit
    """Seconds that a peer may take, its start included."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(RL, argv, "bench rl")
    known = TINY if options.dry else CASES
    parts = chosen("--parts", options.parts, PARTS)
    names = list(known) if options.dry else chosen("--only", options.only, list(known))
    peers = [] if options.peers == "none" else chosen("--peers", options.peers, PEERS)
    need_transformers("bench rl")
    bench = Bench.of(options, "rl", resolve("cpu" if options.dry else "require"), argv)
    for name in names:
        job = known[name] if options.dry else replace(known[name], limit=options.limit)
        found = cache(partial(facts, bench, name, job))
        if "rollouts" in parts and (of := found("rollouts")):
            keep_rollouts(bench, name, of)
            if exact := found("rollouts-exact"):
                keep_exact_rollouts(bench, name, of, exact)
        for who in ("prefill", "prefill-exact") if "prefill" in parts else ():
            if of := found(who):
                keep_prefill(bench, name, job, of, who)
        if "exact" in parts and (of := found("loop")) and (other := found("loop-not-exact")):
            keep_exact(bench, name, of, other)
        if "step" in parts:
            with learning_alone(bench, name, job) as measured:
                if of := found("loop"):
                    keep_step(bench, name, of, measured, peers={who: partial(found, who) for who in peers})
    return bench.finish()


def start_worker(bench: Bench, name: str, job: RLJob, who: str) -> Worker | None:
    """Return a contender's process, or None where it failed to start, which is reported."""
    return started(bench, name, Worker, replace(job, who=who, device=bench.device.type), module="benchmarks.rl_worker")


def facts(bench: Bench, name: str, job: RLJob, who: str) -> dict[str, Any] | None:
    """Return what a contender measured in its process, or None where that failed, which is reported."""
    if (worker := start_worker(bench, name, job, who)) is None:
        return None
    with worker:
        return worker.facts


@contextmanager
def learning_alone(bench: Bench, name: str, job: RLJob) -> Iterator[Callable[[], dict[str, Any] | None]]:
    """Yield a function that returns what learning alone takes. It is made ready beside the loop's process, whose start is as
    long, and waits: a step of 0.6b with its peer took 250 s."""
    with ThreadPoolExecutor(1) as executor:
        ready = executor.submit(start_worker, bench, name, job, "learning")
        try:
            yield lambda: None if (worker := ready.result()) is None else worker.ask()
        finally:
            if (worker := ready.result()) is not None:
                worker.__exit__()


def keep_rollouts(bench: Bench, name: str, of: Mapping[str, Any]) -> None:
    rates = {lengths: [1 / rate for rate in found] for lengths, found in of["rates"].items()}  # seconds a token
    *_, longest = (lengths for lengths in rates if lengths.isdecimal())
    print(f"{name}: geometric lengths of {of['mean']:.0f} tokens on average", flush=True)
    for lengths, seconds in rates.items():
        goal = asked((RATE, None) if name == "0.6b" else None, 1, len(seconds))
        beside = goal.seconds or {"the longest rows": rates[longest][: len(seconds)]}
        if not lengths.isdecimal():  # a row reads as many keys, on average, as with equal lengths of twice the mean
            case = f"{name} rollout, geometric lengths" + (", one sample a prompt" if lengths == "own" else "")
            peers, gates = {"equal lengths": 1 / median(rates[longest])}, {} if lengths == "own" else {"equal lengths": UNLIKE}
            bench.figure(case, "tok/s", 1 / median(seconds), peers, gates)
        elif goal.seconds or lengths != longest:
            found = measure.compare_samples({"ours": seconds} | beside, clock="perf_counter, drained")
            gates = goal.gates if lengths == GATED else {}
            bench.keep(f"{name} rollout, {lengths} tokens a row", found, unit="tok/s", amount=1, gates=gates)
    if of["syncs"] is not None:
        bench.figure(f"{name} rollout host syncs", "syncs", of["syncs"], {"budget": 0}, {"budget": 1.0})


def keep_exact_rollouts(bench: Bench, name: str, of: Mapping[str, Any], exact: Mapping[str, Any]) -> None:
    for lengths, found in exact["rates"].items():
        case = f"{name} exact rollout, {lengths}{' tokens a row' if lengths.isdecimal() else ' lengths'}"
        bench.figure(case, "tok/s", median(found), {"not exact": median(of["rates"][lengths])}, {})


def keep_prefill(bench: Bench, name: str, job: RLJob, of: Mapping[str, Any], who: str) -> None:
    for length, seconds in of.items():
        found = measure.compare_samples(seconds, clock="perf_counter, drained")
        case = f"{name} {' '.join(reversed(who.split('-')))} of {length} tokens for {job.samples} samples"
        bench.keep(case, found, unit="ms", amount=1, gates={"one sample": SHARED})


def keep_exact(bench: Bench, name: str, exact: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for case, mode, budget, gates in (("gap", exact, 0.0, {"budget": 1.0}), ("gap, not exact", other, GAP, {})):
        print(f"{name} {case}: {mode['gap']:.3g} on average, {mode['largest_gap']:.3g} at most", flush=True)
        bench.figure(f"{name} {case}", "nats", mode["gap"], {"budget": budget}, gates)
    bench.figure(f"{name} step, exact", "s", exact["seconds"], {"not exact": other["seconds"]}, {"not exact": PRICE})


def keep_step(
    bench: Bench, name: str, of: Mapping[str, Any], alone: Callable[[], Any], *, peers: Mapping[str, Callable[[], Any]]
) -> None:
    """Keep the lines of steps, those beside each peer once it has been measured."""

    def print_phases(who: str, each: Mapping[str, Any]) -> None:
        phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in each["phases"].items())
        print(f"{name} {who}: a step of {each['tokens']:,.0f} tokens takes {each['seconds']:.2f} s: {phases}", flush=True)

    print_phases("ours", of)
    learning = 1e3 * of["phases"]["learn"]
    if learnt := alone():
        theirs = 1e3 * learnt["seconds"]
        bench.figure(f"{name} step, learning beside it alone", "ms", learning, {"training alone": theirs}, {})
        bench.figure(f"{name} step", "s", of["seconds"], {"training alone": learnt["seconds"]}, {})
    if learnt and learnt["peak_gib"] is not None:
        peak = {"training alone": learnt["peak_gib"]}
        bench.figure(f"{name} step peak memory", "GiB", of["peak_gib"], peak, {"training alone": MEMORY})
        bench.figure(f"{name} learning host syncs", "syncs", learnt["syncs"], {"budget": 0}, {"budget": 1.0})
    for who, measured in peers.items():
        if (each := measured()) is None:
            continue
        print_phases(who, each)
        bench.figure(f"{name} step", "s", of["seconds"], {who: each["seconds"]}, {"trl": FASTER})
        for phase, words in (("sample", "sampling"), ("reward", "reward"), ("learn", "learning")):
            ours, theirs = (1e3 * max(1e-6, one["phases"][phase]) for one in (of, each))  # ready with the last answer
            bench.figure(f"{name} step, {words}", "ms", ours, {who: theirs}, {})
        if each["peak_gib"] is not None:
            bench.figure(f"{name} step peak memory", "GiB", of["peak_gib"], {who: each["peak_gib"]}, {})


if __name__ == "__main__":
    sys.exit(guarded("bench rl", main, sys.argv[1:]))
