"""OLMo, OLMo 2 and 3, EXAONE 4.

OLMo (the first): Llama with LayerNorms that have no weights. Placing swaps attention, MLP and the loss; the loop over layers
stays that of transformers.

OLMo 2 and 3: norms after the parts of a block, and over whole rows of q and k.

Its norms are between a part of a block and the residual add, so only the final norm can include an add. The loop still avoids
what transformers does around each layer. OLMo 3 has a window in most layers, and angles by type of layer.

EXAONE 4: OLMo 2's blocks with normed heads, and among layers with a window some that see all, without positions.
"""

from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from ..kernels.row_ops import LayerNorm
from ..layers.attention import Rope
from ..layers.fused_weights import Kernels
from .hf_modules import HFMLP, OPS, SWAPS as LLAMA, HFAttention, HFNorm, HFStack, attention, mlp, stack, tried_causal_lm
from .layer_types import TypedStack, typed_attention, typed_stack
from .reader import Reader, angle_types
from .registry import Maker, Swap


class WideNormAttention(HFAttention):
    """q and k are normed over all heads at once."""

    def split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        children: dict[str, Any] = self._modules
        q, k, v = (t.view(*t.shape[:-1], -1, self.head_dim) for t in (children["q_norm"](q), children["k_norm"](k), v))
        return q, k, v


def clipped_attention(module: Any, stack: Any) -> Swap:
    """Return the Swap of Llama's attention, or of OLMoE's, which norms whole rows of q and k. OLMo's may clamp them, too."""
    norm = module._modules.get("q_norm")
    wide = norm is not None and len(norm.weight) > module.head_dim
    swap = attention(module, stack, WideNormAttention if wide else HFAttention)
    if (clip := getattr(module.config, "clip_qkv", None)) is not None:
        swap.refusal = f"it clamps q, k and v (clip_qkv={clip})"
    return swap


OLMO: dict[str, Maker] = {"Attention": clipped_attention, "MLP": mlp, "ForCausalLM": tried_causal_lm}


def gain(embedding: Tensor) -> Tensor:
    return embedding.new_ones(embedding.shape[-1])


class PlainNormReader(Reader):
    def norm(self, module: Any) -> LayerNorm:
        return LayerNorm(self.copies.of(self.embedding.weight, gain), None, 1e-5)


class PostNormStack(HFStack):
    PARTS: ClassVar[dict[str, type]] = {
        "self_attn": HFAttention,
        "post_attention_layernorm": HFNorm,
        "mlp": HFMLP,
        "post_feedforward_layernorm": HFNorm,
    }

    @staticmethod
    def step(block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        children = block._modules
        x = x if pending is None else x + pending
        x = x + children["post_attention_layernorm"](children["self_attn"].mix(x, rope, mask))
        return x, children["post_feedforward_layernorm"](children["mlp"].mix(x))

    def fused_kernels(self) -> Kernels:
        return "a plain loop, since its adds follow its norms; the last one in the final norm: {}", OPS


class TypedPostNormStack(TypedStack, PostNormStack):
    pass


def post_norm_stack(module: Any, _: Any) -> Swap:
    if angle_types(module.rotary_emb):
        return typed_stack(module, None, TypedPostNormStack)
    return stack(module, None, PostNormStack)


OLMO2: dict[str, Maker] = LLAMA | {
    "Attention": partial(typed_attention, part=WideNormAttention),
    "Model": post_norm_stack,
    "ForCausalLM": tried_causal_lm,
}


class PostNormReader(Reader):
    NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


class NoPositionsAttention(HFAttention):
    sliding_window: int | None
    is_sliding: bool

    def turns(self) -> bool:
        return self.sliding_window is None or self.is_sliding

    def window(self) -> int | None:
        return self.sliding_window if self.is_sliding else None


EXAONE4: dict[str, Maker] = OLMO2 | {
    "Attention": partial(attention, part=NoPositionsAttention),
    "Model": partial(typed_stack, part=TypedPostNormStack),
}


class NoPositionsReader(PostNormReader):
    READS = frozenset({"sliding_window_pattern"})

    def window(self, attention: Any) -> int:
        return (attention.is_sliding and attention.sliding_window) or 0

    def table(self, attention: Any) -> int | None:
        return 0 if attention.sliding_window is None or attention.is_sliding else None


SWAPS: dict[str, Any] = OLMO2 | {"olmo": OLMO, "exaone4": EXAONE4}
DECODING: dict[str, Any] = {
    "OlmoForCausalLM": PlainNormReader,
    "ForCausalLM": PostNormReader,
    "Exaone4ForCausalLM": NoPositionsReader,
}
