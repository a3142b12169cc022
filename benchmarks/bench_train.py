"""Whole training steps beside what a user would run instead: Liger, Hugging Face, plain or compiled, a usual loop.

Ours holds fp32 masters, moments and accumulators; "liger" holds weights, gradients and moments in bf16 and so does less;
"liger-autocast" has fp32 weights as ours has masters. Each contender is a process of its own (train_worker.py). Ours and one
peer are alive at a time and step in turn, in random order.
"""

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve

from . import results
from .harness import Bench, asked, chosen, importable
from .memory_rows import keep_phases, peaks_in
from .serving import Job
from .shapes import SHAPES
from .train_worker import CONTENDERS
from .workers import Worker, started, take_turns

FIRST_STEP_S = 10.0
BUSY_PERCENT, BUSY_STEPS = 95.0, 30
SAME_LOSS = 2e-2  # bf16 beside bf16 and fp32, at the first step
DTYPE_BYTES = 4  # of an accumulator


Goal = tuple[float | None, float | None]
"""(gate, moonshot); None: measured, not judged"""


@dataclass(frozen=True)
class Case:
    """One training set-up. `peers`: our speed over theirs."""

    shape: str
    seq: int
    micro: int
    accumulate: int
    peers: dict[str, Goal]
    ours: str = "ours"
    recompute: str = "cheap"
    """of TrainStep"""
    lr: float = 1e-4
    least: tuple[float, float | None] | None = None
    """(gate, moonshot) in tokens a second"""

    @property
    def tokens(self) -> int:
        return self.seq * self.micro * self.accumulate

    def job(self, who: str, device: str) -> Job:
        return Job(who, self.shape, self.seq, self.micro, self.accumulate, device, self.recompute, self.lr)


CASES = {
    "350m": Case(
        "350m",
        1024,
        16,
        1,
        {
            "liger": (1.15, 1.22),
            "liger-cutedsl": (1.15, None),
            "liger-cutile": (1.15, None),
            "compile-max": (1.15, None),
            "liger-autocast": (1.45, None),
            "hf": (None, None),
        },
    ),
    "350m-fp8": Case("350m", 1024, 16, 1, {"ours-bf16": (1.25, None)}, ours="ours-fp8", least=(250_000, 280_000)),
    "350m-x8": Case("350m", 1024, 16, 8, {"liger": (None, None), "liger-autocast": (None, None)}),
    "135m": Case("135m", 1024, 1, 1, {"hf": (8.0, 10.0), "liger": (None, None)}, least=(186_000, 205_000)),  # 5.5 and 5 ms
    "350m-x16": Case("350m", 1024, 16, 16, {}),
    "1b-x8": Case("1b", 2048, 4, 8, {"liger": (1.12, None), "compile": (1.12, None)}, recompute="none", least=(78_000, None)),
    "1b-x8-fp8": Case("1b", 2048, 4, 8, {"ours-bf16": (1.25, None)}, "ours-fp8", "none", least=(95_000, None)),
    "8b": Case("8b", 2048, 1, 4, {}, "ours-8bit", least=(11_000, None)),  # on one GPU
    "8b-fp8": Case("8b", 2048, 1, 4, {}, "ours-fp8-8bit", least=(14_000, None)),
    "feed": Case("tiny", 200, 4, 1, {"frames-usual": (5.6, 7.0)}, ours="frames-ours"),
    "feed-fp32": Case("tiny", 200, 4, 1, {"frames-usual": (5.6, 7.0)}, ours="frames-ours-fp32"),
}
TINY = {
    "tiny": Case("tiny", 32, 2, 1, {"hf": (None, None)}, least=(1.0, 2.0)),
    "tiny-x2": Case("tiny", 32, 2, 2, {"hf": (None, None)}, recompute="none"),
    "tiny-8bit": Case("tiny", 32, 2, 2, {}, "ours-8bit", least=(1.0, None)),
    "feed": CASES["feed"],
}

CATEGORIES = (  # first match wins; attention before products, whose names its kernels contain
    ("attention", r"sdpa|fmha|flash|attention"),
    ("products", r"gemm|cutlass|nvjet|cublas|xmma|splitk|wgmma|_lora_product"),
    ("adapters", r"_lora_"),
    ("update", r"adamw|_squares|_plan_kernel|multi_tensor|FusedAdam|FusedOptimizer"),
    ("norms and gated activations", r"_forward_kernel|_backward_kernel|norm|swiglu|glu"),
    ("rotary", r"rope"),
    ("loss", r"_loss_kernel|_gradient_kernel|_divergence_kernel|cross_entropy|nll|softmax"),
    ("reductions", r"reduce_kernel|reduce"),
    ("copies and fills", r"memcpy|memset|copy|fill|cat"),
    ("elementwise", r"elementwise|vectorized|index|embedding|scatter|gather"),
)


