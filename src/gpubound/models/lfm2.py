"""LFM2 and LFM2-MoE: gated short convolutions in most layers, attention with normed heads in the others.

Placing swaps norms and the loss; the loop over layers, attention, convolutions and MLPs stay those of transformers.
"""

from typing import Any

from .hf_modules import norm, tried_causal_lm
from .mixtral import SparseReader
from .recurrent import RecurrentReader, ShortConvWeights
from .registry import Maker

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "ForCausalLM": tried_causal_lm}


class Lfm2Reader(RecurrentReader):
    NORMS = ("operator_norm", None, "ffn_norm", None)
    FINAL, OUTPUT, MIXER, CONV, MLP = "embedding_norm", "out_proj", "conv", "conv", "feed_forward"
    HEAD_NORMS, GATED = ("q_layernorm", "k_layernorm"), ("w1", "w3", "w2")
    READS = frozenset((
        "norm_eps", "conv_bias", "conv_L_cache", "block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim",
        "full_attn_idxs",
    ))  # fmt: skip

    def activation(self) -> str:
        return "silu"  # no option of the config

    def mixer(self, block: Any) -> ShortConvWeights:
        return ShortConvWeights(**self.common(block))


class Lfm2MoeReader(Lfm2Reader, SparseReader):
    READS = Lfm2Reader.READS | SparseReader.READS | {"num_dense_layers", "use_expert_bias"}
    CORRECTION, ROTARY = "expert_bias", "pos_emb"

    def refusal(self, max_length: int) -> str | None:
        why = super().refusal(max_length)
        return why or (None if self.config.use_expert_bias else "its router has sigmoid scores without a correction")


DECODING: dict[str, Any] = {"Lfm2ForCausalLM": Lfm2Reader, "Lfm2MoeForCausalLM": Lfm2MoeReader}
