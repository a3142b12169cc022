"""FP8: e4m3 weights with a scale for all of a weight, for each row, or for each block.

compressed-tensors (float-quantized): weight, weight_scale of (1), (O, 1) or (blocks of rows, blocks of columns)
fine-grained FP8 (DeepSeek-V3, Qwen3-FP8): weight, weight_scale_inv of blocks of weight_block_size, 128 x 128

    value = code · scale, also of weight_scale_inv; an e8m0 scale is a power of two
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import DataError
from ...layers.quantized_base import KINDS, InFp8
from ..folder import CURE, Stored
from .scheme import Coded, Scheme, Take, Values, Weight

SCALES = ("weight_scale_inv", "weight_scale")


class Fp8Scheme(Scheme):
    name = "FP8"
    PARTS = ("weight", *SCALES, "input_scale", "activation_scale", "weight_zero_point")

    def __init__(self, folder: Path, stored: dict[str, Stored], options: dict[str, Any]) -> None:
        super().__init__(folder, stored, options)
        for name, about in stored.items():
            layer, _, part = name.rpartition(".")
            if part == "weight" and about.dtype == "F8_E4M3":
                if self._scale(layer) is None:
                    raise DataError(f"{about.file}: {name}: got fp8 codes without {' or '.join(SCALES)}; {CURE}.")
                self.layers[layer] = about.shape[0], about.shape[1]

    def _scale(self, layer: str) -> str | None:
        return next((name for part in SCALES if (name := f"{layer}.{part}") in self.stored), None)

    def read(self, layer: str, take: Take) -> Weight:
        codes, scale = take(f"{layer}.weight"), wide(take(str(self._scale(layer))))
        rows, columns = codes.shape
        if scale.numel() == 1:
            scale = scale.view(1, 1)
        elif scale.dim() == 1:
            scale = scale[:, None]
        down, across = (-(-size // n) for size, n in zip((rows, columns), scale.shape))
        block = self.options.get("weight_block_size")
        if block is not None and min(scale.shape) > 0 and scale.numel() > 1:
            down, across = block
        if scale.shape != (-(-rows // down), -(-columns // across)):
            raise DataError(
                f"{self.stored[f'{layer}.weight'].file}: {layer}: got scales {tuple(scale.shape)} for {rows} x {columns} "
                f"weights, wanted one for each block of {down} x {across}; {CURE}."
            )
        scale = scale.repeat_interleave(down, 0)[:rows]
        if columns % 16 or rows % 16 or (scale.shape[1] > 1 and across % 128):
            values = codes.float() * scale.repeat_interleave(across, 1)[:, :columns]
            return Values(
                values, f"its {rows} x {columns} weights in blocks of {down} x {across} are no multiples of 16 and 128"
            )
        words = codes.contiguous().view(torch.int32)
        if scale.shape[1] == 1:
            return Coded(InFp8, words, {"scale": scale[:, 0].contiguous()})
        each = scale.repeat_interleave(across // 128, 1)[:, : -(-columns // 128)]
        return Coded(KINDS["fp8_blocks"], words, {"scale": each.contiguous()})


def wide(scale: Tensor) -> Tensor:
    """Return scales in fp32. uint8 scales are e8m0."""
    return (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
