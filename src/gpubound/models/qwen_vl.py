"""Qwen2.5-VL and Qwen3-VL: Qwen2's and Qwen3's text models, where an image's tokens have positions of a grid.

The tokens of a text have one position on all three axes, and so the angles of any other model.
"""

from functools import partial
from typing import Any

from torch import Tensor

from .hf_modules import SWAPS as LLAMA, HFStack, attention, mlp, norm, stack
from .reader import Reader
from .registry import Maker


class GridStack(HFStack):
    def unable(self, kwargs: dict[str, Any]) -> str | None:
        positions = kwargs.get("position_ids")
        if isinstance(positions, Tensor) and positions.dim() == 3:
            return "position_ids are those of a grid"
        return super().unable(kwargs)


SWAPS: dict[str, Maker] = LLAMA | {
    "Model": partial(stack, part=GridStack),
    # Qwen2.5-VL's names of the text model's parts; its MLP and Attention are those for images
    "Qwen2_5_VLRMSNorm": norm,
    "Qwen2MLP": mlp,
    "Qwen2_5_VLAttention": attention,
}


class GridReader(Reader):
    READS = frozenset({"mrope_section", "mrope_interleaved"})
    image_positions = False


DECODING = {"ForCausalLM": GridReader}
