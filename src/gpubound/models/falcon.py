"""Falcon: parallel blocks of LayerNorms, an MLP without a gate, and one key and value head, or one for a group of heads.

The smaller models have one norm for both parts of a block, the larger ones two. Placing swaps norms and the loss.
"""

from typing import Any

from torch import nn

from ..layers.fused_weights import hooked
from .gpt import FusedReader
from .registry import Maker, role_of

SWAPS: dict[str, Maker] = {}


class FalconReader(FusedReader):
    READS = frozenset((
        "layer_norm_epsilon", "hidden_dropout", "num_kv_heads", "new_decoder_architecture", "multi_query", "parallel_attn",
        "bias", "ffn_hidden_size", "activation", "num_ln_in_parallel_attn",
    ))  # fmt: skip
    BLOCKS, EMBEDDING, FINAL, ATTENTION, OUTPUT = "h", "word_embeddings", "ln_f", "self_attention", "dense"
    LAYERS, OWN = ("dense_h_to_4h", "dense_4h_to_h"), True

    def projects(self, module: nn.Module) -> bool:
        return role_of(module) == "Linear" and not hooked(module)

    def parallel(self, block: Any) -> bool:
        return self.config.new_decoder_architecture or self.config.parallel_attn

    def kv_heads(self, attention: Any) -> int:
        return attention.num_kv_heads

    def scale(self, attention: Any) -> float:
        return attention.inv_norm_factor


class TwoNormsReader(FalconReader):
    NORMS = ("ln_attn", None, "ln_mlp", None)


def read(model: Any) -> FalconReader:
    return (TwoNormsReader if "ln_attn" in model.transformer.h[0]._modules else FalconReader)(model)


DECODING = {"ForCausalLM": read}
