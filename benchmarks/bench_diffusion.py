"""Sampling of a masked diffusion model next to a loop in plain torch: whole requests, with and without the dual cache.

An answer of 256 tokens after a prompt of 512, in blocks of 32, two tokens a step. Weights are random, so the number of tokens
that a confidence threshold would write at once is not measured: it is a property of trained weights.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.decode import MaskedSampler
from gpubound.device import resolve
from gpubound.models import Decoder, DecoderConfig
from gpubound.models.diffusion.masked import BlockCache

from . import results
from .harness import Bench, chosen, release
from .plain_diffusion import PlainDecoder, generate
from .shapes import SHAPES, Shape

LLADA = {"350m": SHAPES["350m"], "llada-8b": Shape(4096, 12288, 32, 32, 32, 126464, False)}
PROMPT, TOKENS, BLOCK, STEPS = 512, 256, 32, 128
DRY = 8, 8, 4, 4
GATE = 1.0  # of ours over the loop in plain torch
AGREES = 5e-2  # relative error of a block's logits: each of up to 64 sub-layers rounds to bf16 at its own places


@dataclass(frozen=True)
class Diffusion:
    """Measure masked diffusion sampling next to a loop in plain torch.

    Example: gpubound bench diffusion --only 350m --batch 1
    """

    only: str = "350m,llada-8b"
    """Shapes, by comma: 350m, llada-8b (32 key and value heads, random weights)."""
    batch: str = "1,8"
    """How many requests at once, by comma."""
    rounds: int = 5
    """How often all take turns; up to six seconds each."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Diffusion, argv, "bench diffusion")
    names = ["tiny"] if options.dry else chosen("--only", options.only, list(LLADA))
    device = resolve("cpu" if options.dry else "require")
    bench = Bench.of(options, "diffusion", device, argv)
    for name in names:
        model = build(LLADA.get(name, SHAPES["tiny"]), device, torch.float32 if options.dry else torch.bfloat16)
        for rows in (2,) if options.dry else map(int, options.batch.split(",")):
            measure_requests(bench, name, model, rows, 2 if options.dry else options.rounds)
        del model
        release(device)
    return bench.finish()


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    sizes = shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads, shape.vocab, shape.tied
    return Decoder(DecoderConfig(*sizes, rope_theta=500000.0, causal=False), device=device, dtype=dtype).eval()


def measure_requests(bench: Bench, name: str, model: Any, rows: int, rounds: int) -> None:
    """Tokens a second of whole requests, answers on the host."""
    prompt, tokens, block, steps = DRY if bench.dry else (PROMPT, TOKENS, BLOCK, STEPS)
    mask, generator = model.config.vocabulary - 1, torch.Generator().manual_seed(0)
    ids = torch.randint(mask, (rows, prompt), generator=generator)
    there, plain = ids.to(bench.device), PlainDecoder(model, prompt + tokens)
    sampler = MaskedSampler(model, mask_token=mask, ends=())
    works: dict[str, Callable[[], Any]] = {}
    for kind, cached in (("", False), (" cached", True)):
        works[f"ours{kind}"] = lambda cached=cached: sampler.generate(
            ids.tolist(), tokens, steps=steps, block=block, cache=cached
        )
        works[f"eager{kind}"] = lambda cached=cached: generate(plain, there, tokens, block, steps, mask, cached)
    if not agree(bench, f"{name} batch {rows}", model, plain, there, prompt, tokens, block, mask):
        return
    positions = {who: works[who]().positions for who in ("ours", "ours cached")}
    for who in ("eager", "eager cached"):
        works[who]()
    seconds: dict[str, list[float]] = {who: [] for who in works}
    order, shuffle = list(works), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for who in order:
            begun = time.perf_counter()
            works[who]()
            seconds[who].append(time.perf_counter() - begun)
    clock = "perf_counter, request to answer on the host"
    full = {"ours": seconds["ours"], "eager": seconds["eager"]}
    cached = {"ours": seconds["ours cached"], "eager cached": seconds["eager cached"], "full": seconds["ours"]}
    cached |= {"eager": seconds["eager"]}
    case = f"{name} batch {rows}, {steps} steps for {tokens} tokens"
    for kind, found in ((case, full), (f"{case}, cached", cached)):
        gates = {peer: GATE for peer in found if peer != "ours"}
        bench.keep(kind, measure.compare_samples(found, clock=clock), unit="tok/s", amount=rows * tokens, gates=gates)
    print(f"{'':44} positions computed: {positions['ours']:,}, cached {positions['ours cached']:,}", flush=True)


def agree(
    bench: Bench, case: str, model: Any, plain: PlainDecoder, prompts: Any, prompt: int, tokens: int, block: int, mask: int
) -> bool:
    """Return whether both compute the same logits: of a full pass, and of the block after one of its tokens changed."""
    ids = torch.cat([prompts, prompts.new_full((len(prompts), tokens), mask)], 1)
    at, cache = slice(prompt, prompt + block), BlockCache(model, len(ids), ids.shape[1])
    place = torch.arange(prompt, prompt + block, device=ids.device).expand(len(ids), block)
    for whole in (True, False):
        with torch.no_grad():
            ours = model.lm_head((cache.full if whole else cache.block)(ids, place, None)).float()
        theirs = plain.logits(ids, at, whole=whole, keep=whole)
        error = ((ours - theirs).norm() / theirs.norm()).item()
        if not error <= AGREES:
            what = "a full pass" if whole else "a pass of the block"
            bench.wrong.append(f"{case}: logits of {what} differ by {error:.1e} (limit {AGREES:.0e}); not timed")
            return False
        ids[:, prompt + 1] = 1
    return True


if __name__ == "__main__":
    sys.exit(guarded("bench", main, sys.argv[1:]))
