"""Decoding a model of DeepSeek-V4-Flash's kind at batch 1, beside transformers' forward and beside our step without a graph.

43 layers in V4-Flash's order, each width half of its own and 64 experts of 256: 19.5 billion random weights, 39 GB in bf16.
What is timed are the tokens behind the first; transformers takes fewer of them.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpubound
from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.decode.placement.plan import SPLITS
from gpubound.decode.runner import SamplingVariant
from gpubound.device import resolve, usable_bytes
from gpubound.formatting import quantity
from gpubound.layers.block import visiting
from gpubound.models.deepseek_v4 import kernels
from gpubound.models.deepseek_v4.kernels import hyper_connections
from gpubound.models.registry import cache_in, cache_word
from gpubound.trace import strict

from . import results
from .decode_host import host_us
from .decode_peers import gaps
from .decode_start import syncs
from .deepseek_models import build_flash, build_model
from .harness import CAPTURED, Bench, chosen, need_transformers, release

PARTS = ("step", "codes", "streams", "flash")
NAME, FLASH = "v4, half of Flash", "v4, Flash in fp4"
K = 8  # tokens a launch
EAGER, ROOFLINE, LAUNCHES, HOST_US, STREAMS = 10.0, 0.25, 25, 10.0, 20.0  # gates
WANTED = 300.0  # tokens a second of Flash on four GPUs
# Deviations that tokens may lie below the greatest logit of transformers' forward, in the mean: bf16 streams there, fp32 ours,
# and an expert that rounding changes in one of 43 layers. What computes something else takes tokens 4 below. The farthest
# of 16 tokens is luck: up to 2.15 at Flash's width.
GAP = 1.0
FLASH_WIDTH = 4096
SLICED = 1.2  # of its share, what a slice takes at most: some weights are on every GPU

Work = Callable[[], float]
"""seconds a token"""


@dataclass(frozen=True)
class DeepSeek:
    """Measure decoding of a 43-layer DeepSeek-V4 at batch 1, and what its own ops bring.

    step: tokens a second behind the first, beside transformers' forward (eager) and our step without a graph (uncaptured);
    host syncs, launches a layer and the host's time. streams: hc_pre and hc_post of a token beside the plain form.
    codes: experts in fp4 and linear layers in fp8,
    as V4 is published, beside 16 bits. flash: V4-Flash itself in these codes, 155 GB, on several GPUs, in stages or with each
    layer split over all of them; it is not among those measured by default.

    Examples: gpubound bench deepseek --parts streams
              gpubound bench deepseek --parts flash --gpus 2
              gpubound bench deepseek --parts flash --gpus 4 --split tensors
    """

    parts: str = ",".join(PARTS[:-1])
    """What to measure, by comma: step, codes, streams, flash."""
    gpus: int = 4
    """GPUs that flash lies on."""
    split: str = "layers"
    """What of flash the GPUs share: layers, tensors, as in gpubound.decoder."""
    rounds: int = 3
    """How often each contender takes its turn."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU: shows that the script works, keeps nothing."""


@dataclass(frozen=True)
class Size:
    """How much is decoded."""

    prompt: int = 600
    ours: int = 257  # new tokens
    peers: int = 16  # transformers takes a quarter of a second for each
    room: int = 1024


DRY = Size(prompt=9, ours=17, peers=2, room=64)


def main(argv: Sequence[str]) -> int:
    options = arguments(DeepSeek, argv, "bench deepseek")
    parts = chosen("--parts", options.parts, PARTS)
    if options.rounds < 3:
        raise ValueError(f"--rounds: got {options.rounds}, wanted at least 3, or there is no median to speak of.")
    if options.split not in SPLITS:
        raise ValueError(f"--split: got {options.split!r}, wanted {' or '.join(SPLITS)}.")
    need_transformers("bench deepseek")
    device = resolve("cpu" if options.dry else "require")
    bench = Bench.of(options, "deepseek", device, argv)
    if "streams" in parts:
        measure_streams(bench)
    if {"step", "codes"} & {*parts}:
        size, model = DRY if options.dry else Size(), build_model(device, options.dry)
        if "step" in parts:
            measure_step(bench, model, size, options.rounds)
        if "codes" in parts:
            measure_codes(bench, build_model(device, options.dry, codes=True), model, size, options.rounds)
            del model
    if "flash" in parts:
        measure_flash(bench, options.gpus, options.split, DRY if options.dry else Size(), options.rounds)
    return bench.finish()


