"""MiniCPM3: latent attention, with factors of the embeddings, of what each part adds to the stream, and of the logits.

The decoder divides the stream by the factor of its additions, as models/granite.py does.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..layers.attention import Mask, Rope
from .decoding import LatentAttentionWeights, Shape
from .granite import ScaledCausalLM, scaled_step
from .hf_modules import causal_lm, stack
from .latent import SWAPS as LATENT, LatentReader, LatentStack
from .registry import Maker


class ResidualScaledStack(LatentStack):
    """Stack of blocks that multiply what each part adds to the stream."""

    @staticmethod
    def step(block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Mask = None) -> tuple[Tensor, Tensor]:
        return scaled_step(block, block.residual_scale, x, pending, rope, mask)


SWAPS: dict[str, Maker] = LATENT | {
    "Model": partial(stack, part=ResidualScaledStack),
    "ForCausalLM": partial(causal_lm, part=ScaledCausalLM),
}


class MiniCPM3Reader(LatentReader):
    READS = LatentReader.READS | {"scale_emb", "scale_depth", "dim_model_base"}
    interleaved = False

    @property
    def factor(self) -> float:
        return self.blocks[0].residual_scale

    def shape(self) -> Shape:
        return replace(super().shape(), logit_scale=1 / self.config.logits_scaling)

    def attention(self, block: Any) -> LatentAttentionWeights:  # type: ignore[override]
        weights = super().attention(block)
        others: dict[str, Any] = {name: getattr(weights, name) for name in ("q_norm", "latent_norm")}  # not of the stream
        return replace(
            weights, **{name: norm and norm._replace(eps=norm.eps * self.factor**2) for name, norm in others.items()}
        )


DECODING = {"ForCausalLM": MiniCPM3Reader}
