"""Modules of DeepSeek-V4 over published codes: linear layers in fp8 and experts in fp4; and norms whose results are rounded."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from ...layers.quantized_base import OnlyCodes
from ..quantized.experts import Fp4Experts, built_with
from .kernels.products import Fp8Blocks, numbers, scales_shape


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
        module = super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, device=self.codes.device, dtype=self.dtype)).dtype
        return module

    def forward(self, x: Tensor) -> Tensor:
        weight = numbers(self.blocks, x.dtype)
        if not self.n_groups:
            return F.linear(x, weight)
        return torch.einsum("...gk,grk->...gr", x, weight.unflatten(0, (self.n_groups, -1)))


class CompressedExperts(Fp4Experts):
    """DeepSeek-V4's experts over their codes."""

    original = theirs.DeepseekV4Experts  # the replaced class, for models/registry.py

    def __init__(self, config: Any) -> None:
        with torch.device("meta"):
            like = self.original(config)
        experts, rows, hidden = like.gate_up_proj.shape
        super().__init__(experts, hidden, rows // 2, persistent=True)
        self.act_fn, self.limit = like.act_fn, like.limit

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def in_fp4(wanted: bool) -> AbstractContextManager[None]:
    """Make transformers build models with experts in fp4 within the context, if `wanted`."""
    return built_with(theirs, "DeepseekV4Experts", CompressedExperts if wanted else None)


def keep_in_fp32(model: Any) -> None:
    """Convert parameters to fp32 as transformers' loading does, and make the norms `rounded` permanently."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    rounded(model)


def rounded(model: nn.Module) -> list[RemovableHandle]:
    """Register hooks that round the norms' outputs, and return their handles; empty if norms already round."""
    norms: list[Any] = [m for m in model.modules() if type(m).__name__ == "DeepseekV4RMSNorm"]
    if not norms or norms[0](norms[0].weight.detach().bfloat16()).dtype == torch.bfloat16:
        return []
    return [norm.register_forward_hook(_round) for norm in norms]


def _round(norm: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y.to(inputs[0].dtype)
