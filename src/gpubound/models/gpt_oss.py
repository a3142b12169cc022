"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases and clamped units, in 16 bits or MXFP4.

Placing swaps norms, attention, the loss and the loop over layers, which moves tokens to their experts. transformers computes
attention with sinks over whole masks in memory; the loop makes none for a batch without padding.

Experts in training are transformers' grouped products, with moves of tokens whose gradients are moves. transformers' gradients
of x[order] and bias[expert] are autograd's of an index, which sorts and adds: 1.1 of 21 ms in a layer of gpt-oss-20b (H200,
2,048 tokens).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from ..kernels import clamped_glu, sink_attention
from ..kernels.dispatch import transformed
from ..layers.attention import Attention, Mask, Rope, RopeTable
from ..layers.fused_weights import Kernels, hooked
from ..layers.invariant import CONTEXT
from ..layers.moe import OwnBias, Permuted, by_group, not_trained
from ..layers.packed_attention import Segments
from .decoding import AttentionWeights, ColumnExpertWeights, Linear
from .gemma import CappedAttention
from .hf_modules import HFNorm, attention, norm
from .language_model import SEGMENTS, restarts
from .layer_types import TypedStack, typed_stack
from .mixtral import sparse_causal_lm
from .quantized.schemes import MxExperts
from .reader import Reader, SingleAngles, weight_of
from .registry import Maker, Swap, role_of


