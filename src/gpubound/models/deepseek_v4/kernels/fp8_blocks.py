"""fp8 weights in the published format of DeepSeek's models: e4m3 codes, and a scale for each block of rows and columns.

value = code · scale of its block
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = (128, 128)


class Fp8Blocks(NamedTuple):
    """A (rows, columns) weight. codes: e4m3; scale: fp32 (row blocks, column blocks). The last blocks may be smaller."""

    codes: Tensor
    scale: Tensor
    block: tuple[int, int] = BLOCK
    dtype: torch.dtype = torch.bfloat16  # of the dequantised weight

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


def scales_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def numbers(weight: Fp8Blocks, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantise the weight to `dtype`, by default weight.dtype."""
    rows, columns = weight.shape
    wide = weight.scale.repeat_interleave(weight.block[0], 0)[:rows].repeat_interleave(weight.block[1], 1)[:, :columns]
    return (weight.codes.float() * wide).to(dtype or weight.dtype)
