"""Granite: Llama with factors of the embeddings, of what each part adds to the stream, of the scores and of the logits.

The decoder divides the whole stream by the factor m of its additions: x = m y, so that y grows by a part's unscaled output.
The norms, which alone read the stream, give the same for y with eps / m².
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..layers.attention import Mask, Rope
from ..layers.block import normed_for
from .decoding import Shape
from .hf_modules import SWAPS as LLAMA, HFCausalLM, HFStack, causal_lm, stack
from .reader import Reader
from .registry import Maker


def scaled_step(
    block: Any, factor: float, x: Tensor, pending: Tensor | None, rope: Rope, mask: Mask = None
) -> tuple[Tensor, Tensor]:
    """Run a block whose parts' outputs are multiplied by `factor` before they are added to the stream."""
    children = block._modules
    attention, mlp = children["self_attn"], children["mlp"]
    y, x = normed_for(attention, children["input_layernorm"], x, pending)
    y, x = normed_for(mlp, children["post_attention_layernorm"], x, attention.mix(y, rope, mask) * factor)
    return x, mlp.mix(y) * factor


class MultipliedStack(HFStack):
    embedding_multiplier: float

    def run(self, x: Tensor, positions: Tensor | None, attention_mask: Mask) -> Tensor:
        return super().run(x * self.embedding_multiplier, positions, attention_mask)

    @staticmethod
    def step(block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Mask = None) -> tuple[Tensor, Tensor]:
        return scaled_step(block, block.residual_multiplier, x, pending, rope, mask)


class ScaledCausalLM(HFCausalLM):
    def scaled(self, x: Tensor) -> Tensor:
        return x / self.config.logits_scaling


SWAPS: dict[str, Maker] = LLAMA | {
    "Model": partial(stack, part=MultipliedStack),
    "ForCausalLM": partial(causal_lm, part=ScaledCausalLM),
}


class MultipliedReader(Reader):
    READS = frozenset({"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"})

    def refusal(self, max_length: int) -> str | None:
        if len({block.residual_multiplier for block in self.trunk.layers}) > 1 or not self.factor > 0:
            return "its layers' residual_multiplier are not one number above 0"
        return super().refusal(max_length)

    @property
    def factor(self) -> float:
        return self.trunk.layers[0].residual_multiplier

    def shape(self) -> Shape:
        embedded = self.trunk.embedding_multiplier / self.factor
        return replace(super().shape(), embedded=embedded, logit_scale=1 / self.config.logits_scaling)


DECODING = {"ForCausalLM": MultipliedReader}
