"""Gemma 3's text model: Gemma 2's blocks with normed heads, no cap on scores, and other angles for layers with a window."""

from functools import partial

from .gemma import SWAPS as GEMMA, SandwichReader, SandwichStack
from .layer_types import typed_attention, typed_stack
from .registry import Maker

SWAPS: dict[str, Maker] = {role: GEMMA[role] for role in ("RMSNorm", "MLP", "ForCausalLM")}
SWAPS |= {"Attention": typed_attention, "TextModel": partial(typed_stack, part=SandwichStack)}


class NormedReader(SandwichReader):
    READS = frozenset({"query_pre_attn_scalar"})  # not the cap, which its attention has as an attribute and does not apply


DECODING = {"ForCausalLM": NormedReader}
