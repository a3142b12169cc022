"""Single layers and whole blocks, forward and backward: GPU beside this machine's CPU, fused beside eager and torch.compile.

seed: the shapes of RustGPT's document, in fp32, on the GPU and on all cores of the CPU, whose ratio it only estimated.
large: a layer of the 350m model at 16,384 tokens in bf16, beside torch, torch.compile and, of an MLP, its products alone.
poly: polynomial attention at 1,024 to 8,192 tokens beside its definition, and beside SDPA's cuDNN backend, another function of
the same products.
steps: whole training steps of the 350m model, masked diffusion beside the next token.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpubound import capture, kernels, measure
from gpubound.cli import arguments, guarded
from gpubound.device import interpreted, label, resolve
from gpubound.layers.linear_product import KEEP_ALL
from gpubound.models.richards.kernels import poly_attention
from gpubound.models.richards.model import MIXERS, MLPS
from gpubound.train.offload import recompute_from

from . import results
from .block_parts import LARGE, LOOPS, PLAIN_MIXERS, PLAIN_MLPS, SEED_SHAPES, TINY, BlockShape, Layer
from .block_steps import measure_steps
from .harness import KERNELS, Bench, chosen, peak_gib, release

PARTS = ("seed", "large", "poly", "steps")
# bf16, rounded at other places in every form: a block's two layers after each other, and a decay's sum over 16k tokens.
TOLERANCE = 5e-2
SEED_TOLERANCE = 1e-3  # fp32, other orders of sums
SEED_GATES = {"glu": 8.0, "attention": 10.0, "block": 6.0, "feed-forward": None}  # what the document claimed
GATES = {"richards_glu": {"eager": 2.0, "compile": 1.0}}
PRODUCTS, PRODUCT_GATES = "products alone", {"richards_glu": 0.85}
POLY_TOKENS, POLY_HEADS, POLY_SIZES = 16384, 16, (64, 128)
POLY_GATES = {"eager": 5.0}
SDPA, SDPA_GATE = "sdpa-cudnn", 0.5


@dataclass(frozen=True)
class Blocks:
    """Measure layers and blocks beside this machine's CPU, torch eager and torch.compile, forward and backward.

    Example: gpubound bench blocks --parts large --only richards_glu
    """

    parts: str = ",".join(PARTS)
    """What to measure, by comma: seed (the document's shapes, GPU against CPU), large (a layer of 350m), poly (polynomial
    attention from 1,024 to 8,192 tokens), steps (masked diffusion beside the next token, 350m)."""
    only: str = ""
    """Of seed and large only these layers, by comma: names of mixers and MLPs, or block; all when empty."""
    peers: str = "eager,compile"
    """Of large and poly, by comma: eager, compile."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Tiny sizes on the CPU through Triton's interpreter: shows that the script works, keeps nothing."""


def layers() -> dict[str, tuple[str, tuple[str, ...]]]:
    """What can be measured, by name: each mixer and MLP that has a plain form here, and blocks of them."""
    found = {name: ("mlp", (name,)) for name in MLPS if name in PLAIN_MLPS}
    found |= {name: ("mixer", (name,)) for name in MIXERS if name in PLAIN_MIXERS}
    pairs = [("softmax", "swiglu"), ("poly", "richards_glu")]
    return found | {f"block of {a} and {b}": ("block", (a, b)) for a, b in pairs if a in found and b in found}


def main(argv: Sequence[str]) -> int:
    options = arguments(Blocks, argv, "bench blocks")
    parts, peers = chosen("--parts", options.parts, PARTS), chosen("--peers", options.peers, ("eager", "compile"))
    known = layers()
    only = chosen("--only", options.only, [*known, "block"]) if options.only else [*known, "block"]
    names = [name for name in known if name in only or (name.startswith("block") and "block" in only)]
    if options.dry and not interpreted():  # triton reads the variable at its import
        again = [sys.executable, "-m", "benchmarks.bench_blocks", *argv]
        return subprocess.run(again, env=os.environ | {"TRITON_INTERPRET": "1"}).returncode
    device = resolve("cpu" if options.dry else "require")
    bench = Bench.of(options, "blocks", device, argv)
    if options.dry:
        peers = [peer for peer in peers if peer == "eager"]
    for name in names:
        kind, inside = known[name]
        if "seed" in parts:
            for place, shape in list(seed_shapes(kind).items())[: 1 if bench.dry else None]:  # of one size in a dry run
                beside_cpu(
                    bench, f"{name} {place}", Layer(kind, inside, TINY if bench.dry else shape, "cpu", torch.float32), place
                )
        if "large" in parts:
            dtype = torch.float32 if bench.dry else torch.bfloat16
            measure_layer(bench, name, Layer(kind, inside, TINY if bench.dry else LARGE, device, dtype), peers)
        release(device)
    if "poly" in parts:
        for size in (16,) if bench.dry else POLY_SIZES:
            for tokens in (32,) if bench.dry else (1024, 2048, 4096, 8192):
                measure_poly(bench, tokens, size, peers)
                release(device)
    if "steps" in parts:
        measure_steps(bench, in_turn)
    return bench.finish()


def seed_shapes(kind: str) -> dict[str, BlockShape]:
    places = {"mlp": ("glu", "feed-forward"), "mixer": ("attention",), "block": ("block",)}[kind]
    return {place: SEED_SHAPES[place] for place in places}


