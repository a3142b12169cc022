"""Gemma 3's text model: Gemma 2's blocks with normed heads, no cap on scores, and other angles for layers with a window."""

from functools import partial
from typing import Any

from .gemma import SWAPS as GEMMA, SandwichReader, SandwichStack
from .layer_types import typed_attention, typed_stack
from .registry import Maker

SWAPS: dict[str, Maker] = {
    "RMSNorm": GEMMA["RMSNorm"],
    "MLP": GEMMA["MLP"],
    "Attention": typed_attention,
    "TextModel": partial(typed_stack, part=SandwichStack),
    "ForCausalLM": GEMMA["ForCausalLM"],
}


class NormedReader(SandwichReader):
    READS = frozenset({"query_pre_attn_scalar"})

    def cap(self, attention: Any) -> float:
        return 0.0


DECODING = {"ForCausalLM": NormedReader}
