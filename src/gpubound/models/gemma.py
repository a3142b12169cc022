"""Gemma and Gemma 2: scaled embeddings, norms whose gain is 1 + weight, an MLP gated by gelu.

Gemma 2 has norms before and after each part of a block, and a window in every other layer. Its scores are capped,
score -> cap · tanh(score / cap), which SDPA does not support. A placed model therefore calls transformers' attention function
that the config names, between the fused projections with RoPE and the output projection. (With SDPA, transformers omits the
cap, and so does the placed model.) The logits are capped too, so the loss stays that of transformers.
"""

import sys
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..layers.attention import Attention, Mask, Rope, RopeTable
from ..layers.block import run_blocks
from ..layers.fused_weights import Kernels
from ..layers.packed_attention import Segments
from .decoding import HFAngles, Reader
from .hf_modules import HFMLP, HFAttention, HFShiftedNorm, HFStack, attention, mlp, norm, stack, tried_causal_lm
from .packed_rows import FULL, WINDOWED
from .registry import Maker, Swap

BOTH_WAYS = "the config lets tokens attend to later tokens"
MASKS = {FULL: create_causal_mask, WINDOWED: create_sliding_window_causal_mask}


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
        kwargs |= {"sliding_window": self.sliding_window, "softcap": self.attn_logit_softcapping}
        return function(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)

    def fused_kernels(self) -> Kernels:
        words, ops = Attention.fused_kernels(self)
        return words.replace("SDPA", "transformers' eager attention (it caps the scores)"), ops


def run_sandwich(
    block: Any, x: Tensor, pending: Tensor | None, rope: dict[str, Rope], mask: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    children = block._modules
    attention, kind = children["self_attn"], children["self_attn"].layer_type
    y, x = children["input_layernorm"].add(x, pending)
    y = children["post_attention_layernorm"](attention.mix(y, rope[kind], mask[kind]))
    y, x = children["pre_feedforward_layernorm"].add(x, y)
    return x, children["post_feedforward_layernorm"](children["mlp"].mix(y))


def both_ways(config: Any) -> bool:
    """Return True if the config asks for bidirectional attention, which changes Gemma 3's masks."""
    return bool(getattr(config, "use_bidirectional_attention", False))


class SandwichStack(HFStack):
    """Stack of blocks with norms before and after each part, and with angles and masks by type of layer."""

    PARTS: ClassVar[dict[str, type]] = {
        "input_layernorm": HFShiftedNorm,
        "self_attn": HFAttention,
        "post_attention_layernorm": HFShiftedNorm,
        "pre_feedforward_layernorm": HFShiftedNorm,
        "mlp": HFMLP,
        "post_feedforward_layernorm": HFShiftedNorm,
    }

    step = staticmethod(run_sandwich)

    tables: dict[str, RopeTable]  # by type of layer

    def run(self, x: Tensor, positions: Tensor | None, attention_mask: Mask) -> Tensor:
        rope = {kind: table.of(x, positions) for kind, table in self.tables.items()}
        mask = {kind: self.mask_of(kind, x, attention_mask) for kind in self.tables}
        return run_blocks(self.layers._modules.values(), self.norm, x, rope, mask, self.step)

    def window(self) -> None:
        """Return None: each type of layer has a separate mask."""

    def changed_below(self) -> str | None:
        """Also compare the layers' types, which the loop uses, with the config's, which transformers uses."""
        if why := super().changed_below():
            return why
        if both_ways(self.config):
            return BOTH_WAYS
        kinds = [layer._modules["self_attn"].layer_type for layer in self.layers._modules.values()]
        return (
            None
            if kinds == list(self.config.layer_types)[: len(kinds)]
            else "the config has other types of layers than the layers"
        )

    def mask_of(self, kind: str, x: Tensor, attention_mask: Mask) -> Any:
        """Return the mask of a type of layer; None for SDPA on a batch without a mask that fits the window."""
        if isinstance(attention_mask, Segments):
            return attention_mask
        fits = kind != WINDOWED or x.shape[1] <= self.config.sliding_window
        if self.implementation == "sdpa" and attention_mask is None and fits:
            return None
        return self.masked(MASKS[kind], x, attention_mask)


class ShiftedStack(HFStack):
    """Gemma's stack: Llama's blocks with other norms."""

    PARTS: ClassVar[dict[str, type]] = HFStack.PARTS | {
        "input_layernorm": HFShiftedNorm,
        "post_attention_layernorm": HFShiftedNorm,
    }


def gemma_stack(module: Any, _: Any) -> Swap:
    sandwich = hasattr(module.layers[0], "pre_feedforward_layernorm")
    return sandwich_stack(module, None) if sandwich else stack(module, None, ShiftedStack)


def capped_attention(module: Any, stack: Any) -> Swap:
    capped = hasattr(module, "attn_logit_softcapping") and module.config._attn_implementation == "eager"
    return attention(module, stack, CappedAttention if capped else HFAttention)


def sandwich_stack(module: Any, _: Any) -> Swap:
    rotary, kinds = module.rotary_emb, sorted(set(module.config.layer_types))
    typed = isinstance(rotary.rope_type, dict)  # Gemma 3's
    swap = stack(module, None, SandwichStack)
    swap.attributes["tables"] = {kind: RopeTable(HFAngles(rotary, kind if typed else None)) for kind in kinds}
    if both_ways(module.config):
        swap.refusal = BOTH_WAYS
    return swap


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
    NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    READS = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping"})

    def cap(self, attention: Any) -> float:
        """Return the cap of the scores, which transformers' SDPA omits."""
        capped = self.config._attn_implementation != "sdpa"
        return (capped and attention.attn_logit_softcapping) or 0.0


def read(model: Any) -> Reader:
    sandwich = hasattr(model.model.layers[0], "pre_feedforward_layernorm")
    return SandwichReader(model) if sandwich else GemmaReader(model)


DECODING = {"ForCausalLM": read}
