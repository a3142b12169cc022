"""Parts for torch's own normalisations, in any model.

Under autocast they run as torch has them: autocast gives them rules of their own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import group_norm, layer_norm, rms_norm
from ..layers.stacked import Kernels


class _Norm:
    """What the parts read of the modules they are swapped into."""

    eps: Any
    num_groups: int
    weight: Tensor | None
    bias: Tensor | None
    ops: tuple[str, ...]
    original: Any

    def fused_kernels(self) -> Kernels:
        return "{}", self.ops


class TorchRMSNorm(_Norm):
    ops = ("rms_norm",)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return self.original.forward(self, x)
        return rms_norm(x, self.weight, self.eps if self.eps is not None else torch.finfo(x.dtype).eps)


class TorchLayerNorm(_Norm):
    ops = ("layer_norm",)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return self.original.forward(self, x)
        return layer_norm(x, self.weight, self.bias, self.eps)


class TorchGroupNorm(_Norm):
    ops = ("group_norm",)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return self.original.forward(self, x)
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


PARTS: dict[type[nn.Module], type] = {nn.RMSNorm: TorchRMSNorm, nn.LayerNorm: TorchLayerNorm, nn.GroupNorm: TorchGroupNorm}
