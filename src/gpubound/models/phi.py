"""Phi: parallel blocks after one LayerNorm, an MLP without a gate, rotation of a part of each head, a head with a bias.

Placing swaps norms, attention and the loss; the loop over layers and the MLP stay those of transformers.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..layers.fused_weights import run_linear
from .decoding import UngatedWeights
from .hf_modules import HFAttention, attention, tried_causal_lm
from .reader import UngatedReader
from .registry import Maker, Swap

NORMED = "it norms each head by a LayerNorm (qk_layernorm)"


class PhiAttention(HFAttention):
    def output(self, y: Tensor) -> Tensor:
        return run_linear(self._modules["dense"], y)


def phi_attention(module: Any, stack: Any) -> Swap:
    swap = attention(module, stack, PhiAttention)
    if module.qk_layernorm:
        swap.refusal = NORMED
    return swap


SWAPS: dict[str, Maker] = {"Attention": phi_attention, "ForCausalLM": tried_causal_lm}


class PhiReader(UngatedReader):
    NORMS = ("input_layernorm", None, None, None)
    READS = frozenset({"layer_norm_eps", "qk_layernorm", "partial_rotary_factor"})
    FINAL, OUTPUT, LAYERS, PARALLEL = "final_layernorm", "dense", ("fc1", "fc2"), True

    def refusal(self, max_length: int) -> str | None:
        return NORMED if self.config.qk_layernorm else super().refusal(max_length)

    def mlp(self, block: Any) -> UngatedWeights:
        return replace(super().mlp(block), norm=self.norm(block.input_layernorm))


DECODING: dict[str, Any] = {"ForCausalLM": PhiReader}
