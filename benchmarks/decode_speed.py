"""The speed's part of the decoding benchmark: tokens a second beside peers, budget and roofline, and over packed weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import gpubound
from gpubound import measure
from gpubound.formatting import quantity
from gpubound.measure.memory_phases import MemoryPhases
from gpubound.trace import strict

from .decode_goals import GOALS
from .decode_peers import CONTENDERS, GAP, LENGTH, NEW, PROMPT, SPARSE_GAP, Contender, build_model, is_sparse, ours, prompts
from .decode_turns import judged, take_turns
from .harness import Bench, asked, release
from .memory_rows import keep_phases

ROOFLINE = 0.5  # of a batch: no step takes longer than reading its weights and its cache twice; one row is latency
PACKED = {"int4": 1.8, "int8": None, "fp8": None}  # copies of the weights -> gate at 8b, over the live ones


def measure_speed(
    bench: Bench,
    name: str,
    model: Any,
    rows: int,
    peers: Sequence[str],
    rounds: int,
    read_bytes_per_s: float,
    note: str = "",
) -> dict[str, list[float]]:
    """Seconds of each, round by round; nothing where ours could not be timed. `note` stands behind the shape's name."""
    case, ids = f"{name}{note} batch {rows}", prompts(name, rows, bench.device)
    memory = MemoryPhases(bench.device)
    with memory("make decoder"), strict():
        decoder = gpubound.decoder(model, rows, LENGTH)
    if decoder.path:
        bench.wrong.append(f"{case}: ours took the model's own forward: {decoder.path}")
        return {}
    mine = ours(decoder)
    with memory("generate"):
        for _ in range(2):  # a prefill is captured when its size comes again
            mine(ids)
    keep_phases(bench, case, memory.peaks)
    makers: dict[str, Callable[[], Contender]] = {"ours": lambda: mine}
    makers |= {peer: partial(CONTENDERS[peer], model, rows) for peer in peers}
    limit = SPARSE_GAP if is_sparse(name) else GAP
    ready = {who: found for who, make in makers.items() if (found := judged(bench, case, who, make, model, ids, limit))}
    if "ours" not in ready:
        return {}
    budget, gates, moonshots = asked(GOALS[name].speed.get(rows), rows * NEW, rounds)
    seconds = take_turns(ready, ids, rounds) | budget
    if len(seconds) < 2:
        bench.unmeasured.append(f"{case}: no peer and no budget to stand beside")
        return {}
    least = decoder.body.bytes_a_step([PROMPT + NEW // 2] * rows)  # of the mean step
    found = measure.compare_samples(seconds, clock="perf_counter, prompt to last token")
    if rows > 1 and bench.device.type == "cuda":
        gates |= {"roofline": ROOFLINE}
    bench.keep(
        case, found, unit="tok/s", amount=rows * NEW, ceiling=("roofline", rows * read_bytes_per_s / least),
        gates=gates, moonshots=moonshots,
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


def measure_packed(bench: Bench, name: str, model: Any, rows: int, rounds: int, read_bytes_per_s: float) -> None:
    """Decode over rounded copies of the weights, beside the live ones; each kind beside its own roofline."""
    ids, alone = prompts(name, rows, bench.device), rows == 1
    for kind, gate in PACKED.items():
        memory = MemoryPhases(bench.device)
        with memory("make decoder"):
            decoders = {"ours": gpubound.decoder(model, rows, LENGTH, weights=kind)}
        with memory("generate"):
            for _ in range(2):
                ours(decoders["ours"])(ids)
        case = f"{name} batch {rows} {kind}"
        keep_phases(bench, case, memory.peaks)
        decoders["bf16"] = gpubound.decoder(model, rows, LENGTH)
        contenders = {who: ours(decoder) for who, decoder in decoders.items()}
        for _ in range(2):
            contenders["bf16"](ids)
        least = decoders["ours"].body.bytes_a_step([PROMPT + NEW // 2] * rows)
        budget, gates, moonshots = asked(GOALS[name].packed.get(kind) if alone else None, NEW, rounds)
        seconds = take_turns(contenders, ids, rounds) | budget
        found = measure.compare_samples(seconds, clock="perf_counter, prompt to last token")
        if gate and alone and name == "8b":
            gates |= {"bf16": gate}
        bench.keep(
            case, found, unit="tok/s", amount=rows * NEW, ceiling=("roofline", rows * read_bytes_per_s / least),
            gates=gates, moonshots=moonshots,
        )  # fmt: skip
        del decoders, contenders
        release(bench.device)
