"""GLM, GLM-4, ERNIE 4.5 and Helium: rotation of pairs (2i, 2i + 1), which for GLM are a part of each head.

The kernels rotate pairs (i, i + P). So each head's dimensions are put in that order first. Scores are the same where q and k
have one order, and only keys for a cache of transformers get their own back.
"""

from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from ..kernels import rope
from ..kernels.rope import apart, together
from ..layers.attention import Attention, Mask, Rope
from ..layers.block import normed_for
from ..layers.fused_weights import Kernels
from .hf_modules import HFMLP, SWAPS as LLAMA, HFAttention, HFNorm, HFStack, attention, mlp, stack
from .phi3 import PackedMLP
from .reader import Reader
from .registry import Maker, Swap


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


SWAPS: dict[str, Maker] = LLAMA | {
    "MLP": packed_mlp,
    "Attention": partial(attention, part=InterleavedAttention),
    "Model": interleaved_stack,
}


class InterleavedReader(Reader):
    NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    READS = frozenset({"partial_rotary_factor", "use_bias"})
    INTERLEAVED = True
    image_positions = False


DECODING = {"ForCausalLM": InterleavedReader}
