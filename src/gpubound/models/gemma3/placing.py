"""How the modules of Gemma 3's text model are swapped: Gemma 2's stack and norms, and attention by SDPA."""

from functools import partial
from typing import Any

from ..gemma2.placing import SWAPS as GEMMA2
from ..gemma2.placing import sandwich_stack
from ..parts import attention
from ..placing import Maker, Swap


def typed_attention(module: Any, stack: Any) -> Swap:
    rotary = None if stack is None else partial(stack.rotary_emb, layer_type=module.layer_type)
    return attention(module, stack, rotary=rotary)


SWAPS: dict[str, Maker] = {
    "RMSNorm": GEMMA2["RMSNorm"],
    "MLP": GEMMA2["MLP"],
    "Attention": typed_attention,
    "TextModel": sandwich_stack,
    "ForCausalLM": GEMMA2["ForCausalLM"],
}
