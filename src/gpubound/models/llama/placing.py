"""How the modules of the Llama kind are swapped: all by the parts that many families share."""

from ..language import causal_lm
from ..parts import attention, mlp, norm
from ..placing import Maker
from ..stack import stack

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "MLP": mlp, "Attention": attention, "Model": stack, "ForCausalLM": causal_lm}
