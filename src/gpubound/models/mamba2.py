"""Mamba-2 by itself: no layer has attention or an MLP.

Placing swaps norms, layers of Mamba-2 and the loss; the loop over layers stays that of transformers.
"""

from typing import Any

from ..layers.attention import Angles
from .decoding import NoWeights
from .hf_modules import norm, tried_causal_lm
from .mamba import MambaReader
from .reader import NoAngles
from .recurrent_modules import mamba
from .registry import Maker

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "Mixer": mamba, "ForCausalLM": tried_causal_lm}


class Mamba2Reader(MambaReader):
    NORMS = ("norm", None, "norm", None)
    EMBEDDING, FINAL, MIXER = "embeddings", "norm_f", "mixer"
    READS = frozenset((
        "num_heads", "state_size", "layer_norm_epsilon", "expand", "conv_kernel", "n_groups", "use_bias", "use_conv_bias",
        "residual_in_fp32", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor",
        "rescale_prenorm_residual", "chunk_size",
    ))  # fmt: skip

    def mlp_of(self, block: Any) -> None:
        return None

    def mlp(self, block: Any) -> NoWeights:
        return NoWeights()

    def head_dim(self, attention: Any) -> int:
        return 2  # of tables that no layer reads

    def angles(self) -> list[Angles]:
        return [NoAngles(1)]


DECODING: dict[str, Any] = {"ForCausalLM": Mamba2Reader}