def run_experts(experts: Any, x: Tensor, ids: Tensor, shares: Tensor, unit: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute what `experts` compute of x (N, hidden), by the ids (N, S) of each row's experts and their shares.

    unit  what the experts compute of gate and up, (M, 2 I) -> (M, I)
    """
    if not computed(experts):
        return experts(x, ids, shares)

    def product(name: str, rows: Tensor) -> Tensor:
        weight = getattr(experts, name)
        y = F.grouped_mm(rows, weight if experts.is_transposed else weight.transpose(1, 2), offs=ends)
        return OwnBias.apply(y, getattr(experts, f"{name}_bias"), own) if experts.has_bias else y

    order, inverse, ends = by_group(ids, len(experts.gate_up_proj))
    own = ids.flatten()[order]
    rows = Permuted.apply(x.to(experts.gate_up_proj.dtype), order, inverse, ids.shape[1])
    y = product("down_proj", unit(product("gate_up_proj", rows)))
    y = Permuted.apply(y, inverse, order, 1).unflatten(0, ids.shape)
    return (y * shares[..., None]).sum(1).to(x.dtype)


def computed(experts: Any) -> bool:
    """Return whether `run_experts` computes: for a family's own experts, on one device, that F.grouped_mm takes. Others, with
    adapters or hooks, in fp32 on a GPU, run as they are."""
    if role_of(experts) != "Experts" or hooked(experts) or "forward" in vars(experts):
        return False
    if getattr(experts, "_is_expert_parallel", False):
        return False
    stacks = [experts._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    if any(w is None or w.dtype == torch.float64 or not_trained(w) for w in stacks) or transformed():
        return False
    return stacks[0].dtype == stacks[1].dtype  # type: ignore[union-attr]  # none is None here


CAUSAL = object()
"""mask of a batch in which a token attends to all before it, as far as its layer's window: to eager attention, None is all"""


class SinkAttention(CappedAttention):
    """Attention with sinks by the op. Masks, keys of a cache, dropout and exact rows are for transformers' function."""

    sinks: Tensor

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cached: bool = False, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        packed = isinstance(mask, Segments) and mask.cu_seqlens is not None
        if not (packed or mask is CAUSAL) or cached or self.drops() or exact():
            return super().attended(q, k, v, mask, cached, **kwargs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        bounds = mask.bounds() if packed else None
        return sink_attention(q, k, v, self.sinks, self.scaling, self.window(), bounds), None

    def drops(self) -> bool:
        return self.training and self.attention_dropout > 0

    def beyond_sdpa(self) -> dict[str, Any]:
        return {"s_aux": self.sinks}

    def angles(self, embeddings: tuple[Tensor, Tensor]) -> Rope:
        cos, sin = ((t[0] if len(t) == 1 else t).float() for t in embeddings)
        return cos, sin

    def fused_kernels(self) -> Kernels:
        words, ops = Attention.fused_kernels(self)
        return words.replace("SDPA", "torch's attention with sinks"), ops


def exact() -> bool:
    """Return whether rows are to have the same bits in any batch. transformers' function is refused then, with a sentence."""
    return not torch.compiler.is_compiling() and getattr(CONTEXT, "mode", None) is not None


def run_sparse(block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Any = None) -> tuple[Tensor, Tensor]:
    children = block._modules
    y, x = children["input_layernorm"].add(x, pending)
    y, x = children["post_attention_layernorm"].add(x, children["self_attn"].mix(y, rope, mask))
    mlp = children["mlp"]
    if role_of(mlp) != "MLP" or hooked(mlp) or "forward" in vars(mlp):
        return x, mlp(y)[0]
    rows, experts = y.flatten(0, 1), mlp.experts
    _, shares, ids = mlp.router(rows)
    return x, run_experts(experts, rows, ids, shares, partial(unit, experts)).view(y.shape)


def unit(experts: Any, packed: Tensor) -> Tensor:
    return clamped_glu(packed, float(experts.alpha), float(experts.limit))


class SinkStack(TypedStack):
    PARTS: ClassVar[dict[str, type]] = {
        "input_layernorm": HFNorm,
        "self_attn": SinkAttention,
        "post_attention_layernorm": HFNorm,
    }
    step = staticmethod(run_sparse)
    output = MoeModelOutputWithPast

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        asked, config = kwargs.get("output_router_logits"), self.config
        if config.output_router_logits if asked is None else asked:
            return "the router's logits were asked for"
        if self.training and config.attention_dropout > 0:
            return f"attention drops {config.attention_dropout:g} of its weights"
        if exact():
            return "attention with sinks has no batch-invariant kernel"
        positions: Any = kwargs.get("position_ids")
        others = (kwargs.get("attention_mask"), kwargs.get(SEGMENTS))
        if others == (None, None) and getattr(positions, "ndim", 0) == 2 and restarts(positions, len(positions)):
            return "transformers does not look for packed rows in position_ids"
        return super().unable(kwargs | {"output_router_logits": None})

    def run(self, x: Tensor, positions: Tensor | None, attention_mask: Mask) -> Tensor:
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
            if not capturing and bool(attention_mask.all()):  # synchronises once, as transformers does for SDPA
                attention_mask = None
        return super().run(x, positions, attention_mask)

    def mask_of(self, kind: str, x: Tensor, attention_mask: Mask) -> Any:
        return CAUSAL if attention_mask is None else super().mask_of(kind, x, attention_mask)


def sink_stack(module: Any, _: Any) -> Swap:
    swap = typed_stack(module, None, SinkStack)
    swap.attributes["tables"] = dict.fromkeys(swap.attributes["tables"], RopeTable(SingleAngles(module.rotary_emb)))
    return replace(swap, calls=(*swap.calls, ("clamped_glu", ())))


def sinks_attention(module: Any, stack: Any) -> Swap:
    swap, config = attention(module, stack, SinkAttention), module.config
    heads = config.num_attention_heads, config.num_key_value_heads, module.head_dim
    call = "sink_attention", (*heads, module.sliding_window is not None, False)
    return replace(swap, calls=(*swap.calls, call))


SWAPS: dict[str, Maker] = {
    "RMSNorm": norm,
    "Attention": sinks_attention,
    "Model": sink_stack,
    "ForCausalLM": sparse_causal_lm,
}
PARAMETERS = {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}


class GptOssReader(Reader):
    READS = frozenset((
        "num_local_experts", "num_experts_per_tok", "swiglu_alpha", "swiglu_limit", "router_aux_loss_coef",
        "output_router_logits",
    ))  # fmt: skip
    ANGLES = SingleAngles

    def refusal(self, max_length: int) -> str | None:
        for number, block in enumerate(self.blocks):
            for name, kind, wanted in (("experts", "Experts", PARAMETERS), ("router", "TopKRouter", {"weight", "bias"})):
                module = getattr(block.mlp, name)
                known = type(module) is MxExperts or (role_of(module) == kind and set(module._parameters) == wanted)
                if not known or "forward" in vars(module) or hooked(module):
                    return f"model.layers.{number}.mlp.{name}: {type(module).__name__}, not the family's own, or with hooks"
        return super().refusal(max_length)

    def attention(self, block: Any) -> AttentionWeights:
        return replace(super().attention(block), sinks=block.self_attn._parameters["sinks"])

    def mlp(self, block: Any) -> ColumnExpertWeights:
        router, experts = block.mlp.router, block.mlp.experts
        weights: Any = experts._parameters
        coded = type(experts) is MxExperts
        return ColumnExpertWeights(
            norm=self.norm(block.post_attention_layernorm),
            router=Linear(weight_of(router), router.bias),
            gate_up=experts.packed("gate_up") if coded else weights["gate_up_proj"],
            gate_up_bias=weights["gate_up_proj_bias"],
            down=experts.packed("down") if coded else weights["down_proj"],
            down_bias=weights["down_proj_bias"],
            slots=int(router.top_k),
            alpha=float(experts.alpha),
            limit=float(experts.limit),
        )

    def routers(self) -> dict[int, Any]:
        return {number: block.mlp.router for number, block in enumerate(self.blocks)}


DECODING: dict[str, Any] = {"ForCausalLM": GptOssReader}
