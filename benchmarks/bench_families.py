"""Decoding and training of families other than Llama, at published sizes with random weights, beside transformers and Liger.

Decoding: greedy, a prompt of 32 tokens and 256 new ones, beside transformers' own forward captured by hand ("graph") and what
reading once a token allows ("roofline"): the weights, of experts the chosen ones, and the cache and states.

Training: forward and backward of a placed model, beside Liger where it has a patch for the family, and plain transformers. Each
is a process, which holds one family after the other. Some have fewer layers than published; the case's name says so.

Where FLA is installed, transformers computes a gated delta rule by it. Peers are then called "graph-fla", "liger-fla", ... It
tunes 100 configurations of its kernels at their first launch. With Triton 3.4 to 3.7.0, FLA 0.6 refuses to train on Hopper.

Folders, if asked for, are quantised models of quantized_folders.py.
"""

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpubound
from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError
from gpubound.formatting import quantity
from gpubound.trace import strict

from . import results
from .bench_decode import batch_sizes
from .bench_place import agrees
from .decode_peers import (
    GAP,
    LENGTH,
    NEW,
    PROMPT,
    SPARSE_GAP,
    CapturedForward,
    Contender,
    experts_by,
    gaps,
    ours,
)
from .decode_turns import take_turns, warmed
from .families import FAMILIES, NAMED, build, by_fla, layers_of, train_of
from .harness import Bench, chosen, need_transformers, release
from .quantized_folders import FOLDERS, read
from .serving import Job
from .workers import Worker

PARTS = ("decode", "train", "folders")
DENSE, SPARSE, LIGER = 0.70, 0.45, 1.25  # gates: of the roofline at batch 1, and of Liger
STEPS = 3  # a round of training


@dataclass(frozen=True)
class Families:
    """Measure decoding and training of Qwen3.5, Gemma 4, gpt-oss, GLM-4 and others beside transformers and Liger.

    Examples: gpubound bench families --only qwen3.5-4b --parts decode --batch 1,32
              gpubound bench families --parts train --seconds 400
    """

    only: str = ",".join([*FAMILIES, *FOLDERS])
    """Models, by comma: qwen3.5-4b, gemma4-e4b, gpt-oss-20b, glm4-9b, deepseek-v2-lite, lfm2-1.2b, nemotron-h-8b, gemma3-4b.
    Both parts of the first four come before the others. Folders: gpt-oss-20b-mxfp4, llama-8b-gptq, llama-8b-gptq-act-order."""
    parts: str = "decode,train"
    """What to measure, by comma: decode, train, folders (that are quantised)."""
    batch: str = "1"
    """Batch sizes of decoding, by comma."""
    peer: str = "graph"
    """What decodes beside ours: graph, or none, which leaves the roofline alone, in half of the time."""
    rounds: int = 3
    """How often each contender takes its turn."""
    seconds: float = 170.0
    """No case begins later; those left out are listed as not measured. One takes 10 to 25 s."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Tiny models on the CPU: shows that the script works, keeps nothing."""


