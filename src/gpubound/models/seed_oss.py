"""Seed-OSS: Qwen2 with dropout of the outputs of attention and MLP, which its released configs ask for in training."""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .hf_modules import HFMLP, SWAPS as LLAMA, HFAttention, attention, mlp
from .reader import Reader
from .registry import Maker


class DroppedAttention(HFAttention):
    residual_dropout: float

    def output(self, y: Tensor) -> Tensor:
        return F.dropout(super().output(y), self.residual_dropout, self.training)


class DroppedMLP(HFMLP):
    residual_dropout: float

    def mix(self, x: Tensor) -> Tensor:
        return F.dropout(super().mix(x), self.residual_dropout, self.training)


SWAPS: dict[str, Maker] = LLAMA | {
    "MLP": partial(mlp, part=DroppedMLP),
    "Attention": partial(attention, part=DroppedAttention),
}


class DroppedReader(Reader):
    READS = frozenset({"attention_out_bias", "residual_dropout"})


DECODING: dict[str, Any] = {"ForCausalLM": DroppedReader}
