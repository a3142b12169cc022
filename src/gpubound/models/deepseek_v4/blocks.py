"""A linear layer whose weight stays in fp8, as it is published: codes, and a scale for each block (kernels/fp8_blocks.py).

A step of few rows reads the codes. Of many rows, and in the module's own forward, which transformers' generate and the
decoder's trial call, the numbers are written out for the product and forgotten.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layers.quantized_base import OnlyCodes
from .kernels.fp8_blocks import Fp8Blocks, numbers, scales_shape


class Fp8Linear(OnlyCodes):
    """In the place of a linear layer without a bias. The buffers are bytes, whatever they mean: `.to(torch.bfloat16)` rounds
    every floating-point number that it finds. transformers cannot read what is saved of them."""

    linear = True
    codes: Tensor
    scale: Tensor

    def __init__(self, layer: Any, block: tuple[int, int]) -> None:
        super().__init__()
        self.n_groups = getattr(layer, "n_groups", 0)  # of a layer each group of whose rows reads its own
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
        """`.to(dtype)` says what the numbers are."""
        found = super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, device=self.codes.device, dtype=self.dtype)).dtype
        return found

    def forward(self, x: Tensor) -> Tensor:
        weight = numbers(self.blocks, x.dtype)
        if not self.n_groups:
            return F.linear(x, weight)
        return torch.einsum("...gk,grk->...gr", x, weight.unflatten(0, (self.n_groups, -1)))