@dataclass(frozen=True)
class Train:
    """Measure whole training steps beside Liger and Hugging Face.

    Example: gpubound bench train --only 350m,135m
    """

    only: str = "350m,350m-x8,135m,feed"
    """Cases, by comma: 350m, 350m-fp8, 350m-x8, 350m-x16, 135m, 1b-x8, 1b-x8-fp8, 8b, 8b-fp8, feed, feed-fp32."""
    peers: str = ""
    """Of a case's peers only these, by comma."""
    rounds: int = 12
    """How often ours and a peer take turns; about half a second each."""
    limit: float = 600.0
    """Seconds that a peer has until its first step has ended; torch.compile's max-autotune takes minutes."""
    again: bool = False
    """Also time the first step of a second process, which finds the kernels that the first one compiled."""
    profile: str = ""
    """A contender (ours, hf, liger, liger-autocast, compile): print where a step of it goes in each case; measure nothing."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Train, argv, "bench train")
    known = TINY if options.dry else CASES
    names = list(TINY) if options.dry else options.only.split(",")
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"--only: there is no case {wrong[0]!r}, wanted some of {', '.join(known)}.")
    peers = chosen("--peers", options.peers, list(CONTENDERS)) if options.peers else []
    device = resolve("cpu" if options.dry else "require")
    if options.profile:
        for name in names:
            who = options.profile if known[name].ours == "ours" else f"frames-{options.profile}"
            profile(name, Worker(known[name].job(who, device.type)))
        return 0
    bench = Bench.of(options, "train", device, argv)
    limit = measure.ceilings(device, quick=options.dry)
    for name in names:
        with tempfile.TemporaryDirectory() as kernels:
            rounds = 3 if options.dry else options.rounds
            measure_case(bench, name, known[name], rounds, limit, peers, kernels, options.limit)
            if options.again:
                with Worker(known[name].job(known[name].ours, device.type), kernels=kernels) as again:
                    first_step(bench, f"{name} first step, a second process", again)
    return bench.finish()


def first_step(bench: Bench, case: str, worker: Worker) -> None:
    bench.figure(case, "s", worker.facts["first_step_s"], {"budget": FIRST_STEP_S}, {"budget": 1.0})


def tell_start(bench: Bench, name: str, mine: Worker) -> None:
    """What is known of ours before anything is timed: that it is a graph, how long it took to begin, that no step waits."""
    if bench.device.type == "cuda" and not mine.facts["captured"]:
        bench.wrong.append(f"{name}: ours did not run as a graph; the reason is above")
    first_step(bench, f"{name} first step", mine)
    if peaks := peaks_in(mine.facts.get("phases", {})):  # a first step may reserve 5 % more than others
        keep_phases(bench, name, peaks, {"first step": ("a later step", peaks["steps"].reserved, 1 / 1.05)})
    if "syncs" in mine.facts:
        bench.figure(f"{name} host syncs", "syncs", mine.facts["syncs"], {"budget": 0}, {"budget": 1.0})


def peers_here(bench: Bench, name: str, case: Case, peers: list[str]) -> Iterator[tuple[str, Goal]]:
    """Those of a case's peers that were asked for, all of them when `peers` is empty, and can run."""
    for peer in (peer for peer in peers if peer not in case.peers):
        print(f"{name}: {peer} is no peer of this case; it has {', '.join(case.peers) or 'none'}", flush=True)
    for peer, goal in case.peers.items():
        if peers and peer not in peers:
            continue
        if "liger" in peer and not importable("liger_kernel"):
            bench.unmeasured.append(f"{name}: liger-kernel is not installed (pip install 'gpubound[bench]')")
            continue
        yield peer, goal


def measure_case(
    bench: Bench, name: str, case: Case, rounds: int, limit: measure.Ceilings, peers: list[str], kernels: str,
    peer_limit: float | None = None,
) -> None:  # fmt: skip
    """`kernels` is an empty folder: the first step compiles all of its own. `peer_limit`: seconds of a peer's first step."""
    import torch

    device = bench.device.type
    if (mine := started(bench, name, Worker, case.job(case.ours, device), kernels=kernels)) is None:
        return
    with mine:
        tell_start(bench, name, mine)
        if mine.facts["captured"] and device == "cuda":
            bench.figure(f"{name} GPU busy", "%", mine.ask(busy=BUSY_STEPS), {"budget": BUSY_PERCENT}, {"budget": 1.0})
        shape = SHAPES[case.shape]
        rate = limit.flops_per_s(torch.bfloat16) / shape.train_flops_per_token(case.seq)
        tokens = case.ours.startswith("ours")
        if case.least is not None:
            beside_goal(bench, name, case, mine, rounds, rate)
        for peer, (gate, moonshot) in peers_here(bench, name, case, peers):
            ceiling = ("bf16 rate", rate) if tokens else None
            with_peer(bench, name, case, mine, peer, gate, moonshot, rounds, ceiling, peer_limit)
        if alone := case.accumulate > 1 and not room_for_two(bench, mine):
            seconds = take_turns({"ours": mine}, rounds)
        elif case.accumulate > 1:
            against_one(bench, name, case, {"ours": mine}, {}, rounds)
    if alone:  # ours has ended, and given its memory back
        against_one(bench, name, case, {}, seconds, rounds)


