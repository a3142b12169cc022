"""Cohere and Cohere 2: parallel blocks after one LayerNorm without a bias, interleaved rotation, a factor of the logits.

Cohere 2 has a window in most layers, and no positions in the others.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..kernels import layer_norm
from ..layers.attention import Rope
from ..layers.fused_weights import Kernels
from .decoding import Shape
from .hf_modules import HFCausalLM, attention, causal_lm, mlp
from .interleaved import InterleavedAttention
from .reader import InterleavedAngles, LayerNormReader, halves
from .registry import BATCH, TOKENS, Delegating, Maker, Swap, random_case


class HFLayerNorm(Delegating, nn.Module):
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if why := self.patched():
            return self.delegate(why, hidden_states)
        return layer_norm(hidden_states, self.weight, None, self.variance_epsilon)

    def fused_kernels(self) -> Kernels:
        return "{}", ("layer_norm",)


def plain_norm(module: Any, stack: Any) -> Swap:
    shape = (BATCH, TOKENS, *module.weight.shape[-1:])
    refusal = "it norms each head by its own weights" if module.weight.dim() > 1 else ""
    cases = (random_case(module, shape),)
    return Swap(HFLayerNorm, (("layer_norm", shape[-1:]),), {"delegated": Counter()}, cases, refusal)


class CohereAttention(InterleavedAttention):
    sliding_window: int | None

    def angles(self, embeddings: tuple[Tensor, Tensor]) -> Rope:
        return halves(embeddings, interleaved=True)

    def project(self, x: Tensor, turn: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate q and k, but in Cohere 2's layers without a window."""
        if vars(self).get("sliding_window", 0) is None:
            return super(InterleavedAttention, self).project(x, None)
        return super().project(x, turn)


def cohere_attention(module: Any, stack: Any) -> Swap:
    swap = attention(module, stack, CohereAttention)
    if getattr(module, "use_qk_norm", False):
        swap.refusal = "it norms each head by its own weights"
    return swap


class CohereCausalLM(HFCausalLM):
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.config.logit_scale


SWAPS: dict[str, Maker] = {
    "LayerNorm": plain_norm,
    "MLP": mlp,
    "Attention": cohere_attention,
    "ForCausalLM": partial(causal_lm, part=CohereCausalLM),
}


class CohereReader(LayerNormReader):
    NORMS = ("input_layernorm", None, None, None)
    READS = frozenset({"logit_scale", "layer_norm_eps", "rope_theta", "sliding_window_pattern"})
    ANGLES, INTERLEAVED, PARALLEL = InterleavedAngles, True, True
    image_positions = False

    def shape(self) -> Shape:
        return replace(super().shape(), logit_scale=float(self.model.logit_scale))

    def table(self, attention: Any) -> int | None:
        return 0 if getattr(attention, "sliding_window", 0) is not None else None


DECODING = {"ForCausalLM": CohereReader}
