"""Every kernel door beside torch eager, torch.compile and Liger, forward and backward, at the widths of a 350m and an 8b model.

Memory-bound doors are judged in GB/s against this machine's copy rate, linear_cross_entropy in TFLOP/s against its bf16 rate.

What counts as moved is what any implementation must move: each input read once, each output written once. The backward
reads the upstream gradients and what it cannot do without from the forward, and writes each distinct gradient once.
Statistics, partial sums, copies and second passes are an implementation's own affair and are not counted in its favour.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import interpreted, resolve

from . import results
from .door import Door, Drawer
from .doors import DOORS, into_main_grad, linear_cross_entropy
from .harness import Bench, chosen, host_syncs, importable, peak_gib, release
from .shapes import SHAPES, Shape

PEERS = ("eager", "compile", "liger")
BATCHES = {"350m": (16, 1024), "8b": (8, 2048), "tiny": (2, 4)}  # 16k tokens
COPY, MATRIX = "copy rate", "bf16 rate"
LIGER_GATE = {"liger": 1.0}
COPY_GATE = {COPY: 0.85}  # at 16k x 4096, where a kernel has nothing to hide behind
# Liger adds its chunks' weight gradients in bf16: with 32 chunks that alone is 2^-9 · √32, about 1 %.
LINEAR_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Kernels:
    """Measure every kernel door beside its peers, forward and backward.

    Example: gpubound bench kernels --only rms_norm,swiglu --peers eager,liger
    """

    only: str = ""
    """Doors to measure, by comma; all when empty."""
    peers: str = ",".join(PEERS)
    """Peers, by comma. compile takes a minute or two to compile; liger is skipped aloud when it is not installed."""
    widths: str = "350m,8b"
    """Model widths, by comma."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Tiny sizes on the CPU through Triton's interpreter: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Kernels, argv, "bench kernels")
    doors = chosen("--only", options.only, [*DOORS, "linear_cross_entropy"])
    peers = chosen("--peers", options.peers, PEERS)
    widths = ["tiny"] if options.dry else chosen("--widths", options.widths, list(BATCHES))
    if options.dry and not interpreted():  # triton reads the variable at its import, so a fresh process must start with it
        again = [sys.executable, "-m", "benchmarks.bench_kernels", *argv]
        return subprocess.run(again, env=os.environ | {"TRITON_INTERPRET": "1"}).returncode
    device = resolve("cpu" if options.dry else "require")
    if options.dry:
        peers = [peer for peer in peers if peer == "eager"]  # the others need a compiler or a GPU
    if "liger" in peers and not importable("liger_kernel"):
        print("liger-kernel is not installed (pip install 'gpubound[bench]'): measuring without it", file=sys.stderr)
        peers.remove("liger")
    bench = Bench.of(options, "kernels", device, argv)
    limits = measure.ceilings(device, quick=options.dry)
    dtype = torch.float32 if options.dry else torch.bfloat16
    for width in widths:
        for name in doors:
            if name in DOORS:
                draw = Drawer(device, dtype, *BATCHES[width])
                measure_door(bench, name, width, DOORS[name](SHAPES[width], draw), peers, limits.copy_bytes_per_s)
                release(device)
    if "linear_cross_entropy" in doors:
        for width in ["tiny"] if options.dry else ["350m", "1b", "8b"]:
            draw = Drawer(device, dtype, *BATCHES.get(width, BATCHES["350m"]))
            measure_linear(bench, SHAPES[width], draw, peers, limits.flops_per_s(dtype))
            release(device)
    return bench.finish()


def measure_door(bench: Bench, name: str, width: str, door: Door, peers: Sequence[str], copy_per_s: float) -> None:
    """The lines of one door: forward and backward apart, or as one where a peer does its backward's work in the forward."""
    functions = _functions(door, peers)
    if "liger" in peers and door.liger is None and door.without_liger:
        print(f"{name} {width}: not beside Liger. {door.without_liger}")
    gates = LIGER_GATE | (COPY_GATE if width == "8b" and not door.whole else {})
    if door.whole:
        works = {who: door.both(fn) for who, fn in functions.items()}
        bench.case(f"{name} {width}", works, unit="GB/s", amount=door.both_bytes, ceiling=(COPY, copy_per_s), gates=gates)
        return
    for way, make, amount in (("forward", door.forward, door.forward_bytes), ("backward", door.backward, door.backward_bytes)):
        works = {who: make(fn) for who, fn in functions.items()}
        bench.case(f"{name} {way} {width}", works, unit="GB/s", amount=amount, ceiling=(COPY, copy_per_s), gates=gates)


def measure_linear(bench: Bench, shape: Shape, draw: Drawer, peers: Sequence[str], flops_per_s: float) -> None:
    """linear_cross_entropy: rate, peak memory and host syncs of forward and backward together, in two forms.

    Plain, it returns the weight's gradient, which it has summed in fp32; Liger sums its chunks in 16 bits, and so holds less.
    The other form is the trainer's: the gradient goes into an fp32 accumulator that exists anyway, and no gradient is held at
    all. A peer returns its 16-bit gradient in both; adding that to an accumulator would be on top.
    """
    door = linear_cross_entropy(shape, draw)
    case = f"linear_cross_entropy H{shape.hidden} V{shape.vocab}"
    plain = {who: door.both(fn) for who, fn in _functions(door, peers).items()}
    _measure_linear(bench, case, plain, door, flops_per_s, {})
    _measure_linear(bench, f"{case} into main_grad", plain | {"ours": into_main_grad(door)}, door, flops_per_s, LIGER_GATE)


def _measure_linear(
    bench: Bench, case: str, works: dict[str, measure.Prepared], door: Door, flops_per_s: float, memory_gates: dict[str, float]
) -> None:
    # Three products of 2·N·H·V: logits, the input's gradient, the weight's. Computing the logits again is not counted.
    x, weight, _ = door.inputs
    found = bench.case(
        case,
        works,
        unit="TFLOP/s",
        amount=6 * x.shape[0] * weight.numel(),
        ceiling=(MATRIX, flops_per_s),
        gates=LIGER_GATE,
        tolerance=LINEAR_TOLERANCE,
    )
    if found is None or bench.device.type != "cuda":
        return
    peaks = {who: peak_gib(works[who], bench.device) for who in found.timings}
    bench.figure(f"{case} peak memory", "GiB", peaks.pop("ours"), peaks, memory_gates)
    syncs = {who: host_syncs(partial(measure.run_once, works[who])) for who in found.timings}
    bench.figure(f"{case} host syncs", "syncs", syncs.pop("ours"), {"budget": 0} | syncs, {"budget": 1.0})


def _functions(door: Door, peers: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Ours and the peers that have this op. Compiling happens in the warm-up, so no figure holds it."""
    found = {"ours": door.ours}
    if "eager" in peers:
        found["eager"] = door.eager
    if "compile" in peers:
        found["compile"] = torch.compile(door.eager, dynamic=False)
    if "liger" in peers and door.liger is not None:
        found["liger"] = door.liger
    return found


if __name__ == "__main__":
    sys.exit(guarded("bench kernels", main, sys.argv[1:]))
