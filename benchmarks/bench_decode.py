"""Greedy decoding of a Hugging Face Llama beside Hugging Face's own ways: a prompt of 32 tokens, 256 new ones.

Everyone decodes one model with random weights, in turn, in random order, from the prompt to the last token on the host. A speed
that was asked for stands as the peer "budget", what reading the weights and the live cache once a token allows as "roofline".
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpubound
from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError
from gpubound.trace import strict
from gpubound.words import quantity

from . import results
from .decode_cache import measure_cache
from .decode_peers import (
    CONTENDERS,
    GAP,
    LENGTH,
    NEW,
    PROMPT,
    SPARSE_GAP,
    Contender,
    build_model,
    gap,
    is_sparse,
    ours,
    prompts,
)
from .decode_stages import measure_stages
from .decode_start import MARK
from .harness import Bench, chosen, need_transformers, release

PARTS = ("start", "speed", "packed", "cache", "host")
STAGES = "stages"  # a part for machines with two GPUs
CPU = "cpu"  # a part by itself, for machines without a GPU
CPU_SHAPE = "135m"  # SmolLM2-135M's
CPU_BATCHES = (1, 20)
PACKED = {"int4": 1.8, "int8": None, "fp8": None}  # copies of the weights -> gate at 8b, over the live ones
HOST_US = 5.0  # of the host's time, a token
HOST_K = 32  # tokens a launch there
BUSY = 0.97  # of the speed stays beside two busy threads
BEYOND_BYTES = 100e6  # beyond weights and cache


@dataclass(frozen=True)
class Goal:
    """Tokens a second, (gate, moonshot) by batch; seconds to the first token, and whether they are a gate."""

    speed: dict[int, tuple[float, float]] = field(default_factory=dict)
    first_token_s: float = 3.0
    gated: bool = False


GOALS = {
    "135m": Goal(),
    "350m": Goal({1: (2_000, 3_000), 32: (17_900, 26_800)}, 1.0, gated=True),
    "1b": Goal({1: (1_250, 1_450), 32: (25_200, 32_000)}),
    "8b": Goal({1: (250, 265), 32: (6_000, 6_800)}, 3.0, gated=True),
    "moe": Goal(),
    "tiny": Goal(),
}


@dataclass(frozen=True)
class Decode:
    """Measure greedy decoding beside Hugging Face, beside budgets and beside the roofline.

    start: from a loaded model to the first token, in a fresh process, with an empty and a filled Triton cache; its memory and
    host syncs. speed: tokens a second. packed: over int4, int8 and fp8 copies of the weights. cache: over long texts, with
    keys and values in int8 and fp8. host: the host's time a token, and the speed beside two busy Python threads.
    stages: the layers of 8b on two GPUs beside one; it is not among those measured by default.
    cpu: tokens a second on the CPU beside generate, in fp32 and bf16; it needs no GPU, and is measured by itself.

    Examples: gpubound bench decode --only 1b --batch 1 --peers graph
              gpubound bench decode --parts cpu
    """

    only: str | None = None
    """Shapes, by comma: 135m, 350m, 1b, 8b, moe (64 experts, 8 a token); tiny is --dry. By default 350m,1b,8b; on the CPU
    135m."""
    batch: str | None = None
    """Batch sizes, by comma. By default 1,32; on the CPU 1,20."""
    peers: str = "eager,graph"
    """Peers, by comma: eager (generate), graph (a forward captured by hand), compile (a static cache; 25 s to start)."""
    parts: str = ",".join(PARTS)
    """What to measure, by comma: start, speed, packed, cache, host, stages; or cpu alone."""
    rounds: int = 3
    """How often each contender takes its turn; eager takes 3 to 5 s each time."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Decode, argv, "bench decode")
    dry = options.dry or options.only == "tiny"
    parts = chosen("--parts", options.parts, (*PARTS, STAGES, CPU))
    on_cpu = parts == [CPU]
    if CPU in parts and not on_cpu:
        raise ValueError("--parts: cpu is measured by itself; leave the others out.")
    names = ["tiny"] if dry else chosen("--only", options.only or (CPU_SHAPE if on_cpu else "350m,1b,8b"), list(GOALS))
    peers = chosen("--peers", options.peers, list(CONTENDERS))
    batches = batch_sizes(options.batch or (",".join(map(str, CPU_BATCHES)) if on_cpu else "1,32"))
    if options.rounds < 3:
        raise ValueError(f"--rounds: got {options.rounds}, wanted at least 3, or there is no median to speak of.")
    need_transformers("bench decode")
    device = resolve("cpu" if dry or on_cpu else "require")
    bench = Bench.of(replace(options, dry=dry), "decode", device, argv)
    if on_cpu:
        rate = measure.ceilings(device, quick=dry).read_bytes_per_s
        for name in names:
            measure_cpu(bench, name, batches, options.rounds, rate)
    if "start" in parts:  # while nothing of ours is on the device
        for name in names:
            measure_start(bench, name)
    for name in names if STAGES in parts else ():
        measure_stages(bench, name, options.rounds, take_turns)
    if {"speed", "packed", "cache", "host"} & set(parts):
        rate = measure.ceilings(device, quick=dry).read_bytes_per_s
        for name in names:
            model = build_model(name, device)
            for rows in batches if "speed" in parts else ():
                measure_speed(bench, name, model, rows, peers, options.rounds, rate)
                release(device)
            if "packed" in parts and is_sparse(name):
                print(f"{name}: experts are read as they are, so there is nothing packed to measure", flush=True)
            elif "packed" in parts:
                measure_packed(bench, name, model, options.rounds, rate)
            if "cache" in parts:
                measure_cache(bench, name, model, options.rounds, rate)
                release(device)
            if "host" in parts:
                measure_host(bench, name, model)
            del model
            release(device)
    return bench.finish()


