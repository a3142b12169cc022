"""Qwen2.5-VL and Qwen3-VL: Qwen2's and Qwen3's text models, where an image's tokens have positions of a grid.

The tokens of a text have one position on all three axes, and so the angles of any other model.
"""

from typing import Any

from torch import Tensor

from .hf_modules import HFStack, attention, causal_lm, mlp, norm, stack
from .reader import Reader
from .registry import Maker, Swap


class GridStack(HFStack):
    def unable(self, kwargs: dict[str, Any]) -> str | None:
        positions = kwargs.get("position_ids")
        if isinstance(positions, Tensor) and positions.dim() == 3:
            return "position_ids are those of a grid"
        return super().unable(kwargs)


def grid_stack(module: Any, _: Any) -> Swap:
    return stack(module, None, GridStack)


SWAPS: dict[str, Maker] = {
    "RMSNorm": norm,
    "MLP": mlp,
    "Attention": attention,
    "Model": grid_stack,
    "ForCausalLM": causal_lm,
    # Qwen2.5-VL's names of the text model's parts; its MLP and Attention are those for images
    "Qwen2_5_VLRMSNorm": norm,
    "Qwen2MLP": mlp,
    "Qwen2_5_VLAttention": attention,
}


class GridReader(Reader):
    READS = frozenset({"mrope_section", "mrope_interleaved"})
    image_positions = False


DECODING = {"ForCausalLM": GridReader}
