"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases and clamped units.

Placing swaps norms and the loss; attention and experts stay those of transformers.
"""

from dataclasses import replace
from typing import Any

from ..layers.fused_weights import hooked
from .decoding import AttentionWeights, ColumnExpertWeights, Linear
from .hf_modules import norm
from .mixtral import sparse_causal_lm
from .reader import Reader, SingleAngles, weight_of
from .registry import Maker, role_of

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "ForCausalLM": sparse_causal_lm}
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
                known = role_of(module) == kind and set(module._parameters) == wanted and "forward" not in vars(module)
                if not known or hooked(module):
                    return f"model.layers.{number}.mlp.{name}: {type(module).__name__}, not the family's own, or with hooks"
        return super().refusal(max_length)

    def attention(self, block: Any) -> AttentionWeights:
        return replace(super().attention(block), sinks=block.self_attn._parameters["sinks"])

    def mlp(self, block: Any) -> ColumnExpertWeights:
        router, experts = block.mlp.router, block.mlp.experts
        weights: Any = experts._parameters
        return ColumnExpertWeights(
            norm=self.norm(block.post_attention_layernorm),
            router=Linear(weight_of(router), router.bias),
            gate_up=weights["gate_up_proj"],
            gate_up_bias=weights["gate_up_proj_bias"],
            down=weights["down_proj"],
            down_bias=weights["down_proj_bias"],
            slots=int(router.top_k),
            alpha=float(experts.alpha),
            limit=float(experts.limit),
        )

    def routers(self) -> dict[int, Any]:
        return {number: block.mlp.router for number, block in enumerate(self.blocks)}


DECODING: dict[str, Any] = {"ForCausalLM": GptOssReader}
