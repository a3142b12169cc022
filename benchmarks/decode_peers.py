"""Who generates in the decoding benchmark: ours, and what Hugging Face offers, all of them from the live weights of one model.

A contender takes ids (B, T) and gives the NEW greedy tokens (B, NEW) on the host.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .decode_gptfast import GptFast
from .shapes import SparseShape, llama_config, qwen3_moe_config, shape_of
from .widened import in_fp32

if TYPE_CHECKING:  # importing the decoder is on the clock of its first token
    from gpubound.decode import FastDecoder

PROMPT, NEW = 32, 256
LENGTH = 512  # places of every static cache, ours too
PLACES = 8192  # that the model knows angles of
SAMPLE_ROWS = 4  # whose tokens are judged: their logits are whole in memory

# How far a token may lie below the greatest logit of the model's own forward in fp32, in standard deviations of the logits at
# its place. Contenders round to bf16 at places of their own, and of 128,256 random logits the greatest two lie close: which one
# is taken is chance. What computes something else takes tokens 4 below.
GAP = 0.25
# The same where rounding may also give a token another expert than fp32 gives it.
SPARSE_GAP = 1.0

Contender = Callable[[Tensor], Tensor]


def build_model(shape: str, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """A Hugging Face Llama or Qwen3-MoE with random weights, unless told otherwise in bf16 on a GPU and fp32 on a CPU."""
    from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    s, kind = shape_of(shape), Qwen3MoeForCausalLM if is_sparse(shape) else LlamaForCausalLM
    with device:
        model = kind._from_config(
            qwen3_moe_config(s, PLACES) if isinstance(s, SparseShape) else llama_config(s, PLACES),
            attn_implementation="sdpa",
            dtype=dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32),
        ).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def is_sparse(shape: str) -> bool:
    return isinstance(shape_of(shape), SparseShape)


def prompts(shape: str, rows: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(shape_of(shape).vocab, (rows, PROMPT), generator=generator).to(device)


def ours(decoder: "FastDecoder") -> Contender:
    return lambda ids: torch.tensor(decoder.generate(ids.tolist(), max_new_tokens=NEW, stop=()).tokens)


def eager(model: Any) -> Contender:
    """`model.generate` as everyone calls it: a dynamic cache, a host that launches every kernel."""
    return lambda ids: _generate(model, ids)


def compiled(model: Any) -> Contender:
    """`model.generate` with a static cache, for which transformers compiles the forward of a step."""
    return lambda ids: _generate(model, ids, cache_implementation="static")


def _generate(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **options
        )
    return found[:, ids.shape[1] :].cpu()


def static_cache(config: Any) -> Any:
    """A StaticCache in which every layer of attention has LENGTH places; its mask has the window.

    A StaticCache gives a window's layer the places of the window, and counts tokens on the host to choose what a step does with
    them, which a captured step cannot do.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    cache = StaticCache(config=config, max_cache_len=LENGTH)
    cache.layers = [StaticLayer(LENGTH) if getattr(layer, "is_sliding", False) else layer for layer in cache.layers]
    return cache


