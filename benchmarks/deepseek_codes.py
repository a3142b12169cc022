"""DeepSeek-V4 with its experts in fp4, as it is published, beside the same sizes in 16 bits."""

from typing import Any

import torch

import gpubound
from gpubound import measure
from gpubound.kernels.packed import BIAS
from gpubound.models.deepseek_v4.coded import PARTS, Fp4Experts
from gpubound.trace import strict

from .harness import Bench, release

NARROW = 7  # scales of 2^-7 give weights a spread of 0.02


@torch.no_grad()
def fill(model: Any) -> None:
    """Random codes in every expert."""
    for experts in (module for module in model.modules() if isinstance(module, Fp4Experts)):
        for part in PARTS:
            packed = experts.packed(part)
            packed.words.random_(-(2**31), 2**31)
            packed.scale.fill_(BIAS - NARROW)


@torch.no_grad()
def measure_codes(bench: Bench, case: str, models: dict[str, Any], ids: Any, size: Any, rounds: int, works: Any) -> None:
    """models: "ours" and "16 bits". works: a decoder's seconds a token, how far tokens lie from a model's own, and may lie."""
    captured, gap, limit = works
    with strict():
        decoders = {who: gpubound.decoder(model, 1, size.room, k=8) for who, model in models.items()}
    prompt = ids.tolist()
    for _ in range(2):  # a prefill is captured when its size comes again
        found = {who: one.generate(prompt, max_new_tokens=size.ours, stop=()).tokens for who, one in decoders.items()}
    far = gap(models["ours"], ids, torch.tensor(found["ours"])[:, : size.peers])
    if not far <= limit:
        bench.wrong.append(f"{case}: ours lie up to {far:.2f} deviations below the model's own (limit {limit}); not timed")
        return
    seconds: dict[str, list[float]] = {who: [] for who in decoders}
    for _ in range(rounds):
        for who, one in decoders.items():
            seconds[who].append(captured(one, prompt, size.ours))
    rate = measure.ceilings(bench.device, quick=bench.dry).read_bytes_per_s
    least = decoders["ours"].body.bytes_a_step([size.prompt + size.ours // 2])
    bench.keep(
        case, measure.compare_samples(seconds, clock="perf_counter, behind the first token"), unit="tok/s", amount=1,
        ceiling=("roofline", rate / least), gates={"16 bits": 1.0},
    )  # fmt: skip
    release(bench.device)
