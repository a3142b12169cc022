"""Forward and backward of a Hugging Face Llama placed by gpubound, beside Liger's patches, compile and plain transformers.

One process a contestant, because Liger patches transformers' classes for the whole process. They are built once, then run in
turn in random order: each line on a worker's stdin is a round, answered by its median seconds a step.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError
from gpubound.measure.memory_phases import MemoryPhases
from gpubound.trace import strict

from . import results
from .harness import Bench, chosen, need_transformers
from .memory_rows import keep_phases, peaks_in
from .shapes import SHAPES, llama_config

CONTESTANTS = ("ours", "liger", "eager", "compile")
SEEN = "@"  # marks a worker's own lines among what libraries print


@dataclass(frozen=True)
class Setting:
    shape: str
    seq: int
    micro: int
    gate: float | None
    work: str = "forward+backward"

    @property
    def case(self) -> str:
        return f"{self.shape} seq {self.seq} micro {self.micro} {self.work}"


SETTINGS = {
    "1b": Setting("1b", 2048, 4, 1.05), "350m": Setting("350m", 1024, 16, 1.10), "8b": Setting("8b", 2048, 1, None),
    "tiny": Setting("tiny", 16, 2, 1.0),
}  # fmt: skip
PLACING = int(1.5 * 2**30)  # bytes that placing may reserve besides the weights
# Each contestant rounds to bf16 at its own places through every layer; the loss is a mean over thousands of tokens.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-2, 5e-2


@dataclass(frozen=True)
class Place:
    """Measure a placed Hugging Face Llama beside Liger, torch.compile and plain transformers.

    Example: gpubound bench place --shapes 1b --peers liger,eager
    """

    shapes: str = "1b,350m"
    """Shapes, by comma: 1b (seq 2048, micro 4), 350m (seq 1024, micro 16), 8b (seq 2048, micro 1)."""
    peers: str = "liger,eager,compile"
    """Peers, by comma."""
    rounds: int = 10
    """Rounds of three steps for each contestant."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU beside plain transformers: shows that the script works, keeps nothing."""
    worker: str = ""
    """Used by the benchmark itself: run as this contestant."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Place, argv, "bench place")
    settings = [SETTINGS[name] for name in (["tiny"] if options.dry else chosen("--shapes", options.shapes, list(SETTINGS)))]
    peers = ["eager"] if options.dry else chosen("--peers", options.peers, CONTESTANTS[1:])
    need_transformers("bench place")
    device = resolve("cpu" if options.dry else "require")
    if options.worker:
        return serve(options.worker, settings[0], device)
    bench = Bench.of(options, "place", device, argv)
    flops_per_s = measure.ceilings(device, quick=options.dry).flops_per_s(torch.float32 if options.dry else torch.bfloat16)
    for setting in settings:
        contest(bench, setting, ["ours", *peers], 3 if options.dry else options.rounds, flops_per_s)
    return bench.finish()


def contest(bench: Bench, setting: Setting, names: Sequence[str], rounds: int, flops_per_s: float) -> None:
    """Build every contestant, check that they agree on loss and gradient norm, then let them run in turn."""
    ready, seconds = in_turn(bench, setting.case, {name: Worker(name, setting.shape, bench.dry) for name in names}, rounds)
    if peaks := peaks_in(ready.get("ours", {}).get("phases", {})):
        limits = {"place": ("the weights and 1.5 GiB", ready["ours"]["weights"] + PLACING, 1.0)}
        peers = {name: peaks_in(ready[name]["phases"]) for name in seconds if name != "ours"}
        keep_phases(bench, setting.case, peaks, limits, peers)
    if len(seconds) < 2:
        return
    found = measure.compare_samples(seconds, clock="device events" if bench.device.type == "cuda" else "perf_counter")
    tokens = setting.seq * setting.micro
    ceiling = ("bf16 rate", flops_per_s / SHAPES[setting.shape].train_flops_per_token(setting.seq))
    bench.keep(
        setting.case,
        found,
        unit="tok/s",
        amount=tokens,
        ceiling=ceiling,
        gates={} if setting.gate is None else {"liger": setting.gate},
    )
    if bench.device.type == "cuda":
        peaks = {name: ready[name]["peak_gib"] for name in seconds}
        bench.figure(f"{setting.case} peak memory", "GiB", peaks.pop("ours"), peaks, {})


def in_turn(
    bench: Bench, case: str, workers: dict[str, "Worker"], rounds: int
) -> tuple[dict[str, dict], dict[str, list[float]]]:
    """Every contestant's first answer, and the seconds of each round of those that agree with ours; none without ours."""
    try:
        ready = {name: answer for name, worker in workers.items() if (answer := worker.read()) is not None}
        for name in workers:
            if name not in ready:
                (bench.wrong if name == "ours" else bench.unmeasured).append(f"{case}: {name} could not start")
        if "ours" not in ready:
            return ready, {}
        seconds: dict[str, list[float]] = {name: [] for name in ready if agrees(bench, case, name, ready)}
        order = list(seconds)
        for turn in range(rounds):
            random.Random(turn).shuffle(order)
            for name in order:
                seconds[name].append(workers[name].round())
    finally:
        for worker in workers.values():
            worker.stop()
    return ready, seconds


