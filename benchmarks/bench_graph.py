"""A captured Hugging Face Llama forward at batch 1: how near the replay comes to the sum of its own kernels, and to eager;
and what a call costs the host.

At batch 1 the model is launch-bound: eager waits for the host between kernels. A replay should take what its kernels take.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError

from . import results
from .harness import Bench, need_transformers, release
from .shapes import SHAPES, Shape, llama_config

KERNELS = "sum of its kernels"
WITHIN = 1.15  # times the sum of its kernels that a replay may take; 1b at one token took 1.48 on an H200
PROFILED = 20
HOST_US = 5.0  # what a replay's checks may cost the host
ATTENTION = "sdpa_without_mask"


@dataclass(frozen=True)
class Graph:
    """Measure a captured Llama forward at batch 1 beside eager and beside the sum of its kernels.

    Example: gpubound bench graph --shape 1b --lengths 1,128
    """

    shape: str = "1b"
    """The model: 135m, 350m, 1b or 8b."""
    lengths: str = "1,128,1024"
    """Tokens in the sequence, by comma."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU, where a capture runs eagerly: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Graph, argv, "bench graph")
    need_transformers("bench graph")
    name = "tiny" if options.dry else options.shape
    if name not in SHAPES:
        raise ValueError(f"--shape: got {name!r}, wanted one of {', '.join(SHAPES)}.")
    lengths = [int(word) for word in ("8" if options.dry else options.lengths).split(",")]
    device = resolve("cpu" if options.dry else "require")
    bench = Bench.of(options, "graph", device, argv)
    forward = build(SHAPES[name], max(lengths), device)
    for length in lengths:
        measure_length(bench, name, SHAPES[name], forward, length)
        release(device)
    measure_host_cost(bench)
    return bench.finish()


def build(shape: Shape, positions: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The model's forward, ids to logits. Its attention is transformers' own SDPA under a name for which no mask is made.

    While making one, transformers reads a tensor from the host to see whether the batch is packed. A capture cannot do that,
    and while a stream captures transformers skips the question and passes an explicit mask: other and slower kernels.
    """
    from transformers import AttentionInterface, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM._from_config(
            llama_config(shape, positions),
            attn_implementation=ATTENTION,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        ).eval()

    @torch.no_grad()
    def forward(ids: Tensor) -> Tensor:
        return model(input_ids=ids).logits

    return forward


def measure_length(bench: Bench, name: str, shape: Shape, forward: Callable[[Tensor], Tensor], length: int) -> None:
    from gpubound.graph import capture

    case = f"{name} forward, batch 1, {length} tokens"
    ids = torch.randint(shape.vocab, (1, length), device=bench.device)
    captured = capture(forward, ids)
    other = torch.randint(shape.vocab, (1, length), device=bench.device)  # not what it was captured with
    if not torch.equal(captured(other), forward(other)):
        bench.wrong.append(f"{case}: the replay's logits are not eager's, bit for bit; not timed")
        return
    found = measure.compare(
        {"ours": lambda: captured(other), "eager": lambda: forward(other)}, rounds=bench.rounds, warmup=3, device=bench.device
    )
    bench.keep(case, found, unit="ms", amount=1)
    if bench.device.type == "cuda":
        replay_ms = found.timings["ours"].median_s * 1e3
        kernels_ms = kernel_seconds(lambda: captured(other)) * 1e3
        bench.figure(f"{case}, replay", "ms", replay_ms, {KERNELS: kernels_ms}, {KERNELS: 1 / WITHIN})


def measure_host_cost(bench: Bench) -> None:
    """What a call costs the host before and beside its launch, where a graph holds the parameters of many small layers."""
    from gpubound.graph import capture

    layers = 4 if bench.dry else 150
    model = nn.Sequential(*(nn.Linear(8, 8, device=bench.device) for _ in range(layers)))
    x = torch.ones(1, 8, device=bench.device)
    captured = capture(model, x)
    static = captured._recording.inputs
    costs = {
        "check of what is held": captured._recording.guards.check,
        "check and copy of the inputs": lambda: static.copy_in(static.tensors((x,))),
        "bare replay": captured._recording.runner.replay,
        "whole call": lambda: captured(x),
    }
    spent = {name: host_us(call, bench.device) for name, call in costs.items()}
    for name in ("check of what is held", "check and copy of the inputs"):
        bench.figure(f"host cost, {2 * layers} tensors held, {name}", "us", spent[name], {"budget": HOST_US}, {})
    whole, bare = spent["whole call"], {"bare replay": spent["bare replay"]}
    bench.figure(f"host cost, {2 * layers} tensors held, whole call", "us", whole, bare, {})


def host_us(call: Callable[[], object], device: torch.device, times: int = 200) -> float:
    """Microseconds of the host's time in one call: the best of five stretches, each begun on an idle device."""
    stretches = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            call()
        stretches.append((time.perf_counter() - start) / times)
    return min(stretches) * 1e6


def kernel_seconds(run: Callable[[], object]) -> float:
    """Seconds that the device works in one `run`: every kernel, copy and memset that the profiler saw, over PROFILED runs."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not on_device:
        raise MeasureError("bench graph: the profiler saw no kernel; CUPTI may be unavailable here.")
    return sum(e.time_range.elapsed_us() for e in on_device) / 1e6 / PROFILED


if __name__ == "__main__":
    sys.exit(guarded("bench graph", main, sys.argv[1:]))