def batch_sizes(text: str) -> list[int]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := [word for word in found if not word.isdecimal() or int(word) < 1]:
        raise ValueError(f"--batch: got {wrong[0]!r}, wanted batch sizes by comma, such as 1,32.")
    return [int(word) for word in found]


# --- start ---


def measure_start(bench: Bench, name: str) -> None:
    """The same twice: the first process finds an empty Triton cache, the second one what the first has compiled."""
    goal = GOALS[name]
    with tempfile.TemporaryDirectory(prefix="gpubound-triton-") as cache:
        for state in ("empty", "filled"):
            try:
                facts = started(name, bench.device, cache)
            except MeasureError as error:
                bench.unmeasured.append(f"{name}: {error}")
                return
            gates = {"budget": 1.0} if goal.gated and state == "filled" else {}
            case = f"{name} first token, fresh process, {state} Triton cache"
            bench.figure(case, "s", facts["first_token_s"], {"budget": goal.first_token_s}, gates)
            print(f"{'':44} {facts['built_s']:.2f} s of it until the decoder is built and verified", flush=True)
    if facts["path"]:
        bench.wrong.append(f"{name}: ours took the model's own forward: {facts['path']}")
    if "syncs" in facts:
        bench.figure(f"{name} host syncs in a generation", "syncs", facts["syncs"], {"budget": 0}, {"budget": 1.0})
        beyond, allowed = facts["beyond_bytes"] / 2**30, BEYOND_BYTES / 2**30
        bench.figure(f"{name} memory beyond weights and cache", "GiB", beyond, {"budget": allowed}, {"budget": 1.0})