def agrees(bench: Bench, case: str, name: str, ready: dict[str, dict]) -> bool:
    """Whether a contestant's first loss and gradient norm are ours; what is not is reported, and ends the run red."""
    limits = {"loss": LOSS_TOLERANCE, "gradient_norm": GRADIENT_TOLERANCE}
    for what, limit in limits.items():
        ours, theirs = ready["ours"][what], ready[name][what]
        if not abs(ours - theirs) <= limit * abs(theirs):
            bench.wrong.append(f"{case}: {what} is {ours:.5g} in ours, {theirs:.5g} in {name} (limit {limit:.0%}); not timed")
            return False
    return True


class Worker:
    """The parent's end of one contestant, whose life is `module --worker`."""

    def __init__(self, name: str, shape: str, dry: bool, module: str = "benchmarks.bench_place"):
        command = [sys.executable, "-m", module, "--worker", name, "--shapes", shape]
        self.name = name
        self.process = subprocess.Popen(
            command + (["--dry"] if dry else []), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def read(self) -> dict | None:
        """The worker's next answer; None when it has ended."""
        for line in self.process.stdout:
            if line.startswith(SEEN):
                return json.loads(line.removeprefix(SEEN))
        return None

    def round(self) -> float:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        answer = self.read()
        if answer is None:
            raise MeasureError(f"bench: {self.name} ended in the middle of the measurement; its message is above.")
        return answer["seconds"]

    def stop(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:  # it hangs in a library's exit; its figures are in
            self.process.kill()
            self.process.wait()


def serve(name: str, setting: Setting, device: torch.device) -> int:
    """A contestant's life: build, warm up, say the loss and the gradient norm, then a round for every line on stdin."""
    memory, on_gpu = MemoryPhases(device), device.type == "cuda"
    step = contestant(name, setting, device, memory)
    with memory("first step"):
        model, loss = step()
        answer: dict[str, Any] = {"loss": loss.item(), "peak_gib": 0.0}
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]).norm()  # no copies in fp32
    del gradients
    answer |= {"gradient_norm": norm.item(), "weights": sum(p.nbytes for p in model.parameters())}
    with memory("steps"):
        for _ in range(3 if on_gpu else 1):
            step()
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        answer["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    tell(answer | {"phases": {phase: peak._asdict() for phase, peak in memory.peaks.items()}})
    for _ in sys.stdin:
        tell({"seconds": measure.time(step, warmup=0, runs=3 if on_gpu else 1, device=device).median_s})
    return 0


def contestant(name: str, setting: Setting, device: torch.device, memory: MemoryPhases) -> Callable[[], tuple]:
    """One step of it: gradients cleared, forward with the loss, backward. Weights and batch are the same for all. `memory`
    measures the phase of placing."""
    from transformers import LlamaForCausalLM

    if name == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    shape = SHAPES[setting.shape]
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM._from_config(
            llama_config(shape, setting.seq),
            attn_implementation="sdpa",
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        ).train()
        ids = torch.randint(shape.vocab, (setting.micro, setting.seq))
    if name == "ours":
        from gpubound.place import place

        with memory("place"):
            table = place(model, device)
        print(table, file=sys.stderr)
    forward = torch.compile(model) if name == "compile" else model

    def step() -> tuple:
        model.zero_grad(set_to_none=True)
        with strict():
            loss = forward(input_ids=ids, labels=ids).loss
            loss.backward()
        return model, loss

    return step


def tell(answer: dict) -> None:
    print(SEEN + json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(guarded("bench place", main, sys.argv[1:]))
