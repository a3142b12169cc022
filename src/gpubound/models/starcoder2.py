"""StarCoder2: Llama's attention with biases, LayerNorms, and an MLP without a gate.

Placing swaps norms, attention and the loss; the loop over layers and the MLP stay those of transformers.
"""

from functools import partial
from typing import Any

from .hf_modules import attention, tried_causal_lm
from .reader import UngatedReader
from .registry import Maker
from .seed_oss import DroppedAttention

SWAPS: dict[str, Maker] = {"Attention": partial(attention, part=DroppedAttention), "ForCausalLM": tried_causal_lm}


class Starcoder2Reader(UngatedReader):
    READS = frozenset({"norm_epsilon", "residual_dropout", "embedding_dropout", "use_bias"})


DECODING: dict[str, Any] = {"ForCausalLM": Starcoder2Reader}
