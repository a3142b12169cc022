"""Mamba-2 by itself, where no layer has attention or an MLP, and Bamba, which has attention in some layers.

Placing swaps norms, MLPs, layers of Mamba-2 and the loss; attention and the loop over layers stay those of transformers.
"""

from dataclasses import replace
from typing import Any

from .decoding import NoWeights
from .hf_modules import mlp, norm, tried_causal_lm
from .recurrent import MambaWeights, RecurrentReader
from .recurrent_modules import head_norm, mamba, mamba_shape, norm_groups
from .registry import Maker, Swap


def bamba_causal_lm(module: Any, stack: Any) -> Swap:
    swap = tried_causal_lm(module, stack)
    return replace(swap, refusal="its loss has a z-loss") if getattr(module, "z_loss_coefficient", 0) else swap


SWAPS: dict[str, Maker] = {"RMSNorm": norm, "MLP": mlp, "Mixer": mamba, "ForCausalLM": bamba_causal_lm}


class MambaReader(RecurrentReader):
    NORMS = ("input_layernorm", None, "pre_ff_layernorm", None)
    FINAL, MIXER, MLP = "final_layernorm", "mamba", "feed_forward"
    READS = frozenset((
        "attn_layer_indices", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
        "mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "num_logits_to_keep", "z_loss_coefficient",
    ))  # fmt: skip

    def refusal(self, max_length: int) -> str | None:
        if (why := super().refusal(max_length)) or self.activation() == "silu":
            return why
        return "its Mamba layers have another activation than silu"

    def mixer(self, block: Any) -> MambaWeights:
        layer = self.attention_of(block)
        return MambaWeights(
            **self.common(block),
            a_log=layer._parameters["A_log"],
            dt=layer._parameters["dt_bias"],
            skip=layer._parameters["D"],
            head_norm=head_norm(layer),
            norm_groups=norm_groups(layer),
            shape=mamba_shape(layer),
        )


class Mamba2Reader(MambaReader):
    NORMS = ("norm", None, "norm", None)
    EMBEDDING, FINAL, MIXER, ROTATES = "embeddings", "norm_f", "mixer", False
    READS = frozenset((
        "num_heads", "state_size", "layer_norm_epsilon", "expand", "conv_kernel", "n_groups", "use_bias", "use_conv_bias",
        "residual_in_fp32", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor",
        "rescale_prenorm_residual", "chunk_size",
    ))  # fmt: skip

    def mlp(self, block: Any) -> NoWeights:
        return NoWeights()

    def head_dim(self, attention: Any) -> int:
        return 2  # of a table that no layer reads


DECODING: dict[str, Any] = {"BambaForCausalLM": MambaReader, "Mamba2ForCausalLM": Mamba2Reader}