def prompt_of(model: Any, size: Size) -> Tensor:
    ids = torch.randint(model.config.vocab_size, (1, size.prompt), generator=torch.Generator().manual_seed(1))
    return ids.to(model.device)


@torch.no_grad()
def measure_step(bench: Bench, model: Any, size: Size, rounds: int) -> None:
    ids, case = prompt_of(model, size), f"{NAME} batch 1"
    prompt, decoder = ids.tolist(), decoder_of(model, size)
    works = {
        "ours": lambda: captured(decoder, prompt, size.ours),
        "uncaptured": lambda: uncaptured(decoder, size.peers),
        "eager": lambda: own_forward(model, ids, size.peers),
    }
    if not beside(bench, case, decoder, size, rounds, works, {"eager": EAGER, "roofline": ROOFLINE}):
        return
    for what, idle, gates in (("", True, {"budget": 1.0}), (", the device at work", False, {})):
        spent = host_us(decoder, prompt, rounds, K, size.ours, idle)
        bench.figure(f"{case}, host time a token, {K} a launch{what}", "us", spent, {"budget": HOST_US}, gates)
    if bench.device.type == "cuda":
        count_on_gpu(bench, case, decoder, prompt, size)
    release(bench.device)


@torch.no_grad()
def measure_codes(bench: Bench, coded: Any, model: Any, size: Size, rounds: int) -> None:
    """Experts in fp4 and linear layers in fp8, as DeepSeek-V4 is published, beside `model`, all of which has 16 bits."""
    prompt, decoders = prompt_of(model, size).tolist(), {"ours": decoder_of(coded, size), "16 bits": decoder_of(model, size)}
    works = {who: lambda one=one: captured(one, prompt, size.ours) for who, one in decoders.items()}
    beside(bench, f"{NAME} batch 1, experts in fp4", decoders["ours"], size, rounds, works, {"16 bits": 1.0})
    release(bench.device)


@torch.no_grad()
def measure_flash(bench: Bench, gpus: int, split: str, size: Size, rounds: int) -> None:
    """Of stages one works at a time: the roofline is that of one GPU. Split layers keep all GPUs at work. Where slices leave no
    room for the layers they are cut from, these wait in the host's memory."""
    there = torch.cuda.device_count()
    if not bench.dry and there < gpus:
        bench.unmeasured.append(f"{FLASH}: needs {gpus} GPUs, and {there} {'is' if there == 1 else 'are'} visible; pass --gpus")
        return
    devices = [torch.device("cpu")] * gpus if bench.dry else [torch.device("cuda", number) for number in range(gpus)]
    model = build_flash(devices, bench.dry)
    share = SLICED * sum(t.nbytes for t in (*model.parameters(), *model.buffers())) / gpus
    if split == "tensors" and any(usable_bytes(device) < share for device in devices if device.type == "cuda"):
        model.to("cpu")
        release(bench.device)
    case = f"{FLASH} batch 1 on {gpus}{', each layer split' if split == 'tensors' else ''}"
    decoder = decoder_of(model, size, devices=[str(device) for device in devices], split=split)
    prompt = prompt_of(model, size).tolist()
    works: dict[str, Work] = {"ours": lambda: captured(decoder, prompt, size.ours), "budget": lambda: 1 / WANTED}
    if beside(bench, case, decoder, size, rounds, works, {"budget": 1.0}) and bench.device.type == "cuda":
        waits = syncs(lambda: decoder.generate(prompt, max_new_tokens=size.ours, stop=()))
        bench.figure(f"{case}, host syncs in a generation", "syncs", waits, {"budget": 0}, {"budget": 1.0})
    release(bench.device)


def decoder_of(model: Any, size: Size, **given: Any) -> Any:
    with strict():
        decoder = gpubound.decoder(model, 1, size.room, k=K, **given)
    for _ in range(2):  # a prefill is captured when its size comes again
        decoder.generate(prompt_of(model, size).tolist(), max_new_tokens=size.ours, stop=())
    return decoder


