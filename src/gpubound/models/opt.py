"""OPT: learnt positions, LayerNorms before the parts of a block, and an MLP without a gate, whose layers are the block's own.

Placing swaps norms and the loss. OPT-350m, whose norms follow the parts, is not decoded by the kernels.
"""

from typing import Any

from .reader import LearntReader
from .registry import Maker

SWAPS: dict[str, Maker] = {}


class OPTReader(LearntReader):
    NORMS = ("self_attn_layer_norm", None, "final_layer_norm", None)
    READS = frozenset((
        "ffn_dim", "word_embed_proj_dim", "dropout", "activation_function", "layerdrop", "init_std", "enable_bias",
    ))  # fmt: skip
    FINAL, OUTPUT, LAYERS, POSITIONS, SKIPPED = "final_layer_norm", "out_proj", ("fc1", "fc2"), "embed_positions", 2

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.trunk = model.model.decoder

    def mlp_of(self, block: Any) -> Any:
        return block

    def refusal(self, max_length: int) -> str | None:
        if self.trunk.project_in is not None:
            return "its embeddings have another width than its layers (word_embed_proj_dim)"
        return super().refusal(max_length)


DECODING = {"ForCausalLM": OPTReader}
