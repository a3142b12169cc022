"""Arcee and Jais 2: Llama's attention, and an MLP without a gate. Jais 2 has LayerNorms.

Placing swaps norms, attention and the loss; the loop over layers and the MLP stay those of transformers.
"""

from typing import Any

from .hf_modules import attention, norm, tried_causal_lm
from .reader import Reader, UngatedReader
from .registry import Maker

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "Attention": attention, "ForCausalLM": tried_causal_lm}


class JaisReader(UngatedReader):
    READS = frozenset({"layer_norm_eps"})
    LAYERS = ("up_proj", "down_proj")


class ArceeReader(JaisReader):
    norm = Reader.norm


DECODING: dict[str, Any] = {"Jais2ForCausalLM": JaisReader, "ArceeForCausalLM": ArceeReader}