def room_gib(bench: Bench) -> float:
    import torch

    return torch.cuda.get_device_properties(bench.device).total_memory / 2**30


def room_for_two(bench: Bench, mine: Worker) -> bool:
    """Whether the GPU can hold ours twice."""
    return "peak_gib" not in mine.facts or 2 * mine.facts["peak_gib"] < room_gib(bench)


def beside_goal(bench: Bench, name: str, case: Case, mine: Worker, rounds: int, rate: float) -> None:
    """Speed, and peak memory where no peer's is told, by themselves."""
    seconds, gates, moonshots = asked(case.least, case.tokens, rounds)
    found = measure.compare_samples(take_turns({"ours": mine}, rounds) | seconds, clock="perf_counter, drained")
    bench.keep(name, found, unit="tok/s", amount=case.tokens, ceiling=("bf16 rate", rate), gates=gates, moonshots=moonshots)
    if not case.peers and "peak_gib" in mine.facts:
        bench.figure(f"{name} peak memory", "GiB", mine.facts["peak_gib"], {"the GPU's memory": room_gib(bench)}, {})


def with_peer(
    bench: Bench, name: str, case: Case, mine: Worker, peer: str,
    gate: float | None, moonshot: float | None, rounds: int, ceiling: tuple[str, float] | None, limit: float | None = None,
) -> None:  # fmt: skip
    """Speed, and peak memory, beside one peer that starts from the same loss; and its first step, if it is compiled in it."""
    if (theirs := started(bench, name, Worker, case.job(peer, bench.device.type), limit=limit)) is None:
        return
    with theirs:
        a, b = mine.facts["loss"], theirs.facts["loss"]
        if case.accumulate == 1 and not abs(a - b) <= SAME_LOSS * abs(b):
            bench.wrong.append(f"{name}: the first loss of ours is {a:.4f}, of {peer} {b:.4f}; not timed")
            return
        if peer.startswith("compile"):
            bench.figure(f"{name} first step", "s", mine.facts["first_step_s"], {peer: theirs.facts["first_step_s"]}, {})
        found = measure.compare_samples(take_turns({"ours": mine, peer: theirs}, rounds), clock="perf_counter, drained")
        unit, amount = ("tok/s", case.tokens) if ceiling else ("ms", 1)
        gates, moonshots = {peer: gate} if gate else None, {peer: moonshot} if moonshot else None
        bench.keep(name, found, unit=unit, amount=amount, ceiling=ceiling, gates=gates, moonshots=moonshots)
        if "peak_gib" in theirs.facts and ceiling:
            allowed = theirs.facts["peak_gib"] + DTYPE_BYTES * mine.facts["parameters"] / 2**30
            bench.figure(
                f"{name} peak memory", "GiB", mine.facts["peak_gib"], {f"{peer} + fp32 accumulators": allowed},
                {"liger + fp32 accumulators": 1.0},
            )  # fmt: skip


def against_one(
    bench: Bench, name: str, case: Case, mine: dict[str, Worker], seconds: dict[str, list[float]], rounds: int
) -> None:
    """Accumulation must not cost: time per micro-batch beside our own step of one, which takes turns with `mine`, or is held
    against the `seconds` that ours took before."""
    one = replace(case, accumulate=1)
    if (single := started(bench, f"{name} by one micro-batch", Worker, one.job(case.ours, bench.device.type))) is None:
        return
    with single:
        seconds = seconds | take_turns(mine | {"accumulate 1": single}, rounds)
    seconds["ours"] = [s / case.accumulate for s in seconds["ours"]]
    found = measure.compare_samples(seconds, clock="perf_counter, drained")
    bench.keep(name, found, unit="tok/s", amount=one.tokens, gates={"accumulate 1": 1.0})


def profile(name: str, worker: Worker) -> None:
    """Where one step goes: kernel time by category, then the longest kernels. The worker ends."""
    with worker:
        seconds, kernels = worker.ask(steps=5), worker.ask(profile=1)
    total = sum(ms for _, ms, _ in kernels)
    print(f"{name} {worker.who}: {1e3 * seconds:.2f} ms a step, {total:.2f} ms of kernels")
    groups: dict[str, list[float]] = {}
    for kernel, ms, count in kernels:
        group = groups.setdefault(next((c for c, pattern in CATEGORIES if re.search(pattern, kernel, re.I)), "other"), [0, 0])
        group[0], group[1] = group[0] + ms, group[1] + count
    for category, (ms, count) in sorted(groups.items(), key=lambda item: -item[1][0]):
        print(f"  {category:28} {ms:8.3f} ms  {100 * ms / total:5.1f} %  {count:.0f} launches")
    for kernel, ms, count in kernels[:20]:
        print(f"    {ms:8.3f} ms  {count:5}  {kernel[:110]}")


if __name__ == "__main__":
    sys.exit(guarded("bench train", main, sys.argv[1:]))
