"""Mamba-2 by itself: no layer has attention or an MLP.

Placing swaps norms, layers of Mamba-2 and the loss; the loop over layers stays that of transformers.
"""

from typing import Any

from .decoding import NoWeights
from .hf_modules import norm, tried_causal_lm
from .mamba import MambaReader
from .recurrent_modules import mamba
from .registry import Maker

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "Mixer": mamba, "ForCausalLM": tried_causal_lm}


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


DECODING: dict[str, Any] = {"ForCausalLM": Mamba2Reader}
