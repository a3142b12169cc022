"""Models that rotate pairs (2i, 2i + 1): Cohere and Cohere 2, GLM, GLM-4, ERNIE 4.5 and Helium.

Cohere and Cohere 2: parallel blocks after one LayerNorm without a bias, interleaved rotation, a factor of the logits.

Cohere 2 has a window in most layers, and no positions in the others.

GLM, GLM-4, ERNIE 4.5 and Helium: rotation of pairs (2i, 2i + 1), which for GLM are a part of each head.

The kernels rotate pairs (i, i + P). So each head's dimensions are put in that order first. Scores are the same where q and k
have one order, and only keys for a cache of transformers get their own back.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ..kernels import layer_norm, rope
from ..kernels.rope import apart, together
from ..layers.attention import Attention, Mask, Rope
from ..layers.block import normed_for
from ..layers.fused_weights import Kernels
from .decoding import Shape
from .hf_modules import HFMLP, SWAPS as LLAMA, HFAttention, HFCausalLM, HFNorm, HFStack, attention, causal_lm, mlp, stack
from .phi import PackedMLP
from .reader import InterleavedAngles, LayerNormReader, Reader, halves
from .registry import BATCH, TOKENS, Delegating, Maker, Swap, random_case


class InterleavedAttention(HFAttention):
    def turned(self, x: Tensor, turn: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, with q and k rotated and their dimensions apart."""
        q, k, v = Attention.project(self, x, None)
        pairs = turn[0].shape[-1]
        return *rope(apart(q, pairs), apart(k, pairs), *turn), v

    def project(self, x: Tensor, turn: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.turned(x, turn)
        pairs = turn[0].shape[-1]
        return together(q, pairs), together(k, pairs), v

    def mix(self, x: Tensor, rope: Any, mask: Mask = None) -> Tensor:
        q, k, v = self.turned(x, rope)
        y, _ = self.attended(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.output(y.flatten(-2))

    def fused_kernels(self) -> Kernels:
        return super().fused_kernels()[0], ("rope",)


class Glm4Stack(HFStack):
    """Stack of blocks with norms before and after each part."""

    PARTS: ClassVar[dict[str, type]] = HFStack.PARTS | {"post_self_attn_layernorm": HFNorm, "post_mlp_layernorm": HFNorm}

    @staticmethod
    def step(block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Mask = None) -> tuple[Tensor, Tensor]:
        children = block._modules
        attention, mlp = children["self_attn"], children["mlp"]
        y, x = normed_for(attention, children["input_layernorm"], x, pending)
        y = children["post_self_attn_layernorm"](attention.mix(y, rope, mask))
        y, x = normed_for(mlp, children["post_attention_layernorm"], x, y)
        return x, children["post_mlp_layernorm"](mlp.mix(y))


def interleaved_stack(module: Any, _: Any) -> Swap:
    return stack(module, None, Glm4Stack if "post_mlp_layernorm" in module.layers[0]._modules else HFStack)


def packed_mlp(module: Any, stack: Any) -> Swap:
    return mlp(module, stack, PackedMLP if "gate_up_proj" in module._modules else HFMLP)


INTERLEAVED: dict[str, Maker] = LLAMA | {
    "MLP": packed_mlp,
    "Attention": partial(attention, part=InterleavedAttention),
    "Model": interleaved_stack,
}


class InterleavedReader(Reader):
    NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    READS = frozenset({"partial_rotary_factor", "use_bias"})
    INTERLEAVED = True


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


COHERE: dict[str, Maker] = {
    "LayerNorm": plain_norm,
    "MLP": mlp,
    "Attention": cohere_attention,
    "ForCausalLM": partial(causal_lm, part=CohereCausalLM),
}


class CohereReader(LayerNormReader):
    NORMS = ("input_layernorm", None, None, None)
    READS = frozenset({"logit_scale", "layer_norm_eps", "rope_theta", "sliding_window_pattern"})
    ANGLES, INTERLEAVED, PARALLEL = InterleavedAngles, True, True

    def shape(self) -> Shape:
        return replace(super().shape(), logit_scale=float(getattr(self.model, "logit_scale", 1.0)))

    def table(self, attention: Any) -> int | None:
        return 0 if getattr(attention, "sliding_window", 0) is not None else None


SWAPS: dict[str, Any] = {
    "glm": INTERLEAVED,
    "glm4": INTERLEAVED,
    "ernie4_5": INTERLEAVED,
    "helium": INTERLEAVED,
    "cohere": COHERE,
    "cohere2": COHERE,
}
DECODING: dict[str, Any] = {
    "GlmForCausalLM": InterleavedReader,
    "Glm4ForCausalLM": InterleavedReader,
    "Ernie4_5ForCausalLM": InterleavedReader,
    "HeliumForCausalLM": InterleavedReader,
    "CohereForCausalLM": CohereReader,
    "Cohere2ForCausalLM": CohereReader,
}