def beside_cpu(bench: Bench, name: str, layer: Layer, place: str) -> None:
    """The same layer in fp32 on the GPU, in a CUDA graph as in a training step, and on the CPU as plain torch, all cores; each
    waited for."""
    there = copy.copy(layer)
    there.module = copy.deepcopy(layer.module).to(bench.device)
    there.parameters = list(there.module.parameters())
    ours = there.work(there.ours)
    works = {"ours": ours if bench.dry else capture(ours), "cpu": layer.work(layer.plain)}  # a capture's checks are 12 calls
    case = f"{name}, {layer.shape}, fp32"
    worst = max(apart(a, b) for a, b in zip(works["ours"](), works["cpu"]()))
    if worst > SEED_TOLERANCE:
        bench.wrong.append(f"{case}: ours and the CPU's differ by {worst:.1e} (limit {SEED_TOLERANCE:.0e}); not timed")
        return
    found = measure.compare_samples(in_turn(works, bench.device, bench.rounds), clock="perf_counter, waited for")
    print(f"{case}: beside {label(torch.device('cpu'))}", flush=True)
    gate = SEED_GATES[place]
    bench.keep(case, found, unit="us", amount=1, gates={"cpu": gate} if gate else None)


def apart(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def in_turn(works: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of each, one after the other, round by round; the first round of all warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            began = perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:
                seconds[name].append(perf_counter() - began)
    return seconds


def measure_layer(bench: Bench, name: str, layer: Layer, peers: Sequence[str]) -> None:
    """Beside its plain form, eager and compiled, which keep all that backward needs, as it does here. Of an MLP beside its
    products, too, and once more as it trains by default: with the gated result computed again."""
    again = recompute_from(layer.module, KEEP_ALL)
    works = {"ours": layer.work(layer.ours)}
    if "eager" in peers:
        works["eager"] = layer.work(layer.plain)
    if "compile" in peers and not set(layer.names) & set(LOOPS):
        works["compile"] = layer.work(torch.compile(layer.plain, dynamic=False))
    case = f"{name}, {layer.shape}"
    gates = {peer: gate for peer, gate in GATES.get(name, {}).items() if peer in works}
    bench.case(case, works, unit="us", amount=1, gates=gates, tolerance=TOLERANCE)
    if layer.kind == "mlp":
        products = layer.products()
        beside(bench, f"{case}, its products", works["ours"], PRODUCTS, products, PRODUCT_GATES.get(name))
        again()
        beside(bench, f"{case}, less kept, its products", works["ours"], PRODUCTS, products, None)


def beside(bench: Bench, case: str, ours: Any, peer: str, work: Any, gate: float | None, **kept: Any) -> None:
    """Beside what computes something else, and so is not compared by what it gives."""
    clock = KERNELS if bench.device.type == "cuda" else {}
    warmup = 1 if bench.dry else 3
    found = measure.compare({"ours": ours, peer: work}, rounds=bench.rounds, warmup=warmup, device=bench.device, **clock)
    bench.keep(case, found, gates={peer: gate} if gate else None, **{"unit": "us", "amount": 1.0, **kept})


def measure_poly(bench: Bench, tokens: int, size: int, peers: Sequence[str]) -> None:
    """Degree 3, causal. TFLOP/s count the products of the causal half, forward 2 and backward 5, as SDPA's are counted."""
    heads, rows = (2, 1) if bench.dry else (POLY_HEADS, POLY_TOKENS // tokens)
    dtype = torch.float32 if bench.dry else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(rows, tokens, heads, size, generator=generator).to(bench.device, dtype) for _ in range(4))
    coefficients = torch.tensor([1.0, 0.1, tokens**-0.5], device=bench.device).requires_grad_()
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def both(op: Callable[..., Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            y = op(q, k, v, coefficients)
            return y, *torch.autograd.grad(y, [*leaves, coefficients], upstream)[
                :3
            ]  # as Layer.work leaves out sums that cancel

        return run

    def sdpa() -> tuple[Tensor, ...]:
        backend = SDPBackend.CUDNN_ATTENTION if bench.device.type == "cuda" else SDPBackend.MATH
        with sdpa_kernel(backend):
            y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return y, *torch.autograd.grad(y, leaves, upstream.transpose(1, 2))

    definition = kernels.reference("poly_attention")
    works = {"ours": both(poly_attention)}
    works |= {"eager": both(definition)} if "eager" in peers else {}
    works |= {"compile": both(torch.compile(definition, dynamic=False))} if "compile" in peers else {}
    case, operations = f"poly attention, {rows}x{tokens}, heads of {size}", 7 * 2 * rows * heads * tokens**2 * size / 2
    rate = {"unit": "TFLOP/s", "amount": operations}
    gates = {peer: gate for peer, gate in POLY_GATES.items() if peer in works}
    found = bench.case(case, works, gates=gates, tolerance=TOLERANCE, **rate)
    if bench.device.type == "cuda" and found is not None:
        peaks = {name: peak_gib(works[name], bench.device) for name in found.timings}
        bench.figure(f"{case}, peak memory", "GiB", peaks.pop("ours"), peaks, dict.fromkeys(peaks, 1.0))
    beside(bench, f"{case}, beside softmax", works["ours"], SDPA, sdpa, SDPA_GATE, **rate)


if __name__ == "__main__":
    sys.exit(guarded("bench blocks", main, sys.argv[1:]))
