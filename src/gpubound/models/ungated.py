"""Llama's attention with another MLP: Arcee and Jais 2, Seed-OSS, StarCoder2.

Arcee and Jais 2: an MLP without a gate. Jais 2 has LayerNorms.

Placing swaps norms, attention and the loss; the loop over layers and the MLP stay those of transformers.

Seed-OSS: Qwen2 with dropout of the outputs of attention and MLP, which its released configs ask for in training.

StarCoder2: Llama's attention with biases, LayerNorms, and an MLP without a gate.

Placing swaps norms, attention and the loss; the loop over layers and the MLP stay those of transformers.
"""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .hf_modules import HFMLP, SWAPS as LLAMA, HFAttention, attention, mlp, norm, tried_causal_lm
from .reader import Reader, UngatedReader
from .registry import Maker

UNGATED: dict[str, Maker] = {"RMSNorm": norm, "Attention": attention, "ForCausalLM": tried_causal_lm}


class JaisReader(UngatedReader):
    READS = frozenset({"layer_norm_eps"})
    LAYERS = ("up_proj", "down_proj")


class ArceeReader(JaisReader):
    norm = Reader.norm


class DroppedAttention(HFAttention):
    residual_dropout: float

    def output(self, y: Tensor) -> Tensor:
        return F.dropout(super().output(y), self.residual_dropout, self.training)


class DroppedMLP(HFMLP):
    residual_dropout: float

    def mix(self, x: Tensor) -> Tensor:
        return F.dropout(super().mix(x), self.residual_dropout, self.training)


SEED_OSS: dict[str, Maker] = LLAMA | {
    "MLP": partial(mlp, part=DroppedMLP),
    "Attention": partial(attention, part=DroppedAttention),
}


class DroppedReader(Reader):
    READS = frozenset({"attention_out_bias", "residual_dropout"})


STARCODER2: dict[str, Maker] = {"Attention": partial(attention, part=DroppedAttention), "ForCausalLM": tried_causal_lm}


class Starcoder2Reader(UngatedReader):
    READS = frozenset({"norm_epsilon", "residual_dropout", "embedding_dropout", "use_bias"})


SWAPS: dict[str, Any] = UNGATED | {"seed_oss": SEED_OSS, "starcoder2": STARCODER2}
DECODING: dict[str, Any] = {
    "Jais2ForCausalLM": JaisReader,
    "ArceeForCausalLM": ArceeReader,
    "SeedOssForCausalLM": DroppedReader,
    "Starcoder2ForCausalLM": Starcoder2Reader,
}
