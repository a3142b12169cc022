"""The Llama kind of transformers: swapped by the parts that many families share, and decoded as decoding.Reader reads it."""

from ..decoding import Reader
from ..parts import attention, mlp, norm
from ..placing import Maker
from ..stack import causal_lm, stack

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "MLP": mlp, "Attention": attention, "Model": stack, "ForCausalLM": causal_lm}

DECODING = {"ForCausalLM": Reader}