@torch.no_grad()
def beside(
    bench: Bench, case: str, decoder: Any, size: Size, rounds: int, works: dict[str, Work], gates: dict[str, float]
) -> bool:
    """Time the works by turns and keep the line, unless the decoder's tokens are not its model's."""
    model, ids = decoder.model, prompt_of(decoder.model, size)
    tokens = decoder.generate(ids.tolist(), max_new_tokens=size.ours, stop=()).tokens
    with visiting(model.model.layers, bench.device):
        far = gaps(model, ids, torch.tensor(tokens)[:, : size.peers], wide=False)  # codes cannot be widened
    print(
        f"{case}: tokens lie {far.mean():.2f} deviations below the model's own in the mean, {far.max():.2f} at most", flush=True
    )
    if not far.mean() <= GAP:
        bench.wrong.append(f"{case}: ours lie {far.mean():.2f} deviations below the model's own (limit {GAP}); not timed")
        return False
    seconds: dict[str, list[float]] = {who: [] for who in works}
    for _ in range(rounds):
        for who, work in works.items():
            seconds[who].append(work())
    rate = measure.ceilings(bench.device, quick=bench.dry).read_bytes_per_s * max(1, len(decoder.body.peers))
    least = decoder.body.bytes_a_step([size.prompt + size.ours // 2])
    bench.keep(
        case, measure.compare_samples(seconds, clock="perf_counter, behind the first token"), unit="tok/s", amount=1,
        ceiling=("roofline", rate / least), gates=gates,
    )  # fmt: skip
    print(f"{'':44} roofline: {quantity(least, 'B')} a step / {quantity(rate, 'B/s')} read here", flush=True)
    return True


def captured(decoder: Any, prompt: list[list[int]], new: int) -> float:
    found = decoder.generate(prompt, max_new_tokens=new, stop=())
    return (found.seconds - found.first_token_s) / (new - 1)


def uncaptured(decoder: Any, new: int) -> float:
    """The same step behind the last request's text, launched by the host."""
    with decoder.plainly():
        return timed(decoder.body.device, new, lambda: decoder.graphs.run(1, 1, SamplingVariant()))


def own_forward(model: Any, ids: Tensor, new: int) -> float:
    """transformers' forward over its own cache. The likeliest token stays on the device, which is kinder than `generate`."""
    found, word = model(ids, use_cache=True, logits_to_keep=1), cache_word(model.forward)

    def step() -> None:
        nonlocal found
        token = found.logits[:, -1:].argmax(-1)
        found = model(token, **{word: cache_in(found)}, use_cache=True)

    return timed(ids.device, new, step)


def timed(device: torch.device, count: int, step: Callable[[], object]) -> float:
    """Seconds of one of so many steps, with their end on the device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - begun) / count


def count_on_gpu(bench: Bench, case: str, decoder: Any, prompt: list[list[int]], size: Size) -> None:
    from torch.profiler import ProfilerActivity, profile

    with decoder.plainly(), profile(activities=[ProfilerActivity.CUDA]) as seen:
        decoder.graphs.run(1, 1, SamplingVariant())
        torch.cuda.synchronize()
    launched = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for name in sorted(set(launched), key=launched.count, reverse=True):
        print(f"{launched.count(name):6} x {name[:90]}", flush=True)
    layers = len(decoder.body.layers)
    bench.figure(f"{case}, launches a layer", "launches", len(launched) / layers, {"budget": LAUNCHES}, {"budget": 1.0})
    waits = syncs(lambda: decoder.generate(prompt, max_new_tokens=size.ours, stop=()))
    bench.figure(f"{case}, host syncs in a generation", "syncs", waits, {"budget": 0}, {"budget": 1.0})


def measure_streams(bench: Bench) -> None:
    """A token's two streams ops, in one graph each: what is timed is the device."""
    width = 64 if bench.dry else FLASH_WIDTH
    generator = torch.Generator(bench.device).manual_seed(0)
    x, y, weight, base = (
        torch.randn(size, generator=generator, device=bench.device)
        for size in ((1, 1, 4, width), (1, 1, width), (24, 4 * width), (24,))
    )
    given = x, weight * width**-0.5, torch.ones(3, device=bench.device), base

    def ours() -> tuple[Tensor, Tensor]:
        u, post, comb = kernels.hc_pre(*given)
        return u, kernels.hc_post(x, y, post, comb)

    def eager() -> tuple[Tensor, Tensor]:
        u, post, comb = hyper_connections.hc_pre_reference(*given)
        return u, hyper_connections.hc_post_reference(x, y, post, comb)

    bench.case(
        f"hc_pre and hc_post, one token, 4 x {width}", {"ours": ours, "eager": eager}, unit="us", amount=1,
        gates={"eager": STREAMS}, clock=CAPTURED,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(guarded("bench deepseek", main, sys.argv[1:]))
