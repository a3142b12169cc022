"""Stacks whose layers are of several types, some with a window: a mask for each type, and angles where these differ, too.

Ministral and CWM have no other differences from Llama. Gemma and OLMo 3 use the parts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ..layers.attention import Mask, Rope, RopeTable
from ..layers.block import run_blocks
from ..layers.packed_attention import Segments
from .hf_modules import SWAPS as LLAMA, HFAttention, HFStack, attention, stack
from .language_model import FULL, WINDOWED
from .reader import HFAngles, Reader, angle_types, layer_type
from .registry import Maker, Swap

BOTH_WAYS = "the config lets tokens attend to later tokens"
MASKS = {FULL: create_causal_mask, WINDOWED: create_sliding_window_causal_mask}


def step_of_type(
    step: Callable, block: Any, x: Tensor, pending: Tensor | None, rope: dict[str, Rope], mask: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Run a block with the angles and the mask of its type."""
    kind = layer_type(block._modules["self_attn"])
    return step(block, x, pending, rope[kind], mask[kind])


class TypedStack(HFStack):
    """Stack with angles and masks by type of layer."""

    takes_masks_by_type = True  # as a model of images and text makes them

    tables: dict[str, RopeTable]  # by type of layer

    def run(self, x: Tensor, positions: Tensor | None, attention_mask: Mask) -> Tensor:
        rope = {kind: table.of(x, positions) for kind, table in self.tables.items()}
        mask = {kind: self.mask_of(kind, x, attention_mask) for kind in self.tables}
        return run_blocks(self.layers._modules.values(), self.norm, x, rope, mask, partial(step_of_type, self.step))

    def window(self) -> None:
        """Return None: each type of layer has a separate mask."""

    def changed_below(self) -> str | None:
        """Also compare the layers' types, which the loop uses, with the config's, which transformers uses."""
        if why := super().changed_below():
            return why
        if both_ways(self.config):
            return BOTH_WAYS
        types = [layer_type(layer._modules["self_attn"]) for layer in self.layers._modules.values()]
        return (
            None
            if types == list(self.config.layer_types)[: len(types)]
            else "the config has other types of layers than the layers"
        )

    def mask_of(self, kind: str, x: Tensor, attention_mask: Mask) -> Any:
        """Return the mask of a type of layer; None for SDPA on a batch without a mask that fits the window."""
        if isinstance(attention_mask, Segments):
            return attention_mask
        if isinstance(attention_mask, dict):
            return attention_mask[kind]
        fits = kind != WINDOWED or x.shape[1] <= self.config.sliding_window
        if self.implementation == "sdpa" and attention_mask is None and fits:
            return None
        return self.masked(MASKS[kind], x, attention_mask)


def both_ways(config: Any) -> bool:
    """Return True if the config lets a text's tokens attend to later ones, which changes the masks."""
    return getattr(config, "use_bidirectional_attention", False) in (True, "all")


def typed_stack(module: Any, _: Any, part: type[TypedStack] = TypedStack) -> Swap:
    rotary, types = module.rotary_emb, sorted(set(module.config.layer_types))
    typed = angle_types(rotary)
    swap = stack(module, None, part)
    swap.attributes["tables"] = {kind: RopeTable(HFAngles(rotary, kind if typed else None)) for kind in types}
    if both_ways(module.config):
        swap.refusal = BOTH_WAYS
    return swap


def typed_attention(module: Any, stack: Any, part: type[HFAttention] = HFAttention) -> Swap:
    """Return the Swap of an attention module, whose angles may be those of its type."""
    rotary: Any = getattr(stack, "rotary_emb", None)
    if angle_types(rotary):
        return attention(module, stack, part, partial(rotary, layer_type=layer_type(module)))
    return attention(module, stack, part)


SWAPS: dict[str, Maker] = LLAMA | {"Attention": typed_attention, "Model": typed_stack}

DECODING = {"ForCausalLM": Reader}
