"""Every kernel door beside torch eager, torch.compile and other libraries, forward and backward, at the widths of 350m and 8b.

Memory-bound doors are judged in GB/s against this machine's copy rate, linear_cross_entropy, the gated MLP and attention in
TFLOP/s against its bf16 rate.

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

from . import liger_ops, results
from .door import Door, Drawer
from .doors import DOORS, attention, gated_mlp, into_main_grad, linear_cross_entropy
from .harness import Bench, chosen, host_syncs, importable, peak_gib, release
from .shapes import SHAPES

PEERS = ("eager", "compile", "liger", "quack", "flash-attn-4")
MORE = ("liger-cutedsl", "liger-cutile", "quack-untuned")
NEEDS = {  # what a peer imports, and what installs it
    "liger": ("liger_kernel", "gpubound[bench]"),
    "liger-cutedsl": ("liger_kernel.ops.cutedsl.ops", "liger-kernel[cutedsl] nvidia-cutlass-dsl[cu13]"),
    "liger-cutile": ("liger_kernel.ops.cutile.ops", "liger-kernel[cutile-tileiras]"),
    "quack": ("quack.rmsnorm", "quack-kernels[cu13]"),
    "quack-untuned": ("quack.rmsnorm", "quack-kernels[cu13]"),
    "flash-attn-4": ("flash_attn.cute", "flash-attn-4[cu13]"),
}
BATCHES = {"350m": (16, 1024), "1b": (8, 2048), "8b": (8, 2048), "tiny": (2, 4)}  # 16k tokens
PRODUCTS = ("linear_cross_entropy", "gated_mlp", "attention")
COPY, MATRIX = "copy rate", "bf16 rate"
LIBRARY_GATES = {"liger": 1.0, "quack": 1.0, "flash-attn-4": 1.0}
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
    """Peers, by comma; also liger-cutedsl, liger-cutile (Liger's other implementations) and quack-untuned. compile and quack's
    products take a minute or two to compile. A library that is not installed is left out, and named."""
    widths: str = "350m,8b"
    """Model widths, by comma: 350m, 1b, 8b. Products and attention are measured at all three."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Tiny sizes on the CPU through Triton's interpreter: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Kernels, argv, "bench kernels")
    doors = chosen("--only", options.only, [*DOORS, *PRODUCTS])
    peers = chosen("--peers", options.peers, (*PEERS, *MORE))
    widths = ["tiny"] if options.dry else chosen("--widths", options.widths, list(BATCHES))
    if options.dry and not interpreted():  # triton reads the variable at its import, so a fresh process must start with it
        again = [sys.executable, "-m", "benchmarks.bench_kernels", *argv]
        return subprocess.run(again, env=os.environ | {"TRITON_INTERPRET": "1"}).returncode
    device = resolve("cpu" if options.dry else "require")
    peers = installed(peers)
    if options.dry:
        peers = [peer for peer in peers if peer == "eager"]  # the others need a compiler or a GPU
    bench = Bench.of(options, "kernels", device, argv)
    limits = measure.ceilings(device, quick=options.dry)
    dtype = torch.float32 if options.dry else torch.bfloat16
    for width in widths:
        for name in doors:
            if name in DOORS:
                draw = Drawer(device, dtype, *BATCHES[width])
                measure_door(bench, name, width, DOORS[name](SHAPES[width], draw), peers, limits.copy_bytes_per_s)
                release(device)
    for name in PRODUCTS:
        for width in ["tiny"] if options.dry else ["350m", "1b", "8b"]:
            if name in doors:
                draw = Drawer(device, dtype, *BATCHES[width])
                MEASURED[name](bench, width, draw, peers, limits.flops_per_s(dtype))
                release(device)
    return bench.finish()


def installed(peers: Sequence[str]) -> list[str]:
    """Return the peers that can be imported, and name the others."""
    found = []
    for peer in peers:
        module, wanted = NEEDS.get(peer, ("", ""))
        if module and not importable(module):
            print(f"{peer} is not installed (pip install '{wanted}'): measuring without it", file=sys.stderr)
        else:
            found.append(peer)
    return found


def measure_door(bench: Bench, name: str, width: str, door: Door, peers: Sequence[str], copy_per_s: float) -> None:
    """The lines of one door: forward and backward apart, or as one where a peer does its backward's work in the forward."""
    functions = _functions(name, door, peers)
    if "liger" in peers and door.liger is None and door.without_liger:
        print(f"{name} {width}: not beside Liger. {door.without_liger}")
    gates = LIBRARY_GATES | (COPY_GATE if width == "8b" and not door.whole else {})
    if door.whole:
        works = {who: door.both(fn) for who, fn in functions.items()}
        bench.case(f"{name} {width}", works, unit="GB/s", amount=door.both_bytes, ceiling=(COPY, copy_per_s), gates=gates)
        return
    for way, make, amount in (("forward", door.forward, door.forward_bytes), ("backward", door.backward, door.backward_bytes)):
        works = {who: make(fn) for who, fn in functions.items()}
        bench.case(f"{name} {way} {width}", works, unit="GB/s", amount=amount, ceiling=(COPY, copy_per_s), gates=gates)


def measure_linear(bench: Bench, width: str, draw: Drawer, peers: Sequence[str], flops_per_s: float) -> None:
    """linear_cross_entropy: rate, peak memory and host syncs of forward and backward together, in two forms.

    Plain, it returns the weight's gradient, which it has summed in fp32; Liger sums its chunks in 16 bits, and so holds less.
    The other form is the trainer's: the gradient goes into an fp32 accumulator that exists anyway, and no gradient is held at
    all. A peer returns its 16-bit gradient in both; adding that to an accumulator would be on top.
    """
    shape = SHAPES[width]
    door = linear_cross_entropy(shape, draw)
    case = f"linear_cross_entropy H{shape.hidden} V{shape.vocab}"
    plain = {who: door.both(fn) for who, fn in _functions("linear_cross_entropy", door, peers).items()}
    _measure_linear(bench, case, plain, door, flops_per_s, {})
    gates = {"liger": 1.0}
    _measure_linear(bench, f"{case} into main_grad", plain | {"ours": into_main_grad(door)}, door, flops_per_s, gates)


def measure_mlp(bench: Bench, width: str, draw: Drawer, peers: Sequence[str], flops_per_s: float) -> None:
    """Forward and backward of the gated MLP: two products of 2·N·H·2I and 2·N·I·H operations, and twice that."""
    shape = SHAPES[width]
    forward = 6 * draw.tokens * shape.hidden * shape.intermediate
    _measure_ways(bench, "gated_mlp", width, gated_mlp(shape, draw), peers, flops_per_s, (forward, 2 * forward))


def measure_attention(bench: Bench, width: str, draw: Drawer, peers: Sequence[str], flops_per_s: float) -> None:
    """Two products of the forward and four of the backward, half masked. Computing the scores again is not counted."""
    shape = SHAPES[width]
    forward = 2 * draw.batch * draw.seq * (draw.seq + 1) * shape.heads * shape.head_dim
    _measure_ways(bench, "attention", width, attention(shape, draw), peers, flops_per_s, (forward, 2 * forward))


def _measure_ways(
    bench: Bench, name: str, width: str, door: Door, peers: Sequence[str], flops_per_s: float, amounts: tuple[float, float]
) -> None:
    functions = _functions(name, door, peers)
    for way, make, amount in zip(("forward", "backward"), (door.forward, door.backward), amounts, strict=True):
        works = {who: make(fn) for who, fn in functions.items()}
        ceiling = (MATRIX, flops_per_s)
        bench.case(f"{name} {way} {width}", works, unit="TFLOP/s", amount=amount, ceiling=ceiling, gates=LIBRARY_GATES)


MEASURED = {"linear_cross_entropy": measure_linear, "gated_mlp": measure_mlp, "attention": measure_attention}


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
        gates=LIBRARY_GATES,
        tolerance=LINEAR_TOLERANCE,
    )
    if found is None or bench.device.type != "cuda":
        return
    peaks = {who: peak_gib(works[who], bench.device) for who in found.timings}
    bench.figure(f"{case} peak memory", "GiB", peaks.pop("ours"), peaks, memory_gates)
    syncs = {who: host_syncs(partial(measure.run_once, works[who])) for who in found.timings}
    bench.figure(f"{case} host syncs", "syncs", syncs.pop("ours"), {"budget": 0} | syncs, {"budget": 1.0})


def _functions(name: str, door: Door, peers: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Ours and the peers that have this op. Compiling happens in the warm-up, so no figure holds it."""
    known: dict[str, Callable[..., Any]] = {"eager": door.eager, **door.others}
    if "compile" in peers:
        known["compile"] = torch.compile(door.eager, dynamic=False)
    if door.liger is not None:
        known |= {"liger": door.liger}
        known |= {peer: liger_ops.through(peer, door.liger) for peer, doors in liger_ops.DOORS.items() if name in doors}
    return {"ours": door.ours} | {peer: known[peer] for peer in (*PEERS, *MORE) if peer in peers and peer in known}


if __name__ == "__main__":
    sys.exit(guarded("bench kernels", main, sys.argv[1:]))
