"""EXAONE 4: OLMo 2's blocks with normed heads, and among layers with a window some that see all, without positions."""

from functools import partial
from typing import Any

from .hf_modules import HFAttention, attention
from .layer_types import typed_stack
from .olmo2 import SWAPS as OLMO, PostNormReader, TypedPostNormStack
from .registry import Maker


class NoPositionsAttention(HFAttention):
    sliding_window: int | None
    is_sliding: bool

    def turns(self) -> bool:
        return self.sliding_window is None or self.is_sliding

    def window(self) -> int | None:
        return self.sliding_window if self.is_sliding else None


SWAPS: dict[str, Maker] = OLMO | {
    "Attention": partial(attention, part=NoPositionsAttention),
    "Model": partial(typed_stack, part=TypedPostNormStack),
}


class NoPositionsReader(PostNormReader):
    READS = frozenset({"sliding_window_pattern"})

    def window(self, attention: Any) -> int:
        return (attention.is_sliding and attention.sliding_window) or 0

    def table(self, attention: Any) -> int | None:
        return 0 if attention.sliding_window is None or attention.is_sliding else None


DECODING = {"ForCausalLM": NoPositionsReader}
