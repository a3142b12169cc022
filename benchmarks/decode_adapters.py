"""The adapters' part of the decoding benchmark: low-rank adapters read where they lie, beside the same merged into the weights;
and rows with adapters of their own beside as many rows of a model that has one adapter.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gpubound
from gpubound import measure
from gpubound.measure.memory_phases import MemoryPhases
from gpubound.trace import strict

from .decode_peers import GAP, LENGTH, NEW, SAMPLE_ROWS, build_model, gap, prompts
from .decode_turns import take_turns
from .harness import Bench, release
from .memory_rows import keep_phases

RANK, ROWS = 16, 8
MERGED, ONE = 0.9, 0.9  # of the speed beside the merged model, and beside one adapter for all rows


def adapted(name: str, device: torch.device, count: int) -> Any:
    """The same weights and the same adapters at each call, in the layers that "all-linear" means."""
    model = build_model(name, device)
    for number in range(count):
        gpubound.lora.add(model, RANK, init=False, name=f"adapter{number}")
    return model


def measure_adapters(bench: Bench, name: str, rounds: int) -> None:
    case, ids = f"{name} batch 1, an adapter of rank {RANK}", prompts(name, 1, bench.device)
    live = adapted(name, bench.device, 1)
    mine = measured(bench, case, ids, live, 1)
    merged = adapted(name, bench.device, 1)
    gpubound.lora.merge(merged, for_good=True)
    works = {"ours": mine, "merged": generating(merged, 1)}
    if not (far := gap(live, ids, works["ours"](ids))) <= GAP:
        bench.wrong.append(f"{case}: tokens lie up to {far:.2f} deviations below the model's own; not timed")
        return
    found = measure.compare_samples(take_turns(warm(works, ids), ids, rounds), clock="perf_counter, prompt to last token")
    bench.keep(case, found, unit="tok/s", amount=NEW, gates={"merged": MERGED})
    del live, merged, mine, works
    release(bench.device)
    model, ids = adapted(name, bench.device, ROWS), prompts(name, ROWS, bench.device)
    names = [f"adapter{number}" for number in range(ROWS)]
    case = f"{name} batch {ROWS}, each row with its own of {ROWS} adapters"
    mine = measured(bench, case, ids, model, ROWS, names)
    works = {"ours": mine, "one adapter": generating(adapted(name, bench.device, 1), ROWS)}
    if not (far := gap_by_row(model, names, ids, works["ours"](ids))) <= GAP:
        bench.wrong.append(f"{case}: tokens lie up to {far:.2f} deviations below the model's own; not timed")
        return
    found = measure.compare_samples(take_turns(warm(works, ids), ids, rounds), clock="perf_counter, prompt to last token")
    bench.keep(case, found, unit="tok/s", amount=ROWS * NEW, gates={"one adapter": ONE})


def gap_by_row(model: Any, names: list[str], ids: Tensor, tokens: Tensor) -> float:
    """`gap` of some rows, each with its own adapter on and all others off."""
    found = []
    for name, row, new in list(zip(names, ids, tokens))[:SAMPLE_ROWS]:
        with gpubound.lora.disable(model):
            gpubound.lora.enable(model, name)
            found.append(gap(model, row[None], new[None]))
    return max(found)


def measured(bench: Bench, case: str, ids: Tensor, model: Any, rows: int, adapters: Any = None) -> Callable[[Tensor], Tensor]:
    """Return `generating`'s function, and keep the memory of making and of calling it, while there is no other model."""
    memory = MemoryPhases(bench.device)
    with memory("make decoder"):
        generate = generating(model, rows, adapters)
    with memory("generate"):
        warm({"ours": generate}, ids)
    keep_phases(bench, case, memory.peaks)
    return generate


def generating(model: Any, rows: int, adapters: Any = None) -> Callable[[Tensor], Tensor]:
    with strict():
        decoder = gpubound.decoder(model, rows, LENGTH)
    given = {} if adapters is None else {"adapters": adapters}
    generate = partial(decoder.generate, max_new_tokens=NEW, stop=(), **given)
    return lambda ids: torch.tensor(generate(ids.tolist()).tokens)


def warm(works: dict[str, Callable[[Tensor], Tensor]], ids: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    for work in works.values():
        work(ids)
        work(ids)
    return works
