"""The prefill's part of the decoding benchmark: one long prompt, up to its first new token, beside the model's own forward.

A prompt is read in chunks, and attention of a chunk reads the keys before it from the cache. That attention is measured by
itself, too, beside torch's causal SDPA of the whole prompt at the same heads.
"""

from typing import Any

import torch
import torch.nn.functional as F

import gpubound
from gpubound import measure
from gpubound.decode.layer import attend_prompt
from gpubound.decode.request import CHUNK
from gpubound.trace import strict

from .decode_peers import GAP, gaps
from .decode_turns import take_turns, warmed
from .harness import Bench, peak_gib, release
from .shapes import shape_of

TEXT, DRY = 32_768, 40
SDPA, SHARE = "SDPA", 0.8  # gate: of its causal rate


def measure_prefill(bench: Bench, name: str, model: Any, rounds: int) -> None:
    text, shape = DRY if bench.dry else TEXT, shape_of(name)
    measure_attention(bench, name, text, DRY // 4 if bench.dry else CHUNK, model.dtype)
    release(bench.device)
    case = f"{name} prefill of {text} tokens"
    model.config.max_position_embeddings = max(model.config.max_position_embeddings, text + 1)
    ids = torch.randint(shape.vocab, (1, text), generator=torch.Generator().manual_seed(0)).to(bench.device)
    with strict():
        decoder = gpubound.decoder(model, 1, text + 1)

    def mine(ids: torch.Tensor) -> torch.Tensor:
        return torch.tensor(decoder.generate(ids.tolist(), max_new_tokens=1, stop=()).tokens)

    @torch.no_grad()
    def eager(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1).cpu()

    works = {}
    for who, work in {"ours": mine, "eager": eager}.items():
        if first := warmed(bench, case, who, lambda work=work: work, ids):
            far = gaps(model, ids, first[1], wide=False).max().item()  # fp32 would hold all scores: SDPA's math, for fewer keys
            if far <= 2 * GAP:
                works[who] = work
            else:
                bench.wrong.append(f"{case}: {who}'s token lies {far:.2f} deviations below the model's own; not timed")
    if works.keys() != {"ours", "eager"}:
        return
    found = measure.compare_samples(take_turns(works, ids, rounds), clock="perf_counter, prompt to first token")
    blocks = shape.matrix_params - shape.vocab * shape.hidden
    operations = 2 * text * blocks + shape.layers * operations_of(shape, text)
    rate = measure.ceilings(bench.device, quick=bench.dry).flops_per_s(model.dtype)
    bench.keep(case, found, unit="tok/s", amount=text, ceiling=("products", rate * text / operations))
    if bench.device.type == "cuda":
        cache = decoder.body.cache_bytes() / 2**30  # which the model's own forward makes anew
        own = peak_gib(lambda: eager(ids), bench.device) - cache
        peak = peak_gib(lambda: mine(ids), bench.device)
        bench.figure(f"{case}, memory beyond weights and cache", "GiB", peak, {"eager": own}, {})


def measure_attention(bench: Bench, name: str, text: int, chunk: int, dtype: torch.dtype) -> None:
    """All chunks of one layer, whose keys and values lie as in a cache."""
    shape, generator = shape_of(name), torch.Generator(bench.device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=bench.device, dtype=dtype)

    q = draw(1, text, shape.heads, shape.head_dim).transpose(1, 2)
    k, v = (draw(1, shape.kv_heads, text, shape.head_dim) for _ in range(2))
    scale = shape.head_dim**-0.5

    def ours() -> list[torch.Tensor]:
        ends = (min(at + chunk, text) for at in range(0, text, chunk))
        parts = ((at, q[:, :, at:end], k[:, :, :end], v[:, :, :end]) for at, end in zip(range(0, text, chunk), ends))
        return [attend_prompt(*part, at, 0, scale) for at, *part in parts]

    def whole() -> list[torch.Tensor]:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shape.heads != shape.kv_heads)
        return list(y.transpose(1, 2).split(chunk, 1))

    case, operations = f"{name} attention of {text} tokens in chunks of {chunk}", operations_of(shape, text)
    bench.case(case, {"ours": ours, SDPA: whole}, unit="TFLOP/s", amount=operations, gates={SDPA: SHARE})


def operations_of(shape: Any, text: int) -> int:
    """Return the operations of a layer's causal attention."""
    return 2 * text * (text + 1) * shape.heads * shape.head_dim
