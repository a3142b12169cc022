"""Linear layer whose weight stays in fp8, its published format, with a scale per block (kernels/fp8_blocks.py).

A decoding step of few rows reads the quantised weight. For many rows, and in the module's forward, which transformers' generate
and the decoder's reference check call, the weight is dequantised temporarily.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layers.quantized_base import OnlyCodes
from .kernels.fp8_blocks import Fp8Blocks, numbers, scales_shape


class Fp8Linear(OnlyCodes):
    """Replacement of a linear layer without a bias. The buffers are uint8, since `.to(torch.bfloat16)` would round
    floating-point buffers. transformers cannot load the saved buffers."""

    linear = True
    codes: Tensor
    scale: Tensor

    def __init__(self, layer: Any, block: tuple[int, int]) -> None:
        super().__init__()
        self.n_groups = getattr(layer, "n_groups", 0)  # of a grouped layer: each group of rows has a separate input
        self.block, self.dtype = block, layer.weight.dtype
        rows, columns = layer.weight.shape
        like = {"device": layer.weight.device, "dtype": torch.uint8}
        self.register_buffer("codes", torch.zeros(rows, columns, **like))
        across, down = scales_shape((rows, columns), block)
        self.register_buffer("scale", torch.zeros(across, 4 * down, **like))

    @property
    def blocks(self) -> Fp8Blocks:
        return Fp8Blocks(self.codes.view(torch.float8_e4m3fn), self.scale.view(torch.float32), self.block, self.dtype)

    @property
    def size(self) -> int:
        return self.codes.numel()

    def _apply(self, fn: Any, recurse: bool = True) -> "Fp8Linear":
        """Apply fn to the buffers, and to the dtype of the dequantised weight."""
        found = super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, device=self.codes.device, dtype=self.dtype)).dtype
        return found

    def forward(self, x: Tensor) -> Tensor:
        weight = numbers(self.blocks, x.dtype)
        if not self.n_groups:
            return F.linear(x, weight)
        return torch.einsum("...gk,grk->...gr", x, weight.unflatten(0, (self.n_groups, -1)))
