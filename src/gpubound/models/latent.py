"""DeepSeek-V2 and V3, GLM-4-MoE-Lite and Youtu: multi-head latent attention, whose cache holds one latent a token.

DeepSeek-V3 is Kimi-K2's layout, too. Experts are read as those of models/mixtral.py. DeepSeek-V2 chooses them by a softmax,
with groups ranked by the best of each.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.expert_choice import ExpertRouting
from ..layers.attention import Rope
from ..layers.linear_product import format_of
from .decoding import ExpertWeights, LatentAttentionWeights, Shape
from .hf_modules import mlp, norm
from .mixtral import SparseReader
from .reader import HFAngles, linear_of
from .registry import Maker

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "MLP": mlp}


class LatentReader(SparseReader):
    READS = SparseReader.READS | {
        "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "rope_interleave",
        "mlp_layer_types", "topk_method", "embedding_initializer_range",
    }  # fmt: skip

    def refusal(self, max_length: int) -> str | None:
        for number, block in enumerate(self.blocks):
            if format_of(linear_of(block.self_attn.kv_b_proj).weight).coded:
                return (
                    f"model.layers.{number}.self_attn.kv_b_proj is quantised, of which a step multiplies each head's two parts"
                )
        return super().refusal(max_length)

    def head_dim(self, attention: Any) -> int:
        return attention.qk_head_dim

    def shape(self) -> Shape:
        attention = self.attention_of(self.blocks[0])
        return replace(super().shape(), latent=attention.kv_lora_rank + attention.qk_rope_head_dim)

    def attention(self, block: Any) -> LatentAttentionWeights:  # type: ignore[override]
        attention, (before,) = self.attention_of(block), self.norms(block, self.NORMS[:1])
        q_norm, latent_norm = self.norms(attention, ("q_a_layernorm", "kv_a_layernorm"))
        low = attention.q_lora_rank is not None
        return LatentAttentionWeights(
            norm=before,
            q=linear_of(attention.q_b_proj if low else attention.q_proj),
            latent=linear_of(attention.kv_a_proj_with_mqa),
            latent_norm=latent_norm,
            up=linear_of(attention.kv_b_proj)._replace(adapters=()),  # a step multiplies the weight, and would add none
            o=linear_of(attention.o_proj),
            interleaved=self.interleaved,
            q_down=linear_of(attention.q_a_proj) if low else None,
            q_norm=q_norm,
        )

    @property
    def interleaved(self) -> bool:
        return bool(self.config.rope_interleave)

    def together(self, block: Any) -> list[list[Any]]:
        attention, ungrouped = self.attention_of(block), self.mlp_of(block)
        q = attention.q_proj if attention.q_lora_rank is None else attention.q_a_proj
        mlp = [[ungrouped.gate_proj, ungrouped.up_proj]] if hasattr(ungrouped, "gate_proj") else []
        return [[q, attention.kv_a_proj_with_mqa], *mlp]


class ComplexAngles(HFAngles):
    """Angles of a rotary module that returns complex numbers."""

    def __call__(self, positions: Tensor) -> Rope:
        like = torch.empty(0, device=positions.device, dtype=torch.float32)
        turns = self.rotary(like, positions.reshape(-1, positions.shape[-1])).reshape(*positions.shape, -1)
        return turns.real.float(), turns.imag.float()


class DeepseekV2Reader(LatentReader):
    ANGLES = ComplexAngles
    interleaved = True

    def mlp(self, block: Any) -> Any:
        weights = super().mlp(block)
        return replace(weights, normalise=False) if isinstance(weights, ExpertWeights) else weights

    def routing(self, block: Any) -> ExpertRouting | None:
        router = block.gate
        groups = router.topk_method == "group_limited_greedy"
        if not groups and router.routed_scaling_factor == 1:
            return None
        count, kept = (router.num_group, router.topk_group) if groups else (1, 1)
        return ExpertRouting(None, False, float(router.routed_scaling_factor), count, kept, best=1)


DECODING = {"DeepseekV2ForCausalLM": DeepseekV2Reader, "ForCausalLM": LatentReader}
