"""Mistral 4: DeepSeek-V3's latent attention with Ministral 3's queries, and experts chosen by a softmax.

Placing replaces norms, MLPs and the loss. Attention, whose queries grow with their position, and its loop stay transformers'.
"""

from typing import Any

from ..kernels.expert_choice import ExpertRouting
from .hf_modules import mlp, norm
from .latent import LatentReader
from .ministral3 import ScaledReader
from .mixtral import sparse_causal_lm
from .registry import Maker

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "MLP": mlp, "ForCausalLM": sparse_causal_lm}


class Mistral4Reader(ScaledReader, LatentReader):
    READS = LatentReader.READS | ScaledReader.READS

    def refusal(self, max_length: int) -> str | None:
        if self.config.n_group > 1:
            return f"its experts are in {self.config.n_group} groups, and chosen by a softmax"
        return super().refusal(max_length)

    def routing(self, block: Any) -> ExpertRouting | None:
        router = block.gate
        factor = float(router.routed_scaling_factor)
        return None if factor == 1 else ExpertRouting(None, bool(router.norm_topk_prob), factor)


DECODING = {"ForCausalLM": Mistral4Reader}
