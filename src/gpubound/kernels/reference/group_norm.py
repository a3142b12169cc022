"""GroupNorm: x (N, C, *) is normalised over each of `groups` runs of channels with all that follows; weight and bias per
channel.
"""

from math import prod

import torch
from torch import Tensor


def group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    samples, channels, *places = x.shape
    centred = x.to(wide).reshape(samples, groups, channels // groups * prod(places))
    centred = centred - centred.mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    per_channel = (channels, *(1 for _ in places))
    if weight is not None:
        y = y * weight.to(wide).reshape(per_channel)
    if bias is not None:
        y = y + bias.to(wide).reshape(per_channel)
    return y.to(x.dtype)