@dataclass
class Budget:
    """The time in which cases may begin."""

    bench: Bench
    seconds: float
    begun: float = field(default_factory=time.monotonic)

    def spend(self, case: str, measured: Callable[[], None]) -> None:
        """Measure a case if it may begin, and say how long it took. What it raises is reported, and the next case begins."""
        began, wrong, left_out = time.monotonic(), len(self.bench.wrong), len(self.bench.unmeasured)
        if (spent := began - self.begun) > self.seconds:
            self.bench.unmeasured.append(f"{case}: not begun after {spent:.0f} s; pass --seconds above {self.seconds:g}")
            return
        try:
            measured()
        except Exception as error:  # transformers, a certificate, a kernel or a process can raise anything
            self.bench.wrong.append(f"{case}: raised {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
        release(self.bench.device)
        for line in (*self.bench.wrong[wrong:], *self.bench.unmeasured[left_out:]):  # now: a run may be cut off before its end
            print(line, flush=True)
        print(f"{case}: {time.monotonic() - began:.0f} s", flush=True)


def main(argv: Sequence[str]) -> int:
    options = arguments(Families, argv, "bench families")
    asked = chosen("--only", options.only, [*FAMILIES, *FOLDERS])
    names = [name for name in FAMILIES if name in asked]
    parts = chosen("--parts", options.parts, PARTS)
    batches = batch_sizes(options.batch)
    if options.rounds < 3:
        raise ValueError(f"--rounds: got {options.rounds}, wanted at least 3, or there is no median to speak of.")
    need_transformers("bench families")
    if options.peer not in ("graph", "none"):
        raise ValueError(f"--peer: got {options.peer!r}, wanted graph or none.")
    device = resolve("cpu" if options.dry else "require")
    bench = Bench.of(options, "families", device, argv)
    budget = Budget(bench, options.seconds)
    with Contestants(bench) as contestants:
        for group in ([n for n in names if n in NAMED], [n for n in names if n not in NAMED]):
            for name in group if "decode" in parts else ():
                budget.spend(f"{name} decode", partial(measure_decode, bench, name, batches, options.rounds, options.peer))
            for name in group if "train" in parts else ():
                if FAMILIES[name].train is None:
                    print(f"{name}: has no training case", flush=True)
                else:
                    budget.spend(f"{name} train", partial(measure_train, bench, name, contestants, options.rounds))
        for name in [n for n in FOLDERS if n in asked] if "folders" in parts else ():
            budget.spend(name, partial(measure_folder, bench, name, batches, options.rounds))
    return bench.finish()


def measure_decode(bench: Bench, name: str, batches: Sequence[int], rounds: int, beside: str) -> None:
    rate = measure.ceilings(bench.device, quick=bench.dry).read_bytes_per_s
    model = build(name, bench.device, bench.dry).eval()
    model.config.use_cache = True
    for rows in batches:
        measure_rows(bench, name, model, rows, rounds, rate, beside)
        release(bench.device)


def measure_folder(bench: Bench, name: str, batches: Sequence[int], rounds: int) -> None:
    """A quantised folder: loading, and decoding beside the roofline alone."""
    rate, model = measure.ceilings(bench.device, quick=bench.dry).read_bytes_per_s, read(bench, name)
    for rows in batches:
        measure_rows(bench, name, model, rows, rounds, rate, "none")
        release(bench.device)


def measure_rows(bench: Bench, name: str, model: Any, rows: int, rounds: int, rate: float, beside: str = "graph") -> None:
    """One batch size, beside the captured forward, if it is asked for, and the roofline."""
    case, sparse = f"{name} decode batch {rows}", (FAMILIES | FOLDERS)[name].sparse
    drawn = torch.randint(model.config.vocab_size, (rows, PROMPT), generator=torch.Generator().manual_seed(rows))
    ids = drawn.to(bench.device)
    with strict():
        decoder = gpubound.decoder(model, rows, LENGTH)
    if decoder.path:
        bench.wrong.append(f"{case}: ours took the model's own forward: {decoder.path}")
        return
    mine = ours(decoder)
    mine(ids)  # a prefill is captured when its size comes again
    makers: dict[str, Callable[[], Contender]] = {"ours": lambda: mine}
    if beside == "graph":
        makers["graph-fla" if by_fla(name) else "graph"] = partial(CapturedForward, model, rows)
    limit = SPARSE_GAP if sparse else GAP
    works = {who: work for who, make in makers.items() if (work := judged(bench, case, who, make, model, ids, limit))}
    if "ours" not in works:
        return
    seconds = take_turns(works, ids, rounds)
    least = decoder.body.bytes_a_step([PROMPT + NEW // 2] * rows)  # of the mean step
    ceiling: tuple[str, float] | None = ("roofline", rows * rate / least)
    if len(works) < 2:  # a peer's failure is reported already
        seconds["roofline"], ceiling = [NEW * least / rate] * rounds, None
    found = measure.compare_samples(seconds, clock="perf_counter, prompt to last token")
    gates = {"roofline": SPARSE if sparse else DENSE} if rows == 1 and bench.device.type == "cuda" else {}
    bench.keep(case, found, unit="tok/s", amount=rows * NEW, ceiling=ceiling, gates=gates)
    print(f"{'':44} roofline: {quantity(least, 'B')} a step / {quantity(rate, 'B/s')} read here", flush=True)


def judged(
    bench: Bench, case: str, who: str, make: Callable[[], Contender], model: Any, ids: Tensor, limit: float
) -> Contender | None:
    """The contender, warm, if its tokens are the model's own within rounding. By their mean distance below the greatest logit:
    where rounding chooses experts, or passes through a state, the farthest of 256 is chance."""
    if (first := warmed(bench, case, who, make, ids)) is None:
        return None
    work, tokens = first
    with experts_by(model, "eager"):  # whose products are there in fp32, and take no copies of weights
        far = gaps(model, ids, tokens)
    mean, most = far.mean().item(), far.max().item()
    print(f"{case}: {who}'s tokens lie {mean:.3f} deviations below the model's own in the mean, {most:.2f} at most", flush=True)
    if tuple(tokens.shape) != (len(ids), NEW) or not mean <= limit:
        bench.wrong.append(
            f"{case}: {who}'s tokens {tuple(tokens.shape)} lie {mean:.2f} deviations below the model's own (limit {limit}); "
            "not timed"
        )
        return None
    return work


class Contestants:
    """The processes that train, which begin together at the first `get` and end with the context, or when one of them fails."""

    def __init__(self, bench: Bench) -> None:
        self._whos = ["ours", "eager"] if bench.dry else ["ours", "liger", "eager"]
        shape = "dry" if bench.dry else ""
        self._job = partial(Job, shape=shape, seq=0, micro=0, accumulate=1, device=bench.device.type)
        self._running: dict[str, Worker] = {}
        self._stack = ExitStack()

    def get(self) -> dict[str, Worker]:
        def begin(who: str) -> Worker:
            return self._stack.enter_context(Worker(self._job(who), "benchmarks.families_worker"))

        if not self._running:
            with ThreadPoolExecutor(len(self._whos)) as pool:
                self._running = dict(zip(self._whos, pool.map(begin, self._whos)))
        return self._running

    def __enter__(self) -> "Contestants":
        return self

    def end(self) -> None:
        self._stack.close()
        self._running = {}

    def __exit__(self, *_: object) -> None:
        self.end()


def measure_train(bench: Bench, name: str, contestants: Contestants, rounds: int) -> None:
    """Forward and backward. A contestant that cannot is reported. When a process ends, the next family gets new ones."""
    try:
        contest(bench, name, contestants.get(), rounds)
    except MeasureError:
        contestants.end()
        raise


def contest(bench: Bench, name: str, workers: Mapping[str, Worker], rounds: int) -> None:
    """Build every contestant's model, check that they agree on loss and gradient norm, then let them run in turn."""
    train = train_of(name, bench.dry)
    assert train is not None
    case = f"{name}{layers_of(name, train)}, seq {train.seq} micro {train.micro} forward+backward"
    with ThreadPoolExecutor(len(workers)) as pool:
        said = dict(zip(workers, pool.map(lambda one: one.ask(family=name), workers.values())))
    ready = {who: facts for who, facts in said.items() if "loss" in facts}
    for who, facts in said.items():
        if "absent" in facts:
            print(f"{case}: {who} has no patch for {facts['absent']}", flush=True)
        elif "error" in facts:
            (bench.wrong if who == "ours" else bench.unmeasured).append(f"{case}: {who} raised {facts['error']}")
    if "ours" in ready:
        seconds: dict[str, list[float]] = {who: [] for who in ready if agrees(bench, case, who, ready)}
        order = list(seconds)
        for turn in range(rounds):
            random.Random(turn).shuffle(order)
            for who in order:
                seconds[who].append(workers[who].ask(steps=1 if bench.dry else STEPS))
        named = {who: f"{who}-fla" if who != "ours" and ready[who].get("fla") else who for who in seconds}
        if len(seconds) > 1:
            clock = "device events" if bench.device.type == "cuda" else "perf_counter"
            found = measure.compare_samples({named[who]: taken for who, taken in seconds.items()}, clock=clock)
            bench.keep(
                case, found, unit="tok/s", amount=train.seq * train.micro, gates=dict.fromkeys(("liger", "liger-fla"), LIGER)
            )
        if len(seconds) > 1 and bench.device.type == "cuda":
            peaks = {named[who]: ready[who]["peak_gib"] for who in seconds}
            bench.figure(f"{case} peak memory", "GiB", peaks.pop("ours"), peaks, {})
    for worker in workers.values():
        worker.ask()


if __name__ == "__main__":
    sys.exit(guarded("bench families", main, sys.argv[1:]))
