"""Gemma 3's text model: Gemma 2's blocks with normed heads, no cap on scores, and other angles for layers with a window."""

from functools import partial
from typing import Any

from ..layers.attention import Angles
from .decoding import HFAngles
from .gemma import SWAPS as GEMMA, SandwichReader, sandwich_stack
from .hf_modules import attention
from .registry import Maker, Swap


def typed_attention(module: Any, stack: Any) -> Swap:
    rotary = None if stack is None else partial(stack.rotary_emb, layer_type=module.layer_type)
    return attention(module, stack, rotary=rotary)


SWAPS: dict[str, Maker] = {
    "RMSNorm": GEMMA["RMSNorm"],
    "MLP": GEMMA["MLP"],
    "Attention": typed_attention,
    "TextModel": sandwich_stack,
    "ForCausalLM": GEMMA["ForCausalLM"],
}


class TypedReader(SandwichReader):
    READS = frozenset({"query_pre_attn_scalar"})

    def kinds(self) -> list[str]:
        return sorted(set(self.config.layer_types))

    def angles(self) -> list[Angles]:
        return [HFAngles(self.trunk.rotary_emb, kind) for kind in self.kinds()]

    def table(self, attention: Any) -> int:
        return self.kinds().index(attention.layer_type)

    def cap(self, attention: Any) -> float:
        return 0.0


DECODING = {"ForCausalLM": TypedReader}
