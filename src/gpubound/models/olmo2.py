"""OLMo 2 and 3: norms after the parts of a block, and over whole rows of q and k.

Its norms are between a part of a block and the residual add, so only the final norm can include an add. The loop still avoids
what transformers does around each layer. OLMo 3 has a window in most layers, and angles by type of layer.
"""

from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from ..layers.attention import Rope
from ..layers.fused_weights import Kernels
from .hf_modules import HFMLP, OPS, SWAPS as LLAMA, HFAttention, HFNorm, HFStack, stack, tried_causal_lm
from .layer_types import TypedStack, typed_attention, typed_stack
from .reader import Reader, angle_types
from .registry import Maker, Swap


class WideNormAttention(HFAttention):
    """q and k are normed over all heads at once."""

    def split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        children: dict[str, Any] = self._modules
        q, k, v = (t.view(*t.shape[:-1], -1, self.head_dim) for t in (children["q_norm"](q), children["k_norm"](k), v))
        return q, k, v


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


SWAPS: dict[str, Maker] = LLAMA | {
    "Attention": partial(typed_attention, part=WideNormAttention),
    "Model": post_norm_stack,
    "ForCausalLM": tried_causal_lm,
}


class PostNormReader(Reader):
    NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


DECODING = {"ForCausalLM": PostNormReader}