def started(name: str, device: torch.device, cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.decode_start", name, device.type]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise MeasureError(f"its fresh process ended with {done.returncode} and no figures; its own message is above.")


# --- speed ---


def measure_speed(
    bench: Bench, name: str, model: Any, rows: int, peers: Sequence[str], rounds: int, read_bytes_per_s: float, note: str = ""
) -> dict[str, list[float]]:
    """Seconds of each, round by round; nothing where ours could not be timed. `note` stands behind the shape's name."""
    case, ids = f"{name}{note} batch {rows}", prompts(name, rows, bench.device)
    with strict():
        decoder = gpubound.decoder(model, rows, LENGTH)
    if decoder.path:
        bench.wrong.append(f"{case}: ours took the model's own forward: {decoder.path}")
        return {}
    mine = ours(decoder)
    for _ in range(2):  # a prefill is captured when its size comes again
        mine(ids)
    makers: dict[str, Callable[[], Contender]] = {"ours": lambda: mine}
    makers |= {peer: partial(CONTENDERS[peer], model, rows) for peer in peers}
    limit = SPARSE_GAP if is_sparse(name) else GAP
    ready = {who: found for who, make in makers.items() if (found := judged(bench, case, who, make, model, ids, limit))}
    if "ours" not in ready:
        return {}
    seconds = take_turns(ready, ids, rounds)
    goal = GOALS[name].speed.get(rows)
    if goal:
        seconds["budget"] = [rows * NEW / goal[0]] * rounds
    if len(seconds) < 2:
        bench.unmeasured.append(f"{case}: no peer and no budget to stand beside")
        return {}
    least = decoder.body.bytes_a_step([PROMPT + NEW // 2] * rows)  # of the mean step
    found = measure.compare_samples(seconds, clock="perf_counter, prompt to last token")
    bench.keep(
        case, found, unit="tok/s", amount=rows * NEW, ceiling=("roofline", rows * read_bytes_per_s / least),
        gates={"budget": 1.0} if goal else None, moonshots={"budget": goal[1] / goal[0]} if goal else None,
    )  # fmt: skip
    print(f"{'':44} roofline: {quantity(least, 'B')} a step / {quantity(read_bytes_per_s, 'B/s')} read here", flush=True)
    return seconds


def measure_cpu(bench: Bench, name: str, batches: Sequence[int], rounds: int, read_bytes_per_s: float) -> None:
    """Beside generate. Each case twice: by its medians, and by its best rounds, which other processes disturb least."""
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(name, bench.device, dtype)
        for rows in batches:
            note = f" {str(dtype).removeprefix('torch.')} on the CPU"
            seconds = measure_speed(bench, name, model, rows, ["eager"], rounds, read_bytes_per_s, note)
            best = {who: rows * NEW / min(found) for who, found in seconds.items()}
            if "eager" in best:
                bench.figure(f"{name}{note} batch {rows}, best round", "tok/s", best["ours"], {"eager": best["eager"]}, {})


def measure_packed(bench: Bench, name: str, model: Any, rounds: int, read_bytes_per_s: float) -> None:
    """One row over rounded copies of the weights, beside the live ones; each kind beside its own roofline."""
    ids = prompts(name, 1, bench.device)
    for kind, gate in PACKED.items():
        decoders = {"ours": gpubound.decoder(model, 1, LENGTH, weights=kind), "bf16": gpubound.decoder(model, 1, LENGTH)}
        contenders = {who: ours(decoder) for who, decoder in decoders.items()}
        for work in contenders.values():
            work(ids)
            work(ids)
        least = decoders["ours"].body.bytes_a_step([PROMPT + NEW // 2])
        found = measure.compare_samples(take_turns(contenders, ids, rounds), clock="perf_counter, prompt to last token")
        bench.keep(
            f"{name} batch 1 {kind}", found, unit="tok/s", amount=NEW, ceiling=("roofline", read_bytes_per_s / least),
            gates={"bf16": gate} if gate and name == "8b" else None,
        )  # fmt: skip
        del decoders, contenders
        release(bench.device)


def judged(
    bench: Bench, case: str, who: str, make: Callable[[], Contender], model: Any, ids: Tensor, limit: float = GAP
) -> Contender | None:
    """The contender, warm, if its tokens are the model's own within rounding."""
    try:
        work = make()
        tokens = work(ids)
    except Exception as error:  # a peer can raise anything; the run goes on without it
        said = (str(error).strip().splitlines() or [""])[0]
        (bench.wrong if who == "ours" else bench.unmeasured).append(f"{case}: {who} raised {type(error).__name__}: {said}")
        return None
    far = gap(model, ids, tokens)
    if tuple(tokens.shape) != (len(ids), NEW) or not far <= limit:
        bench.wrong.append(
            f"{case}: {who}'s tokens {tuple(tokens.shape)} lie up to {far:.2f} deviations below the model's own (limit "
            f"{limit}); not timed"
        )
        return None
    return work


def take_turns(works: dict[str, Contender], ids: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each, round by round. Tokens end on the host, so the host's clock sees all of it."""
    order, found, shuffle = list(works), {who: [] for who in works}, random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for who in order:
            begun = time.perf_counter()
            works[who](ids)
            found[who].append(time.perf_counter() - begun)
    return found


# --- host ---


def measure_host(bench: Bench, name: str, model: Any) -> None:
    """At batch 1: what the host does for a token, and whether it matters that it has other things to do."""
    ids = prompts(name, 1, bench.device).tolist()
    with strict():
        decoder = gpubound.decoder(model, 1, LENGTH)
        for _ in range(2):
            decoder.generate(ids, max_new_tokens=NEW, stop=())
    spent = host_us(decoder, ids, 1 if bench.dry else 5)
    case = f"{name} host time a token, {HOST_K} a launch"
    bench.figure(case, "us", spent, {"budget": HOST_US}, {"budget": 1.0})
    rounds, new = (
        (3, 3) if bench.dry else (5, NEW)
    )  # on a CPU every op of a token is launched by the host, and waits for the GIL
    whole: dict[str, list[float]] = {"ours": [], "undisturbed": []}
    later: dict[str, list[float]] = {"ours": [], "undisturbed": []}
    for _ in range(rounds):
        for who, threads in (("undisturbed", 0), ("ours", 2)):
            with busy(threads):
                found = decoder.generate(ids, max_new_tokens=new, stop=())
            whole[who].append(found.seconds)
            later[who].append(found.seconds - found.first_token_s)
    for what, seconds, tokens, gates in (
        ("after the first token", later, new - 1, {"undisturbed": BUSY}),
        ("with its prompt", whole, new, None),
    ):
        found = measure.compare_samples(seconds, clock="perf_counter")
        bench.keep(f"{name} beside two busy Python threads, {what}", found, unit="tok/s", amount=tokens, gates=gates)


def host_us(decoder: Any, ids: list[list[int]], rounds: int) -> float:
    """A token's share of the median cycle from one launch of HOST_K tokens to the next, less what it waited for the device."""
    waited, marks, cycles = [0.0], [], []
    launch, events = decoder.graphs.launch, decoder.slots._events

    def marking(*what: Any) -> None:
        if HOST_K in what:
            marks.append((time.perf_counter(), waited[0]))
        launch(*what) if events else timed(waited, lambda: launch(*what))  # on a CPU the launch is the work

    decoder.graphs.launch, decoder.slots._events = marking, [Waiting(event, waited) for event in events]
    try:
        for _ in range(rounds):
            marks.clear()
            decoder.generate(ids, max_new_tokens=LENGTH - PROMPT, stop=())
            cycles += [(then[0] - now[0]) - (then[1] - now[1]) for now, then in pairwise(marks)]
    finally:
        del decoder.graphs.launch
        decoder.slots._events = events
    return statistics.median(cycles) / HOST_K * 1e6


class Waiting:
    """An event that is waited for at once when it is asked, so that the waiting can be told from the work."""

    def __init__(self, event: torch.cuda.Event, waited: list[float]):
        self.event, self.waited = event, waited

    def record(self) -> None:
        self.event.record()

    def query(self) -> bool:
        timed(self.waited, self.event.synchronize)
        return True


def timed(total: list[float], work: Callable[[], object]) -> None:
    begun = time.perf_counter()
    work()
    total[0] += time.perf_counter() - begun


@contextmanager
def busy(threads: int) -> Iterator[None]:
    """So many threads that compute in Python all the time, each holding the GIL as long as it may."""
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    running = [threading.Thread(target=count, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in running:
            thread.join()


if __name__ == "__main__":
    sys.exit(guarded("bench decode", main, sys.argv[1:]))
