"""Reinforcement learning on one GPU: rollouts, a prefill for several samples, exact log-probabilities, and whole steps.

Random weights of Qwen3-0.6B's shape, in bf16. A step is 64 prompts x 8 samples x 512 tokens (of larger models 16 prompts): of
`gb.rl.train`, with its defaults, and of TRL's GRPOTrainer, which generates with transformers, at equal settings.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from statistics import median
from typing import Any

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError

from . import results
from .harness import Bench, chosen, need_transformers
from .rl_worker import RLJob
from .workers import Worker

PARTS = ("rollouts", "prefill", "exact", "step")
PEERS = ("trl", "trl-continuous")
RATE = 95_000.0  # tokens a second of 0.6b's rollouts, with equal lengths whose mean is that of the unlike ones
UNLIKE, SHARED, PRICE, GAP, FASTER, MEMORY = 0.85, 1 / 1.15, 1 / 1.3, 1e-3, 8.0, 1 / 1.2
GATED = 256  # of equal lengths, the one that the rate is asked of


def case(shape: str, micro: int, prompts: int = 64, **rest: Any) -> RLJob:
    """8 answers of 512 tokens to each prompt, for TRL in micro-batches that its logits leave room for."""
    return RLJob("", shape, 640, micro, prompts * 8 // micro, "cuda", prompts=prompts, **rest)


# A step of 64 prompts takes 1.7b some 20 s, and 8b 40.
CASES = {"0.6b": case("0.6b", 16), "1.7b": case("1.7b", 16, 16), "8b-lora": case("8b", 8, 16, lora=True)}
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
    jobs = {name: known[name] if options.dry else replace(known[name], limit=options.limit) for name in names}
    for part, keep in (("rollouts", keep_rollouts), ("prefill", keep_prefill)):
        for name, job in jobs.items() if part in parts else ():
            with Contenders(bench, {name: job}, (part, f"{part}-exact")) as contenders:
                keep(bench, name, job, partial(contenders.ask, name))
    steps: dict[str, Any] = {}
    exact = "exact" in parts  # two contenders a case: one case at a time, for their memory
    for some in ([{name: job} for name, job in jobs.items()] if exact else [jobs]) if {"exact", "step"} & {*parts} else ():
        with Contenders(bench, some, ("loop", "loop-not-exact") if exact else ("loop",)) as contenders:
            for name in some:
                if of := contenders.ask(name, "loop"):
                    steps[name] = of
                    if "step" in parts:
                        keep_step(bench, name, step_case(name, jobs[name]), of)
                    if exact and (other := contenders.ask(name, "loop-not-exact")):
                        keep_exact(bench, name, step_case(name, jobs[name]), of, other)
    for name, of in steps.items() if "step" in parts else ():
        for who in peers:
            with Contenders(bench, {name: jobs[name]}, (who,)) as contenders:
                if each := contenders.ask(name, who):
                    keep_peer(bench, step_case(name, jobs[name]), of, who, each)
    return bench.finish()


class Contenders:
    """Processes, by case and contender, that become ready at once: starts are half of the time that a case takes. While one
    measures, the others stand still."""

    def __init__(self, bench: Bench, jobs: Mapping[str, RLJob], whos: Sequence[str]):
        self.bench = bench
        self.workers = {
            (name, who): Worker(replace(job, who=who, device=bench.device.type), "benchmarks.rl_worker", wait=False)
            for name, job in jobs.items()
            for who in whos
        }

    def __enter__(self) -> "Contenders":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.__exit__()

    def ask(self, name: str, who: str, **wish: Any) -> Any:
        """Return what a contender measures, or None where its process has failed, which is reported once."""
        if (worker := self.workers.get((name, who))) is None:
            return None
        others = [one.process for one in self.workers.values() if one is not worker]
        try:
            worker.hear_facts()
            for process in others:
                process.send_signal(SIGSTOP)
            return worker.ask(**wish)
        except MeasureError as error:
            self.bench.unmeasured.append(f"{name}: {error}")
            del self.workers[name, who]
        finally:
            for process in others:
                process.send_signal(SIGCONT)


def keep_rollouts(bench: Bench, name: str, job: RLJob, ask: Callable[..., Any]) -> None:
    """Keep the lines of rollouts, those that are held to something first."""
    rates: dict[int, float] = {}

    def keep_equal(new: int) -> None:
        if found := ask("rollouts", lengths=f"{new}"):
            rates[new] = median(found)
            peers = {"budget": RATE} if name == "0.6b" else {"the longest rows": rates[longest]}
            gates = {"budget": 1.0} if name == "0.6b" and new == GATED else {}
            if name == "0.6b" or new != longest:
                bench.figure(f"{name} rollout, {new} tokens a row", "tok/s", rates[new], peers, gates)

    def keep_unlike(lengths: str, words: str, gates: Mapping[str, float]) -> None:
        # A row reads as many keys, on average, as with equal lengths of twice the mean.
        if found := ask("rollouts", lengths=lengths):
            bench.figure(f"{name} rollout, {words}", "tok/s", median(found), {"equal lengths": rates[longest]}, gates)

    *short, longest = job.equal
    keep_equal(longest)
    if not rates:
        return
    print(f"{name}: geometric lengths of {ask('rollouts', lengths='mean'):.0f} tokens on average", flush=True)
    keep_equal(short[-1])
    keep_unlike("geometric", "geometric lengths", {"equal lengths": UNLIKE})
    if (syncs := ask("rollouts", lengths="syncs")) is not None:
        bench.figure(f"{name} rollout host syncs", "syncs", syncs, {"budget": 0}, {"budget": 1.0})
    for new in (short[-1], longest):
        if found := ask("rollouts-exact", lengths=f"{new}"):
            bench.figure(f"{name} exact rollout, {new} tokens a row", "tok/s", median(found), {"not exact": rates[new]}, {})
    for new in short[:-1]:
        keep_equal(new)
    keep_unlike("own", "geometric lengths, one sample a prompt", {})


def keep_prefill(bench: Bench, name: str, job: RLJob, ask: Callable[..., Any]) -> None:
    for who, words in (("prefill", "prefill"), ("prefill-exact", "exact prefill")):
        for length in job.lengths:
            if seconds := ask(who, length=length):
                found = measure.compare_samples(seconds, clock="perf_counter, drained")
                case = f"{name} {words} of {length} tokens for {job.samples} samples"
                bench.keep(case, found, unit="ms", amount=1, gates={"one sample": SHARED})


def step_case(name: str, job: RLJob) -> str:
    return f"{name} step" if job.prompts == 64 or job.device == "cpu" else f"{name} step of {job.prompts} prompts"


def keep_exact(bench: Bench, name: str, case: str, exact: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for what, mode, budget, gates in (("gap", exact, 0.0, {"budget": 1.0}), ("gap, not exact", other, GAP, {})):
        print(f"{name} {what}: {mode['gap']:.3g} on average, {mode['largest_gap']:.3g} at most", flush=True)
        bench.figure(f"{name} {what}", "nats", mode["gap"], {"budget": budget}, gates)
    bench.figure(f"{case}, exact", "s", exact["seconds"], {"not exact": other["seconds"]}, {"not exact": PRICE})


def print_phases(case: str, who: str, of: Mapping[str, Any]) -> None:
    phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in of["phases"].items())
    print(f"{case}, {who}: {of['tokens']:,.0f} tokens in {of['seconds']:.2f} s: {phases}", flush=True)


def keep_step(bench: Bench, name: str, case: str, of: Mapping[str, Any]) -> None:
    """Keep the lines of a step that need no peer: its learning, and what its training alone holds."""
    print_phases(case, "ours", of)
    bench.figure(case, "s", of["seconds"], {"its learning": of["phases"]["learn"]}, {})
    if (alone := of["alone"])["peak_gib"] is not None:
        peak = {"training alone": alone["peak_gib"]}
        bench.figure(f"{case} peak memory", "GiB", of["peak_gib"], peak, {"training alone": MEMORY})
        bench.figure(f"{name} learning host syncs", "syncs", alone["syncs"], {"budget": 0}, {"budget": 1.0})


def keep_peer(bench: Bench, case: str, of: Mapping[str, Any], who: str, each: Mapping[str, Any]) -> None:
    print_phases(case, who, each)
    bench.figure(case, "s", of["seconds"], {who: each["seconds"]}, {"trl": FASTER})
    for phase, words in (("sample", "sampling"), ("reward", "reward"), ("learn", "learning")):
        ours, theirs = (1e3 * max(1e-6, one["phases"][phase]) for one in (of, each))  # ready with the last answer
        bench.figure(f"{case}, {words}", "ms", ours, {who: theirs}, {})
    if each["peak_gib"] is not None:
        bench.figure(f"{case} peak memory", "GiB", of["peak_gib"], {who: each["peak_gib"]}, {})


if __name__ == "__main__":
    sys.exit(guarded("bench rl", main, sys.argv[1:]))
