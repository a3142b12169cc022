"""Phi: parallel blocks after one LayerNorm, an MLP without a gate, rotation of a part of each head, a head with a bias.

Placing swaps norms, attention and the loss; the loop over layers and the MLP stay those of transformers.
"""

from typing import Any

from torch import Tensor

from ..layers.fused_weights import run_linear
from .hf_modules import HFAttention, attention, tried_causal_lm
from .reader import UngatedReader
from .registry import Maker, Swap


class PhiAttention(HFAttention):
    def output(self, y: Tensor) -> Tensor:
        return run_linear(self._modules["dense"], y)


def phi_attention(module: Any, stack: Any) -> Swap:
    swap = attention(module, stack, PhiAttention)
    if module.qk_layernorm:
        swap.refusal = "it norms each head by a LayerNorm (qk_layernorm)"
    return swap


SWAPS: dict[str, Maker] = {"Attention": phi_attention, "ForCausalLM": tried_causal_lm}


class PhiReader(UngatedReader):
    NORMS = ("input_layernorm", None, None, None)
    READS = frozenset({"layer_norm_eps", "partial_rotary_factor"})
    FINAL, OUTPUT, LAYERS, PARALLEL = "final_layernorm", "dense", ("fc1", "fc2"), True


DECODING: dict[str, Any] = {"ForCausalLM": PhiReader}
