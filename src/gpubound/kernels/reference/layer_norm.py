"""LayerNorm over the last dimension: y = (x − mean) / sqrt(var + eps) · weight + bias."""

import torch
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(wide)
    centred = centred - centred.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)
