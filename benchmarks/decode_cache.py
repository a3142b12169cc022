"""The cache's part of the decoding benchmark: many long texts at once, where keys and values weigh as much as the weights.

Prompts fill a text but for its last NEW tokens. What is timed are the steps behind the first token, so the prompts' own
time, which is alike for all, is left out.
"""

from typing import Any

import torch

import gpubound
from gpubound import measure
from gpubound.kernels.decode_attention import KINDS
from gpubound.measure.memory_phases import MemoryPhases

from .decode_peers import NEW
from .harness import Bench, release
from .memory_rows import keep_phases
from .shapes import shape_of

ROWS, PLACES = 32, 4096
DRY = 2, 264


def measure_cache(bench: Bench, name: str, model: Any, rounds: int, read_bytes_per_s: float) -> None:
    """Each kind beside the model's own dtype and its own roofline; and pages, which should cost nothing."""
    rows, places = DRY if bench.dry else (ROWS, PLACES)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape_of(name).vocab, (rows, places - NEW), generator=generator).tolist()
    forms: dict[str, dict[str, Any]] = {"plain": {}, "paged": {"pages": rows * -(-places // 64)}}
    forms |= {kind: {"cache": kind} for kind in KINDS}
    seconds: dict[str, list[float]] = {}
    least: dict[str, int] = {}
    for form, options in forms.items():  # one after the other: together their caches would not leave room for the prompts
        memory = MemoryPhases(bench.device)
        with memory("make decoder"):
            decoder = gpubound.decoder(model, rows, places, **options)
        least[form] = decoder.body.bytes_a_step([places - NEW // 2] * rows)
        with memory("generate"):
            found = [decoder.generate(ids, max_new_tokens=NEW, stop=()) for _ in range(rounds + 1)][1:]
        keep_phases(bench, f"{name} batch {rows} at {places} tokens, {form} cache", memory.peaks)
        seconds[form] = [result.seconds - result.first_token_s for result in found]
        del decoder
        release(bench.device)
    for form in ("paged", *KINDS):
        compared = measure.compare_samples(
            {"ours": seconds[form], "plain cache": seconds["plain"]}, clock="perf_counter, first to last token"
        )
        bench.keep(
            f"{name} batch {rows} at {places} tokens, {form} cache", compared, unit="tok/s", amount=rows * (NEW - 1),
            ceiling=("roofline", rows * read_bytes_per_s / least[form]),
        )  # fmt: skip
