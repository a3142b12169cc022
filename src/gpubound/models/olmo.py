"""OLMo (the first): Llama with LayerNorms that have no weights.

Placing swaps attention, MLP and the loss; the loop over layers stays that of transformers.
"""

from typing import Any

from torch import Tensor

from ..kernels.row_ops import LayerNorm
from .hf_modules import mlp, tried_causal_lm
from .mixtral import sparse_attention
from .reader import Reader
from .registry import Maker

SWAPS: dict[str, Maker] = {"Attention": sparse_attention, "MLP": mlp, "ForCausalLM": tried_causal_lm}


def gain(embedding: Tensor) -> Tensor:
    return embedding.new_ones(embedding.shape[-1])


class PlainNormReader(Reader):
    def norm(self, module: Any) -> LayerNorm:
        return LayerNorm(self.copies.of(self.embedding.weight, gain), None, 1e-5)


DECODING = {"ForCausalLM": PlainNormReader}
