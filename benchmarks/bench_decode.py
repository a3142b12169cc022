"""Greedy decoding of a Hugging Face Llama beside Hugging Face's own ways: a prompt of 32 tokens, 256 new ones.

Everyone decodes one model with random weights, in turn, in random order, from the prompt to the last token on the host. A speed
that was asked for stands as the peer "budget", what reading the weights and the live cache once a token allows as "roofline".
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve

from . import results
from .decode_adapters import measure_adapters
from .decode_cache import measure_cache
from .decode_draft import measure_draft
from .decode_far import measure_far
from .decode_first import measure_start
from .decode_goals import GOALS
from .decode_host import measure_host
from .decode_peers import CONTENDERS, build_model, is_sparse
from .decode_prefill import measure_prefill
from .decode_speed import measure_cpu, measure_packed, measure_speed
from .decode_stages import measure_stages
from .decode_turns import take_turns
from .harness import Bench, chosen, need_transformers, release

PARTS = ("start", "speed", "far", "prefill", "packed", "cache", "adapters", "host")
STAGES = "stages"  # a part for machines with two GPUs
DRAFT = "draft"
CPU = "cpu"  # a part by itself, for machines without a GPU
CPU_SHAPE = "135m"  # SmolLM2-135M's
CPU_BATCHES = (1, 20)
BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Decode:
    """Measure greedy decoding beside Hugging Face, beside budgets and beside the roofline.

    start: from a loaded model to the first token, in a fresh process, with an empty and a filled Triton cache; its memory and
    host syncs. speed: tokens a second. prefill: a prompt of 32,768 tokens, and its attention beside SDPA. packed: over int4,
    int8 and fp8 copies of the weights, of one row unless --batch names others. cache: over long texts, with keys and values in
    int8 and fp8. host: the host's time a token, and the speed beside two busy Python threads.
    draft: steps of 2 to 6 tokens that a draft head drafts, beside plain ones; also not by default.
    stages: 8b on two GPUs, in stages and in slices, beside one; it is not among those measured by default.
    cpu: tokens a second on the CPU beside generate, in fp32 and bf16; it needs no GPU, and is measured by itself.

    Examples: gpubound bench decode --only 1b --batch 1 --peers graph
              gpubound bench decode --parts cpu
    """

    only: str | None = None
    """Shapes, by comma: 135m, 350m, 1b, 8b, moe (64 experts, 8 a token); tiny is --dry. By default 350m,1b,8b; on the CPU
    135m."""
    batch: str | None = None
    """Batch sizes, by comma. By default 1,2,4,8,16,32; on the CPU 1,20."""
    peers: str = "eager,graph"
    """Peers, by comma: eager (generate), graph (a forward captured by hand), compile (a static cache; 25 s to start), gpt-fast
    (its design, over the model's own weights; it is compiled first), continuous (transformers' continuous batching)."""
    parts: str = ",".join(PARTS)
    """What to measure, by comma: start, speed, far (behind 4,096 tokens), prefill, packed, cache, adapters, host, stages,
    draft; or cpu alone."""
    rounds: int = 3
    """How often each contender takes its turn; eager takes 3 to 5 s each time."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Decode, argv, "bench decode")
    dry = options.dry or options.only == "tiny"
    parts = chosen("--parts", options.parts, (*PARTS, STAGES, DRAFT, CPU))
    on_cpu = parts == [CPU]
    if CPU in parts and not on_cpu:
        raise ValueError("--parts: cpu is measured by itself; leave the others out.")
    names = ["tiny"] if dry else chosen("--only", options.only or (CPU_SHAPE if on_cpu else "350m,1b,8b"), list(GOALS))
    peers = chosen("--peers", options.peers, list(CONTENDERS))
    batches = batch_sizes(options.batch) if options.batch else list(CPU_BATCHES if on_cpu else BATCHES)
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
    if {"speed", "far", "prefill", "packed", "cache", "host", DRAFT} & set(parts):
        rate = measure.ceilings(device, quick=dry).read_bytes_per_s
        for name in names:
            model = build_model(name, device)
            for rows in batches if "speed" in parts else ():
                measure_speed(bench, name, model, rows, peers, options.rounds, rate)
                release(device)
            if "far" in parts:
                measure_far(bench, name, model, options.rounds, rate)
            if "prefill" in parts and not is_sparse(name):
                measure_prefill(bench, name, model, options.rounds)
                release(device)
            if "packed" in parts and is_sparse(name):
                print(f"{name}: experts are read as they are, so there is nothing packed to measure", flush=True)
            elif "packed" in parts:
                for rows in batches if options.batch else [1]:
                    measure_packed(bench, name, model, rows, options.rounds, rate)
            if "cache" in parts:
                measure_cache(bench, name, model, options.rounds, rate)
                release(device)
            if DRAFT in parts and not is_sparse(name):
                measure_draft(bench, name, model, options.rounds)
            if "host" in parts:
                measure_host(bench, name, model)
            del model
            release(device)
    for name in names if "adapters" in parts else ():  # on models of their own
        measure_adapters(bench, name, options.rounds)
        release(device)
    return bench.finish()


def batch_sizes(text: str) -> list[int]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := [word for word in found if not word.isdecimal() or int(word) < 1]:
        raise ValueError(f"--batch: got {wrong[0]!r}, wanted batch sizes by comma, such as 1,32.")
    return [int(word) for word in found]


if __name__ == "__main__":
    sys.exit(guarded("bench decode", main, sys.argv[1:]))
