"""The stages' part of the decoding benchmark: a model on two GPUs, in stages and in slices, beside the whole model on one.

A lane of rows reads all weights, so two lanes of 8 rows have the reads of two steps of 8, by two GPUs at a time: beside one
GPU with 16 rows that is no gain by itself. What two GPUs bring is the rows of two: so the same number of rows a lane as one
GPU has in all is a case too, of which the tokens of all lanes count.
"""

import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gpubound
from gpubound import measure

from .decode_peers import GAP, LENGTH, NEW, build_model, gap, ours, prompts
from .decode_start import syncs
from .harness import Bench, release

ROWS = 16  # of a batch, in all
ALONE, TOGETHER = 0.93, 1.6  # gates beside one GPU: a single row, and ROWS rows in lanes
SLICED, MOONSHOT = 1.4, 1.9  # a single row in slices; 1.9 are 500 tok/s of 8b beside an H200's 263
SHAPES = ("8b", "tiny")


def measure_stages(bench: Bench, name: str, rounds: int, take_turns: Any) -> None:
    """The model twice, alike: the layers of one are moved. What it has in slices is copied."""
    if name not in SHAPES:
        return
    if not bench.dry and torch.cuda.device_count() < 2:
        bench.unmeasured.append(f"{name} in stages: needs two GPUs, and {torch.cuda.device_count()} is visible")
        return
    whole, parted = (build_model(name, bench.device) for _ in range(2))
    measured = (
        ("tensors", 1, 1, SLICED),
        ("layers", 1, 1, ALONE),
        ("layers", 2, ROWS // 2, TOGETHER),
        ("layers", 2, ROWS, None),
    )
    for split, lanes, lane, gate in measured:  # in slices first: stages move the layers
        rows, moonshot = lanes * lane, {"one GPU": MOONSHOT} if split == "tensors" else None
        case = f"{name} batch {rows} in two {'slices' if split == 'tensors' else 'stages'}"
        devices = ["cpu"] * 2 if bench.dry else ["cuda:0", "cuda:1"]
        staged = gpubound.decoder(parted, rows, LENGTH, devices=devices, split=split)
        decoders = {"ours": staged, "one GPU": gpubound.decoder(whole, rows if gate else lane, LENGTH)}
        ids = prompts(name, rows, bench.device)
        works = {who: partial(_tokens, decoder, ids[: decoder.max_batch]) for who, decoder in decoders.items()}
        for who, decoder in decoders.items():
            works[who]()
            far = gap(whole, ids[: decoder.max_batch], works[who]())
            if not far <= GAP:
                bench.wrong.append(f"{case}: {who}'s tokens lie up to {far:.2f} deviations below the model's own (limit {GAP})")
        seconds = take_turns({who: lambda _, work=work: work() for who, work in works.items()}, ids, rounds)
        if gate:
            found = measure.compare_samples(seconds, clock="perf_counter, prompt to last token")
            bench.keep(case, found, unit="tok/s", amount=rows * NEW, gates={"one GPU": gate}, moonshots=moonshot)
        else:
            rate = {who: decoders[who].max_batch * NEW / statistics.median(found) for who, found in seconds.items()}
            bench.figure(case, "tok/s", rate["ours"], {f"one GPU, batch {lane}": rate["one GPU"]}, {})
        if lanes == 1 and bench.device.type == "cuda":
            waits = syncs(partial(staged.generate, ids.tolist(), max_new_tokens=NEW, stop=()))
            bench.figure(f"{case}, host syncs in a generation", "syncs", waits, {"budget": 0}, {"budget": 1.0})
        del staged, decoders, works
        release(bench.device)


def _tokens(decoder: Any, ids: Tensor) -> Tensor:
    return ours(decoder)(ids)
