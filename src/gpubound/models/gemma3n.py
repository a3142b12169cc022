"""Gemma 3n's text model: Gemma 4's attention, and MLPs whose gates may keep their largest values alone.

Each block mixes four streams (AltUp), one of which attention and the MLP read. No kernel of a step does, so a decoder runs the
model's own forward.
"""

from functools import partial
from typing import Any

from torch import Tensor

from ..kernels.gated import gated
from ..layers.fused_weights import run_linear
from .gemma4 import any_norm, shared_attention
from .hf_modules import HFMLP, mlp, tried_causal_lm
from .reader import Reader
from .registry import Maker


class SparseGateMLP(HFMLP):
    activation_sparsity: float
    _gaussian_topk: Any  # of the module's class

    def mix(self, x: Tensor) -> Tensor:
        if self.activation_sparsity <= 0:
            return super().mix(x)
        gate, up = self.products(x)
        return run_linear(self._modules["down_proj"], gated(self.activation, self._gaussian_topk(gate), up.contiguous()))


class Gemma3nReader(Reader):
    def refusal(self, max_length: int) -> str:
        return "its blocks mix several streams (AltUp), which no kernel of a step does"


SWAPS: dict[str, Maker] = {
    "RMSNorm": any_norm,
    "TextMLP": partial(mlp, part=SparseGateMLP),
    "TextAttention": shared_attention,
    "ForCausalLM": tried_causal_lm,
}

DECODING = {"ForCausalLM": Gemma3nReader}
