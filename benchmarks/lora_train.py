"""Whole LoRA steps beside PEFT's, and beside what no such step can leave out: the frozen model's forward and dX."""

import tempfile
from dataclasses import dataclass, replace
from functools import partial

from gpubound import measure

from .bench_train import BUSY_PERCENT, BUSY_STEPS, SAME_LOSS, Case, Goal, peers_here, tell_start
from .harness import Bench, asked
from .lora_worker import ADAPTERS
from .results import FLOOR
from .shapes import SHAPES
from .workers import Worker, started, take_turns

LearningWorker = partial(Worker, module="benchmarks.lora_worker")
LR = 5e-4
LOSSES = 20
# Of how far the loss falls in them. Adam's first steps have the gradient's signs, whatever its size: where rounding to bf16 is
# as large as a gradient, its sign is chance. In a bf16 model of four layers, 256 wide, falls differ by 4e-4 of it at most.
# What trains less than all adapters, or by another scale, is far off.
SAME_FALL = 0.05


@dataclass(frozen=True)
class LoraCase(Case):
    lr: float = LR
    floor: str | None = "floor"
    """the contender that runs the frozen model alone; None: told in another case"""
    alike: bool = True
    """whether ours and its peers compute one thing, and must learn alike; else they begin alike and learn"""


UNJUDGED = (None, None)
PEERS = dict.fromkeys(("peft", "peft-autocast", "peft-liger", "peft-liger-autocast"), UNJUDGED)
COMPILED = {"peft-compile": (1.35, 1.74), "peft-compile-autocast": (1.35, None)}

CASES = {
    "1b": LoraCase("1b", 1024, 8, 1, COMPILED | PEERS),
    "1b-8192": LoraCase("1b", 8192, 1, 1, COMPILED | PEERS),
    "8b": LoraCase("8b", 4096, 1, 1, PEERS, least=(14_000, 16_000)),
    "135m": LoraCase("135m", 512, 1, 1, PEERS | {"peft": (4.0, None), "peft-compile": UNJUDGED}),
}
for name, base, least in (("8b", "fp8", (18_000, 22_000)), ("1b", "nf4", None)):  # beside the base in bf16
    CASES[f"{name}-{base}"] = replace(
        CASES[name], peers={"ours-lora": UNJUDGED}, ours=f"ours-{base}", floor=f"floor-{base}", least=least, alike=False
    )
TINY = {"tiny": LoraCase("tiny", 16, 8, 1, {"peft": UNJUDGED}, least=(1.0, 2.0))}


def pefts_own(case: LoraCase) -> LoraCase:
    """Adapters that PEFT attached, trained by our step."""
    return replace(case, ours="ours-peft", peers={"ours-lora": UNJUDGED, "peft": UNJUDGED}, least=None, floor=None)


def alone(case: LoraCase) -> LoraCase:
    """Ours, beside nobody."""
    return replace(case, peers={}, least=None, floor=None)


def one_each(case: LoraCase) -> LoraCase:
    """Several adapters in a batch of as many tokens, a row each, beside one adapter for all rows."""
    return replace(
        case, seq=case.tokens // ADAPTERS, micro=ADAPTERS, ours="ours-rows", peers={"ours-lora": (0.9, None)}, least=None,
        floor=None, alike=False,
    )  # fmt: skip


def measure_case(bench: Bench, name: str, case: LoraCase, rounds: int, flops_per_s: float, peers: list[str]) -> None:
    device = bench.device.type
    with tempfile.TemporaryDirectory() as kernels:  # empty: the first step compiles all of its own
        if (mine := started(bench, name, LearningWorker, case.job(case.ours, device), kernels=kernels)) is None:
            return
        with mine:
            tell_start(bench, name, mine)
            losses = [mine.facts["loss"], *mine.ask(losses=LOSSES)]
            if mine.facts["captured"] and device == "cuda":
                bench.figure(f"{name} GPU busy", "%", mine.ask(busy=BUSY_STEPS), {"budget": BUSY_PERCENT}, {"budget": 1.0})
            if case.floor is not None:
                beside_floor(bench, name, case, mine, case.floor, rounds, flops_per_s)
            for peer, goal in peers_here(bench, name, case, peers):
                beside_peer(bench, name, case, mine, losses, peer, goal, rounds)


def beside_floor(bench: Bench, name: str, case: LoraCase, mine: Worker, floor: str, rounds: int, flops_per_s: float) -> None:
    """The price of training adapters, which is told in a sentence, too; and what was asked for."""
    if (frozen := started(bench, f"{name} floor", LearningWorker, case.job(floor, bench.device.type))) is None:
        return
    with frozen:
        seconds = take_turns({"ours": mine, FLOOR: frozen}, rounds)
    budget, gates, moonshots = asked(case.least, case.tokens, rounds)
    found = measure.compare_samples(seconds | budget, clock="perf_counter, drained")
    rate = flops_per_s / SHAPES[case.shape].frozen_flops_per_token(case.seq)
    ceiling = "bf16 rate", rate
    bench.keep(name, found, unit="tok/s", amount=case.tokens, ceiling=ceiling, gates=gates, moonshots=moonshots)
    price = found.ratios[FLOOR]
    print(f"{name}: LoRA step = {1 / price.value:.2f} x (frozen forward + dX)", flush=True)


def beside_peer(
    bench: Bench, name: str, case: LoraCase, mine: Worker, losses: list[float], peer: str,
    goal: Goal, rounds: int,
) -> None:  # fmt: skip
    """Speed and peak memory beside a peer that learns as fast from the same start."""
    if (theirs := started(bench, name, LearningWorker, case.job(peer, bench.device.type))) is None:
        return
    with theirs:
        if why := differs(losses, [theirs.facts["loss"], *theirs.ask(losses=LOSSES)], case.alike):
            bench.wrong.append(f"{name}: {why} in {peer}; not timed")
            return
        found = measure.compare_samples(take_turns({"ours": mine, peer: theirs}, rounds), clock="perf_counter, drained")
        gate, moonshot = ({peer: wanted} if wanted else None for wanted in goal)
        bench.keep(name, found, unit="tok/s", amount=case.tokens, gates=gate, moonshots=moonshot)
        if "peak_gib" in theirs.facts:
            peak, beside = mine.facts["peak_gib"], {peer: theirs.facts["peak_gib"]}
            bench.figure(f"{name} peak memory", "GiB", peak, beside, {} if peer.startswith("ours") else {peer: 1.0})


def differs(ours: list[float], theirs: list[float], alike: bool = True) -> str | None:
    """Why two runs of losses, from the first step on, are not those of one computation; None where they are.

    Not `alike`: why they do not begin as one, or one of them does not fall.
    """
    apart, falls = abs(ours[0] - theirs[0]), [run[0] - run[-1] for run in (ours, theirs)]
    if alike and apart <= SAME_FALL * falls[1] and abs(falls[0] - falls[1]) <= SAME_FALL * falls[1]:
        return None
    if not alike and apart <= SAME_LOSS * theirs[0] and min(falls) > 0:
        return None
    told = [f"from {run[0]:.4f} to {run[-1]:.4f}" for run in (ours, theirs)]
    return f"the loss falls {told[0]} in ours, {told[1]}"
