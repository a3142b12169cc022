"""Granite 4 (GraniteMoeHybrid): Mamba-2 or attention, then an MLP with or without experts, with Granite's factors.

Placing swaps norms, layers of Mamba-2 and the loss; attention, MLPs and the loop over layers stay those of transformers.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from .decoding import DenseWeights, Linear
from .granite import MultipliedReader, ScaledCausalLM
from .hf_modules import causal_lm, norm
from .mamba import MambaReader
from .mixtral import SparseCausalLM, SparseReader
from .reader import linear_of, parts_of
from .recurrent_modules import mamba
from .registry import Maker


class GraniteHybridCausalLM(ScaledCausalLM, SparseCausalLM):
    pass


SWAPS: dict[str, Maker] = {
    "RMSNorm": norm,
    "MambaLayer": mamba,
    "ForCausalLM": partial(causal_lm, part=GraniteHybridCausalLM),
}


class GraniteHybridReader(MultipliedReader, MambaReader, SparseReader):
    NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
    FINAL, ROUTER, GATED = "norm", "router", ("gate_proj", "up_proj", "output_linear")
    READS = MultipliedReader.READS | MambaReader.READS | SparseReader.READS | {
        "shared_intermediate_size", "position_embedding_type",
    }  # fmt: skip

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.ROTATES = self.trunk.rotary_emb is not None

    def mlp_of(self, block: Any) -> Any:
        return block._modules.get("block_sparse_moe") or block.shared_mlp

    def mlp(self, block: Any) -> Any:
        weights, (gate, up) = super().mlp(block), self.gate_up(block.shared_mlp)
        if isinstance(weights, DenseWeights):
            return weights
        return replace(weights, shared=DenseWeights(None, gate, up, linear_of(block.shared_mlp.output_linear)))

    def gate_up(self, mlp: Any) -> list[Linear]:
        return parts_of(mlp.input_linear, [self.config.shared_intermediate_size] * 2)

    def scale(self, attention: Any) -> float:
        return attention.scaling


DECODING: dict[str, Any] = {"ForCausalLM": GraniteHybridReader}
