"""The part of the decoding benchmark behind a long text: one row whose steps read thousands of keys and values.

What is timed are the steps behind the first token, as in decode_cache.py.
"""

import statistics
from typing import Any

import torch

import gpubound
from gpubound import measure
from gpubound.measure.memory_phases import MemoryPhases
from gpubound.trace import strict

from .decode_goals import GOALS
from .decode_peers import GAP, NEW, SPARSE_GAP, gap, is_sparse
from .harness import Bench, asked, release
from .memory_rows import keep_phases
from .shapes import shape_of

TEXT, DRY = 4096, 40


def measure_far(bench: Bench, name: str, model: Any, rounds: int, read_bytes_per_s: float) -> None:
    """Beside the goal and its own roofline, if its tokens are the model's."""
    text = DRY if bench.dry else TEXT
    case = f"{name} batch 1 behind {text} tokens"
    ids = torch.randint(shape_of(name).vocab, (1, text), generator=torch.Generator().manual_seed(0))
    memory = MemoryPhases(bench.device)
    with memory("make decoder"), strict():
        decoder = gpubound.decoder(model, 1, text + NEW)
    with memory("generate"):
        results = [decoder.generate(ids.tolist(), max_new_tokens=NEW, stop=()) for _ in range(rounds + 1)]
    keep_phases(bench, case, memory.peaks)
    far = gap(model, ids.to(bench.device), torch.tensor(results[0].tokens))
    if not far <= (SPARSE_GAP if is_sparse(name) else GAP):
        bench.wrong.append(f"{case}: tokens lie up to {far:.2f} deviations below the model's own; not timed")
        return
    took = [result.seconds - result.first_token_s for result in results[1:]]
    roofline = read_bytes_per_s / decoder.body.bytes_a_step([text + NEW // 2])
    budget, gates, moonshots = asked(GOALS[name].far, NEW - 1, rounds)
    if budget:
        found = measure.compare_samples({"ours": took} | budget, clock="perf_counter, first to last token")
        ceiling = "roofline", roofline
        bench.keep(case, found, unit="tok/s", amount=NEW - 1, ceiling=ceiling, gates=gates, moonshots=moonshots)
    else:
        bench.figure(case, "tok/s", (NEW - 1) / statistics.median(took), {"roofline": roofline}, {})
    del decoder
    release(bench.device)
