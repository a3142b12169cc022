"""Nemotron-H: blocks of Mamba-2, attention without positions, and MLPs without a gate.

A block that mixes tokens and the MLP after it are read as one layer. A mixer that another one follows is a layer without an
MLP.

Placing swaps norms, layers of Mamba-2 and the loss; all else stays that of transformers.
"""

from typing import Any

from torch import nn

from .decoding import NoWeights, UngatedWeights
from .hf_modules import norm, tried_causal_lm
from .mamba import MambaReader
from .reader import UNGATED_NAMES, Reader, linear_of
from .recurrent_modules import mamba
from .registry import Maker

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "Mamba2Mixer": mamba, "ForCausalLM": tried_causal_lm}


class NemotronHReader(MambaReader):
    NORMS = ("norm", None, "norm", None)
    EMBEDDING, FINAL, ATTENTION, ROTATES = "embeddings", "norm_f", "mixer", False
    READS = frozenset((
        "layers_block_type", "mlp_hidden_act", "use_mamba_kernels", "ssm_state_size", "mamba_num_heads", "mamba_head_dim",
        "mamba_hidden_act", "n_groups", "conv_kernel", "expand", "time_step_min", "time_step_max", "time_step_limit",
        "time_step_floor", "use_conv_bias", "chunk_size", "mamba_proj_bias", "mamba_ssm_cache_dtype", "n_routed_experts",
        "output_router_logits", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
        "moe_latent_size", "moe_shared_expert_overlap", "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group",
        "norm_topk_prob", "num_nextn_predict_layers", "mtp_layers_block_type", "use_bias", "layer_norm_epsilon",
        "num_logits_to_keep", "hidden_dropout", "rescale_prenorm_residual", "residual_in_fp32",
    ))  # fmt: skip

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.pairs_of_blocks: list[Any] = []
        for block in self.trunk.layers:
            if block.block_type == "mlp" and self.pairs_of_blocks and len(self.pairs_of_blocks[-1]) == 1:
                self.pairs_of_blocks[-1].append(block)
            else:
                self.pairs_of_blocks.append(nn.ModuleList([block]))

    @property
    def blocks(self) -> Any:
        return self.pairs_of_blocks

    def refusal(self, max_length: int) -> str | None:
        types = [pair[0].block_type for pair in self.blocks]
        if other := set(types) - {"linear_attention", "full_attention"}:
            return f"it has blocks of type {sorted(other)[0]!r}, which do not follow a mixer of tokens, or which have experts"
        if self.config.mamba_hidden_act != "silu":
            return "its Mamba layers have another activation than silu"
        return Reader.refusal(self, max_length)

    def activation(self) -> str | None:
        return UNGATED_NAMES.get(self.config.mlp_hidden_act)

    def mixes(self, block: Any) -> bool:
        return block[0].block_type == "linear_attention"

    def attention_of(self, block: Any) -> Any:
        return (block[0] if isinstance(block, nn.ModuleList) else block).mixer

    def attention(self, block: Any) -> Any:
        return self.mixer(block[0]) if self.mixes(block) else Reader.attention(self, block[0])

    def mlp_of(self, block: Any) -> Any:
        return block[1].mixer if len(block) > 1 else None

    def mlp(self, block: Any) -> Any:
        layers, activation = self.mlp_of(block), self.activation()
        if layers is None:
            return NoWeights()
        assert activation is not None
        (before,) = self.norms(block[1], self.NORMS[:1])
        return UngatedWeights(before, linear_of(layers.up_proj), linear_of(layers.down_proj), activation)

    def window(self, attention: Any) -> int:
        return 0


DECODING: dict[str, Any] = {"ForCausalLM": NemotronHReader}