@contextmanager
def experts_by(model: Any, way: str | None) -> Iterator[None]:
    """Inside, transformers computes the experts of a model that has some by `way`; None: as outside."""
    if way is None or not any(hasattr(module, "is_concatenated") for module in model.modules()):
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation(way)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@dataclass
class CapturedForward:
    """The model's own forward over a StaticCache, a step captured by hand: what one writes without a library."""

    model: Any
    rows: int

    def __post_init__(self) -> None:
        from gpubound.models.registry import cache_word

        device = self.model.device
        self.cache = static_cache(self.model.config)
        self.cached = {cache_word(self.model.forward): self.cache}
        self.token = torch.zeros(self.rows, 1, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.found = torch.zeros(self.rows, NEW, dtype=torch.long, device=device)
        self.replay: Callable[[], object] = self._step
        self._prefill(torch.zeros(self.rows, PROMPT, dtype=torch.long, device=device))
        if device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.no_grad(), torch.cuda.stream(side):
                for _ in range(3):
                    self._step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                self._step()
            self.replay = graph.replay

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        self._prefill(ids)
        for _ in range(NEW - 1):
            self.replay()
        return self.found.cpu()

    @torch.no_grad()
    def _prefill(self, ids: Tensor) -> None:
        self.cache.reset()
        places = torch.arange(ids.shape[1], device=ids.device)
        self.place.fill_(ids.shape[1])
        self.column.zero_()
        self._take(self._forward(ids, places))

    @torch.no_grad()
    def _step(self) -> None:
        with experts_by(self.model, "batched_mm" if self.rows == 1 and self.token.is_cuda else None):  # as `generate` does
            logits = self._forward(self.token, self.place)
        self.place.add_(1)
        self._take(logits)

    def _forward(self, ids: Tensor, places: Tensor) -> Tensor:
        return self.model(
            input_ids=ids,
            cache_position=places,
            position_ids=places.expand(self.rows, -1),
            use_cache=True,
            logits_to_keep=1,
            **self.cached,
            **self._masks(places),
        ).logits

    def _masks(self, places: Tensor) -> dict[str, Any]:
        """Return masks for a model with windows and eager attention: to make its own, transformers 5.17 uploads a number."""
        config = self.model.config
        if config._attn_implementation != "eager" or not getattr(config, "sliding_window", None):
            return {}
        behind = places[:, None] - torch.arange(LENGTH, device=places.device)
        masks = {}
        for kind, window in (("full_attention", LENGTH), ("sliding_attention", config.sliding_window)):
            hidden = (behind < 0) | (behind >= window)
            mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=places.device)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(mask.dtype).min).expand(self.rows, 1, -1, -1)
        return {"attention_mask": masks}

    def _take(self, logits: Tensor) -> None:
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.found.index_copy_(1, self.column, self.token)
        self.column.add_(1)


class Continuous:
    """transformers' continuous batching as it comes, with the paged cache of 256 tokens a block that SDPA reads.

    Its thread runs until the contender goes: `generate_batch` starts and stops one each time, which takes most of a second. It
    reads a copy of the model with the same weights, whose attention it changes.
    """

    def __init__(self, model: Any, rows: int):
        from transformers import ContinuousBatchingConfig, GenerationConfig

        same_weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        own = copy.deepcopy(model, same_weights)
        how = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
        paged = ContinuousBatchingConfig(
            num_blocks=2 * rows * LENGTH // 256,  # twice what the rows fill: none waits for a block
            max_batch_tokens=max(256, rows * PROMPT),  # all prompts at once; by default as many as the GPU's memory holds
            max_requests_per_batch=rows,
        )
        self.manager = own.init_continuous_batching(how, paged)
        self.manager.warmup()
        self.manager.start()

    def __call__(self, ids: Tensor) -> Tensor:
        names = self.manager.add_requests(ids.tolist(), max_new_tokens=NEW)
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            answer = self.manager.get_result(timeout=1.0)
            if answer is None and not self.manager.is_running():
                raise RuntimeError("the thread of continuous batching has ended")
            if answer is not None and answer.error is not None:
                raise RuntimeError(answer.error)
            if answer is not None and answer.is_finished():
                found[answer.request_id] = answer.generated_tokens
        return torch.tensor([found[name] for name in names])

    def __del__(self) -> None:
        if manager := getattr(self, "manager", None):
            manager.destroy()


CONTENDERS: dict[str, Callable[[Any, int], Contender]] = {
    "eager": lambda model, rows: eager(model),
    "graph": CapturedForward,
    "compile": lambda model, rows: compiled(model),
    "gpt-fast": lambda model, rows: GptFast(model, rows, LENGTH, NEW),
    "continuous": Continuous,
}


def gap(model: nn.Module, ids: Tensor, tokens: Tensor) -> float:
    """How far below the greatest logit of the model's own forward a token lies, at most, in standard deviations there.

    In fp32: in bf16 the judge rounds as much as the judged, and the gap is that of both. Behind 4,096 tokens 8b's was 0.27.
    """
    return gaps(model, ids, tokens).max().item()


@torch.no_grad()
def gaps(model: nn.Module, ids: Tensor, tokens: Tensor, wide: bool = True) -> Tensor:
    """How far each lies. `wide`: by fp32, else by what the model computes as it is."""
    ids, tokens = ids[:SAMPLE_ROWS], tokens[:SAMPLE_ROWS].to(ids.device)
    found = []
    for row, new in zip(ids, tokens):
        with in_fp32(model) if wide else nullcontext():
            logits = model(torch.cat([row, new])[None], use_cache=False, logits_to_keep=len(new) + 1).logits[0, :-1].float()
        taken = logits.gather(-1, new[:, None])[:, 0]
        found.append((logits.max(-1).values - taken) / logits.std(-1))
    return torch.cat(found)
