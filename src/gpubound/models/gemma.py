"""Gemma, Gemma 2 and VaultGemma: scaled embeddings, norms whose gain is 1 + weight, an MLP gated by gelu.

Gemma 2 has norms before and after each part of a block, and a window in every other layer; VaultGemma has no norms after the
parts. The scores of both are capped,
score -> cap · tanh(score / cap), which SDPA does not support. A placed model therefore calls transformers' attention function
that the config names, between the fused projections with RoPE and the output projection. (With SDPA, transformers omits the
cap, and so does the placed model.) The logits are capped too, so the loss stays that of transformers.
"""

import sys
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..layers.attention import Attention, Rope
from ..layers.fused_weights import Kernels
from ..layers.packed_attention import Segments
from .hf_modules import HFMLP, HFAttention, HFShiftedNorm, HFStack, attention, mlp, norm, stack, tried_causal_lm
from .layer_types import TypedStack, typed_stack
from .reader import Reader, text_stack
from .registry import Maker, Swap


class CappedAttention(HFAttention):
    IMPLEMENTATIONS = ("eager",)

    attn_logit_softcapping: float | None
    sliding_window: int | None

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        """Return why the class was patched; transformers' function supports every argument of its module."""
        return self.patched()

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cached: bool = False, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        eager = sys.modules[self.original.__module__].eager_attention_forward
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        if isinstance(mask, Segments):
            mask = mask.bias(q.dtype, self.sliding_window)
        kwargs |= {"sliding_window": self.sliding_window, **self.beyond_sdpa()}
        return function(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)

    def beyond_sdpa(self) -> dict[str, Any]:
        """Return the arguments of transformers' function that SDPA lacks."""
        return {"softcap": self.attn_logit_softcapping}

    def fused_kernels(self) -> Kernels:
        words, ops = Attention.fused_kernels(self)
        return words.replace("SDPA", "transformers' eager attention (it caps the scores)"), ops


def run_sandwich(
    block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    children = block._modules
    y, x = children["input_layernorm"].add(x, pending)
    y = children["post_attention_layernorm"](children["self_attn"].mix(y, rope, mask))
    y, x = children["pre_feedforward_layernorm"].add(x, y)
    return x, children["post_feedforward_layernorm"](children["mlp"].mix(y))


def run_vault(block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    children = block._modules
    y, x = children["input_layernorm"].add(x, pending)
    y, x = children["pre_feedforward_layernorm"].add(x, children["self_attn"].mix(y, rope, mask))
    return x, children["mlp"].mix(y)


class VaultStack(TypedStack):
    """Stack of blocks with norms before each part."""

    PARTS: ClassVar[dict[str, type]] = {
        "input_layernorm": HFShiftedNorm,
        "self_attn": HFAttention,
        "pre_feedforward_layernorm": HFShiftedNorm,
        "mlp": HFMLP,
    }

    step = staticmethod(run_vault)


class SandwichStack(TypedStack):
    """Stack of blocks with norms before and after each part."""

    PARTS: ClassVar[dict[str, type]] = VaultStack.PARTS | {
        "post_attention_layernorm": HFShiftedNorm,
        "post_feedforward_layernorm": HFShiftedNorm,
    }

    step = staticmethod(run_sandwich)


class ShiftedStack(HFStack):
    """Gemma's stack: Llama's blocks with other norms."""

    PARTS: ClassVar[dict[str, type]] = HFStack.PARTS | {
        "input_layernorm": HFShiftedNorm,
        "post_attention_layernorm": HFShiftedNorm,
    }


def gemma_stack(module: Any, _: Any) -> Swap:
    """Return the Swap of a stack of one of the three kinds of blocks, which differ in their norms."""
    names = module.layers[0]._modules
    if "pre_feedforward_layernorm" not in names:
        return stack(module, None, ShiftedStack)
    return typed_stack(module, None, SandwichStack if "post_feedforward_layernorm" in names else VaultStack)


def capped_attention(module: Any, stack: Any) -> Swap:
    capped = hasattr(module, "attn_logit_softcapping") and module.config._attn_implementation == "eager"
    return attention(module, stack, CappedAttention if capped else HFAttention)


SWAPS: dict[str, Maker] = {
    "RMSNorm": partial(norm, part=HFShiftedNorm),
    "MLP": mlp,
    "Attention": capped_attention,
    "Model": gemma_stack,
    "ForCausalLM": tried_causal_lm,
}


class GemmaReader(Reader):
    OFFSET = 1.0


class SandwichReader(GemmaReader):
    NORMS: ClassVar[tuple[str | None, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    READS = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping"})

    def cap(self, attention: Any) -> float:
        """Return the cap of the scores, which transformers' SDPA omits."""
        capped = self.config._attn_implementation != "sdpa"
        return (capped and attention.attn_logit_softcapping) or 0.0


class VaultReader(SandwichReader):
    NORMS = ("input_layernorm", None, "pre_feedforward_layernorm", None)


def read(model: Any) -> Reader:
    names = text_stack(model).layers[0]._modules
    if "pre_feedforward_layernorm" not in names:
        return GemmaReader(model)
    return SandwichReader(model) if "post_feedforward_layernorm" in names else VaultReader(model)


DECODING = {"ForCausalLM": read}
