"""Low-rank adapters beside PEFT's, and beside the frozen model that nobody can leave out: one layer, and whole training steps.

linear: one layer, forward and backward (lora_linear.py). train: whole steps (lora_train.py). rows: eight adapters in one batch,
a row each, beside one. peft: adapters that PEFT attached, trained by our step, beside our own and beside PEFT. start: the first
step alone.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import interpreted, resolve
from gpubound.errors import MeasureError

from . import lora_linear, lora_train, results
from .bench_train import profile
from .harness import Bench, chosen, importable, need_transformers
from .lora_train import LearningWorker
from .lora_worker import CONTENDERS

PARTS = ("train", "linear", "rows", "peft")  # those of a command that names none
START = "start"
MODELS = {  # parts that measure whole models -> what a case is called there, and what it becomes
    "train": ("{}", lambda case: case),
    "rows": ("{}, eight adapters in one batch", lora_train.one_each),
    "peft": ("{}, PEFT's own adapters", lora_train.pefts_own),
    START: ("{}", lora_train.alone),
}


@dataclass(frozen=True)
class Lora:
    """Measure low-rank adapters beside PEFT's and beside the frozen model's forward and dX.

    Example: gpubound bench lora --parts train --only 1b --peers peft-compile,peft-liger
    """

    parts: str = ",".join(PARTS)
    """What to measure, by comma: train (whole steps), linear (one layer), rows (eight adapters in one batch), peft (PEFT's own
    adapters in our step), start (the first step alone, which train and rows tell, too)."""
    only: str = "1b,135m,8b"
    """Whole models, by comma: 1b (8 x 1024 tokens), 1b-8192, 8b (4096), 135m (512: launch-bound); with the base in fewer bits,
    8b-fp8, 1b-nf4."""
    peers: str = ""
    """Of the peers only these, by comma: peft, peft-autocast, peft-compile, peft-compile-autocast, peft-liger,
    peft-liger-autocast; of rows, peft and a base in fewer bits also ours-lora."""
    rounds: int = 12
    """How often ours and a peer take turns; about half a second each."""
    profile: str = ""
    """A contender (ours, floor, peft-compile, ours-peft, ...): print where a step of it goes in each model; measure nothing."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Tiny sizes on the CPU: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Lora, argv, "bench lora")
    parts = chosen("--parts", options.parts, (*PARTS, START))
    known = lora_train.TINY if options.dry else lora_train.CASES
    names = list(known) if options.dry else chosen("--only", options.only, list(known))
    theirs = [who for who in CONTENDERS if who.startswith("peft") or who == "ours-lora"]
    peers = chosen("--peers", options.peers, theirs) if options.peers else []
    profiled = chosen("--profile", options.profile, list(CONTENDERS)) if options.profile else []
    layers = "linear" in parts and not profiled
    if layers and options.dry and not interpreted():  # triton reads the variable at its import
        again = [sys.executable, "-m", "benchmarks.bench_lora", *argv]
        return subprocess.run(again, env=os.environ | {"TRITON_INTERPRET": "1"}).returncode
    need_transformers("bench lora")
    if not importable("peft"):
        raise MeasureError("bench lora needs PEFT: pip install 'gpubound[bench]'.")
    device = resolve("cpu" if options.dry else "require")
    for who in profiled:
        for name in names:
            profile(name, LearningWorker(known[name].job(who, device.type)))
    if profiled:
        return 0
    bench = Bench.of(options, "lora", device, argv)
    rounds = 3 if options.dry else options.rounds
    rate = measure.ceilings(device, quick=options.dry).flops_per_s(torch.bfloat16)
    for part in parts:
        if part == "linear":
            beside = [peer for peer in lora_linear.PEERS if not peers or peer in peers]
            measure_linears(bench, [peer for peer in beside if not (options.dry and "compile" in peer)])
            continue
        words, becomes = MODELS[part]
        for name in names:
            lora_train.measure_case(bench, words.format(name), becomes(known[name]), rounds, rate, peers)
    return bench.finish()


def measure_linears(bench: Bench, peers: Sequence[str]) -> None:
    for shape in lora_linear.TINY if bench.dry else lora_linear.LINEARS:
        for dtype in lora_linear.DTYPES:
            lora_linear.measure_linear(bench, shape, dtype, peers)


if __name__ == "__main__":
    sys.exit(guarded("bench lora", main, sys.argv[1:]))
